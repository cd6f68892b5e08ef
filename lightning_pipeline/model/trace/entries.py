"""Which entries of a dictionary a traced step reads."""

from collections import defaultdict
from typing import Any


class EntryReads(defaultdict[Any, Any]):
    """Stands for a dictionary while a step is traced: which entries are read?

    Args:
        original: What it is a copy of.

    Attributes:
        original: That.
        read: Keys that were read before they were set; after a read of all, every such key.
    """

    def __init__(self, original: dict[Any, Any]) -> None:
        super().__init__(getattr(original, "default_factory", None), original)
        self.original = original
        self.read: set[Any] = set()
        self._set: set[Any] = set()

    def _note(self, *keys: Any) -> None:
        self.read.update(key for key in keys if key not in self._set)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._set.add(key)
        super().__setitem__(key, value)

    def update(self, *given: Any, **named: Any) -> None:
        """Note and set."""
        items = dict(*given, **named)
        self._set.update(items)
        super().update(items)

    def __getitem__(self, key: Any) -> Any:
        self._note(key)
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        """Note and answer."""
        self._note(key)
        return super().get(key, default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """Note and answer."""
        self._note(key)
        return super().setdefault(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        """Note and answer."""
        self._note(key)
        return super().pop(key, *default)

    def values(self) -> Any:
        """Note and answer."""
        self._note(*dict.keys(self))
        return super().values()

    def items(self) -> Any:
        """Note and answer."""
        self._note(*dict.keys(self))
        return super().items()
