"""Writes weights as safetensors shards with an index, each rank its own."""

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lightning_pipeline.checkpoint import Ranks
from lightning_pipeline.checkpoint.folder import check_kinds, sync_folder, write_tensors
from lightning_pipeline.errors import CheckpointError
from lightning_pipeline.weights.transfer import once

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_Shape = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Shard:
    """What one file is to hold.

    Attributes:
        shapes: Sizes and data types by name, in order.
        ties: Further names of tensors in it, and the names they are under.
    """

    shapes: dict[str, _Shape]
    ties: dict[str, str]

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in self.shapes.values())


def save_weights(
    path: Path, own: Mapping[str, Tensor], ranks: Ranks, *, prefix: str, max_shard_bytes: int, overwrite: bool
) -> None:
    """Write shards and their index; all ranks call. No rank holds more than it has and one tensor.

    Args:
        path: A folder, the same on every rank; other files in it stay.
        own: What this rank writes, by its name in the whole module; each name is written by one rank.
        ranks: Of the save.
        prefix: Is taken off the names; what has it not is left out.
        max_shard_bytes: Largest size of a file with several tensors.
        overwrite: Whether weights that lie there are replaced.

    Raises:
        CheckpointError: On every rank; what lay there before is still there.
    """
    what = f"saving {path}"
    named = {name.removeprefix(prefix): v for name, v in own.items() if name.startswith(prefix)}
    told = ranks.everyone(what, lambda: _shards_of(named, max_shard_bytes))
    ranks.leader(what, lambda: _make_room(path, told, prefix, overwrite))
    total = sum(len(shards) for shards in told)
    files = (
        [SINGLE] if total == 1 else [f"model-{i + 1:05d}-of-{total:05d}.safetensors" for i in range(total)]
    )
    before = sum(len(shards) for shards in told[: ranks.rank])
    mark = str(ranks.leader(what, lambda: f".lp-{secrets.token_hex(4)}.tmp"))
    mine = dict(zip(files[before:], told[ranks.rank], strict=False))

    def write() -> None:
        for file, shard in mine.items():
            write_tensors(
                path / f"{file}{mark}", shard.shapes, named.__getitem__, {"format": "pt", **shard.ties}
            )

    try:
        ranks.everyone_local(what, write)
        shards = [shard for of_rank in told for shard in of_rank]
        ranks.leader(what, lambda: _commit(path, dict(zip(files, shards, strict=True)), mark))
    finally:
        for file in mine:
            (path / f"{file}{mark}").unlink(missing_ok=True)


def _shards_of(named: Mapping[str, Tensor], max_bytes: int) -> list[Shard]:
    """Consecutive tensors, as many as fit; one that is larger has a file of its own."""
    kept, names = once(named), dict[int, str]()
    for name, tensor in named.items():
        names.setdefault(id(tensor), name)
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in kept.items()}
    check_kinds(shapes)
    shards: list[Shard] = []
    for name, shape in shapes.items():
        alone = Shard({name: shape}, {})
        if not shards or shards[-1].num_bytes + alone.num_bytes > max_bytes:
            shards.append(alone)
        else:
            shards[-1].shapes.update(alone.shapes)
    where = {name: shard for shard in shards for name in shard.shapes}
    for name, tensor in named.items():
        if name not in kept:
            where[names[id(tensor)]].ties[name] = names[id(tensor)]
    return shards


def _make_room(path: Path, told: list[list[Shard]], prefix: str, overwrite: bool) -> None:
    if not any(told):
        raise CheckpointError(f"no weight's name begins with prefix={prefix!r}: nothing would be saved")
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{path} is a file, and weights are saved as a folder of shards")
    if not overwrite and path.is_dir() and _old_files(path):
        raise CheckpointError(f"{path} holds weights already: give another path, or overwrite=True")
    path.mkdir(parents=True, exist_ok=True)


def _old_files(path: Path) -> list[Path]:
    """Weights in a folder, their index first: what reads meanwhile misses it, and finds no mix."""
    shards = [*path.glob("model.safetensors"), *path.glob("model-*-of-*.safetensors")]
    return [*path.glob(INDEX), *sorted(shards)]


def _commit(path: Path, shards: Mapping[str, Shard], mark: str) -> None:
    for old in _old_files(path):
        old.unlink()
    for file in shards:
        (path / f"{file}{mark}").replace(path / file)
    if len(shards) > 1:
        places = {name: file for file, shard in shards.items() for name in shard.shapes}
        size = sum(shard.num_bytes for shard in shards.values())
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
        temporary = path / f"{INDEX}{mark}"
        temporary.write_text(json.dumps(index, indent=2) + "\n")
        temporary.replace(path / INDEX)
    sync_folder(path)
