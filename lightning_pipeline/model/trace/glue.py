"""What the code between the units does while a step is traced: where values go, and what it writes."""

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from lightning_pipeline._torch import DynamicOutputShapeException, TorchDispatchMode, disable_current_modes
from lightning_pipeline.errors import SplitError
from lightning_pipeline.model.random import RANDOM_FUNCTIONS, Generators, SeedsOfStart
from lightning_pipeline.model.tensors import (
    GRADIENT,
    Tag,
    TagStore,
    TensorSpec,
    by_shape_alone,
    chosen_by,
    counts_apart,
    data_set_without_values,
    is_placeholder,
    map_tensors,
    of_most,
    operands_of,
    put_back,
    read_of,
    storage_key,
    tensors_in,
    user_line,
    version_of,
    weights_needed,
    written_tensors,
)
from lightning_pipeline.model.trace.choices import SCALAR_READS, Guesses, is_tensor_read
from lightning_pipeline.model.trace.record import Observation, refuse
from lightning_pipeline.model.trace.saved_activations import SavedActivations

_MAY_MIX = frozenset(
    f"aten::{name}"
    for name in (
        "index", "index_select", "gather", "take_along_dim", "flip", "roll", "sort", "argsort", "cumsum",
        "cumprod", "rot90",
    )
)  # fmt: skip
_SUMMING = frozenset(
    f"aten::{name}"
    for name in (
        "mean", "sum", "var", "std", "var_mean", "std_mean", "amax", "amin", "aminmax", "max", "min", "norm",
        "linalg_vector_norm", "median", "logsumexp", "nanmean", "nansum",
    )
)  # fmt: skip
_PRODUCTS = frozenset({"aten::mm", "aten::mv", "aten::bmm"})
_SUMS, _MEANS = frozenset({"sum", "nansum"}), frozenset({"mean", "nanmean"})
"""Over samples, which are followed where values of units meet what is made of them in a loss."""
_TRIED = 4  # samples that are changed to see what depends on them
_DERIVED = frozenset({Tag("batch")})
_APART = frozenset(
    f"aten::{name}"
    for name in (
        "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "clone", "detach", "alias", "_to_copy",
        "native_dropout", "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like",
    )
)  # fmt: skip
"""Beside those that work number by number: operations that keep samples apart."""


class Glue:
    """Follows dependence through the operations between units.

    Attributes:
        unknown_line: Where the trace stopped knowing what the values are; empty before.
        divided_line: Likewise, beyond whether they are finite: parts of a batch may go different ways.
        steering: What the numbers come from that the code reads: all that runs later may depend on these.
        written_states: Parameters and buffers that glue writes, by name.
        computed: Those of them whose values may come from units.
        draws: Whether a function runs that is known to draw random numbers.
    """

    def __init__(self, observed: Observation, keeping: SavedActivations) -> None:
        self._observed, self._keeping = observed, keeping
        self.unknown_line, self.divided_line, self.draws = "", "", False
        self.steering: set[Tag] = set()
        self.written_states: dict[str, Tensor] = {}
        self.computed: set[str] = set()
        self.write_positions: dict[str, set[int]] = {}  # by name, how many units had been called
        self.moved: set[str] = set()  # parameters whose memory is another one after the step
        self.mixing = MixingSeen(observed)
        self._seen_states: set[str] = set()
        self._restores: list[tuple[Tensor, Tensor, int]] = []
        self._saved: set[int] = set()
        self._hooks: list[tuple[int, str]] = []
        self.guesses = Guesses(holds=observed.trace.assumed.holds, **observed.answers)
        self._stand_ins: dict[int, Tensor] = {}
        self._poisoned_by: dict[int, Tensor] = {}  # the other way: the real tensor behind a stand-in

    def close(self) -> None:
        """Put back what glue wrote into parameters and buffers."""
        for tensor, value, version in self._restores:
            put_back(tensor, value, version)
        for held in (self._observed.poisoned, self._stand_ins, self._poisoned_by, self.written_states):
            held.clear()

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation of glue; its results, and what it writes, come from all of its operands."""
        operands = list(operands_of(args, kwargs))
        if func.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
            raise refuse(
                "a collective of torch.distributed inside a step would be entered by one stage only",
                self._observed.root,
            )
        poisoned = any(map(self._observed.is_poisoned, operands))
        empty = poisoned or any(map(is_placeholder, operands))
        faked = poisoned or any(map(self._is_foreign, operands))
        tags = self._observed.tags.union(operands)
        written = list(written_tensors(func, args, kwargs))
        if poisoned:
            args, kwargs = self.without_poison((args, kwargs))
        self._note_states(written, faked)
        if func._schema.name in SCALAR_READS:
            if faked:
                return self._scalar(func, operands)
            if empty:
                raise weights_needed(tags, self._observed.root)
            self._observed.trace.everywhere |= {tag.name for tag in tags if tag.kind == "state"}
            self._observed.trace.steered = True
        if not self.draws and torch.Tag.nondeterministic_seeded in func.tags:
            self._observed.trace.draws_unseen = True
        result = self._run(func, args, kwargs)
        results = list(operands_of((result,)))
        self.guesses.note(func, operands, results)
        self.mixing.operation(func, args, kwargs, result)
        self._note_work(func, args, kwargs, result)
        for tensor in results:
            self._observed.tags.add(tensor, tags)
            if empty and not any(tensor is operand for operand in operands):
                self._observed.made.append(weakref.ref(tensor))
        for tensor in written:
            self._note_write(tensor, tags, empty)
        self._keeping.operation_in_glue(results)
        return result

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation; the length of what values choose is assumed.

        Stages that run later code have these values and find the length; messages say where it is another.
        """
        known = [tensor for tensor in chosen_by(func, args) if not self._is_foreign(tensor)]
        self._observed.trace.everywhere |= {
            tag.name for tag in self._observed.tags.union(known) if tag.kind == "state"
        }
        try:
            return func(*args, **kwargs)
        except DynamicOutputShapeException:
            self._steers(list(operands_of(args, kwargs)))
            trace = self._observed.trace
            result = of_most(func, args, kwargs, self._observed.mode.make, few=trace.assumed.few)
            if result is None:
                raise
            trace.counts_apart |= counts_apart(func)
            return result

    def _note_work(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if not self._observed.costs:
            return
        work = self._keeping.work_of(func, args, kwargs, result)
        if work.flops or work.num_bytes:
            self._observed.trace.between[len(self._observed.trace.calls)].append(work)

    def _is_foreign(self, tensor: Tensor) -> bool:
        """Whether its values are computed by units, so that some stages do not know them."""
        if not is_placeholder(tensor):
            return False
        tags = self._observed.tags.of(tensor)
        return (
            not self._observed.weightless or not tags or any(t.kind not in ("state", "batch") for t in tags)
        )

    def _note_write(self, tensor: Tensor, tags: frozenset[Tag], empty: bool) -> None:
        observed = self._observed
        observed.shared.written(tensor, lambda: user_line(observed.root))
        self._observed.trace.mutated |= {(tag.call, tag.leaf) for tag in self._observed.handed.of(tensor)}
        self._observed.note_batch(tensor)
        self._observed.tags.add(tensor, tags)
        if storage_key(tensor) in self._poisoned_by:
            self._observed.tags.add(self._poisoned_by[storage_key(tensor)], tags)
        if empty and not is_placeholder(tensor):
            self._observed.poisoned[storage_key(tensor)] = tensor

    def _note_states(self, written: list[Tensor], faked: bool) -> None:
        for tensor in written:
            name = self._observed.states.get(storage_key(tensor))
            if name is None:
                key = storage_key(tensor)
                if self._observed.tensor_written(tensor, computed=faked) and key not in self._saved:
                    self._saved.add(key)
                    base = tensor if tensor._base is None else tensor._base
                    self._restores.append((base, base.detach().clone(), version_of(base)))
                continue
            if name not in self._seen_states and not is_placeholder(tensor) and not tensor.is_meta:
                self._restores.append((tensor, tensor.detach().clone(), version_of(tensor)))
            self._seen_states.add(name)
            self.write_positions.setdefault(name, set()).add(len(self._observed.trace.calls))
            if faked or self.unknown_line:
                self.computed.add(name)
            if faked or self._observed.trace.calls:  # before any unit, every stage does the same
                self.written_states.setdefault(name, tensor)

    def written_in_unit(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An operation of a unit is about to run: note the states that it writes, to put them back."""
        if "batch_norm" in func._schema.name:
            return
        for tensor in written_tensors(func, args, kwargs):
            real = self._observed.origin(tensor)
            name = self._observed.states.get(storage_key(real))
            if name is None:
                continue
            self._observed.trace.buffers_written.add(name)
            if not real.is_floating_point():
                continue
            if name not in self._observed.trace.written_in_units and not (
                is_placeholder(real) or real.is_meta
            ):
                self._restores.append((real, real.detach().clone(), version_of(real)))
            self._observed.trace.written_in_units.add(name)

    @property
    def all_written(self) -> list[str]:
        """Every parameter, buffer and plain tensor that glue writes, before the units too."""
        return sorted(self._seen_states | self.moved)

    def without_poison(self, value: Any) -> Any:
        """The same with placeholders for real tensors that a placeholder was written into."""
        if not self._observed.poisoned:
            return value

        def swap(tensor: Tensor) -> Tensor:
            if is_placeholder(tensor) or not self._observed.is_poisoned(tensor):
                return tensor
            return self._stand_in(tensor)

        return map_tensors(swap, value)

    def _stand_in(self, tensor: Tensor) -> Tensor:
        """A view of the one placeholder for the memory of `tensor`; what is written there is noted here."""
        base = self._stand_ins.get(storage_key(tensor))
        if base is None:
            count = tensor.untyped_storage().nbytes() // tensor.element_size()
            spec = TensorSpec((count,), (1,), tensor.dtype, tensor.device.type, False)
            base = self._stand_ins[storage_key(tensor)] = self._observed.mode.make(spec)
            self._poisoned_by[storage_key(base)] = tensor
        self._observed.tags.add(base, self._observed.tags.of(tensor))
        return base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def _scalar(self, func: Any, operands: list[Tensor]) -> Any:
        is_bool = operands[0].dtype is torch.bool
        self._steers(operands, divides=not (is_bool and self.guesses.asks_if_finite(operands[0])))
        if self.guesses.are_endless:
            raise refuse(
                "code between units goes on for as long as a value computed by the model says so, and while "
                "it is traced no value is known: put it into the forward of a module",
                self._observed.root,
            )
        return self.guesses.answer(func, operands[0])

    def _steers(self, operands: list[Tensor], *, divides: bool = True) -> None:
        """A number or a length that follows from these is known to the code from now on."""
        self._observed.values_read()
        self._observed.trace.reads_values = True
        if not self.unknown_line:
            self.unknown_line = user_line(self._observed.root)
        if divides and not self.divided_line:
            self.divided_line = user_line(self._observed.root)
        self.steering |= self._observed.tags.union(operands)
        self._observed.trace.tail |= self.steering

    def hook_registered(self, tensor: Tensor) -> None:
        """A gradient hook was put on a tensor between units."""
        observed = self._observed
        returned = [tag.call for tag, known in observed.values.items() if known() is tensor]
        observed.trace.hooked |= {(call, len(observed.trace.calls)) for call in returned}
        written = any((tag.call, tag.leaf) in observed.trace.mutated for tag in observed.handed.of(tensor))
        if any(t.kind == "value" for t in observed.tags.of(tensor)) and (written or not returned):
            self._hooks.append((len(self._observed.trace.calls), user_line(self._observed.root)))

    def check_hooks(self) -> None:
        """Refuse hooks on values whose gradient comes from several stages."""
        for position, line in self._hooks:
            if position < len(self._observed.trace.calls):
                raise SplitError(
                    f"register_hook at {line} is on a value computed between units, whose gradient may come "
                    "from several stages: put the hook on the output of a module"
                )


class GlueOperations(TorchDispatchMode):
    """Sees every operation that is not inside a unit."""

    def __init__(self, observed: Observation, keeping: SavedActivations, glue: Glue) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._observed, self._keeping, self._glue = observed, keeping, glue

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._observed.inside is not None or self._keeping.is_packing:
            if self._observed.runs_really:
                self._glue.written_in_unit(func, args, kwargs or {})
            result = func(*args, **(kwargs or {}))
            if self._observed.runs_really:
                self._note_made(func, args, kwargs or {}, result)
            return result
        known = by_shape_alone(func, args) if self._observed.trace.assumed.constants else args
        return self._glue.operation(func, known, kwargs or {})

    def _note_made(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Of a unit that runs on made-up input: what it computes or writes; a view is neither."""
        old = {storage_key(tensor) for tensor in operands_of(args, kwargs)}
        new = (tensor for tensor in operands_of((result,)) if storage_key(tensor) not in old)
        self._observed.note_made((*new, *written_tensors(func, args, kwargs)))


_TO_ARRAY = (Tensor.numpy, Tensor.__array__)


def array_of(func: Any, tensor: Any) -> "numpy.ndarray[Any, Any] | None":
    """A placeholder as an array of made-up numbers, for which one of it is read.

    Args:
        func: The function that is called.
        tensor: Its first argument.

    Returns:
        None where the function makes no array of a tensor, or torch refuses it.
    """
    if func not in _TO_ARRAY or not is_placeholder(tensor) or not tensor.numel() or tensor.requires_grad:
        return None
    number = tensor.reshape(-1)[0].item()
    with disable_current_modes():
        kind = torch.empty(0, dtype=tensor.dtype).numpy().dtype
    return numpy.full(tuple(tensor.shape), number, kind)


class GlueFunctions(TorchFunctionMode):
    """Sees calls that are no operations: gradients taken inside the step, hooks on tensors, and draws.

    Args:
        observed: The step, whose trace is told.
        glue: What is seen of its operations.
        args: Of the step.
    """

    def __init__(self, observed: Observation, glue: Glue, args: Any) -> None:
        super().__init__()
        self._observed, self._glue = observed, glue
        self._seeds = SeedsOfStart(Generators(observed.root.modules()))
        self._lengths = {tensor.shape[0] for tensor in tensors_in(args) if tensor.dim()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        observed = self._observed
        if data_set_without_values(func, args, writes=observed.inside is None):
            return None
        if (read := read_of(func, args, kwargs)) is not None:
            return read
        observed.tensors_used(operands_of(args, kwargs or {}))
        if observed.inside is None:
            self._note_read(func, args)
            if func in (torch.autograd.grad, torch.autograd.backward, Tensor.backward):
                values = observed.tags.union(tensors_in((args, kwargs or {})))
                if any(tag.kind == "value" for tag in values):
                    raise refuse(
                        "a gradient is taken inside the step through what units return, as for a gradient "
                        "penalty: the graph inside units is each stage's own, of another backward. Take it "
                        "in the forward of one module, which returns what is needed, and keep it whole: "
                        "PipelineStrategy(units=['<its name>']); with create_graph=True the loss may depend "
                        "on it there, under any schedule",
                        observed.root,
                    )
            elif func is Tensor.register_hook:
                self._glue.hook_registered(args[0])
            elif (array := array_of(func, args[0] if args else None)) is not None:
                return array
        self._glue.draws = func in RANDOM_FUNCTIONS
        try:
            if self._glue.draws and observed.inside is None:
                return self._drawn(func, args, kwargs or {})
            result = func(*args, **(kwargs or {}))
            self._glue.guesses.note_function(func, args, kwargs or {}, result)
            return result
        finally:
            self._glue.draws = False

    def _note_read(self, func: Any, args: Any) -> None:
        """Numbers of the batch, and gradients of weights, may be read."""
        trace = self._observed.trace
        trace.steered |= is_tensor_read(func) and not is_placeholder(args[0])
        trace.steered |= self._glue.guesses.picked.counts(func, args)
        trace.reads_gradients |= func == GRADIENT and isinstance(args[0], Parameter)

    def _drawn(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """A random number between units."""
        seeds, generator = self._observed.seeds, kwargs.get("generator")
        if seeds is not None:
            before = seeds.drawing(generator)
            result = func(*args, **kwargs)
            seeds.drawn(before)
            return result
        result = func(*args, **kwargs)
        of_samples = isinstance(result, Tensor) and result.dim() > 0 and result.shape[0] in self._lengths
        if of_samples and self._seeds.are_other(generator):
            self._observed.trace.seeded_at = user_line(self._observed.root)
        self._glue.guesses.note_function(func, args, kwargs, result)
        return result


class MixingSeen:
    """Tries out, for operations on what comes from the batch alone, whether samples stay apart.

    Args:
        observed: The step, whose trace is told.
    """

    def __init__(self, observed: Observation) -> None:
        self._observed = observed
        self._derived, self._drawn = TagStore(), TagStore()
        self._continuous, self._summed = TagStore(), TagStore()
        self._samples = 0
        self._meet = False  # values of units, in an operation that may mix samples

    def begin(self, batch: Any) -> None:
        """The step begins, with these arguments."""
        held = [tensor for tensor in tensors_in(batch) if tensor.dim() and not is_placeholder(tensor)]
        self._samples = held[0].shape[0] if held else 0
        for tensor in held:
            self._derived.add(tensor, _DERIVED)
            self._continuous.add(tensor, _DERIVED)

    def reaches_unit(self, given: Iterable[Tensor]) -> None:
        """A unit is called with these: what was made of a mean of the batch's samples counts as mixed."""
        self._observed.trace.may_mix_values |= self._meet
        for _, position, _, found in self._summed.union(given):
            name, _, line = found.partition(" ")
            self._observed.trace.mixed.setdefault(line, (name, position))

    def _meets_values(self, own: Iterable[Tensor]) -> None:
        """Values of units are combined with these, such as advantages or targets standardized over the batch.

        What is divided by a sum or mean is left to the loss, whose sums are followed. A mean may be in more.
        """
        trace = self._observed.trace
        for *_, found in self._summed.union(one for one in own if self._has_rows([one])):
            name, _, line = found.partition(" ")
            if name not in _SUMS | _MEANS:
                trace.mixed.setdefault(line, (name, len(trace.calls)))
            elif name in _MEANS:
                trace.has_means = True

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """An operation has run.

        Args:
            func: It.
            args: Its arguments.
            kwargs: Likewise.
            result: What it gave.
        """
        operands, results = list(operands_of(args, kwargs)), list(operands_of((result,)))
        self._meet = self._meet or self._may_meet(func, args, operands)
        if self._samples < 2:
            return
        if any(map(is_placeholder, (*operands, *results))):
            self._meets_values([one for one in operands if not is_placeholder(one)])
            return
        if torch.Tag.nondeterministic_seeded in func.tags or any(map(self._drawn.of, operands)):
            for tensor in results:
                self._drawn.add(tensor, _DERIVED)
        if not any(map(self._derived.of, operands)):
            return
        if func._schema.name in _MAY_MIX and self._mixes(func, args, kwargs, results):
            found = func._schema.name.removeprefix("aten::"), len(self._observed.trace.calls)
            self._observed.trace.mixed.setdefault(user_line(self._observed.root), found)
        for tensor in results:
            self._derived.add(tensor, _DERIVED)
        if any(map(self._continuous.of, operands)):
            self._note_summed(func, args, kwargs, results)

    def _may_meet(self, func: Any, args: tuple[Any, ...], operands: list[Tensor]) -> bool:
        """Whether what units gave for a sample may reach others by this operation."""
        if torch.Tag.pointwise in func.tags or func._schema.name in _APART or not operands:
            return False
        if all(tag.kind != "value" for tag in self._observed.tags.union(operands)):
            return False
        if func._schema.name in ("aten::slice", "aten::select"):
            shape, dim = operands[0].shape, args[1] if len(args) > 1 else 0
            return bool(shape[dim] == max(self._samples, 1))
        return True

    def _note_summed(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Tensor]
    ) -> None:
        """What has one number for all samples, such as a mean over them, and what is made of it."""
        operands = list(operands_of(args, kwargs))
        summed, name = set(self._summed.union(operands)), func._schema.name.removeprefix("aten::")
        sums = func._schema.name in _SUMMING and self._has_rows(operands[:1])
        sums = sums and operands[0].is_floating_point() and bool(self._continuous.of(operands[0]))
        sums = sums and self._is_of_all(func, args, kwargs, results)
        if sums or (func._schema.name in _PRODUCTS and self._is_of_pairs(*operands)):
            line = user_line(self._observed.root)
            summed.add(Tag("batch", len(self._observed.trace.calls), name=f"{name} {line}"))
        for tensor in results:
            self._continuous.add(tensor, _DERIVED)
            self._summed.add(tensor, frozenset(summed))

    def _is_of_pairs(self, one: Tensor, other: Tensor) -> bool:
        """Whether a product is over the samples of a batch, or of each with each."""
        if not (one.is_floating_point() and self._continuous.of(one) and self._continuous.of(other)):
            return False
        return self._samples in other.shape[-2:] and (one.dim() < 3 or one.shape[0] % self._samples != 0)

    def _is_of_all(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Tensor]
    ) -> bool:
        return not self._has_rows(results) or self._mixes(func, args, kwargs, results)

    def _mixes(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Tensor]) -> bool:
        """Whether a sample of a result changes where another one of the first operand does."""
        data = args[0]
        if not self._has_rows([data, *results]) or not self._derived.of(data):
            return False
        rows: Any = args[1] if len(args) > 1 else None
        if func._schema.name == "aten::index" and rows[0] is not None and self._drawn.of(rows[0]):
            return True  # which may be the order that stands there, by chance
        for row in range(min(_TRIED, self._samples)):
            other = data.clone()
            other[row] = ~data[row] if data.dtype is torch.bool else data[row] + 1
            found = operands_of((func(other, *args[1:], **kwargs),))
            for before, after in zip(results, found, strict=True):
                differs = (before != after).reshape(self._samples, -1).any(1)
                differs[row] = False
                if bool(differs.any()):
                    return True
        return False

    def _has_rows(self, tensors: Iterable[Tensor]) -> bool:
        return all(tensor.dim() and tensor.shape[0] == self._samples for tensor in tensors)
