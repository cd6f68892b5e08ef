"""What a tensor came from: sets of tags kept per storage, so that views and in-place writes share them.

Outputs of a unit may share memory with each other, or with what the unit was called with. On stages each has
memory of its own, so that code between units that changes one of them does not change the others. That is
what one device computes as long as nobody reads the others afterwards.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_pipeline._torch import disable_current_modes
from lightning_pipeline.model.tensors.operations import memory_of, storage_key

_MOST = 1 << 24  # entries, above which memory in one range counts as shared
_CHANGED = "changed"


class Tag(NamedTuple):
    """One origin of a value.

    `kind` is "value" (output `leaf` of call `call`), "state" (the parameter or buffer called `name`),
    "effect" (something that call `call` changed beside its output), "saved" (keeps memory number `call`) or
    "changed" (shares memory with an output of call `call` that was changed at the line `name`).
    """

    kind: str
    call: int = -1
    leaf: int = 0
    name: str = ""


NO_TAGS: frozenset[Tag] = frozenset()


class TagStore:
    """Tags by storage. Storages that are gone are forgotten; their address cannot be reused meanwhile."""

    def __init__(self) -> None:
        self._tags: dict[int, tuple[StorageWeakRef, frozenset[Tag]]] = {}

    def of(self, tensor: Tensor) -> frozenset[Tag]:
        """The tags of the memory behind `tensor`."""
        found = self._tags.get(storage_key(tensor))
        return NO_TAGS if found is None else found[1]

    def union(self, tensors: Iterable[Tensor]) -> frozenset[Tag]:
        """The tags of all of them together."""
        result = NO_TAGS
        for tensor in tensors:
            found = self.of(tensor)
            if found and not found <= result:
                result |= found
        return result

    def add(self, tensor: Tensor, tags: frozenset[Tag]) -> None:
        """Add tags to the memory behind `tensor`."""
        if tags:
            self.add_to(memory_of(tensor), tags)

    def add_to(self, memory: UntypedStorage, tags: frozenset[Tag]) -> None:
        """Add tags to a piece of memory."""
        key = int(memory._cdata)
        known = self._tags.get(key)
        if known is None:
            self._tags[key] = (StorageWeakRef(memory), tags)
        elif not tags <= known[1]:
            self._tags[key] = (known[0], known[1] | tags)

    def replace(self, tensor: Tensor, tags: frozenset[Tag]) -> None:
        """Set the tags of the memory behind `tensor` to just these."""
        self._tags[storage_key(tensor)] = (StorageWeakRef(memory_of(tensor)), tags)


class SharedMemory:
    """Knows who shares memory with an output, and what comes from it after the other was changed.

    Args:
        tags: What each tensor comes from.
        origin: The real tensor behind a placeholder that is a view of one.
    """

    def __init__(self, tags: TagStore, origin: Callable[[Tensor], Tensor]) -> None:
        self._tags, self._origin = tags, origin
        self._members: list[_Member] = []

    def apart(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[bool]:
        """For each output of a call, whether it is to have memory of its own while the step is traced.

        Args:
            inputs: Of the call.
            outputs: As the unit returned them.
        """
        known, found = list(map(self._place, inputs)), []
        for place in map(self._place, outputs):
            found.append(any(_overlap(place, other) for other in known))
            known.append(place)
        return found

    def called(
        self, call: int, inputs: Sequence[Tensor], outputs: Sequence[Tensor], handed: Sequence[Tensor]
    ) -> None:
        """A unit was called.

        Args:
            call: Its number.
            inputs: What it was called with.
            outputs: What it returned.
            handed: What stands for that between the units.
        """
        before = [_Member(call, self._place(tensor), memory_of(tensor)) for tensor in inputs]
        after = [
            _Member(call, self._place(raw), memory_of(own)) for raw, own in zip(outputs, handed, strict=True)
        ]
        for one in (*before, *after):
            others = after if any(one is own for own in before) else (*before, *after)
            if any(other is not one and _overlap(one.place, other.place) for other in others):
                self._members.append(one)

    def written(self, tensor: Tensor, line: Callable[[], str]) -> None:
        """Code between units writes into this: whatever shared its memory is not what it would be.

        Args:
            tensor: It.
            line: Tells where.
        """
        waiting, seen = [_key(memory_of(tensor))], set[int]()
        while waiting:  # two calls may share what both were given, or one what another gave
            key = waiting.pop()
            seen.add(key)
            for one in [member for member in self._members if _key(member.memory) == key]:
                for other in self._members:
                    if _key(other.memory) not in seen and _overlap(one.place, other.place):
                        self._tags.add_to(other.memory, frozenset({Tag(_CHANGED, one.call, name=line())}))
                        waiting.append(_key(other.memory))

    def _place(self, tensor: Tensor) -> "_Place":
        real = self._origin(tensor)
        if real.layout is not torch.strided:
            return _Place(memory_of(real), 0, (), (), 0)
        shape, stride = tuple(real.shape), real.stride()
        return _Place(real.untyped_storage(), real.element_size(), shape, stride, int(real.storage_offset()))


def is_changed(tag: Tag) -> bool:
    """Whether something comes from a value that was changed through another output of its unit."""
    return tag.kind == _CHANGED


class _Place(NamedTuple):
    """Where a tensor lies. An entry of no bytes stands for one that is not strided."""

    memory: UntypedStorage
    entry: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    first: int

    def last(self) -> int:
        """The last entry; before the first one where it is empty."""
        if 0 in self.shape:
            return self.first - 1
        return self.first + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))


class _Member(NamedTuple):
    """An argument or output of a call: where it lay in the unit, and its memory between units."""

    call: int
    place: _Place
    memory: UntypedStorage


def _key(memory: UntypedStorage) -> int:
    return int(memory._cdata)


def _overlap(one: _Place, other: _Place) -> bool:
    """Whether two tensors have an entry in the same place."""
    if _key(one.memory) != _key(other.memory):
        return False
    if not one.entry or one.entry != other.entry:
        return True
    if max(one.first, other.first) > min(one.last(), other.last()):
        return False
    start, end = min(one.first, other.first), max(one.last(), other.last())
    if end - start > _MOST:
        return True
    with disable_current_modes():
        seen = torch.zeros(end - start + 1, dtype=torch.bool)
        seen.as_strided(one.shape, one.stride, one.first - start).fill_(True)
        return bool(seen.as_strided(other.shape, other.stride, other.first - start).any())
