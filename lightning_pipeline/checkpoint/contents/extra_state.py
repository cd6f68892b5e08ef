"""What modules keep in a state_dict beside parameters and buffers: extra state, states of metrics."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_pipeline._torch import EXTRA_STATE_SUFFIX
from lightning_pipeline.errors import CheckpointError
from lightning_pipeline.model.cut import Partition
from lightning_pipeline.model.tensors import storage_key

Owns = Callable[[nn.Module], bool]
EXTRA = EXTRA_STATE_SUFFIX
_LIBRARIES = ("torch", "torchmetrics", "lightning", "lightning_fabric", "pytorch_lightning")


def owned_by(cut: Partition | None, stages: Sequence[int]) -> Owns:
    """Whether a module's own state is that of some stages: its unit's; outside of units, the last stage's.

    Args:
        cut: Of the module; `None` where it is whole.
        stages: Of this rank.
    """
    if cut is None:
        return lambda module: True
    stage_of = {
        id(part): cut.stage_of[number]
        for number, unit in enumerate(cut.trace.units)
        for part in unit.module.modules()
    }
    return lambda module: stage_of.get(id(module), cut.num_stages - 1) in stages


def extra_names(root: nn.Module) -> set[str]:
    """Names of extra state in a module's `state_dict`."""
    return {name for _, _, names in _parts(root) for name in names.values()}


def extra_states(root: nn.Module, owns: Owns) -> dict[str, Any]:
    """Extra state by its name in the whole module's `state_dict`.

    Args:
        root: The module.
        owns: Whose to ask.
    """
    return {
        name: part.get_extra_state() if key == EXTRA else getattr(part, key)
        for _, part, names in _parts(root)
        if owns(part)
        for key, name in names.items()
    }


def as_told(root: nn.Module, own: Mapping[str, Any], held: Collection[str]) -> dict[str, Any]:
    """A rank's part of the `state_dict`, as the module's own `state_dict` tells it where that is overridden.

    Args:
        root: The module.
        own: What this rank owns, by name.
        held: Names of all that it holds, others' too.
    """
    overrides = (
        type(m).state_dict is not nn.Module.state_dict for m in root.modules() if not isinstance(m, Metric)
    )
    if not any(overrides):
        return dict(own)
    told = root.state_dict()
    others = {*held, *extra_names(root)}
    kept = {name: value for name, value in own.items() if name in told}
    changed = {name: told[name] for name, value in kept.items() if is_another(told[name], value)}
    return {**kept, **changed, **{name: value for name, value in told.items() if name not in others}}


def is_another(told: Any, own: Any) -> bool:
    """Whether a tensor is another one, not only detached."""
    if not (isinstance(told, Tensor) and isinstance(own, Tensor)):
        return False
    return _place_of(told) != _place_of(own)


def _place_of(tensor: Tensor) -> tuple[Any, ...]:
    begin = tensor.data_ptr() if tensor.layout is torch.strided else storage_key(tensor)
    return begin, tensor.shape, tensor.dtype


def is_loaded_by_code(root: nn.Module) -> bool:
    """Whether code that is none of torch's or Lightning's has a say in what `load_state_dict` does.

    Args:
        root: The module: its own `load_state_dict`, hooks of loading, and how its parts take their tensors.
    """
    taking: list[Any] = [type(root).load_state_dict]
    for part in root.modules():
        if not isinstance(part, Metric):
            taking.append(type(part)._load_from_state_dict)
            hooks = (part._load_state_dict_pre_hooks, part._load_state_dict_post_hooks)
            taking += [hook for held in hooks for hook in held.values()]
    return any(_module_of(one).partition(".")[0] not in _LIBRARIES for one in taking)


def _module_of(code: Any) -> str:
    while isinstance(code, partial):
        code = code.func
    return str(getattr(code, "__module__", ""))


def load_extra_states(root: nn.Module, values: Mapping[str, Any]) -> None:
    """Give modules their extra state, as `load_state_dict` does.

    Args:
        root: The module.
        values: By name; those without one keep what they have.

    Raises:
        CheckpointError: A module refuses it.
    """
    for prefix, part, names in _parts(root):
        own: dict[str, Any] = {name: values[name] for name in names.values() if name in values}
        if own:
            refused: list[str] = []
            part._load_from_state_dict(own, prefix, {}, False, [], [], refused)
            if refused:
                raise CheckpointError(f"extra state {', '.join(names.values())} was not taken: {refused}")


def _parts(root: nn.Module) -> Iterator[tuple[str, nn.Module, dict[str, str]]]:
    """Modules with extra state: their prefix, and its names in the whole module by those in the module."""
    for path, part in root.named_modules():
        prefix = f"{path}." if path else ""
        keys = [EXTRA] if type(part).get_extra_state is not nn.Module.get_extra_state else []
        if isinstance(part, Metric):
            keys += [key for key, persists in part._persistent.items() if persists]
        if keys:
            yield prefix, part, {key: f"{prefix}{key}" for key in keys}
