"""Lets a constructor run without weights: tensors have no memory, and what is done to them is recorded."""

import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_pipeline._torch import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    tree_map_only,
)
from lightning_pipeline.errors import SplitError
from lightning_pipeline.model.construction.tape import (
    Entry,
    Tape,
    View,
    drawing_from,
    generator_of,
    outputs_of,
)
from lightning_pipeline.model.tensors import leaves_in, storage_key, tensors_in, version_of, written_tensors

aten = torch.ops.aten
_NEEDS_VALUES = (
    DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException,
    UnsupportedOperatorException, NotImplementedError,
)  # fmt: skip
_COPIED = 1 << 16  # bytes: larger values from outside are not copied, for they may be mapped files
# How many numbers are drawn follows from the shape alone.
_SHAPE_DRAWS = {
    "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "cauchy_", "log_normal_", "geometric_",
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli", "normal",
    "native_dropout",
}  # fmt: skip


class Recorder(FakeTensorMode):
    """Makes tensors without memory and records what happens to them, also after the constructor.

    Args:
        draws: Whether random numbers are drawn, and dropped: generators are then always in the state in which
            one device has them, and values can be made.

    Attributes:
        tape: What was recorded.
        largest: Bytes of the largest tensor that was drawn.
        elsewhere: Bytes that were made on other devices than the CPU, with values, by device.
    """

    def __init__(self, *, draws: bool = True) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.tape, self._draws = Tape(), draws
        self.largest = 0
        self.elsewhere: dict[str, int] = {}
        self._within = False
        self._kept: dict[int, list[Entry]] = {}  # that use values from outside, by their memory
        self._versions: list[tuple[Tensor, int]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> "Recorder":
        return self  # copies of a tensor are recorded on the same tape

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, new tensors have no memory."""
        with warnings.catch_warnings(), _Factories(self):
            # torch's deepcopy asks each tensor of a subclass whether it has memory
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor", UserWarning)
            yield

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for each operation on a tensor without memory."""
        if self._within:
            return super().dispatch(func, types, args, kwargs or {})
        return self.handle(func, types, args, kwargs or {})

    def owns(self, tensor: Any) -> bool:
        """Whether a tensor has no memory, and is this one's."""
        return isinstance(tensor, FakeTensor) and tensor.fake_mode is self

    def handle(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation without memory, and record it."""
        operands = list(tensors_in((args, kwargs)))
        mine = [tensor for tensor in operands if self.owns(tensor)]
        for tensor in written_tensors(func, args, kwargs):
            if not self.owns(tensor):
                self._preserve(tensor)
                return func(*self._valued(args), **self._valued(kwargs))
        if operands and not mine and func is not aten.lift_fresh.default:
            return func(*args, **kwargs)  # of tensors that the constructor was given
        if self._is_elsewhere(kwargs, mine):
            return self._made_elsewhere(func(*args, **kwargs))
        if not operands and _is_empty(func) and func is aten.empty.memory_format and 0 in args[0]:
            return func(*args, **kwargs)  # has no values, and may be given memory that has
        state = self._draw(func, args, kwargs) if torch.Tag.nondeterministic_seeded in func.tags else None
        known = [self.tape.view(tensor) for tensor in mine]
        try:
            result = self._fake(func, args, kwargs)
        except _NEEDS_VALUES:
            return self._really(func, args, kwargs, state)
        self._record(func, args, kwargs, result, {view.memory for view in known}, state)
        return result

    @staticmethod
    def _is_elsewhere(kwargs: dict[str, Any], mine: list[Tensor]) -> bool:
        """Whether something new is made on another device than the CPU."""
        device = kwargs.get("device")
        return not mine and device is not None and torch.device(device).type != "cpu"

    def _made_elsewhere(self, result: Any) -> Any:
        for tensor in tensors_in(result):
            if not tensor.is_meta:
                device = str(tensor.device)
                self.elsewhere[device] = self.elsewhere.get(device, 0) + tensor.nbytes
        return result

    def _fake(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._within = True
        try:
            with self:
                return self._without_constants(func(*args, **kwargs))
        finally:
            self._within = False
            self.fake_tensor_converter.meta_converter.tensor_memo.clear()  # its references forbid swapping

    def _without_constants(self, result: Any) -> Any:
        """A number that torch keeps beside a tensor without memory would be copied with it."""
        for tensor in tensors_in(result):
            if isinstance(tensor, FakeTensor):
                tensor.constant = None
        return result

    def _record(
        self, func: Any, args: Any, kwargs: Any, result: Any, known: set[int], state: Tensor | None
    ) -> None:
        outputs = [self.tape.view(one) if self.owns(one) else None for one in outputs_of(result)]
        written = {self.tape.view(tensor).memory for tensor in written_tensors(func, args, kwargs)}
        new = {view.memory for view in outputs if view is not None} - known
        if not written and (not new or _is_empty(func)):
            return
        given = [one for one in tensors_in(args) if not self.owns(one) and one.nbytes >= _COPIED]
        args, kwargs = tree_map_only(Tensor, self._described, (args, kwargs))
        reads = frozenset(view.memory for view in leaves_in((args, kwargs), View))
        filled = self.tape.fills(func, args[0] if args else None)
        if func is aten.lift_fresh.default:  # a value that was typed in
            func, filled = None, next(iter(new))
        entry = Entry(func, args, kwargs, reads, frozenset(written | new), outputs, filled, state)
        self.tape.add(entry)
        for tensor in given:
            self._kept.setdefault(storage_key(tensor), []).append(entry)
            self._versions.append((tensor, version_of(tensor)))

    def _described(self, tensor: Tensor) -> Any:
        if self.owns(tensor):
            return self.tape.view(tensor)
        return tensor.detach().clone() if tensor.nbytes < _COPIED else tensor.detach()

    def _preserve(self, tensor: Tensor) -> None:
        """A tensor from outside is about to be changed: what was taken from it keeps its values."""
        key = storage_key(tensor)
        self._versions = [(one, version) for one, version in self._versions if storage_key(one) != key]
        for entry in self._kept.pop(key, ()):
            entry.args = tree_map_only(
                Tensor, lambda one: one.clone() if storage_key(one) == key else one, entry.args
            )

    # Values

    def make(self, memories: Collection[int], *, asked: bool = False) -> dict[int, torch.UntypedStorage]:
        """Memories with the values that they have now.

        Args:
            memories: Their numbers on the tape.
            asked: Whether the constructor asks.

        Raises:
            SplitError: A value that was taken from outside is not what it was.
        """
        for tensor, version in self._versions:
            if version_of(tensor) != version:
                raise SplitError(
                    f"a tensor of shape {tuple(tensor.shape)} that the constructor copied values from was "
                    "changed afterwards: let it as it is until the run has begun, or copy from a clone of it"
                )
        return self.tape.make(memories, asked=asked)

    def value(self, tensor: Tensor) -> Tensor:
        """The tensor with its values, as they are now."""
        if not self.owns(tensor):
            return tensor
        view = self.tape.view(tensor)
        return view.of(self.make([view.memory], asked=True)[view.memory])

    def _valued(self, value: Any) -> Any:
        return tree_map_only(Tensor, self.value, value)

    def _really(self, func: Any, args: Any, kwargs: Any, state: Tensor | None) -> Any:
        """Run an operation that needs values; what it gives is a value from there on."""
        written = list(written_tensors(func, args, kwargs))
        args_, kwargs_ = self._valued(args), self._valued(kwargs)
        with drawing_from(state, kwargs):
            result = func(*args_, **kwargs_)
        for tensor, value in zip(written, written_tensors(func, args_, kwargs_), strict=True):
            tensor.copy_(value)
        if written:
            return args[0]
        return tree_map_only(Tensor, self.taken_over, result)

    def taken_over(self, value: Tensor) -> Tensor:
        """A tensor without memory that has a value from outside."""
        made = self._fake(aten.empty_strided.default, (value.shape, value.stride()), {"dtype": value.dtype})
        view = self.tape.view(made)
        self.tape.add(
            Entry(None, (value.detach(),), {}, frozenset(), frozenset({view.memory}), [view], view.memory)
        )
        return made  # type: ignore[no-any-return]

    def _draw(self, func: Any, args: Any, kwargs: Any) -> Tensor | None:
        """Draw what the operation draws, into memory that is dropped.

        Returns:
            The state of the generator before.
        """
        if not self._draws:
            return None
        state = generator_of(kwargs).get_state()
        by_shape = func.overloadpacket.__name__ in _SHAPE_DRAWS
        operand: Callable[[Tensor], Tensor] = self._scratch if by_shape else self.value
        drawn = func(*tree_map_only(Tensor, operand, args), **tree_map_only(Tensor, operand, kwargs))
        self.largest = max([self.largest, *(tensor.nbytes for tensor in tensors_in(drawn))])
        return state

    def _scratch(self, tensor: Tensor) -> Tensor:
        if not self.owns(tensor):
            return tensor
        made = self.tape.view(tensor).scratch()
        return made.zero_() if made.dtype.is_floating_point and made.numel() < 2 else made


class _Factories(TorchDispatchMode):
    """Sees the operations that have no operand without memory."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._recorder.handle(func, types, args, kwargs or {})


def _is_empty(func: Any) -> bool:
    """Whether an operation makes memory of no particular values."""
    name = func.overloadpacket.__name__
    return name in (
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "empty_permuted",
    )
