"""Units whose own forward mixes the samples of a batch, such as `h - h.mean(0)` or experts with a capacity.

A unit runs on a micro-batch, so it mixes fewer samples than on one device. Whether it does is found by
running it on made-up values: as they are, and with one sample in the place of all others. Where it is given
the same for this sample in both runs, what it gives for it has to be the same. So it is with the first sample
and with one in the middle: a recurrent layer whose time stands where samples are begins with the first.
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from lightning_pipeline._torch import AnyBatchNorm, TorchDispatchMode, tree_leaves
from lightning_pipeline.data import split_batch
from lightning_pipeline.model.cut import Microbatch, TracedOutput
from lightning_pipeline.model.mixing import is_cut_by_rows, standing_of
from lightning_pipeline.model.random import random_state_kept
from lightning_pipeline.model.rehearsal.made_up_runs import MadeUpRuns, are_same, rounding_of, seed_all
from lightning_pipeline.model.replay import Step
from lightning_pipeline.model.rules import MadeUp, made_up
from lightning_pipeline.model.tensors import TensorSpec, is_placeholder, map_tensors, tensors_in
from lightning_pipeline.model.trace import Trace, UnitPatches
from lightning_pipeline.registry import parameters_of

_log = logging.getLogger(__name__)
_aten = torch.ops.aten
Shape = tuple[int, ...]
UnitCall = tuple[int, int]
"""A unit, and which call of it."""
Outputs = Mapping[UnitCall, TracedOutput]
Dimensions = Callable[[UnitCall, Shape], Sequence[int]]
"""Which dimensions of an output of a call may be that of the samples."""
Place = Callable[[int], int]
"""Which of so many samples is looked at."""
_LARGEST = 1 << 28  # bytes of a unit's parameters, and of one made-up value
_FEW = 16  # powers of two: numbers of a sample's values that are compared


class UnitMixing:
    """Finds them, on the rank that has the unit.

    Args:
        runs: Makes runs of a step.
        stage_of: The stage of each unit.
        stages: Those of this rank.

    Attributes:
        found: By step, the units that mix samples, by their names and classes.
        numbers: By step, units that give a number of all samples which is not the mean of its parts': whether
            it is the sum.
    """

    def __init__(self, runs: MadeUpRuns, stage_of: Sequence[int], stages: Collection[int]) -> None:
        self._runs, self._stage_of, self._stages = runs, stage_of, stages
        self._patches = runs.patches
        self._tried: dict[str, set[int]] = {}
        self.found: dict[str, list[str]] = {}
        self.numbers: dict[str, dict[str, bool]] = {}

    def look(
        self, step: Step, whole: Microbatch, sizes: Sequence[int],
        outputs: Callable[[Microbatch], Outputs], over_batch: Collection[int] = (),
    ) -> None:  # fmt: skip
        """A batch of several micro-batches begins: try those of its units that were not tried in this step.

        Args:
            step: The batch.
            whole: Its arguments as one.
            sizes: Samples of each micro-batch.
            outputs: Gives what units return for arguments on the way of the first micro-batch.
            over_batch: Units that run once for the whole batch.
        """
        tried = self._tried.setdefault(step.name, set())
        units = {unit for unit in step.routes[0].trace.path if self._stage_of[unit] in self._stages}
        units -= tried | set(over_batch)
        own = frozenset(filter(self._is_to_be_tried, units))
        tried |= units
        pair = _pair(step, whole, sizes) if own else None
        if pair is None:
            return
        try:
            mixing = self._mixing(step, pair, outputs, own)
        except Exception as error:  # the user's code, on made-up values
            _log.debug("whether units of %s mix samples cannot be tried: %s", step.name, error)
            return
        self.found.setdefault(step.name, []).extend(self._named(unit) for unit in sorted(mixing))

    def _note_numbers(self, step: Step, seen: Sequence["_Seen"]) -> None:
        numbers = self.numbers.setdefault(step.name, {})
        for one in seen:
            if one.sums is not None:
                numbers[self._named(one.unit)] = one.sums

    def _is_to_be_tried(self, unit: int) -> bool:
        """Whether it is of a size to be run twice more, and no batch norm, which the run tells of."""
        module = self._patches.units[unit].module
        is_norm = any(isinstance(part, AnyBatchNorm) and part.training for part in module.modules())
        size = sum(p.numel() * p.element_size() for p in parameters_of(module))
        return not is_norm and size <= _LARGEST

    def _named(self, unit: int) -> str:
        name, module = self._patches.units[unit].name, self._patches.units[unit].module
        return f"{name} ({type(module._modules.get('_orig_mod') or module).__name__})"

    def _mixing(
        self, step: Step, pair: "_Pair", outputs: Callable[[Microbatch], Outputs], own: frozenset[int]
    ) -> frozenset[int]:
        """Those of some units that mix; what they return for another size is asked for where it is needed."""
        trace, returned, samples = step.routes[0].trace, outputs(pair.part), pair.samples
        alike = [_like_one(pair, at) for at in _PLACES]

        def run(
            units: frozenset[int], dimensions: "_ByLength | _Grown", number: int | None = None
        ) -> list["_Seen"]:
            repeats, at = (None, _first) if number is None else (dimensions, _PLACES[number])
            values = _Values(returned, repeats, at)
            pieces = pair if number is None else None
            seen = _Forwards(self._patches, trace, units, samples, dimensions, pieces)
            batch = pair.part if number is None else alike[number]
            assert batch is not None, "samples were found"
            self._run(step, batch, MadeUp(values, trace, units, seen.all, sees=False))
            if pieces is not None:
                self._note_numbers(step, seen.found)
            return seen.found

        def differing(
            units: frozenset[int], dimensions: "_ByLength | _Grown", first: list["_Seen"]
        ) -> frozenset[int]:
            """Those that give one of the samples something else."""
            found = frozenset[int]()
            for number in range(len(_PLACES)):
                if units - found:
                    found |= _differing(first, run(units - found, dimensions, number), number)
            return found

        if None in alike:
            return frozenset()
        by_length, suspects = _ByLength(samples), own
        if not by_length.is_in_doubt(returned):
            suspects = differing(own, by_length, run(own, by_length))
        if not suspects:
            return suspects
        grown = _Grown(returned, outputs(pair.other), samples, pair.number)
        first = run(suspects, grown)
        again = run(suspects, grown)
        drawn = frozenset[int]().union(*(_differing(first, again, number) for number in range(len(_PLACES))))
        return differing(suspects, grown, first) - drawn

    def _run(self, step: Step, batch: Microbatch, runner: MadeUp) -> None:
        try:
            with self._runs.apart(step):
                self._runs.run(step, batch, runner)
        except _EnoughError:
            pass
        except Exception as error:
            _log.debug("%s ends early on made-up values: %s", step.name, error)


class _EnoughError(BaseException):
    """All calls of units that are looked at have been made; the user's `except Exception` lets it through."""


class _Pair(NamedTuple):
    """Samples of a batch to run units on, and another number of them, which tells where samples are.

    Attributes:
        part: Arguments of the step.
        samples: In them, at least two.
        other: Other ones.
        number: Samples in these.
    """

    part: Microbatch
    samples: int
    other: Microbatch
    number: int


class _Seen(NamedTuple):
    """What a call of a unit was given and gave.

    Attributes:
        unit: Its number.
        given: By place, of each tensor among its arguments the sample there, for each dimension that may be
            that of the samples; the whole tensor where none may.
        plain: Numbers and texts among its arguments, and what tells how the unit stands.
        gave: Of each output the samples likewise; nothing where the unit raised.
        drawn: By which functions it drew numbers, and of which shapes.
        rounding: How much of the largest number two results of the same may differ by.
        sums: Whether what it gives without samples is the sum of what it gives for parts; None where it is
            the mean by samples, or nobody knows.
    """

    unit: int
    given: list[list[list[Tensor]]]
    plain: list[Any]
    gave: list[list[list[Tensor]]]
    drawn: list[Any]
    rounding: float
    sums: bool | None


class _Forwards:
    """The forwards of all units; those that are looked at note what they are given and give.

    Args:
        patches: The patched units.
        trace: Of the step.
        units: That are looked at.
        samples: That they are given.
        dimensions: Of outputs.
        pair: Samples to tell dimensions by, where units are run on pieces of what they are given; else None.

    Attributes:
        all: By number of the unit.
        found: What was noted.
    """

    def __init__(
        self, patches: UnitPatches, trace: Trace, units: Collection[int], samples: int,
        dimensions: "_ByLength | _Grown", pair: _Pair | None,
    ) -> None:  # fmt: skip
        self._patches, self._dimensions, self._trace = patches, dimensions, trace
        self._of_samples = _ByLength(samples)
        self._by_shape = None if pair is None else {**_grown_shapes(pair), **dimensions.by_shape()}
        self._left = sum(call.unit in units for call in trace.calls)
        self._counts: Counter[int] = Counter()
        self._inside = False
        self.found: list[_Seen] = []
        self.all = list(patches.originals)
        for unit in units:
            self.all[unit] = self._noted(unit, patches.originals[unit])

    def _noted(self, unit: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            if self._inside:  # a unit that is called by another is part of that
                return forward(*args, **kwargs)
            self._inside = True
            try:
                self.found.append(self._seen(unit, forward, args, kwargs))
            finally:
                self._inside = False
            self._left -= 1
            if not self._left:
                raise _EnoughError
            return None

        return noted

    def _seen(self, unit: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> _Seen:
        call = unit, self._counts[unit]
        self._counts[unit] += 1
        inputs = list(_tensors((args, kwargs)))
        given = [
            [list(map(_some, self._there(at, call, t, self._of_samples))) or [_some(t)] for t in inputs]
            for at in _PLACES
        ]
        plain = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, bool | int | float | str)]
        plain.append(hash(standing_of(self._patches.units[unit].module)))
        still = _Still()
        with random_state_kept():
            output = self._output(unit, forward, (args, kwargs), still)
        gave = [
            [
                list(map(_some, self._there(at, call, t, self._dimensions))) if t.is_floating_point() else []
                for t in _tensors(output)
            ]
            for at in _PLACES
        ]
        rounding = rounding_of(self._patches.units[unit].module, inputs)
        sums = None if still.drawn else self._sums(call, forward, (args, kwargs), output, rounding)
        return _Seen(unit, given, plain, gave, still.drawn, rounding, sums)

    def _sums(
        self, call: UnitCall, forward: Callable[..., Any], given: Any, output: Any, rounding: float
    ) -> bool | None:
        """See `_Seen.sums`."""
        whole = self._numbers_in(call, output)
        if not whole or self._by_shape is None:
            return None
        parts, lengths = [], []
        for part, length in _pieces(given, self._of_samples, self._by_shape):
            with random_state_kept():
                parts.append(self._numbers_in(call, self._output(call[0], forward, part, _Still())))
            lengths.append(length)
        if not parts or any(len(part) != len(whole) for part in parts):
            return None
        numbers = torch.stack([torch.stack(part) for part in parts])
        weights = numbers.new_tensor(lengths)[:, None]
        made = torch.stack(whole)
        if are_same(made, (numbers * weights).sum(0) / weights.sum(), rounding):
            return None
        return are_same(made, numbers.sum(0), rounding)

    def _numbers_in(self, call: UnitCall, output: Any) -> list[Tensor]:
        """Numbers in an output, and in attributes that the step reads."""
        values: list[Any] = [output]
        if (spec := self._trace.ports.get(call)) is not None:
            modules = list(self._trace.root.modules())
            values += [vars(modules[number]).get(name) for (number, name), _ in spec.ways]
        found = [tensor for tensor in _tensors(values) if tensor.is_floating_point() and tensor.dim() == 0]
        return [tensor.detach().double().cpu() for tensor in found]

    @staticmethod
    def _there(at: Place, call: UnitCall, tensor: Tensor, dimensions: Dimensions) -> Iterator[Tensor]:
        for dimension in dimensions(call, tuple(tensor.shape)):
            yield tensor.select(dimension, at(tensor.shape[dimension]))

    @staticmethod
    def _output(unit: int, forward: Callable[..., Any], given: Any, still: "_Still") -> Any:
        """What it gives; gradients are made where it does not run without, as forces of an energy do not."""
        for grads in (torch.no_grad, torch.enable_grad):
            still.drawn.clear()
            seed_all(unit)
            args, kwargs = map_tensors(torch.clone, given)
            try:
                with grads(), still:
                    return forward(*args, **kwargs)
            except Exception as error:  # the user's code, on made-up values
                _log.debug("unit %s does not run on made-up values: %s", unit, error)
        return None


class _Still(TorchDispatchMode):
    """Inside, dropout drops nothing.

    What it drops for a sample could depend on where others put it, such as in a packed sequence.

    Attributes:
        drawn: Which other functions have drawn numbers, and of which shapes.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drawn: list[Any] = []

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        if func is _aten.bernoulli_.float and args[0].is_floating_point():
            return args[0].fill_(args[1] if len(args) > 1 else 0.5)
        if func is _aten.native_dropout.default:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        result = func(*args, **(kwargs or {}))
        self.drawn.append((func, [tuple(tensor.shape) for tensor in tensors_in(result)]))
        return result


class _ByLength:
    """The dimensions as long as there are samples.

    Args:
        samples: So many.
    """

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __call__(self, call: UnitCall, shape: Shape) -> Sequence[int]:
        return [dimension for dimension, length in enumerate(shape) if length == self.samples]

    def by_shape(self) -> Mapping[Shape, int]:
        """What is known of shapes beside that."""
        return {}

    def is_in_doubt(self, outputs: Outputs) -> bool:
        """Whether that are several somewhere."""
        specs = [spec for _, each in outputs.values() for spec in each]
        return any(spec.shape.count(self.samples) > 1 for spec in specs)


class _Grown:
    """The dimension that has as many samples, where there are others too.

    Args:
        part: What units return for it.
        other: What they return for the other.
        samples: Of the one.
        number: Of the other.
    """

    def __init__(self, part: Outputs, other: Outputs, samples: int, number: int) -> None:
        self._found: dict[tuple[UnitCall, Shape], set[int | None]] = {}
        for call in part.keys() & other.keys():
            for one, two in zip(part[call][1], other[call][1], strict=False):
                dimension = _grown(one.shape, two.shape, samples, number)
                self._found.setdefault((call, tuple(one.shape)), set()).add(dimension)

    def by_shape(self) -> Mapping[Shape, int]:
        """The dimension of the samples in outputs of a shape, where those of all calls have the same."""
        every: dict[Shape, set[int | None]] = {}
        for (_, shape), found in self._found.items():
            every.setdefault(shape, set()).update(found)
        return {
            shape: one
            for shape, found in every.items()
            if len(found) == 1
            for one in found
            if one is not None
        }

    def __call__(self, call: UnitCall, shape: Shape) -> Sequence[int]:
        found = self._found.get((call, shape), set())
        return [one for one in found if one is not None] if len(found) == 1 else []


class _Values(Mapping[UnitCall, Any]):
    """Made-up values for what calls of units give, made when they are asked for, from one of each shape.

    Args:
        outputs: What they give.
        alike: Of what one sample is in the place of all others; None where each has its own.
        at: Which.
    """

    def __init__(self, outputs: Outputs, alike: Dimensions | None, at: Place) -> None:
        self._outputs, self._alike, self._at = outputs, alike, at
        self._made: dict[TensorSpec, Tensor] = {}

    @override
    def __getitem__(self, call: UnitCall) -> Any:
        structure, specs = self._outputs[call]
        return [self._tensor(call, spec).requires_grad_(spec.requires_grad) for spec in specs], structure

    @override
    def __iter__(self) -> Iterator[UnitCall]:
        return iter(self._outputs)

    @override
    def __len__(self) -> int:
        return len(self._outputs)

    def _tensor(self, call: UnitCall, spec: TensorSpec) -> Tensor:
        if spec.num_bytes > _LARGEST:
            raise _EnoughError
        if spec not in self._made:
            self._made[spec] = made_up(spec, torch.Generator().manual_seed(sum(spec.shape)))
        made = self._made[spec].roll(sum(call), -1) if spec.shape else self._made[spec].clone()
        for dimension in self._alike(call, tuple(spec.shape)) if self._alike is not None else ():
            made = _repeated(made, dimension, self._at)
        return made


def _grown_shapes(pair: _Pair) -> dict[Shape, int]:
    """The dimension of the samples in tensors of the batch, by shape."""
    pairs = zip(tensors_in(pair.part), tensors_in(pair.other), strict=False)
    found = {tuple(a.shape): _grown(a.shape, b.shape, pair.samples, pair.number) for a, b in pairs}
    return {shape: dimension for shape, dimension in found.items() if dimension is not None}


def _pieces(given: Any, of_samples: _ByLength, by_shape: Mapping[Shape, int]) -> Iterator[tuple[Any, int]]:
    """What a unit is given, cut into up to three; nothing where it is not known along which dimensions."""
    tensors, samples = list(_tensors(given)), of_samples.samples
    dimensions = {
        id(tensor): [by_shape[tuple(tensor.shape)]]
        if tuple(tensor.shape) in by_shape
        else of_samples((0, 0), tuple(tensor.shape))
        for tensor in tensors
    }
    cut = [one for one in dimensions.values() if one]
    if not cut or any(len(one) > 1 for one in cut):
        return
    for begin, end in pairwise(sorted({0, 1, (samples + 1) // 2, samples})):

        def part(tensor: Tensor, begin: int = begin, length: int = end - begin) -> Tensor:
            found = dimensions.get(id(tensor))
            return tensor.narrow(found[0], begin, length) if found else tensor

        yield map_tensors(part, given), end - begin


def _pair(step: Step, whole: Microbatch, sizes: Sequence[int]) -> _Pair | None:
    """The first micro-batch and the batch; where it has one sample, two or three of the batch are taken."""
    part, total = step.microbatches[0], sum(sizes)
    if sizes[0] > 1:
        return _Pair(part, sizes[0], whole, total)
    if not is_cut_by_rows(whole, step.microbatches, sizes):
        return None
    (batch, *rest), kwargs = whole
    some, samples = split_batch(batch, total // 2)[0]
    other = (part, 1) if samples == total else (whole, total)
    return _Pair(((some, *rest), kwargs), samples, *other)


def _like_one(pair: _Pair, at: Place) -> Microbatch | None:
    """Arguments in which one sample is in the place of all others; None where samples are not found."""
    tensors, others = list(tensors_in(pair.part)), list(tensors_in(pair.other))
    if len(tensors) != len(others):  # such as a list with a tensor for each sample
        return None
    found = {
        id(one): _grown(one.shape, other.shape, pair.samples, pair.number)
        for one, other in zip(tensors, others, strict=True)
    }

    def alike(tensor: Tensor) -> Tensor:
        dimension = found.get(id(tensor))
        return tensor if dimension is None else _repeated(tensor, dimension, at)

    args, kwargs = map_tensors(alike, pair.part)
    return args, kwargs


def _grown(one: Sequence[int], other: Sequence[int], samples: int, number: int) -> int | None:
    """The one dimension in which two shapes differ, by the samples."""
    if len(one) != len(other):
        return None
    found = [(d, sizes) for d, sizes in enumerate(zip(one, other, strict=True)) if sizes[0] != sizes[1]]
    return found[0][0] if len(found) == 1 and found[0][1] == (samples, number) else None


def _first(samples: int) -> int:
    return 0


def _middle(samples: int) -> int:
    return samples // 2


_PLACES: tuple[Place, ...] = (_first, _middle)


def _repeated(tensor: Tensor, dimension: int, at: Place) -> Tensor:
    with torch.no_grad():
        same = tensor.narrow(dimension, at(tensor.shape[dimension]), 1).expand_as(tensor).clone()
    return same.requires_grad_(tensor.requires_grad)


def _tensors(value: Any) -> Iterator[Tensor]:
    for tensor in tensors_in(value):
        if not is_placeholder(tensor) and tensor.layout is torch.strided:
            yield tensor


def _some(tensor: Tensor) -> Tensor:
    """Up to some ten thousands of its values, from all over it."""
    return tensor.detach().flatten()[:: (tensor.numel() >> _FEW) | 1].clone()


def _differing(first: Sequence[_Seen], other: Sequence[_Seen], number: int) -> frozenset[int]:
    """Units that gave another thing for the sample at a place, though they were given the same for it."""
    found, calls = set[int](), {one.unit for one in other}
    pairs = zip((one for one in first if one.unit in calls), other, strict=False)
    for one, two in pairs:
        if one.unit != two.unit:
            break  # it went elsewhere, which says nothing
        comparable = one.plain == two.plain and one.drawn == two.drawn and _is_given_same(one, two, number)
        if comparable and _gave_other(one, two, number):
            found.add(one.unit)
    return frozenset(found)


def _is_given_same(one: _Seen, two: _Seen, number: int) -> bool:
    if len(one.given[number]) != len(two.given[number]):
        return False
    return all(
        len(before) == len(after)
        and any(are_same(*pair, one.rounding) for pair in zip(before, after, strict=True))
        for before, after in zip(one.given[number], two.given[number], strict=True)
    )


def _gave_other(one: _Seen, two: _Seen, number: int) -> bool:
    for before, after in zip(one.gave[number], two.gave[number], strict=False):
        for pair in zip(before, after, strict=False):
            if pair[0].shape == pair[1].shape and not are_same(*pair, one.rounding):
                return True
    return False
