"""Which Python code of the user's a module's methods can reach: classes, functions, and their files."""

import functools
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeGuard

from torch import nn

from lightning_pipeline.model.tensors.containers import are_the_users, attributes_of

_MOST = 20_000
_INSTALLED = {"site-packages", "dist-packages"}


@dataclass
class Code:
    """What was found, in an order that is the same on every rank.

    Attributes:
        classes: Of the user's own.
        functions: Likewise, methods among them.
        files: Python files in which classes of the module stand, and those that they import from, for their
            globals.
    """

    classes: list[type] = field(default_factory=list)
    functions: list[FunctionType] = field(default_factory=list)
    files: list[ModuleType] = field(default_factory=list)


def code_of(root: nn.Module) -> Code:
    """Find the code of a module's project: from its classes and those of its layers on.

    Other projects, such as libraries, are left out, but for classes from which the module's own inherits. Of
    other files of the project, globals and classes count of those that the module's own files import from.

    Args:
        root: The LightningModule.
    """
    return _Search(root).found


class _Search:
    def __init__(self, root: nn.Module) -> None:
        self.found = Code()
        self._seen: set[int] = set()
        self._beside: dict[int, ModuleType] = {}
        self._is_home = _home_of(type(root))
        self._bases = [cls for cls in type(root).__mro__ if are_the_users(cls.__module__)]
        self._pending: deque[Any] = deque(self._bases)
        for module in root.modules():
            self._pending.append(type(module))
            self._pending.extend(value for value in vars(module).values() if _leads_on(value))
        for _ in range(_MOST):
            if not self._pending:
                break
            value = self._pending.popleft()
            if id(value) not in self._seen:
                self._seen.add(id(value))
                self._pending.extend(item for item in self._look(value) if _leads_on(item))
        self._note_beside()

    def _look(self, value: Any) -> Iterator[Any]:
        """Note what is the project's, and give what it leads to."""
        if isinstance(value, FunctionType):
            yield from closed_over(value)
            file = sys.modules.get(value.__globals__.get("__name__", ""))
            if file is not None and self._is_mine(file):
                self.found.functions.append(value)
        elif isinstance(value, type):
            yield from self._look_at_class(value)
        elif isinstance(value, ModuleType):
            if self._has_base(value.__name__):
                self.found.files.append(value)
                held = list(vars(value).values())
                self._beside.update({id(file): file for file in map(_file_of, held) if self._is_other(file)})
                yield from [one for one in held if not self._is_imported(one)]
        elif attributes_of(value) is not None:
            yield type(value)
        else:
            yield from _inside(value)

    def _look_at_class(self, cls: type) -> Iterator[Any]:
        file = sys.modules.get(cls.__module__)
        if cls in self._bases or (file is not None and self._is_mine(file)):
            self.found.classes.append(cls)
            yield from list(vars(cls).values())
            yield from cls.__mro__[1:]
            yield file

    def _is_other(self, file: ModuleType | None) -> TypeGuard[ModuleType]:
        """Whether it is another file of the project than those of the module's classes."""
        return file is not None and self._is_mine(file) and not self._has_base(file.__name__)

    def _note_beside(self) -> None:
        """Globals and classes of the files that are imported from; not what these lead to in turn."""
        for file in self._beside.values():
            self.found.files.append(file)
            classes = [held for held in vars(file).values() if isinstance(held, type)]
            own = [cls for cls in classes if cls.__module__ == file.__name__ and id(cls) not in self._seen]
            self.found.classes += own

    def _is_imported(self, value: Any) -> bool:
        return isinstance(value, type) and not self._has_base(value.__module__)

    def _is_mine(self, file: ModuleType) -> bool:
        return self._is_home(file) or self._has_base(file.__name__)

    def _has_base(self, file: str) -> bool:
        return any(cls.__module__ == file for cls in self._bases)


def _file_of(value: Any) -> ModuleType | None:
    """The file that a global stands for or comes from: a module, or that of a function, class or object."""
    if isinstance(value, ModuleType):
        return value
    of = value if isinstance(value, FunctionType | type) else type(value)
    return sys.modules.get(of.__module__)


def _home_of(cls: type) -> Callable[[ModuleType], bool]:
    """What tells whether a Python file is of the project that a class is of: its package, or its folder."""
    package = cls.__module__.partition(".")[0]
    begin = sys.modules.get(package) if package != "__main__" else sys.modules.get(cls.__module__)
    where = getattr(begin, "__file__", None)
    folder = Path(where).resolve().parent if where else None

    def is_home(file: ModuleType) -> bool:
        name = getattr(file, "__name__", "")
        if name.partition(".")[0] == package:
            return True
        own = getattr(file, "__file__", None)
        if not own or folder is None or not are_the_users(name):
            return False
        path = Path(own)
        return path.is_relative_to(folder) and not _INSTALLED & set(path.relative_to(folder).parts)

    return is_home


def is_installed(file: ModuleType) -> bool:
    """Whether a file is of a package, whose numbers and registries are its own."""
    return bool(_INSTALLED & set(Path(getattr(file, "__file__", None) or "").parts))


_METHODS: tuple[type, ...] = (staticmethod, classmethod, property, MethodType)
_PARTIAL: tuple[type, ...] = (functools.partial, functools.partialmethod, functools.cached_property)


def _leads_on(value: Any) -> bool:
    kinds = (FunctionType, ModuleType, type, *_METHODS, *_PARTIAL)
    return isinstance(value, kinds) or attributes_of(value) is not None


def _inside(value: Any) -> Iterator[Any]:
    """The functions that stand in another callable."""
    if isinstance(value, MethodType | staticmethod | classmethod):
        yield value.__func__
    elif isinstance(value, property):
        yield from (value.fget, value.fset, value.fdel)
    elif isinstance(value, functools.cached_property | functools.partial | functools.partialmethod):
        yield value.func


def closed_over(function: FunctionType) -> Iterator[Any]:
    """What stands in the variables of enclosing functions that a function uses."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not set yet
            continue
