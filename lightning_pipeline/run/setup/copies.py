"""Copies of weights in callbacks, the data module, attributes and globals: made whole when a run ends.

A copy made during a run holds this stage's values and placeholders. What stands on the path to a placeholder
is on another rank under the same path, for hooks do the same on all of them.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import setitem
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from lightning_pipeline.model.places import Guard, Owner
from lightning_pipeline.model.tensors import Slots, filled_by, is_placeholder, items_of

_OF_ALL_MODULES = frozenset(vars(nn.Module()))
_LONG = 10_000  # items of a container that is looked into, such as no dataset


class _Held(NamedTuple):
    """Where a tensor is held."""

    path: str
    tensor: Tensor
    put: Callable[[Any], None]


def fill_copies(
    callbacks: Iterable[Callback], beside: Iterable[Owner], root: nn.Module,
    gather: Callable[[Any], list[Any]], *, keep: bool,
) -> None:  # fmt: skip
    """Put the values of all stages into what callbacks hold, what else does, and attributes of the module.

    Args:
        callbacks: Of the Trainer; the same on every rank.
        beside: What else may hold some, with labels that are the same on every rank.
        root: The module itself, which is no copy: its parameters and buffers are left as they are.
        gather: Collects an object of every rank of this replica.
        keep: Whether this rank gets what the others hold; else that is left on the meta device.
    """
    held = {one.path: one for one in _every(callbacks, beside, root)}
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
            one.put(nn.Parameter(value, one.tensor.requires_grad) if parameter else value)


def _every(callbacks: Iterable[Callback], beside: Iterable[Owner], root: nn.Module) -> Iterator[_Held]:
    seen = set(map(id, root.modules()))
    for number, callback in enumerate(callbacks):
        yield from _below(f"{number}", vars(callback), seen)
    for name, part in root.named_modules():
        for key, value in list(vars(part).items()):
            if key not in _OF_ALL_MODULES:
                yield from _held(f"module.{name}.{key}", value, partial(setitem, vars(part), key), seen)
    for owner in beside:
        for key, value in list(owner.read().items()):
            if owner.watches(key):
                yield from _held(f"{owner.label}{key}", value, partial(owner.write, key), seen)


def _held(path: str, value: Any, put: Callable[[Any], None], seen: set[int]) -> Iterator[_Held]:
    """Tensors in what stands somewhere.

    Args:
        path: Where that is.
        value: What stands there.
        put: Lets another value stand there.
        seen: Objects, by `id`, that were looked into.
    """
    if isinstance(value, Tensor):
        yield _Held(path, value, put)
    elif isinstance(value, nn.Module) and id(value) not in seen:
        seen.add(id(value))
        yield from _held_in_module(path, value)
    elif type(value) is tuple:
        items = list(value)
        for key, item in enumerate(value):
            yield from _held(f"{path}.{key}", item, partial(_put_into, items, put, key), seen)
    elif not isinstance(value, Guard) and id(value) not in seen:
        inner = filled_by(value)
        if inner is not None and not isinstance(inner, tuple | set) and len(inner) <= _LONG:
            seen.add(id(value))
            yield from _below(path, inner, seen)


def _below(
    path: str, holder: dict[Any, Any] | list[Any] | deque[Any] | Slots, seen: set[int]
) -> Iterator[_Held]:
    for key, value in list(items_of(holder)):
        yield from _held(f"{path}.{key}", value, partial(setitem, holder, key), seen)


def _put_into(items: list[Any], put: Callable[[Any], None], key: int, value: Any) -> None:
    """One of a tuple, which is made anew with it."""
    items[key] = value
    put(tuple(items))


def _held_in_module(path: str, module: nn.Module) -> Iterator[_Held]:
    for name, part in module.named_modules():
        for registry in (part._parameters, part._buffers, vars(part)):
            for key, tensor in list(registry.items()):
                if isinstance(tensor, Tensor):
                    yield _Held(f"{path}.{name}.{key}", tensor, partial(setitem, registry, key))
