"""Lists that a step fills (`self.outputs.append(x)`) hold one entry per batch, as on one device."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from lightning_pipeline.errors import ConfigurationError

Merge = Callable[[list[Any], list[int]], Any]


class StepLists:
    """Merges what the micro-batches of one batch appended to the lists and deques of a module.

    Only those that this stage really fills; those that the end of the step fills are guarded on the other
    stages. For the time of the batch a deque has no greatest length, so that nothing falls out unmerged.

    Args:
        holders: The LightningModule, before the step, and other objects whose attributes the step fills.
        step: Name of the step, for messages.
    """

    def __init__(self, holders: Iterable[object], step: str) -> None:
        self._holders = list({id(holder): holder for holder in holders}.values())
        self._step = step
        self._deques: list[tuple[dict[Any, Any], Any, deque[Any]]] = []
        for owner, key, _, found in list(self._found(deque)):
            self._deques.append((owner, key, found))
            owner[key] = deque(found)
        self._before = {
            name: (found, len(found), found[-1] if found else None) for _, _, name, found in self._lists()
        }

    def merge(self, sizes: list[int], merge: Merge, done: set[int]) -> None:
        """Make one entry of those that the micro-batches appended, in place.

        Args:
            sizes: Samples of each micro-batch.
            merge: Merges one value per micro-batch.
            done: Identities of lists to leave as they are.

        Raises:
            ConfigurationError: Micro-batches appended different numbers of items.
        """
        for _, _, name, found in self._lists():
            if len(sizes) > 1 and id(found) not in done:
                self._merge(name, found, sizes, merge)
        for owner, key, original in self._deques:
            filled = owner[key]
            if type(filled) is deque:
                original.clear()
                original.extend(filled)
                owner[key] = original

    def _merge(self, name: str, found: Any, sizes: list[int], merge: Merge) -> None:
        start = self._start(name, found)
        added = list(found)[start:]
        each, rest = divmod(len(added), len(sizes))
        if rest:
            raise ConfigurationError(
                f"{self._step} appended {len(added)} items to self.{name} in {len(sizes)} micro-batches: "
                "append the same number in each, so that they can be merged to what one device has"
            )
        for _ in added:
            found.pop()
        found.extend(merge(added[position::each], sizes) for position in range(each))

    def _start(self, name: str, found: Any) -> int:
        """How many items were there before: `self.outputs = self.outputs + [x]` makes a new list of them."""
        before, length, last = self._before.get(name, (found, 0, None))
        same = before is found or (len(found) >= length > 0 and found[length - 1] is last)
        return length if same else 0

    def _lists(self) -> Iterator[tuple[dict[Any, Any], Any, str, Any]]:
        yield from self._found(list)
        yield from ((o, key, str(key), o[key]) for o, key, _ in self._deques if type(o[key]) is deque)

    def _found(self, kind: type) -> Iterator[tuple[dict[Any, Any], Any, str, Any]]:
        """Attributes of this kind, and values of dictionaries that are attributes."""
        for number, holder in enumerate(self._holders):
            for name, value in list(vars(holder).items()):
                path = f"{type(holder).__name__}.{name}" if number else name
                if type(value) is kind:
                    yield vars(holder), name, path, value
                elif isinstance(value, dict) and name[:1] != "_" and type(value).__module__ != _GUARDS:
                    for key, inner in list(value.items()):
                        if type(inner) is kind:
                            yield value, key, f"{path}[{key!r}]", inner


_GUARDS = "lightning_pipeline.model.state.elsewhere"
