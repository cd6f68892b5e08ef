"""Checkpoints of a split module: a folder, every rank writes its part, with the names of the whole module.

`model` and `optimizer_0` hold the tensors, by name, so that any number of stages can read them, and
Lightning's own `consolidate_checkpoint` the weights. `meta.pt` holds the rest.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, load, save
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer

from lightning_pipeline.errors import CheckpointError

META = "meta.pt"
_PER_RANK = "lightning_pipeline"

Gather = Callable[[Any], list[Any]]
"""Gives the objects of all ranks of the pipeline, by pipeline rank."""


def save_folder(
    path: Path,
    checkpoint: dict[str, Any],
    own_optimizers: Sequence[Mapping[str, Any]],
    gather: Gather,
    *,
    first: bool,
) -> None:
    """Write a checkpoint. Every rank of the world calls this.

    Args:
        path: The folder; the same on every rank.
        checkpoint: What Lightning dumped; `state_dict` holds this rank's part.
        own_optimizers: This rank's part of each optimizer's state, from `flat_state`.
        gather: Collects what differs between stages and is no tensor.
        first: Whether this is global rank 0, which writes `meta.pt`.
    """
    rest = {k: v for k, v in checkpoint.items() if k not in ("state_dict", "optimizer_states")}
    state: dict[str, Any] = {"model": checkpoint["state_dict"]}
    if "optimizer_states" in checkpoint:
        state.update({f"optimizer_{index}": dict(flat) for index, flat in enumerate(own_optimizers)})
    rest[_PER_RANK] = {"lr_schedulers": gather(checkpoint.get("lr_schedulers"))}
    if path.is_file() and first:
        path.unlink()
    path.mkdir(parents=True, exist_ok=True)
    save(state, checkpoint_id=path)
    if first:
        torch.save(rest, path / META)


def is_folder(path: Path) -> bool:
    """Whether a path is a checkpoint that `save_folder` wrote."""
    return path.is_dir() and (path / META).is_file()


def read_meta(path: Path, rank: int, num_ranks: int, *, weights_only: bool | None) -> dict[str, Any]:
    """What Lightning dumped, without the tensors.

    Args:
        path: The folder.
        rank: This rank's position on the pipeline axis.
        num_ranks: Ranks of the pipeline axis; where it is not what it was, rank 0's schedulers stand for all.
        weights_only: As for `torch.load`. Default: `False`, for callbacks and loops keep plain Python
            objects.
    """
    meta: dict[str, Any] = torch.load(path / META, map_location="cpu", weights_only=bool(weights_only))
    schedulers = meta.pop(_PER_RANK, {}).get("lr_schedulers") or []
    if len(schedulers) == num_ranks and schedulers[rank] is not None:
        meta["lr_schedulers"] = schedulers[rank]
    return meta


def load_model(path: Path, own: Mapping[str, Tensor], gather: Gather, *, strict: bool) -> None:
    """Read this rank's tensors in place.

    Args:
        path: The folder.
        own: This rank's tensors, by name.
        gather: Collects the names of all stages, for a checkpoint must fit their union.
        strict: Whether a missing or unexpected name is an error.

    Raises:
        CheckpointError: The names do not fit, or the files cannot be read.
    """
    stored = {name.removeprefix("model.") for name in _stored(path) if name.startswith("model.")}
    check_names(stored, set().union(*gather(set(own))), str(path), strict=strict)
    _load({"model": {name: tensor for name, tensor in own.items() if name in stored}}, path)


def check_names(stored: set[str], expected: set[str], path: str, *, strict: bool) -> None:
    """Refuse a checkpoint of another module.

    Raises:
        CheckpointError: With the missing and the unexpected names.
    """
    missing, unexpected = sorted(expected - stored), sorted(stored - expected)
    if strict and (missing or unexpected):
        raise CheckpointError(
            f"checkpoint {path} does not fit this module: missing {_some(missing)}; "
            f"unexpected {_some(unexpected)}. Load the module it was "
            "saved from, or set strict_loading=False on the LightningModule"
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "") or "none"


def load_optimizers(path: Path, optimizers: Sequence[Optimizer], names: Mapping[int, str]) -> None:
    """Read this rank's part of the optimizers' state.

    Args:
        path: The folder.
        optimizers: To fill.
        names: Of this rank's parameters, by `id`.

    Raises:
        CheckpointError: The files cannot be read.
    """
    stored = _stored(path)
    for index, optimizer in enumerate(optimizers):
        prefix = f"optimizer_{index}."
        known = {key.removeprefix(prefix): meta for key, meta in stored.items() if key.startswith(prefix)}
        wanted = _wanted(optimizer, names, known)
        _load({f"optimizer_{index}": wanted}, path)
        fill(optimizer, names, wanted)


def _wanted(optimizer: Optimizer, names: Mapping[int, str], known: Mapping[str, Any]) -> dict[str, Any]:
    """Empty tensors, and placeholders for other values, of the stored state of this rank's parameters."""
    own = tuple(f"state.{name}." for name in _names_of(optimizer, names))
    groups = tuple(f"param_groups.{name}." for name in _names_of(optimizer, names))
    wanted: dict[str, Any] = {}
    for key, meta in known.items():
        if key.startswith(own + groups):
            is_tensor = hasattr(meta, "size") and hasattr(meta, "properties")
            wanted[key] = torch.empty(meta.size, dtype=meta.properties.dtype) if is_tensor else None
    return wanted


def _names_of(optimizer: Optimizer, names: Mapping[int, str]) -> list[str]:
    return [names[id(p)] for group in optimizer.param_groups for p in group["params"] if id(p) in names]


def flat_state(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """An optimizer's state by parameter name, flat: no two stages write the same key.

    The layout is that of `StateDictOptions(flatten_optimizer_state_dict=True)`, which itself raises on a
    stage without trainable parameters.

    Args:
        optimizer: Whose parameters are this rank's.
        names: Of this rank's parameters, by `id`.

    Returns:
        `state.<name>.<key>` and `param_groups.<name>.<key>`.
    """
    flat: dict[str, Any] = {}
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for parameter in group["params"]:
            name = names[id(parameter)]
            flat.update({f"param_groups.{name}.{key}": value for key, value in options.items()})
            flat.update({f"state.{name}.{key}": value for key, value in optimizer.state[parameter].items()}
                        if parameter in optimizer.state else {})  # fmt: skip
    return flat


def fill(optimizer: Optimizer, names: Mapping[int, str], flat: Mapping[str, Any]) -> None:
    """Put flat state into an optimizer, in place.

    Args:
        optimizer: To fill.
        names: Of this rank's parameters, by `id`.
        flat: From `flat_state`.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            state = _under(flat, f"state.{name}.")
            if state:
                optimizer.state[parameter] = {
                    key: _beside(key, value, parameter) for key, value in state.items()
                }
            group.update(_under(flat, f"param_groups.{name}."))


def _under(flat: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {key.removeprefix(prefix): value for key, value in flat.items() if key.startswith(prefix)}


def _beside(key: str, value: Any, parameter: Tensor) -> Any:
    if isinstance(value, Tensor) and key != "step":  # the count of steps stays where torch keeps it
        return value.to(parameter.device)
    return value


def _stored(path: Path) -> dict[str, Any]:
    stored: dict[str, Any] = _guarded(
        path, lambda: dict(FileSystemReader(path).read_metadata().state_dict_metadata)
    )
    return stored


def _load(state: dict[str, Any], path: Path) -> None:
    if any(state.values()):
        # Each rank reads what it needs; nothing is agreed on, so a stage without state need not take part.
        _guarded(path, lambda: load(state, checkpoint_id=path, no_dist=True))


def _guarded(path: Path, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (OSError, CheckpointException, RuntimeError, KeyError) as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {type(error).__name__}: {error}") from error


def load_file(
    path: Path, own: Mapping[str, Tensor], gather: Gather, *, strict: bool, weights_only: bool | None
) -> dict[str, Any]:
    """Read weights from a one-file checkpoint, such as a run on one device writes.

    Args:
        path: The file.
        own: This rank's tensors, by name; filled in place.
        gather: Collects the names of all stages.
        strict: Whether a missing or unexpected name is an error.
        weights_only: As for `torch.load`.

    Returns:
        The checkpoint, without the tensors.

    Raises:
        CheckpointError: The names do not fit.
    """
    checkpoint: dict[str, Any] = torch.load(
        path, map_location="cpu", mmap=True, weights_only=bool(weights_only)
    )
    stored: dict[str, Tensor] = checkpoint.pop("state_dict")
    check_names(set(stored), set().union(*gather(set(own))), str(path), strict=strict)
    with torch.no_grad():
        for name, tensor in own.items():
            if name in stored:
                tensor.copy_(stored[name])
    return checkpoint


def names_by_identity(parameters: Iterable[tuple[str, Tensor]]) -> dict[int, str]:
    """The name of each parameter, by `id`; the first where it has several."""
    names: dict[int, str] = {}
    for name, parameter in parameters:
        names.setdefault(id(parameter), name)
    return names
