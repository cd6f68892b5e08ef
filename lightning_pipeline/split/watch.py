"""Notice, while tracing, which plain attributes of modules a step reads and writes."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeline.split.structure import tensors_in

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
    if isinstance(value, list | tuple | set | dict) and depth and len(value) < 1000:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return (id(value), tuple((str(key), _print_of(item, depth - 1)) for key, item in items))
    return (type(value).__name__, id(value))


class AttributeSnapshot:
    """The plain attributes of some modules at one moment."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._prints = [self._read(module) for module in self._modules]
        self._values = {
            id(module): dict(vars(module)) for module in self._modules
        }  # held: no id is used twice

    @staticmethod
    def _read(module: nn.Module) -> dict[str, Any]:
        return {name: _print_of(value) for name, value in vars(module).items() if name not in _IGNORED}

    def holds(self, module: nn.Module, name: str) -> bool:
        """Whether the attribute is still the object that it was."""
        held = self._values.get(id(module))
        return held is not None and name in held and held[name] is vars(module).get(name)

    def changed(self) -> list[tuple[nn.Module, str]]:
        """Attributes that are new, gone, replaced, or whose container was changed since."""
        found: list[tuple[nn.Module, str]] = []
        for module, before in zip(self._modules, self._prints, strict=True):
            after = self._read(module)
            names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
            found.extend((module, name) for name in names)
        return found


class ReadWatch:
    """Tells when code outside the units reads a watched attribute. Works by a subclass put in place."""

    def __init__(self, on_read: Callable[[nn.Module, str], None]) -> None:
        self._on_read = on_read
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
        on_read, ids = self._on_read, self._classes

        def read(self: nn.Module, name: str) -> Any:
            if name not in _IGNORED and id(self) in ids:
                watched = type.__getattribute__(type(self), "_watched")
                if (watched is None or name in watched) and name in object.__getattribute__(self, "__dict__"):
                    on_read(self, name)
            return cls.__getattribute__(self, name)

        module.__class__ = type(
            cls.__name__, (cls,), {"__getattribute__": read, "_watched": names, "__module__": cls.__module__}
        )

    def stop(self) -> None:
        """Give every module its own class back."""
        for module, cls in self._classes.values():
            module.__class__ = cls
        self._classes.clear()


def holds_tensor(value: Any) -> bool:
    """Whether a tensor is in this value or in a list, tuple or dictionary of it."""
    return isinstance(value, Tensor) or next(iter(tensors_in(value)), None) is not None
