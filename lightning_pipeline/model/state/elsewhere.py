"""What stands on a stage for something that only another stage has."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn

from lightning_pipeline.errors import PlaceholderError
from lightning_pipeline.model.tensors import user_line


class ElsewhereError(PlaceholderError):
    """Something was read that is on the last stage only."""


def _refuse(what: str) -> NoReturn:
    raise ElsewhereError(
        f"{what} is filled by the end of the step, which runs on the last stage only: read it there "
        "(`self.trainer.is_global_zero` is true on it), or use self.log, whose values are on every rank "
        f"[at {user_line()}]"
    )


def _reader(name: str) -> Callable[..., Any]:
    def read(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._refused()

    read.__name__ = name
    return read


def _silent(self: Any, *args: Any, **kwargs: Any) -> None:
    """Writes are dropped: the value lives on the last stage."""


_READS = [
    "__iter__",
    "__len__",
    "__getitem__",
    "__contains__",
    "__bool__",
    "__reversed__",
    "__eq__",
    "__ne__",
    "__lt__",
    "__gt__",
    "__add__",
    "__mul__",
    "index",
    "count",
    "copy",
    "get",
    "keys",
    "values",
    "items",
]
_WRITES = [
    "append",
    "extend",
    "insert",
    "remove",
    "clear",
    "sort",
    "reverse",
    "__setitem__",
    "__delitem__",
    "update",
    "setdefault",
    "appendleft",
    "extendleft",
]


class Elsewhere:
    """Raises on any use, also by torch's functions."""

    def __init__(self, what: str) -> None:
        object.__setattr__(self, "_what", what)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return self._refused()

    def _refused(self) -> NoReturn:
        _refuse(self._what)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = [a for a in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(a, _GUARDS)]
        return found[0]._refused() if found else _refuse("a value")

    def __repr__(self) -> str:
        return f"<{self._what}: on the last stage>"

    __hash__ = None  # type: ignore[assignment]


class Unmerged(Elsewhere):
    """Raises on any use of what the micro-batches of a batch set, and which has no value for the batch."""

    def __init__(self, what: str, step: str) -> None:
        super().__init__(what)
        object.__setattr__(self, "_step", step)

    def _refused(self) -> NoReturn:
        raise PlaceholderError(
            f"{self._what} is set by {self._step}, which runs once for each micro-batch, and the values "
            "cannot be merged to what one device would have: append them to a list, use self.log, or "
            f"override `merge_outputs(outputs, sizes)` on the LightningModule [at {user_line()}]"
        )


for _name in (*_READS, "__float__", "__int__", "__sub__", "__truediv__", "__radd__", "__rmul__", "__call__"):
    setattr(Elsewhere, _name, _reader(_name))


class ElsewhereList(list[Any]):
    """A list that takes writes and drops them, and raises when read."""

    def __init__(self, what: str) -> None:
        super().__init__([Elsewhere(what)])  # torch.stack reads a list's memory, not its methods
        self._what = what

    def __repr__(self) -> str:
        return f"<{self._what}: on the last stage>"

    def _refused(self) -> NoReturn:
        _refuse(self._what)

    __hash__ = None


class ElsewhereDeque(deque[Any]):
    """A deque that takes writes and drops them, and raises when read."""

    def __init__(self, what: str) -> None:
        super().__init__([Elsewhere(what)])
        self._what = what

    def __repr__(self) -> str:
        return f"<{self._what}: on the last stage>"

    def _refused(self) -> NoReturn:
        _refuse(self._what)

    __hash__ = None


class ElsewhereDict(dict[Any, Any]):
    """A dictionary that takes writes and drops them, and raises when read."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what

    def __repr__(self) -> str:
        return f"<{self._what}: on the last stage>"

    def _refused(self) -> NoReturn:
        _refuse(self._what)

    __hash__ = None


_GUARDS = (Elsewhere, ElsewhereList, ElsewhereDeque, ElsewhereDict)
for _cls in _GUARDS[1:]:
    for _name in _READS:
        setattr(_cls, _name, _reader(_name))
    for _name in _WRITES:
        setattr(_cls, _name, _silent)


_MISSING = object()


def attribute_name(root: nn.Module, holder: object, name: str) -> str:
    """What to call an attribute of a module, or of a plain object that a module holds.

    Args:
        root: The LightningModule.
        holder: What has the attribute.
        name: Its name there.
    """
    if holder is root:
        return f"attribute '{name}' of the LightningModule"
    for prefix, module in root.named_modules():
        if module is holder:
            return f"attribute '{prefix}.{name}'"
        for own, value in vars(module).items():
            if value is holder:
                return f"attribute '{prefix + '.' if prefix else ''}{own}.{name}'"
    return f"attribute '{name}' of {type(holder).__name__}"


class AttributeGuards:
    """Puts guards in the place of attributes that a step sets on the last stage, and takes them away."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._before: dict[tuple[int, str], tuple[object, Any]] = {}

    def install(self, attributes: list[tuple[object, str]]) -> None:
        """Guard these; one that was assigned anew since is guarded again."""
        for module, name in attributes:
            own = vars(module)
            value = own.get(name, _MISSING)
            if isinstance(value, _GUARDS):
                continue
            self._before.setdefault((id(module), name), (module, value))
            what = attribute_name(self._root, module, name)
            kinds: dict[type, Callable[[str], Any]] = {
                list: ElsewhereList,
                deque: ElsewhereDeque,
                dict: ElsewhereDict,
            }
            kind = next((kinds[plain] for plain in kinds if isinstance(value, plain)), Elsewhere)
            own[name] = kind(what)

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Take the guards away for a moment, for a trace that looks at every attribute."""
        guarded = [(module, name) for (_, name), (module, _) in self._before.items()]
        self.remove()
        try:
            yield
        finally:
            self.install(guarded)

    def remove(self) -> None:
        """Put back what was there."""
        for (_, name), (module, value) in self._before.items():
            if value is _MISSING:
                vars(module).pop(name, None)
            else:
                vars(module)[name] = value
        self._before.clear()
