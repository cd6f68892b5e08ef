"""Turns one kind of checkpoint into another, in one process, from file to file."""

import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import lightning
import torch
from torch import Tensor

from lightning_pipeline.checkpoint import Part, Ranks, to_file, to_safetensors, verify, write
from lightning_pipeline.checkpoint.contents import (
    as_bytes,
    from_numbered,
    group_options,
    set_apart,
    with_objects,
)
from lightning_pipeline.checkpoint.folder import (
    MANIFEST,
    MODEL,
    OURS,
    beside,
    check_kinds,
    load_object,
    optimizer_key,
    write_tensors,
)
from lightning_pipeline.errors import CheckpointError
from lightning_pipeline.model.cut import size_text
from lightning_pipeline.weights.files import Weights, holds_weights_only, open_weights
from lightning_pipeline.weights.save import save_weights

Format = Literal["folder", "ckpt", "safetensors", "huggingface", "state_dict"]
_BY_SUFFIX: dict[str, Format] = {
    ".ckpt": "ckpt", ".safetensors": "safetensors", ".pt": "state_dict", ".pth": "state_dict",
    ".bin": "state_dict", "": "folder",
}  # fmt: skip
_RUNNING = ("running_mean", "running_var", "num_batches_tracked")
_TITLES = {
    "folder": "checkpoint folder", "ckpt": "one-file checkpoint", "safetensors": "safetensors file",
    "huggingface": "folder of safetensors shards", "state_dict": "state_dict of torch's",
}  # fmt: skip


@dataclass(frozen=True)
class Conversion:
    """What is to become of what.

    Attributes:
        source: A checkpoint or weights.
        target: What is written.
        kind: Of the target.
        weights: Of the source.
        training: Whether the source has more than weights, and the target keeps it.
        force: Whether what is there is replaced.
        trust: Whether objects of any class may be unpickled.
        prefix: Put before each name, or with `strip` taken off.
        strip: See `prefix`.
    """

    source: Path
    target: Path
    kind: Format
    weights: Weights
    training: bool
    force: bool
    trust: bool
    prefix: str
    strip: str

    @property
    def num_bytes(self) -> int:
        """Of all tensors of the model."""
        return sum(
            entry.size.numel() * entry.properties.dtype.itemsize for entry in self.weights.tensors.values()
        )

    def __str__(self) -> str:
        kept = "weights, optimizers and all else" if self.training else "the weights"
        return (
            f"{self.source} -> {self.target} ({_TITLES[self.kind]}): {kept}, "
            f"{len(self.weights.tensors)} tensors of the model, {size_text(self.num_bytes)}"
        )


def plan_conversion(
    source: Path, target: Path, *, kind: Format | None = None, force: bool = False, trust: bool = False,
    prefix: str = "", strip: str = "",
) -> Conversion:  # fmt: skip
    """Look at a source, and say what would be written; nothing is.

    Args:
        source: A checkpoint folder, a one-file checkpoint, a Hugging Face folder, safetensors or a
            `state_dict`.
        target: A new path.
        kind: Of the target. Default: by its suffix.
        force: Whether it may exist.
        trust: Whether objects of any class may be unpickled.
        prefix: Put before each name.
        strip: Taken off each name; what has it not is left out.

    Raises:
        CheckpointError: It cannot be read, or cannot become that.
    """
    if kind is None:
        kind = _BY_SUFFIX.get(target.suffix)
        if kind is None:
            raise CheckpointError(
                f"{target.suffix!r} names no kind of checkpoint: end {target} in "
                f"{', '.join(filter(None, _BY_SUFFIX))}, or in no suffix for a folder, or say --to"
            )
    if target.exists() and not force:
        raise CheckpointError(f"{target} is there already: --force replaces it")
    if target.exists() and source.resolve() == target.resolve():
        raise CheckpointError(f"{target} is what is to be converted")
    weights = open_weights(source, trust=trust)
    if strip:
        weights = _stripped(weights, strip)
    training = kind in ("ckpt", "folder") and not holds_weights_only(source)
    if training and (prefix or strip):
        raise CheckpointError(
            "names of a checkpoint that training goes on from must stay: leave the prefix out"
        )
    return Conversion(source, target, kind, weights.renamed(prefix), training, force, trust, prefix, strip)


def _stripped(weights: Weights, strip: str) -> Weights:
    found = Weights(
        {name.removeprefix(strip): one for name, one in weights.tensors.items() if name.startswith(strip)},
        {
            n.removeprefix(strip): old.removeprefix(strip)
            for n, old in weights.ties.items()
            if n.startswith(strip)
        },
    )
    if not found.tensors:
        raise CheckpointError(f"no name begins with {strip!r}")
    return found


def convert(conversion: Conversion) -> None:
    """Write what was planned. Tensors go from file to file; what had the name before stays until then.

    Args:
        conversion: From `plan_conversion`.

    Raises:
        CheckpointError: It could not be read or written.
    """
    target, source = conversion.target, conversion.source
    target.parent.mkdir(parents=True, exist_ok=True)
    is_folder = (source / MANIFEST).exists()
    plain = not (conversion.prefix or conversion.strip)
    if conversion.kind == "huggingface":
        save_weights(
            target,
            _states(conversion.weights),
            _alone(),
            prefix="",
            max_shard_bytes=5 * 10**9,
            overwrite=conversion.force,
        )
    elif conversion.kind == "folder":
        _to_folder(conversion)
    elif conversion.kind == "safetensors":
        _replacing(target, (lambda new: to_safetensors(source, new)) if is_folder and plain else (
            lambda new: _to_safetensors(conversion.weights, new)
        ))  # fmt: skip
    elif conversion.kind == "ckpt" and is_folder:
        _replacing(target, lambda new: to_file(source, new, trust=conversion.trust, position=True))
    else:
        _replacing(target, lambda new: torch.save(_one_file(conversion), new))


def _alone() -> Ranks:
    return Ranks(None, None, 0, timedelta(minutes=30))


def _replacing(target: Path, write_to: Callable[[Path], Any]) -> None:
    new = beside(target, "partial")
    try:
        write_to(new)
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        new.replace(target)
    finally:
        new.unlink(missing_ok=True)


def _states(weights: Weights) -> dict[str, Tensor]:
    """All of them; tied ones are one tensor. Each is a part of a mapped file."""
    own = {name: stored.read() for name, stored in weights.tensors.items()}
    return {**own, **{new: own[old] for new, old in weights.ties.items()}}


def _to_safetensors(weights: Weights, path: Path) -> None:
    shapes = {name: (tuple(one.size), one.properties.dtype) for name, one in weights.tensors.items()}
    check_kinds(shapes)
    write_tensors(path, shapes, lambda name: weights.tensors[name].read(), {"format": "pt", **weights.ties})


def _one_file(conversion: Conversion) -> dict[str, Any]:
    """A checkpoint of Lightning's with weights alone, a plain `state_dict`, or the source's own content."""
    if conversion.training:
        return dict(_opened(conversion))
    states = _states(conversion.weights)
    if conversion.kind == "state_dict":
        return states
    return {
        "epoch": 0, "global_step": 0, "pytorch-lightning_version": lightning.__version__,
        "state_dict": states,
    }  # fmt: skip


def _opened(conversion: Conversion) -> dict[str, Any]:
    found = load_object(
        conversion.source, f"checkpoint file {conversion.source}", trust=conversion.trust, mmap=True
    )
    assert isinstance(found, dict), "it was looked at when the conversion was planned"
    return found


def _to_folder(conversion: Conversion) -> None:
    """A checkpoint folder, as one rank would write it."""
    target, weights = conversion.target, conversion.weights
    if (conversion.source / MANIFEST).exists() and not (conversion.prefix or conversion.strip):
        verify(conversion.source)
        shutil.copytree(conversion.source, new := beside(target, "partial"))
        shutil.rmtree(target, ignore_errors=True)
        new.replace(target)
        return
    own = {name: stored.read() for name, stored in weights.tensors.items()}
    rest: dict[str, Any] = {"epoch": 0, "global_step": 0, "pytorch-lightning_version": lightning.__version__}
    ours: dict[str, Any] = {"order": list(own), "extra": {}}
    state: dict[str, dict[str, Any]] = {MODEL: dict(own)}
    if conversion.training:
        rest = _opened(conversion)
        states = rest.pop("state_dict")
        ours["extra"] = {name: value for name, value in states.items() if not isinstance(value, Tensor)}
        groups, flat = _by_name(rest.pop("optimizer_states", []), own)
        state |= {optimizer_key(index): one for index, one in enumerate(flat) if one}
        schedulers = rest.get("lr_schedulers", [])
        ours["ranks"] = [{"lr_schedulers": schedulers, "groups": groups}]
        ours["schedulers"] = [min(index, len(groups) - 1) for index in range(len(schedulers))]
        ours["replicas"] = (rest.pop(OURS, None) or {}).get("replicas") or []
    meta, apart = set_apart(rest)
    meta[OURS] = ours
    with_objects(meta, apart)
    about = {
        "step": int(rest.get("global_step", 0)), "epoch": int(rest.get("epoch", 0)), "topology": {"ranks": 1},
    }  # fmt: skip
    aliases = {f"{MODEL}.{new}": f"{MODEL}.{old}" for new, old in weights.ties.items()}
    if target.is_file():
        target.unlink()
    write(Part(state, 0, aliases, as_bytes(meta), about), target, _alone(), "sha256")


def _by_name(states: list[Any], own: Mapping[str, Tensor]) -> tuple[list[Any], list[dict[str, Any]]]:
    """Groups and flat state of optimizers that know parameters by number.

    Raises:
        CheckpointError: The numbers do not tell which parameters are meant.
    """
    groups, flat = [], []
    for index, state in enumerate(states):
        try:
            named = _named_groups(state, own)
        except ValueError as error:
            raise CheckpointError(
                f"optimizer {index} knows its parameters by number, and {error}: resume it in a run, which "
                "knows the module, and save there"
            ) from error
        groups.append(named)
        flat.append(from_numbered(state, named))
    return groups, flat


def _named_groups(state: Mapping[str, Any], own: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    saved = state["param_groups"]
    if all(len(group.get("param_names", ())) == len(group["params"]) for group in saved):
        names = [list(group["param_names"]) for group in saved]
        if not {name for of in names for name in of} <= own.keys():
            raise ValueError("the names that it was given are not those of the model")
    else:
        order = [name for name in own if name.rpartition(".")[2] not in _RUNNING]
        if len(saved) != 1 or len(saved[0]["params"]) != len(order):
            raise ValueError("it has not all parameters in one group, in the order of the model")
        names = [order]
    for group, of in zip(saved, names, strict=True):
        for name, number in zip(of, group["params"], strict=True):
            kept = state["state"].get(number, {}).values()
            like = [v for v in kept if isinstance(v, Tensor) and v.dim()]
            if like and all(v.shape != own[name].shape for v in like):
                raise ValueError(f"what it keeps of number {number} is not of the shape of {name}")
    return [
        {"names": of, "options": group_options(group),
         **({"called": dict(zip(of, group["param_names"], strict=True))} if "param_names" in group else {})}
        for group, of in zip(saved, names, strict=True)
    ]  # fmt: skip


def written_bytes(target: Path, before: Collection[Path]) -> int:
    """How much of a target is on disk, while it is written.

    Args:
        target: Of a conversion.
        before: What lay beside it when that began, from `unfinished`.
    """
    found = 0
    for path in unfinished(target):
        if path not in before:
            try:
                found += path.stat().st_size
            except FileNotFoundError:  # it got its name just now
                continue
    return found


def unfinished(target: Path) -> set[Path]:
    """Files in and beside a target that are being written."""
    beside_it = [file for path in target.parent.glob("lp-partial-*") for file in (path, *path.glob("*"))]
    inside = target.glob("*.lp-*.tmp") if target.is_dir() else ()
    return {path for path in (*beside_it, *inside, *target.parent.glob("lp-partial-*.tmp")) if path.is_file()}
