"""Weights in files of any of the usual kinds, read one tensor at a time."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lightning_pipeline.checkpoint.folder import (
    MANIFEST,
    MODEL,
    Reader,
    load_object,
    read_manifest,
    stamp_file,
)
from lightning_pipeline.errors import CheckpointCorruptError, CheckpointError

_INDEXES = ("model.safetensors.index.json", "*.safetensors.index.json", "pytorch_model.bin.index.json")
_SINGLES = ("model.safetensors", "pytorch_model.bin")
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """A tensor in a file.

    Attributes:
        size: Its sizes.
        properties: Has its data type, as `dtype`.
        read: Gives it; its memory is the file's, only to be copied from.
    """

    size: torch.Size
    properties: Any
    read: Callable[[], Tensor]


@dataclass(frozen=True)
class _Kind:
    dtype: torch.dtype


@dataclass
class Weights:
    """What some files hold.

    Attributes:
        tensors: By name.
        ties: Further names of tensors, with the name each is under.
    """

    tensors: dict[str, Stored] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)

    def under(self, prefix: str) -> dict[str, Any]:
        """As `compare` asks for tensors of the model."""
        return {**self.tensors, **{new: self.tensors[old] for new, old in self.ties.items()}} if (
            prefix == MODEL
        ) else {}  # fmt: skip

    def renamed(self, prefix: str) -> "Weights":
        """The same with something before each name."""
        return Weights(
            {f"{prefix}{name}": stored for name, stored in self.tensors.items()},
            {f"{prefix}{new}": f"{prefix}{old}" for new, old in self.ties.items()},
        )


def holds_weights_only(path: Path) -> bool:
    """Whether a path has weights and nothing else: no checkpoint of ours or of Lightning's.

    Args:
        path: A folder or file.
    """
    if path.is_dir():
        return not (path / MANIFEST).exists() and _weights_in(path) is not None
    if not path.is_file():
        return False
    if path.name.endswith((".safetensors", ".index.json")):
        return True
    try:
        found = load_object(path, f"file {path}", trust=False, mmap=True)
    except CheckpointError:  # told where it is read
        return False
    return isinstance(found, dict) and bool(found) and all(isinstance(v, Tensor) for v in found.values())


def open_weights(path: Path, *, trust: bool = False) -> Weights:
    """Open a checkpoint folder, a Hugging Face folder, a safetensors file or index, or a file of torch's.

    Args:
        path: Of any of these.
        trust: Whether objects of any class may be unpickled.

    Raises:
        CheckpointError: It holds no weights.
        CheckpointCorruptError: A file of it is missing, cut short or damaged.
        UnsafeCheckpointError: It would run code.
    """
    if path.is_dir():
        if (path / MANIFEST).exists():
            return _folder(path, trust)
        inside = _weights_in(path)
        if inside is None:
            raise CheckpointError(
                f"{path} holds no weights: neither a checkpoint's {MANIFEST}, nor {', '.join(_SINGLES)}, nor "
                "an index of shards"
            )
        path = inside
    if not path.is_file():
        raise CheckpointError(f"{path} is no file, nor a folder, with weights")
    if path.name.endswith(".index.json"):
        return _indexed(path, trust)
    return _single(path, trust)


def _weights_in(folder: Path) -> Path | None:
    for pattern in (*_INDEXES[:1], _SINGLES[0], *_INDEXES[1:], _SINGLES[1]):
        found = sorted(folder.glob(pattern))
        if found:
            return found[0]
    alone = sorted(folder.glob("*.safetensors"))
    return alone[0] if len(alone) == 1 else None


def _folder(path: Path, trust: bool) -> Weights:
    manifest = read_manifest(path)
    reader = Reader(
        path, trust=trust, stamps={name: stamp_file(path, name, manifest) for name in manifest.files}
    )

    def read(key: str) -> Tensor:
        found: Tensor = reader.read([key], mapped=True)[key]
        return found

    places: dict[Any, str] = {}
    weights = Weights()
    for name, entry in reader.under(MODEL).items():
        if not hasattr(entry, "size"):
            continue
        key = f"{MODEL}.{name}"
        first = places.setdefault(reader.place_of(key), name)
        if first != name:
            weights.ties[name] = first
        else:
            weights.tensors[name] = Stored(entry.size, entry.properties, partial(read, key))
    return weights


def _indexed(path: Path, trust: bool) -> Weights:
    try:
        places: Mapping[str, str] = json.loads(path.read_text())["weight_map"]
        shards = sorted(set(places.values()))
    except (ValueError, KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
        raise CheckpointCorruptError(f"{path} is no index of shards: {error!r}") from error
    for shard in shards:
        if Path(shard).name != shard:
            raise CheckpointCorruptError(f"{path} lists {shard!r}, which lies outside of its folder")
        if not (path.parent / shard).is_file():
            raise CheckpointCorruptError(f"{path} lists {shard}, which is not there")
    whole = Weights()
    for shard in shards:
        part = _single(path.parent / shard, trust)
        listed = {name for name, place in places.items() if place == shard}
        lost = sorted(listed - part.tensors.keys() - part.ties.keys())
        if lost:
            raise CheckpointCorruptError(
                f"{path.parent / shard} lacks {', '.join(lost[:5])}, which {path.name} lists"
            )
        whole.tensors.update(part.tensors)
        whole.ties.update(part.ties)
    return whole


def _single(path: Path, trust: bool) -> Weights:
    return _safetensors(path) if path.suffix == ".safetensors" else _pickled(path, trust)


def _safetensors(path: Path) -> Weights:
    try:
        file: Any = safe_open(path, "pt")
        names = list(file.keys())
        weights = Weights()
        for name in names:
            slices = file.get_slice(name)
            kind = _DTYPES.get(slices.get_dtype())
            if kind is None:
                raise CheckpointError(f"{name} in {path} is {slices.get_dtype()}, which torch does not know")
            weights.tensors[name] = Stored(
                torch.Size(slices.get_shape()), _Kind(kind), partial(file.get_tensor, name)
            )
        about = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise CheckpointCorruptError(f"{path} cannot be read, as when it was cut short: {error}") from error
    weights.ties.update({new: old for new, old in about.items() if old in weights.tensors})
    return weights


def _pickled(path: Path, trust: bool) -> Weights:
    found = load_object(path, f"file {path}", trust=trust, mmap=True)
    if isinstance(found, dict) and isinstance(found.get("state_dict"), dict):
        found = found["state_dict"]
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds no state_dict")
    weights, first = Weights(), dict[tuple[Any, ...], str]()
    for name, value in found.items():
        if isinstance(value, Tensor):
            where = (value.untyped_storage()._cdata, value.storage_offset(), value.shape, value.dtype)
            known = first.setdefault(where, name)
            if known != name and value.numel():
                weights.ties[name] = known
            else:
                weights.tensors[name] = Stored(value.shape, value, value.detach)
    return weights


def prefix_for(stored: Iterable[str], names: Iterable[str]) -> str:
    """What stands before the stored names in a module, such as `model.` for a Hugging Face folder's.

    Args:
        stored: Names in a file.
        names: In the module.

    Returns:
        The beginning with which most names fit; the shortest of such. Empty where none fits better.
    """
    stored, known = set(stored), set(names)
    candidates = {""}
    for name in known:
        parts = name.split(".")
        candidates.update(".".join(parts[:count]) + "." for count in range(1, min(len(parts), 4)))

    def fits(prefix: str) -> int:
        return sum(f"{prefix}{name}" in known for name in stored)

    return min(sorted(candidates), key=lambda prefix: (-fits(prefix), len(prefix)))
