"""The ledger of what is replaced at run time: one way to replace an attribute, and to put it back.

Patches of one attribute lie on each other. Whichever is undone first, in the end there is what was there
before the first of them: one that lies under others leaves its place to the one above it.
"""

import sys
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

Undo = Callable[[], None]
_MISSING = object()


class _Entry:
    """One replaced attribute. Its owner is known by name, so that the ledger keeps no object alive."""

    def __init__(self, owner: Any, name: str, before: Any) -> None:
        self.owner = getattr(owner, "__name__", type(owner).__name__)
        self.name, self.before = name, before


class _Stack:
    """The patches of one attribute. It goes with the owner, which is kept only where it cannot be watched."""

    def __init__(self, owner: Any, key: tuple[int, str]) -> None:
        self.entries: list[_Entry] = []
        self._watch: weakref.finalize[..., Any] | None = None
        if _stays(owner):  # watching takes longer than all the rest
            return
        try:
            self._watch = weakref.finalize(owner, _STANDING.pop, key, None)
            self._watch.atexit = False
        except TypeError:
            self._owner = owner

    def close(self) -> None:
        """Watch the owner no longer."""
        if self._watch is not None:
            self._watch.detach()


def _stays(owner: Any) -> bool:
    """Whether it is an imported module, of which no other object gets the identity."""
    return type(owner) is types.ModuleType and sys.modules.get(owner.__name__) is owner


_STANDING: dict[tuple[int, str], _Stack] = {}


def patch(owner: Any, name: str, value: Any) -> Undo:
    """Replace an attribute of an object, a class or a module until it is undone.

    An instance gets the value in its own `__dict__`, past properties and `__setattr__`.

    Args:
        owner: Whose attribute.
        name: Of the attribute.
        value: What stands there instead.

    Returns:
        Puts back what was there; called again it does nothing.
    """
    key = id(owner), name  # until the owner is gone
    entry = _Entry(owner, name, vars(owner).get(name, _MISSING))
    if key not in _STANDING:
        _STANDING[key] = _Stack(owner, key)
    stands = _STANDING[key]
    stack = stands.entries
    stack.append(entry)
    _put(owner, name, value)

    def undo() -> None:
        if entry not in stack:
            return
        above = stack.index(entry) + 1
        if above < len(stack):
            stack[above].before = entry.before
        else:
            _put(owner, name, entry.before)
        stack.remove(entry)
        if not stack and _STANDING.get(key) is stands:
            del _STANDING[key]
            stands.close()

    return undo


def _put(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, type):
        delattr(owner, name) if value is _MISSING else setattr(owner, name, value)
    elif value is _MISSING:
        vars(owner).pop(name, None)
    else:
        vars(owner)[name] = value


def patched(owner: Any, attributes: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Inside, attributes are replaced."""
    return _Patched(owner, attributes)


class _Patched(AbstractContextManager[None]):
    """No generator: some are entered with each micro-batch."""

    def __init__(self, owner: Any, attributes: Mapping[str, Any]) -> None:
        self._owner, self._attributes = owner, attributes

    def __enter__(self) -> None:
        patches = [patch(self._owner, name, value) for name, value in self._attributes.items()]
        self._undo = all_undone(patches)

    def __exit__(self, *exception: object) -> None:
        self._undo()


def all_undone(undos: Iterable[Undo]) -> Undo:
    """One function for several, called in reverse; all are called, also where one raises."""
    left = list(undos)

    def undo() -> None:
        while left:
            one = left.pop()
            try:
                one()
            except BaseException:
                undo()
                raise

    return undo


def standing() -> list[str]:
    """What is replaced now, in words: nothing after a run."""
    return [f"{entry.owner}.{entry.name}" for stack in _STANDING.values() for entry in stack.entries]
