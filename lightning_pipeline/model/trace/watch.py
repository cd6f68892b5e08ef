"""Notice, while tracing, which plain attributes of modules a step reads and writes."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeline.model.tensors import filled_by, items_of, objects_below, tensors_in

_PLAIN = (type(None), bool, int, float, complex, str, torch.Size)
_IGNORED = (
    "_parameters",
    "_buffers",
    "_modules",
    "_non_persistent_buffers_set",
    "training",
    "forward",
    "__dict__",
    "__class__",
)


def _print_of(value: Any, depth: int = 3) -> Any:
    """Something that compares unequal when a plain value, a container or a tensor in it was replaced."""
    if isinstance(value, _PLAIN):
        return (type(value).__name__, value)
    if not isinstance(value, list | deque | tuple | set | dict) or not depth:
        return (type(value).__name__, id(value))
    if len(value) >= 1000:
        return (id(value), len(value))
    return (id(value), tuple((str(key), _print_of(item, depth - 1)) for key, item in items_of(value)))


class AttributeSnapshot:
    """The plain attributes of some modules at one moment.

    Args:
        modules: Whose attributes.
        objects: Whether also those of plain objects that the modules hold, each as a holder of its own.
    """

    def __init__(self, modules: Iterable[Any], objects: bool = False) -> None:
        self._modules = list(modules)
        self._modules += objects_below(self._modules) if objects else []
        self._prints = [self._read(module) for module in self._modules]
        self._values = {
            id(module): dict(vars(module)) for module in self._modules
        }  # held: no id is used twice

    @staticmethod
    def _read(module: Any) -> dict[str, Any]:
        return {name: _print_of(value) for name, value in vars(module).items() if name not in _IGNORED}

    def holds(self, module: nn.Module, name: str) -> bool:
        """Whether the attribute is still the object that it was."""
        held = self._values.get(id(module))
        return held is not None and name in held and held[name] is vars(module).get(name)

    def changed(self) -> list[tuple[Any, str]]:
        """Attributes that are new, gone, replaced, or whose container was changed since."""
        found: list[tuple[Any, str]] = []
        for module, before in zip(self._modules, self._prints, strict=True):
            after = self._read(module)
            names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
            found.extend((module, name) for name in names)
        return found


class ReadWatch:
    """Tells when code outside the units reads a watched attribute. Works by a subclass put in place.

    Args:
        on_read: Called with the module and the name.
        on_write: The same, when any attribute is set.
    """

    def __init__(
        self, on_read: Callable[[nn.Module, str], None], on_write: Callable[[nn.Module, str], None]
    ) -> None:
        self._on_read, self._on_write = on_read, on_write
        self._classes: dict[int, tuple[nn.Module, type]] = {}  # by id: a metric's hash reads its attributes

    def watch(self, module: nn.Module, names: set[str] | None = None) -> None:
        """Watch these attributes of `module`, or all in its `__dict__`; more names join those before."""
        if id(module) in self._classes:
            watched = type(module)._watched  # type: ignore[attr-defined]
            if watched is not None and names is not None:
                watched.update(names)
            return
        cls = type(module)
        self._classes[id(module)] = (module, cls)
        on_read, on_write, ids = self._on_read, self._on_write, self._classes

        def read(self: nn.Module, name: str) -> Any:
            if name not in _IGNORED and id(self) in ids:
                watched = type.__getattribute__(type(self), "_watched")
                if (watched is None or name in watched) and name in object.__getattribute__(self, "__dict__"):
                    on_read(self, name)
            return cls.__getattribute__(self, name)

        def write(self: nn.Module, name: str, value: Any) -> None:
            if id(self) in ids:
                on_write(self, name)
            cls.__setattr__(self, name, value)

        own = {"__getattribute__": read, "__setattr__": write, "_watched": names}
        module.__class__ = type(cls.__name__, (cls,), {**own, "__module__": cls.__module__})

    def stop(self) -> None:
        """Give every module its own class back."""
        for module, cls in self._classes.values():
            module.__class__ = cls
        self._classes.clear()


def holds_tensor(value: Any) -> bool:
    """Whether a tensor is in this value, or in what it holds."""
    return next(tensors_held(value), None) is not None


def tensors_held(value: Any, depth: int = 3) -> Iterator[Tensor]:
    """Every tensor in this value, in the containers and in the plain objects of it."""
    if isinstance(value, Tensor):
        yield value
        return
    held = filled_by(value) if depth else None
    if held is None:
        yield from tensors_in(value)
        return
    for _, item in items_of(held):
        yield from tensors_held(item, depth - 1)
