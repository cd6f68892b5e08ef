"""What a constructor did to tensors, so that any of them can be made later, and no others."""

import mmap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_pipeline.model.tensors import leaves_in, map_leaves, storage_key

aten = torch.ops.aten
_MAPPED = 1 << 20  # bytes; freed memory of less stays with the allocator, which uses it again
# Leave nothing of what was in the memory before.
_FILLS = {
    aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.normal_.default, aten.uniform_.default,
    aten.copy_.default, aten.bernoulli_.float, aten.exponential_.default, aten.random_.default,
    aten.random_.to, getattr(aten.random_, "from"),
}  # fmt: skip


class View(NamedTuple):
    """A tensor as a part of a memory.

    Attributes:
        memory: Number of the memory.
        dtype: Of the elements.
        shape: Sizes.
        stride: In elements.
        offset: In elements.
    """

    memory: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def span(self) -> int:
        """Elements from the first to the last, with what lies between."""
        if 0 in self.shape:
            return 0
        return 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))

    def of(self, storage: torch.UntypedStorage) -> Tensor:
        """The tensor in a real memory."""
        empty: Any = torch.empty(0, dtype=self.dtype)
        made: Tensor = empty.set_(storage, self.offset, self.shape, self.stride)
        return made

    def scratch(self) -> Tensor:
        """A tensor of the same layout in a memory of its own, which goes back to the system with it."""
        size = self.span * self.dtype.itemsize
        if size < _MAPPED:
            return self._replace(offset=0).of(torch.empty(size, dtype=torch.uint8).untyped_storage())
        memory = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
        return self._replace(offset=0).of(memory.untyped_storage())


@dataclass(eq=False, slots=True)
class Entry:
    """One operation that made or changed memories.

    Attributes:
        func: The operator; None where a value is taken over as it is.
        args: Operands, with a `View` for each tensor without values.
        kwargs: By name.
        reads: Memories of the operands.
        writes: Memories that it makes or changes.
        outputs: What it returns, in order; None where that is no tensor.
        fills: The memory that it overwrites from end to end; None where something of it stays.
        state: Of the generator before it; None where nothing is drawn.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: frozenset[int]
    writes: frozenset[int]
    outputs: Sequence[View | None]
    fills: int | None = None
    state: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Step:
    """An entry to run, or memories that are put in place of running it.

    Attributes:
        index: Of the entry.
        entry: What is run.
        known: Memories as they were after it when a value was last asked for; empty where it is run.
    """

    index: int
    entry: Entry
    known: frozenset[int] = frozenset()

    @property
    def touches(self) -> frozenset[int]:
        """Memories that have to be there."""
        return self.known or self.entry.reads | self.entry.writes


class Tape:
    """The operations of a constructor, in order.

    A constructor that asks for values often asks in a loop, each time for what follows from the last, as
    rejection sampling does. What a question used is kept until the next, up to two tensors.

    Attributes:
        entries: What was recorded.
        sizes: Bytes of each memory.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.sizes: list[int] = []
        self._numbers: dict[int, int] = {}
        self._held: list[torch.UntypedStorage] = []  # so that no address is used again
        self._recent: dict[int, tuple[int, torch.UntypedStorage]] = {}  # by memory; after which entry

    def view(self, tensor: Tensor) -> View:
        """Describe a tensor without values; a memory that was not seen before gets a number."""
        key = storage_key(tensor)
        if key not in self._numbers:
            self._numbers[key] = len(self._held)
            self._held.append(tensor.untyped_storage())
            self.sizes.append(tensor.untyped_storage().nbytes())
        return View(
            self._numbers[key], tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()),
            int(tensor.storage_offset()),
        )  # fmt: skip

    def fills(self, func: Any, target: Any) -> int | None:
        """The memory that an operation overwrites from end to end."""
        if func not in _FILLS or not isinstance(target, View) or target.offset:
            return None
        count = torch.Size(target.shape).numel()
        whole = count == target.span and count * target.dtype.itemsize == self.sizes[target.memory]
        return target.memory if whole else None

    def add(self, entry: Entry) -> None:
        """Record an operation."""
        self.entries.append(entry)

    def make(self, wanted: Iterable[int], *, asked: bool = False) -> dict[int, torch.UntypedStorage]:
        """Run what some memories depend on, and nothing else; random numbers are those of the constructor.

        Args:
            wanted: Numbers of memories.
            asked: Whether the constructor asks, and may ask for what follows from it.

        Returns:
            The memories as the constructor left them.
        """
        kept = set(wanted)
        if not asked:
            self._recent.clear()
        chosen = self._needed_for(kept)
        ends: dict[int, list[int]] = {}
        for number, index in {n: i for i, step in enumerate(chosen) for n in step.touches}.items():
            if number not in kept:
                ends.setdefault(index, []).append(number)
        made: dict[int, torch.UntypedStorage] = {}
        written: dict[int, int] = {}
        with torch.no_grad(), torch.inference_mode(False):
            for index, step in enumerate(chosen):
                if step.known:
                    made.update({number: self._recent.pop(number)[1] for number in step.known})
                else:
                    self._run(step.entry, made)
                written.update(dict.fromkeys(step.known or step.entry.writes, step.index))
                for number in ends.get(index, ()):
                    storage = made.pop(number)
                    if asked and number in written:
                        self._keep(number, written[number], storage)
        return {number: self._memory(number, made) for number in kept}

    def _keep(self, number: int, after: int, storage: torch.UntypedStorage) -> None:
        """Keep a memory until the next question; of many the last ones."""
        self._recent.pop(number, None)
        self._recent[number] = after, storage
        sizes = {one: self.sizes[one] for one in self._recent}
        while sum(sizes.values()) > 2 * max(sizes.values()):
            oldest = next(iter(sizes))
            del sizes[oldest], self._recent[oldest]

    def _needed_for(self, wanted: set[int]) -> list[_Step]:
        needed, chosen = set(wanted), list[_Step]()
        for index in range(len(self.entries) - 1, -1, -1):
            entry = self.entries[index]
            found = entry.writes & needed
            if found and all(self._is_known(number, index) and number not in wanted for number in found):
                chosen.append(_Step(index, entry, found))
                needed -= found
            elif found:
                chosen.append(_Step(index, entry))
                needed |= entry.reads
                if entry.fills is not None and entry.fills not in _others(entry):
                    needed.discard(entry.fills)
        return chosen[::-1]

    def _is_known(self, number: int, index: int) -> bool:
        return number in self._recent and self._recent[number][0] == index

    def _memory(self, number: int, made: dict[int, torch.UntypedStorage]) -> torch.UntypedStorage:
        """One that is not there yet holds nothing in particular, as after `torch.empty`."""
        if number not in made:
            made[number] = torch.empty(self.sizes[number], dtype=torch.uint8).untyped_storage()
        return made[number]

    def _run(self, entry: Entry, made: dict[int, torch.UntypedStorage]) -> None:
        args, kwargs = map_leaves(
            lambda view: view.of(self._memory(view.memory, made)), (entry.args, entry.kwargs), View
        )
        with drawing_from(entry.state, kwargs):
            results = outputs_of(args[0].clone() if entry.func is None else entry.func(*args, **kwargs))
        for view, result in zip(entry.outputs, results, strict=True):
            if view is not None and view.memory not in made:
                made[view.memory] = self._kept(view, result)
        for number in entry.writes:
            self._memory(number, made)

    def _kept(self, view: View, result: Tensor) -> torch.UntypedStorage:
        """The memory of a result, in the layout that it has on the tape."""
        storage = result.untyped_storage()
        alike = tuple(result.stride()) == view.stride and result.storage_offset() == view.offset
        if alike and storage.nbytes() == self.sizes[view.memory]:
            return storage
        fresh = torch.empty(self.sizes[view.memory], dtype=torch.uint8).untyped_storage()
        view.of(fresh).copy_(result)
        return fresh


def generator_of(kwargs: dict[str, Any]) -> torch.Generator:
    """What an operation draws from."""
    return kwargs.get("generator") or torch.default_generator


@contextmanager
def drawing_from(state: Tensor | None, kwargs: dict[str, Any]) -> Iterator[None]:
    """Inside, an operation draws from a state; the generator is then as it was before.

    Args:
        state: Of the generator; None where nothing is drawn.
        kwargs: Of the operation.
    """
    if state is None:
        yield
        return
    generator = generator_of(kwargs)
    before = generator.get_state()
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(before)


def _others(entry: Entry) -> set[int]:
    """Memories of all operands but the one that is written."""
    return {view.memory for view in leaves_in((entry.args[1:], entry.kwargs), View)}


def outputs_of(value: Any) -> list[Any]:
    """What an operator returns, as a list."""
    return list(value) if isinstance(value, tuple | list) else [value]
