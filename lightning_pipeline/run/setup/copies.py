"""Copies of weights in callbacks, attributes of the module and objects there: made whole when a run ends.

A copy made during a run holds this stage's values and placeholders. What stands on the path to a placeholder
is on another rank under the same path, for callbacks do the same on all of them.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from lightning_pipeline.model.places import Guard
from lightning_pipeline.model.tensors import attributes_of, is_placeholder

_OF_ALL_MODULES = frozenset(vars(nn.Module()))


class _Held(NamedTuple):
    """Where a tensor is held."""

    path: str
    holder: Any
    key: Any
    tensor: Tensor


def fill_copies(
    callbacks: Iterable[Callback], root: nn.Module, gather: Callable[[Any], list[Any]], *, keep: bool
) -> None:
    """Put the values of all stages into what callbacks hold, and attributes of the module.

    Args:
        callbacks: Of the Trainer; the same on every rank.
        root: The module itself, which is no copy: its parameters and buffers are left as they are.
        gather: Collects an object of every rank of this replica.
        keep: Whether this rank gets what the others hold; else that is left on the meta device.
    """
    held = {
        one.path: one
        for number, callback in enumerate(callbacks)
        for one in _held(f"{number}", vars(callback), {id(root)})
    } | {one.path: one for one in _held_by_attributes(root)}
    missing = {path for path, one in held.items() if is_placeholder(one.tensor)}
    wanted = set().union(*gather(missing))
    for path in sorted(wanted):
        own = held[path].tensor if path in held and path not in missing else None
        parts = gather(None if own is None else own.detach().cpu().clone())
        found = next((part for part in parts if part is not None), None)
        if path in missing:
            one = held[path]
            if found is None:
                found = torch.empty(one.tensor.shape, dtype=one.tensor.dtype, device="meta")
            value = found if keep else found.to("meta")
            parameter = isinstance(one.tensor, nn.Parameter)
            one.holder[one.key] = nn.Parameter(value, one.tensor.requires_grad) if parameter else value


def _held_by_attributes(root: nn.Module) -> Iterator[_Held]:
    """Tensors in attributes of all parts of a module, and in lists and dictionaries there."""
    seen = set(map(id, root.modules()))
    for name, part in root.named_modules():
        own = {key: value for key, value in vars(part).items() if key not in _OF_ALL_MODULES}
        for one in _held(f"module.{name}", own, seen):
            yield one._replace(holder=vars(part)) if one.holder is own else one


def _held(path: str, holder: Any, seen: set[int]) -> Iterator[_Held]:
    items = list(holder.items()) if isinstance(holder, dict) else list(enumerate(holder))
    for key, value in items:
        where = f"{path}.{key}"
        if isinstance(value, Tensor):
            yield _Held(where, holder, key, value)
        elif isinstance(value, Guard):
            continue
        elif id(value) not in seen:
            inner = value if isinstance(value, dict | list) else attributes_of(value)
            if isinstance(value, nn.Module):
                seen.add(id(value))
                yield from _held_in_module(where, value)
            elif inner is not None:
                seen.add(id(value))
                yield from _held(where, inner, seen)


def _held_in_module(path: str, module: nn.Module) -> Iterator[_Held]:
    for name, part in module.named_modules():
        for registry in (part._parameters, part._buffers, vars(part)):
            for key, tensor in list(registry.items()):
                if isinstance(tensor, Tensor):
                    yield _Held(f"{path}.{name}.{key}", registry, key, tensor)
