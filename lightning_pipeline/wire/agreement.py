"""What both ends of a cut know about its messages: made by the sender, kept by both."""

import pickle
import zlib
from collections.abc import Hashable, Iterable, Sequence
from functools import cached_property

import torch

from lightning_pipeline.errors import MessageError
from lightning_pipeline.wire.header import header_bytes
from lightning_pipeline.wire.packing import Layout, TensorSpec, specs_of
from lightning_pipeline.wire.stage import Values

_KEPT = 1024


class Agreement:
    """Metadata of the values of one micro-batch at one cut, the same object for every message like it.

    Args:
        data: Pickled specs and table, as they travelled; both ends compute the checksum from these bytes.
        specs: The tensors.
        table: What the stages agreed on about everything upstream.
    """

    def __init__(self, data: bytes, specs: tuple[TensorSpec, ...], table: Hashable) -> None:
        self.data = data
        self.specs = specs
        self.table = table
        self.checksum = zlib.crc32(data)
        self.layout = Layout(specs, start=header_bytes(0))

    @classmethod
    def of(cls, values: Values) -> "Agreement":
        """Describe values that are about to be sent."""
        specs = specs_of(values.tensors)
        return cls(pickle.dumps((specs, values.table)), specs, values.table)

    @classmethod
    def read(cls, data: bytes) -> "Agreement":
        """Rebuild at the other end what `of` made here."""
        try:
            specs, table = pickle.loads(data)
        except Exception as error:
            raise MessageError(
                f"metadata of a cut cannot be read here: {error}; install the same code on all ranks"
            ) from error
        return cls(data, specs, table)

    def covers(self, values: Values) -> bool:
        """Whether values are as agreed: shapes, strides, types, what requires gradient, the table."""
        if self.table is not values.table and self.table != values.table:
            return False
        if len(self.specs) != len(values.tensors):
            return False
        for spec, tensor in zip(self.specs, values.tensors, strict=True):
            shape, stride, dtype, requires_grad = spec
            if (
                tensor.dtype is not dtype
                or tensor.requires_grad is not requires_grad
                or tensor.shape != shape
            ):
                return False
            if tensor.layout is not torch.strided or tensor.stride() != stride:
                return self.specs == specs_of(values.tensors)
        return True

    @cached_property
    def with_gradient(self) -> tuple[int, ...]:
        """Positions of the tensors that a gradient may come back for."""
        return tuple(index for index, spec in enumerate(self.specs) if spec.requires_grad)

    @cached_property
    def gradients(self) -> Layout:
        """Where the gradients lie in the message that goes back, each with the strides of its tensor.

        Autograd lays gradients out like that as a rule, and sums in an order that depends on it.
        """
        specs = tuple(self.specs[index] for index in self.with_gradient)
        return Layout(specs, start=header_bytes(len(specs)))

    @cached_property
    def payload(self) -> Layout:
        """Where the values lie where an edge moves them, apart from the header."""
        return Layout(self.specs, start=0)

    @cached_property
    def gradient_payload(self) -> Layout:
        """Where the gradients lie where an edge moves them back."""
        return Layout(self.gradients.specs, start=0)

    def message_bytes(self, apart: bool) -> int:
        """Length of the message that says that values are as agreed, or how they deviate.

        Args:
            apart: Whether an edge moves the tensors, so that the message is a header alone.
        """
        return header_bytes(0) if apart else self.layout.num_bytes

    def gradient_bytes(self, apart: bool) -> int:
        """Length of the message that brings gradients back; `apart` as of `message_bytes`."""
        return header_bytes(len(self.with_gradient)) if apart else self.gradients.num_bytes

    @property
    def idle_bytes(self) -> int:
        """Buffers of messages like this that are kept to be filled again."""
        return self.layout.idle_bytes + (self.gradients.idle_bytes if self.with_gradient else 0)


class Agreements:
    """Agreements by stage and micro-batch signature; frozen during a run, so both ends never disagree.

    What is new in a run is noted, and enters at its end in an order that both ends share.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, Agreement] = {}
        self._signatures: Sequence[Hashable] = ()
        self._frozen: dict[tuple[int, int], Agreement | None] = {}
        self._noted: dict[tuple[int, int], tuple[Hashable, Agreement]] = {}

    @property
    def idle_bytes(self) -> int:
        """Buffers that are kept to be filled again."""
        return sum(agreement.idle_bytes for agreement in self._known.values())

    def begin(self, signatures: Sequence[Hashable]) -> None:
        """Start a run with these signatures of its micro-batches."""
        self._signatures = signatures
        self._frozen.clear()

    def get(self, stage: int, microbatch: int) -> Agreement | None:
        """What was agreed before this run began, or None."""
        key = (stage, microbatch)
        if key not in self._frozen:
            self._frozen[key] = self._known.get((stage, self._signatures[microbatch]))
        return self._frozen[key]

    def note(self, stage: int, microbatch: int, agreement: Agreement) -> None:
        """Remember what travelled in this run and was not as agreed."""
        self._noted[microbatch, stage] = ((stage, self._signatures[microbatch]), agreement)

    def commit(self) -> None:
        """Let what was noted enter, by micro-batch and stage; the oldest leave when there are too many."""
        for _, (key, agreement) in sorted(self._noted.items(), key=lambda item: item[0]):
            self._known.pop(key, None)
            self._known[key] = agreement
        self._noted.clear()
        for key in self._oldest():
            del self._known[key]

    def _oldest(self) -> Iterable[Hashable]:
        return list(self._known)[: max(0, len(self._known) - _KEPT)]
