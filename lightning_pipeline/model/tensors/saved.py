"""Count what autograd keeps for the backward: by stage and micro-batch, each piece of memory once."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_pipeline._torch import is_traceable_wrapper_subclass, refuses_saved_hooks, top_saved_hooks
from lightning_pipeline.model.tensors.operations import is_placeholder, storage_key
from lightning_pipeline.model.tensors.structure import tensors_in
from lightning_pipeline.patching import patched

Place = tuple[int, int]  # stage and micro-batch
Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any], Tensor]
_PLAIN = (Tensor, torch.nn.Parameter)


@dataclass(slots=True)
class Held:
    """Activations that are held at one moment, or at the worst one of a step.

    Attributes:
        num_bytes: Their size.
        microbatches: Of how many micro-batches.
    """

    num_bytes: int = 0
    microbatches: int = 0

    def rise_to(self, other: "Held") -> None:
        """Keep the larger of each."""
        self.num_bytes = max(self.num_bytes, other.num_bytes)
        self.microbatches = max(self.microbatches, other.microbatches)

    @classmethod
    def together(cls, parts: Iterable["Held"]) -> "Held":
        """The sum of several."""
        parts = list(parts)
        return cls(sum(part.num_bytes for part in parts), sum(part.microbatches for part in parts))


@dataclass(slots=True)
class Peaks:
    """The worst moments on a rank; bytes and micro-batches each by themselves.

    Attributes:
        stages: Of each stage.
        rank: Of all stages together.
    """

    stages: dict[int, Held] = field(default_factory=lambda: defaultdict(Held))
    rank: Held = field(default_factory=Held)

    def rise_to(self, other: "Peaks") -> None:
        """Keep the larger of each."""
        for stage, held in other.stages.items():
            self.stages[stage].rise_to(held)
        self.rank.rise_to(other.rank)


def storages_of(tensor: Tensor) -> list[UntypedStorage]:
    """The memory behind a tensor: one piece, or those of the tensors that it wraps."""
    if type(tensor) in _PLAIN and tensor.layout is torch.strided:
        return [tensor.untyped_storage()]
    wrapper: Any = tensor
    if is_traceable_wrapper_subclass(wrapper):
        names, _ = wrapper.__tensor_flatten__()
        return [storage for name in names for storage in storages_of(getattr(wrapper, name))]
    if tensor.layout is not torch.strided:
        return []
    return [tensor.untyped_storage()]


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Size of the memory behind some tensors, each piece once."""
    pieces = {storage._cdata: storage.nbytes() for tensor in tensors for storage in storages_of(tensor)}
    return sum(pieces.values())


class SavedCount:
    """Counts for one step on one rank; made for the steps that are looked at, so that others pay nothing.

    What a storage's forward saved counts from then until the storage is gone, whoever frees it. What is
    there anyway (parameters, buffers, the batch) does not count, nor what activation checkpointing
    recomputes (what the policy of a selective one keeps does) or other hooks on saved tensors put elsewhere.

    Args:
        apart: Tensors that do not count.

    Attributes:
        peaks: The worst moments so far.
    """

    def __init__(self, apart: Iterable[Tensor]) -> None:
        self.peaks = Peaks()
        self._apart = {storage._cdata for tensor in apart for storage in storages_of(tensor)}
        self._records: dict[Place, dict[int, tuple[StorageWeakRef, int]]] = {}
        self._known: set[int] = set()
        self._now: dict[int, Held] = defaultdict(Held)
        self._open: set[Place] = set()
        self._touched: set[Place] = set()

    @classmethod
    def beside(cls, modules: Sequence[nn.Module], batch: Any) -> "SavedCount":
        """Counts what is saved beside parameters, buffers, plain tensors of modules and a batch."""
        held = [vars(module).values() for module in modules]
        states = [(*module._parameters.values(), *module._buffers.values()) for module in modules]
        tensors = [t for values in (*held, *states) for t in values if isinstance(t, Tensor)]
        return cls([*tensors, *tensors_in(batch)])

    # ---- what the stages tell

    @contextmanager
    def forward(self, stage: int, microbatch: int, received: Sequence[Tensor]) -> Iterator[None]:
        """Count what a forward saves, and what it was sent."""
        self.settle()
        place = stage, microbatch
        self._open.add(place)
        self._now[stage].microbatches += 1
        if any(tensor.requires_grad for tensor in received):
            self._note_received(place, received)
        note = partial(self._note, place)
        with counting_hooks(note), selective_checkpoints(note):
            yield

    def keep(self, stage: int, microbatch: int, tensors: Iterable[Tensor]) -> None:
        """Count what the input half of a backward leaves for the weight half."""
        for tensor in tensors:
            self._note((stage, microbatch), tensor)

    def backward(self, stage: int, microbatch: int) -> None:
        """A backward, or a half of one, begins."""
        self.settle()
        self._touched.add((stage, microbatch))

    def done(self, stage: int, microbatch: int) -> None:
        """The micro-batch's backward is complete."""
        place = stage, microbatch
        if place in self._open:
            self._open.remove(place)
            self._now[stage].microbatches -= 1
        self._touched.add(place)

    def _note_received(self, place: Place, tensors: Sequence[Tensor]) -> None:
        """Count messages by their tensors: what lies between them in the buffer is not activations."""
        sizes: dict[int, int] = defaultdict(int)
        for tensor in tensors:
            for storage in storages_of(tensor):
                sizes[storage._cdata] += tensor.numel() * tensor.element_size()
        for tensor in tensors:
            for storage in storages_of(tensor):
                self._add(place, storage, min(sizes[storage._cdata], storage.nbytes()))

    def _note(self, place: Place, tensor: Tensor) -> None:
        if not is_placeholder(tensor):
            for storage in storages_of(tensor):
                self._add(place, storage, storage.nbytes())

    def _add(self, place: Place, storage: UntypedStorage, num_bytes: int) -> None:
        key = storage._cdata
        if key not in self._known and key not in self._apart:
            self._known.add(key)
            self._records.setdefault(place, {})[key] = (StorageWeakRef(storage), num_bytes)
            self._now[place[0]].num_bytes += num_bytes
            self._touched.add(place)

    # ---- what is held

    def settle(self) -> None:
        """Forget what is gone, before the next action: locals of the one before are gone, too."""
        for place in list(self._touched):
            record = self._records.get(place, {})
            gone = [(key, size) for key, (reference, size) in record.items() if reference.expired()]
            for key, size in gone:
                del record[key]
                self._known.remove(key)
                self._now[place[0]].num_bytes -= size
            if place in self._open:
                self._touched.discard(place)
            elif not record:  # else someone still holds it: look again
                self._touched.discard(place)
                self._records.pop(place, None)
        self.peaks.rise_to(Peaks(self._now, Held.together(self._now.values())))

    def held(self) -> dict[int, Held]:
        """What each stage holds now; a stage that holds nothing may be left out."""
        return {stage: replace(held) for stage, held in self._now.items() if held != Held()}


@contextmanager
def counting_hooks(note: Callable[[Tensor], None]) -> Iterator[None]:
    """Tell `note` every tensor that autograd saves for a backward; what is saved stays what it was.

    Hooks that are in force already go on working: what they keep in a tensor's place is what counts.
    """
    if refuses_saved_hooks():
        yield
        return
    outer = top_hooks()
    pack, unpack = (_pack, _unpack) if outer is None else outer

    def noting(tensor: Tensor) -> Any:
        kept = pack(tensor)
        value = kept[0] if outer is None else kept.tensor if isinstance(kept, _Kept) else kept
        if isinstance(value, Tensor):
            note(value)
        return kept

    with stepping_aside(saved_tensors_hooks(noting, unpack)):
        yield


class _Kept:
    """What autograd saved; a state as it is when the forward ends."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self._version = tensor if tensor.is_leaf else tensor.detach(), tensor._version

    def settle(self) -> None:
        """The forward ends: later ones may write the state before the backward of this one."""
        if self.tensor._version == self._version:
            self.tensor = self.tensor.detach().clone()
            self._version = self.tensor._version

    def value(self) -> Tensor:
        """For the backward."""
        return _unpack((self.tensor, self._version))


@contextmanager
def copied_at_end(states: Sequence[Tensor]) -> Iterator[None]:
    """Where autograd saves one of these, let it have a copy, for others write them before its backward.

    It is made at the end of the forward: one device's backward sees what the same forward wrote later on.
    """
    if refuses_saved_hooks() or top_hooks() is not None:
        yield
        return
    kept: list[_Kept] = []

    def pack(tensor: Tensor) -> Any:
        if all(storage_key(state) != storage_key(tensor) for state in states):  # `.data` may move them
            return _Kept(tensor)
        kept.append(_Kept(tensor))
        return kept[-1]

    with stepping_aside(saved_tensors_hooks(pack, _Kept.value)):
        yield
    for state in kept:
        state.settle()


@contextmanager
def selective_checkpoints(note: Callable[[Tensor], None]) -> Iterator[None]:
    """Tell `note` every tensor that the policy of a selective activation checkpoint keeps.

    These go past autograd, into a storage of the region's own, each in a `_VersionWrapper` of torch's.
    """
    module: Any = torch.utils.checkpoint
    wrapper: Any = module._VersionWrapper

    class Noted(wrapper):  # type: ignore[misc]
        def __init__(self, value: Any) -> None:
            super().__init__(value)
            if isinstance(value, Tensor):
                note(value)

    with patched(module, {"_VersionWrapper": Noted}):
        yield


def _pack(tensor: Tensor) -> tuple[Tensor, int]:
    kept = tensor if tensor.is_leaf else tensor.detach()  # else an output would be saved by its own graph
    return kept, tensor._version


def _unpack(packed: tuple[Tensor, int]) -> Tensor:
    tensor, version = packed
    if tensor._version != version:  # under hooks torch leaves this check out
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version "
            f"{version} instead. Hint: enable anomaly detection to find the operation that failed to compute "
            "its gradient, with torch.autograd.set_detect_anomaly(True)."
        )
    return tensor


def top_hooks() -> tuple[Pack, Unpack] | None:
    """The hooks on saved tensors that are in force. torch has no public name for them (2.13)."""
    return top_saved_hooks()


@contextmanager
def stepping_aside(hooks: saved_tensors_hooks) -> Iterator[None]:
    """Put hooks in force, but take them away for functions that refuse any, such as `torch.func.grad`."""
    graph: Any = torch.autograd.graph
    disable = graph.disable_saved_tensors_hooks

    @contextmanager
    def without(message: str) -> Iterator[None]:
        top = top_hooks()
        ours = top is not None and top[0] is hooks.pack_hook
        with ExitStack() as stack:
            if ours:
                hooks.__exit__()
                stack.callback(hooks.__enter__)
            stack.enter_context(disable(message))
            yield

    with patched(graph, {"disable_saved_tensors_hooks": without}), hooks:
        yield
