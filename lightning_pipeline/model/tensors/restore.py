"""Put a module and the random generators back as they were: a trace must leave no mark."""

import functools
import gc
import inspect
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import CellType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from lightning_pipeline.errors import SplitError
from lightning_pipeline.model.tensors.containers import (
    attributes_of,
    contents_of,
    filled_by,
    is_array,
    items_of,
    refill,
)
from lightning_pipeline.model.tensors.operations import (
    is_placeholder,
    move_back,
    put_back,
    storage_key,
    version_of,
)
from lightning_pipeline.model.tensors.structure import tensors_in
from lightning_pipeline.registry import named_parameters_of, parameters_of

_REGISTRIES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
_HOLDS_NOTHING = frozenset(
    {bool, int, float, complex, str, bytes, type(None), type, Tensor, nn.Parameter, torch.device, torch.dtype}
)
_PLAIN = _HOLDS_NOTHING - {Tensor, nn.Parameter}
_DICTIONARIES = (dict, OrderedDict)
_EMPTY: dict[Any, Any] = {}
_DEPTH, _WIDE = 20, 200  # of the search for what leads to something


class ModuleState:
    """A copy of everything about a module tree that a step may change, apart from parameters' values.

    Args:
        root: The tree.
        writes_undone: Whether somebody else puts back what operations write. Buffers in host memory are
            copied all the same, for NumPy may write them.
    """

    def __init__(self, root: nn.Module, *, writes_undone: bool = False) -> None:
        self._modules = list(root.modules())
        self._dicts = [dict(vars(module)) for module in self._modules]
        self._registries = [
            [_copied(vars(module).get(name)) for name in _REGISTRIES] for module in self._modules
        ]
        attributes = [
            value
            for values in self._dicts
            for name, value in values.items()
            if type(value) not in _PLAIN and name not in _REGISTRIES
        ]
        empty = [value for value in attributes if type(value) in _DICTIONARIES and not value]
        self._containers = [(held, _EMPTY) for held in empty]  # a dozen of each module are for its hooks
        self._containers += _containers(v for v in attributes if type(v) not in _DICTIONARIES or v)
        buffers = [*root.buffers(), *(value for value in attributes if isinstance(value, Tensor))]
        copied = [one for one in buffers if not writes_undone or one.device.type == "cpu"]
        known = [(one, values) for one in copied if (values := _copy_values(one)) is not None]
        self._buffers = [(buffer, values, version_of(buffer)) for buffer, values in known]
        self._graphs = {id(buffer): buffer.grad_fn for buffer, _ in known}
        parameters = [p for p in parameters_of(root) if not isinstance(p, UninitializedParameter)]
        self._flags = [(parameter, parameter.requires_grad) for parameter in parameters]
        kept = [one for one in buffers if writes_undone and not isinstance(one, UninitializedBuffer)]
        self._memory = [(one, one.data) for one in (*parameters, *kept) if not is_placeholder(one)]

    def restore(self) -> None:
        """Put it all back in place."""
        for module, values, registries in zip(self._modules, self._dicts, self._registries, strict=True):
            current = vars(module)
            current.clear()
            current.update(values)
            for name, saved in zip(_REGISTRIES, registries, strict=True):
                _refill(current.get(name), saved)
        for container, saved in self._containers:
            _refill(container, saved)
        for tensor, memory in self._memory:
            if storage_key(tensor) != storage_key(memory):
                move_back(tensor, memory)
        for buffer, value, version in self._buffers:
            graph = buffer.grad_fn
            if graph is not None and graph is not self._graphs[id(buffer)] and not buffer._is_view():
                buffer.detach_()  # from what was computed since
            put_back(buffer, value, version)
        for parameter, flag in self._flags:
            parameter.requires_grad_(flag)


def _copy_values(buffer: Tensor) -> Tensor | None:
    if isinstance(buffer, UninitializedBuffer) or buffer.is_meta or is_placeholder(buffer):
        return None
    return buffer.detach().clone()


def _copied(container: Any) -> Any:
    """A copy; None of those of a scripted module, which stay as they are."""
    return container.copy() if isinstance(container, dict | set) else None


def _containers(level: Iterable[Any], depth: int = 8, anything: bool = False) -> list[tuple[Any, Any]]:
    """Every container below, and a shallow copy of it. `anything`: in objects of any class.

    Level by level, so that what several modules have is looked into from where the most of it is seen.
    """
    found: list[tuple[Any, Any]] = []
    seen: set[int] = set()
    for _ in range(depth):
        below: list[Any] = []
        for value in level:
            if type(value) in _HOLDS_NOTHING or id(value) in seen:
                continue
            seen.add(id(value))
            if is_array(value):
                found.append((value, value.copy()))
                continue
            if anything and hasattr(value, "__dict__") and not isinstance(value, (Tensor, nn.Module, type)):
                value = vars(value)
            held = filled_by(value)
            if held is None or (held is not value and id(held) in seen):
                continue
            seen.add(id(held))
            if not isinstance(held, tuple):
                found.append((held, contents_of(held)))
            if held is value and (own := attributes_of(value)):  # of a class of the user's
                found.append((own, dict(own)))
            if 0 < len(held) <= 1000:
                below.extend(item for _, item in items_of(held))
        level = below
    return found


def _refill(container: Any, saved: Any) -> None:
    if container is not None and saved is not None and (is_array(saved) or saved or container):
        refill(container, saved)


class ObjectState:
    """The containers and attributes of objects handed to a unit, such as a cache of keys and values."""

    def __init__(self, values: Any) -> None:
        self._containers = _containers([values], depth=8, anything=True)

    def restore(self) -> None:
        """Put them back in place."""
        for container, saved in self._containers:
            _refill(container, saved)


def forget_placeholders(made: list["weakref.ref[Tensor]"]) -> None:
    """Remove the trace's placeholders from caches of the user's code (`functools.lru_cache`, dictionaries).

    One left there would turn up in a later, real computation.

    Args:
        made: Weak references to what the trace made.

    Raises:
        SplitError: One is held where it cannot be removed.
    """
    _open_circles(_alive(made))
    if not _alive(made):
        return
    with _thawed():
        _empty_caches(made)
    _open_circles(_alive(made))
    left = _alive(made)
    if left:
        raise SplitError(
            f"{_holder(left[0])} outside the module keeps a tensor of shape {tuple(left[0].shape)} that was "
            "made while the step was traced; keep it in a list, deque or dictionary of the module, or clear "
            "it in the step"
        )


@contextmanager
def _thawed() -> Iterator[None]:
    """Inside, frozen objects, which the garbage collector does not list, are as the others."""
    frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    try:
        yield
    finally:
        if frozen:
            gc.freeze()


def _empty_caches(made: list["weakref.ref[Tensor]"]) -> None:
    for cache in [o for o in gc.get_objects() if type(o) is functools._lru_cache_wrapper]:
        if cache.cache_info().currsize and any(is_placeholder(held) for held in _reachable(cache)):
            cache.cache_clear()
    _empty_dictionaries(_held(made))  # garbage, too: a collection of all objects costs more than it spares


def _empty_dictionaries(tensors: list[Tensor]) -> None:
    known = set(map(id, tensors))
    for holder in gc.get_referrers(*tensors) if tensors else ():
        if isinstance(holder, dict) and "__builtins__" not in holder:
            for key in [key for key, value in holder.items() if id(value) in known]:
                del holder[key]


def _open_circles(tensors: list[Tensor]) -> None:
    known = set(map(id, tensors))
    found = gc.get_referrers(*tensors) if tensors else []
    holders = [one for one in found if isinstance(one, list | CellType) and one is not tensors]
    del found
    loose = _kept_by_graphs(holders)  # as far as objects lead there that are not frozen
    if loose and gc.get_freeze_count():
        with _thawed():
            loose = _kept_by_graphs(loose)
    for holder in loose:
        _let_go(holder, known)


def _let_go(holder: "list[Any] | CellType", known: set[int]) -> None:
    if isinstance(holder, CellType):
        del holder.cell_contents
    else:
        holder[:] = [item for item in holder if id(item) not in known]


def _kept_by_graphs(holders: list[Any]) -> list[Any]:
    """Those to which nothing of Python leads, but functions that autograd keeps, as regions that run again.

    Such a function may hold what the step made after it: a circle that is open only after a backward, and a
    trace has none. One search for all of them, as each step of it looks at every object of the process.
    """
    leads_to = {id(holder): {id(holder)} for holder in holders}
    held: set[int] = set()
    level = list(holders)
    for _ in range(_DEPTH):
        if not level or len(level) > _WIDE:
            break
        below, above = set(map(id, level)), []
        for one in gc.get_referrers(*level):
            if one is level or one is holders or _is_own(one):
                continue
            ends = set[int]().union(
                *(leads_to[id(item)] for item in gc.get_referents(one) if id(item) in below)
            )
            if inspect.isframe(one) or inspect.ismodule(one) or isinstance(one, type):
                held |= ends
            elif not ends <= leads_to.get(id(one), set()):
                leads_to[id(one)] = leads_to.get(id(one), set()) | ends
                above.append(one)
        level = [one for one in above if not leads_to[id(one)] <= held]
    for one in level:  # the search has ended before its end
        held |= leads_to[id(one)]
    return [holder for holder in holders if id(holder) not in held]


def _is_own(value: Any) -> bool:
    return inspect.isframe(value) and value.f_code.co_filename == __file__


def _holder(tensor: Tensor) -> str:
    """What keeps a tensor, in words."""
    kinds = {type(holder).__name__ for holder in gc.get_referrers(tensor) if not inspect.isframe(holder)}
    return f"a {' or '.join(sorted(kinds - {'list_iterator'}))}" if kinds else "a cache"


def _alive(made: list["weakref.ref[Tensor]"]) -> list[Tensor]:
    if _held(made):
        gc.collect()
    return _held(made)


def _held(made: list["weakref.ref[Tensor]"]) -> list[Tensor]:
    """Those that are left, also by circles that nothing leads to any more."""
    return [tensor for tensor in (reference() for reference in made) if tensor is not None]


def _reachable(cache: Any, depth: int = 4) -> Iterator[Any]:
    """What a cache holds, and what is in it; not what the function that it is of can see besides."""
    level = [cache]
    for _ in range(depth):
        level = [item for item in gc.get_referents(*level) if not _is_code(item)] if level else []
        yield from level


def _is_code(item: Any) -> bool:
    return isinstance(item, type | ModuleType) or (type(item) is dict and "__builtins__" in item)


def holds_tensor(value: Any) -> bool:
    """Whether a tensor is in this value, or in what it holds."""
    return next(tensors_held(value), None) is not None


Looked = dict[tuple[int, int], tuple[Any, list[Tensor]]]
"""What was looked into, by identity and depth: itself, so that it lives, and its tensors."""


def tensors_held(
    value: Any, depth: int = 8, most: int | None = None, looked: Looked | None = None
) -> Iterator[Tensor]:
    """Every tensor in this value, in the containers and in the plain objects of it.

    Args:
        value: Anything.
        depth: How far down to go.
        most: Items of a container that is looked into; None: any number.
        looked: Of a look at several values: what leads back to one that holds it, as the nodes of a
            configuration do, is looked into once.
    """
    looked = {} if looked is None else looked
    if isinstance(value, Tensor):
        yield value
    elif type(value) in _PLAIN:
        yield from _tensors_below(value, depth, most, looked)
    else:
        key = id(value), depth
        if key not in looked:
            looked[key] = value, list(_tensors_below(value, depth, most, looked))
        yield from looked[key][1]


def _tensors_below(value: Any, depth: int, most: int | None, looked: Looked | None) -> Iterator[Tensor]:
    held = filled_by(value) if depth else None
    if held is None:
        yield from tensors_in(value)
    elif most is None or len(held) <= most:
        for _, item in items_of(held):
            yield from tensors_held(item, depth - 1, most, looked)


class Versions:
    """Tells which parameters are written from now on.

    Args:
        root: The module that has them, None for none.
    """

    def __init__(self, root: nn.Module | None) -> None:
        named = () if root is None else named_parameters_of(root)
        self._seen = [(name, one, version_of(one)) for name, one in named if not is_placeholder(one)]

    def written(self) -> list[str]:
        """Names of those that were."""
        return [name for name, one, version in self._seen if version_of(one) != version]
