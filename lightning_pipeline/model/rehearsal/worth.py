"""What the loss of each micro-batch is worth in the batch, tried where it cannot be read from the code.

The units answer with made-up values: for the batch as a whole those of all micro-batches, joined. Where the
whole's loss is a sum of the micro-batches' losses, each times a number, its gradients with respect to the
values of one micro-batch are that number times the gradients of this micro-batch's own loss.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_pipeline.model.cut import Microbatch, Route
from lightning_pipeline.model.random import MicrobatchSeeds, seed_torch
from lightning_pipeline.model.replay import Step
from lightning_pipeline.model.rules import (
    LARGEST,
    MadeUp,
    Outputs,
    bytes_of,
    dimension_of,
    joined_values,
    made_up,
)
from lightning_pipeline.model.tensors import is_placeholder, map_tensors, storage_key, tensors_in
from lightning_pipeline.model.trace import Trace, UnitPatches
from lightning_pipeline.registry import parameters_of

_log = logging.getLogger(__name__)
_PRECISE = {torch.float64: 1e-8, torch.float32: 1e-4}  # how far apart two results that are alike may be
_SCALES = ((0.0, 0.0), (0.0, 0.0), (0.0, 6.0), (-2.0, 4.0), (2.0, 4.0), (-3.0, 0.0), (1.5, 0.0))
"""Powers of ten of made-up values: their middle, and how far samples are apart, so that what counts by values
counts otherwise in one of these. That proves nothing of bounds near the targets: see `_BENDS`."""
_FEWEST = 4  # of these that have to give numbers


# What goes by where a value lies. Of single samples it may; of what is made of several, made-up values say
# nothing about where those of a trained model lie.
_BENDS = frozenset({
    "relu", "relu6", "clamp", "clip", "clamp_min", "clamp_max", "abs", "absolute", "max", "min", "amax",
    "amin", "maximum", "minimum", "fmax", "fmin", "where", "threshold", "hardtanh", "masked_fill",
    "nan_to_num", "gt", "lt", "ge", "le", "eq", "ne", "greater", "less", "greater_equal", "less_equal",
    "sign", "heaviside", "round", "floor", "ceil", "bool", "isnan", "isinf", "isfinite",
})  # fmt: skip


class _NotASumError(Exception):
    """The loss of the batch is no sum of the micro-batches' losses, each times a number."""


@dataclass(frozen=True)
class _Found:
    """One run of the step.

    Attributes:
        loss: That it returned.
        values: Its gradients with respect to each made-up value.
        weights: Its gradients with respect to parameters that code between the units uses; None of others.
    """

    loss: Tensor
    values: list[Tensor]
    weights: list[Tensor | None]


class _Bends(TorchFunctionMode):
    """Sees whether code goes by where values lie that are made of several samples' made-up ones.

    Args:
        values: The made-up ones.
        rows: Those of them that have samples, with the dimension that holds them.
    """

    def __init__(self, values: Sequence[Tensor], rows: Sequence[tuple[Tensor, int]]) -> None:
        super().__init__()
        self._made = {storage_key(tensor): tensor for tensor in values}  # held: no identity comes twice
        self._rows = rows
        self._sizes = {tensor.shape[dim] for tensor, dim in rows}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = [one for one in tensors_in((args, kwargs)) if storage_key(one) in self._made]
        name = getattr(func, "__name__", "").strip("_")
        if name in _BENDS and any(self._is_of_several(one) for one in made):
            raise _NotASumError(f"{name} goes by where a value of several samples lies")
        result = func(*args, **kwargs)
        if made:
            self._made.update({storage_key(one): one for one in tensors_in(result)})
        return result

    def _is_of_several(self, tensor: Tensor) -> bool:
        by_rows = any(size % samples == 0 for size in tensor.shape for samples in self._sizes)
        return not by_rows and not self._is_of_one(tensor)

    def _is_of_one(self, tensor: Tensor) -> bool:
        """Whether all of it is made of one sample, as in a loop over samples."""
        values = [value for value, _ in self._rows]
        if not tensor.requires_grad or not all(value.requires_grad for value in values):
            return False
        asked = torch.autograd.grad(
            tensor, values, torch.ones_like(tensor), retain_graph=True, allow_unused=True
        )
        reached = set[int]()
        for gradient, (_, dim) in zip(asked, self._rows, strict=True):
            if gradient is not None:
                reached.update(gradient.movedim(dim, 0).flatten(1).any(1).nonzero().flatten().tolist())
        return len(reached) <= 1


class Worth:
    """Tries what losses are worth, on the stage that has them.

    Args:
        root: The LightningModule.
        patches: The patched units.
        outputs: What units return for arguments, on a way through the model.
        apart: Inside, runs of a step leave nothing behind.
        quiet: Inside, they log nothing, and keep random states; told whether metrics answer by copies.
    """

    def __init__(
        self, root: nn.Module, patches: UnitPatches,
        outputs: Callable[[Route, Microbatch, Callable[[], MicrobatchSeeds]], Outputs],
        apart: Callable[[str], AbstractContextManager[None]],
        quiet: Callable[[bool], AbstractContextManager[None]],
    ) -> None:  # fmt: skip
        self._root, self._patches, self._outputs = root, patches, outputs
        self._apart, self._quiet = apart, quiet

    def of(
        self, step: Step, whole: Microbatch, sizes: Sequence[float], by_metrics: bool = False
    ) -> list[float] | None:
        """What each micro-batch's loss is multiplied with in the batch's; None where it is no sum of them.

        Args:
            step: The batch.
            whole: Its arguments as one.
            sizes: Samples of each micro-batch, or what share of the batch's they are.
            by_metrics: Whether metrics make the loss.
        """
        try:
            with self._apart(step.name), self._quiet(by_metrics):
                return self._found(step, whole, sizes)
        except Exception as error:  # the user's code, on made-up values
            _log.debug("what losses of %s are worth cannot be tried: %s", step.name, error)
            return None

    def _found(self, step: Step, whole: Microbatch, sizes: Sequence[float]) -> list[float]:
        route = step.routes[0]
        if any(other is not route for other in step.routes):
            raise _NotASumError("micro-batches go different ways")
        batches = [*step.microbatches, whole]
        seeds = partial(step.seeds.microbatch, 0)
        outputs = [self._outputs(route, batch, seeds) for batch in batches]
        if bytes_of(outputs[-1]) > LARGEST:
            raise _NotASumError("the batch's values are too large")
        tries = list[_Try]()
        for seed, scale in enumerate(_SCALES):
            values, dimensions = _values(outputs, sizes, seed, scale)
            floats = [t for tensors, _ in values[-1].values() for t in tensors if t.is_floating_point()]
            pairs = zip(floats, dimensions, strict=True)
            rows = [(one, dim) for one, dim in pairs if dim is not None]
            run = partial(self._run, step, route.trace, whole, rows)
            found = [run(batch, given) for batch, given in zip(batches, values, strict=True)]
            if bool(found[-1].loss.isfinite()):
                tries.append(_Try(found[:-1], found[-1], dimensions, sizes))
        if len(tries) < _FEWEST:
            raise _NotASumError("the loss is inf or nan")
        columns = zip(*(one.ratios() for one in tries), strict=True)
        ratios = [_of_all(column, _tolerance(found[-1].loss)) for column in columns]
        worth = _with_constants(ratios, found[:-1], sizes)
        if not any(worth):
            raise _NotASumError("nothing counts, which values may have decided")
        for one in tries:
            one.check(worth)
        return worth

    def _run(
        self, step: Step, trace: Trace, whole: Microbatch, rows: Sequence[tuple[Tensor, int]],
        batch: Microbatch, values: Mapping[Any, Any],
    ) -> _Found:  # fmt: skip
        made = MadeUp(values, trace, frozenset(), self._patches.originals)
        args, kwargs = map_tensors(lambda t: t.detach().clone().requires_grad_(t.requires_grad), batch)
        seed_torch(0)
        made_up_ones = [tensor for tensors, _ in values.values() for tensor in tensors]
        sees = _Bends(made_up_ones, rows) if batch is whole else nullcontext()
        with self._patches.run_by(made), step.context(), torch.enable_grad(), sees:
            result = step.function(*args, **kwargs)
        loss = result["loss"] if isinstance(result, dict) else result
        given = [t for tensors, _ in values.values() for t in tensors if t.is_floating_point()]
        if isinstance(loss, int | float) and batch is not whole:  # where no sample of it counts
            loss = given[0].new_tensor(float(loss))
        if not isinstance(loss, Tensor) or is_placeholder(loss) or loss.numel() != 1:
            raise _NotASumError("there is no loss")
        own = [p for p in parameters_of(self._root) if p.requires_grad and not is_placeholder(p)]
        return _Found(loss.detach().reshape(()), *_gradients(loss, given, own))


def _gradients(loss: Tensor, given: list[Tensor], own: list[Any]) -> tuple[list[Tensor], list[Tensor | None]]:
    asked = [tensor for tensor in (*given, *own) if tensor.requires_grad]
    found: Sequence[Tensor | None] = (
        torch.autograd.grad(loss.sum(), asked, allow_unused=True)
        if loss.requires_grad
        else [None] * len(asked)
    )
    by_id = {id(tensor): gradient for tensor, gradient in zip(asked, found, strict=True)}
    of_values = [by_id.get(id(tensor)) for tensor in given]
    full = [torch.zeros_like(t) if g is None else g for t, g in zip(given, of_values, strict=True)]
    return full, [by_id.get(id(parameter)) for parameter in own]


def _values(
    outputs: Sequence[Outputs], sizes: Sequence[float], seed: int, scale: tuple[float, float]
) -> tuple[list[dict[Any, Any]], list[int | None]]:
    """What units return for each micro-batch and, last, for the batch; where the floating ones are joined."""
    generator = torch.Generator().manual_seed(seed)
    found: list[dict[Any, Any]] = [{} for _ in outputs]
    dimensions = []
    for call in outputs[-1]:
        structures, specs = zip(*(one[call] for one in outputs), strict=True)
        columns = []
        for *parts, whole in zip(*specs, strict=True):
            tensors = [_scaled(made_up(spec, generator), generator, *scale) for spec in parts]
            joined = joined_values(tensors, whole, sizes)
            columns.append([t.requires_grad_(whole.requires_grad) for t in (*tensors, joined)])
            if joined.is_floating_point():
                dimensions.append(dimension_of(tensors, whole))
        for number, (table, structure) in enumerate(zip(found, structures, strict=True)):
            table[call] = ([column[number] for column in columns], structure)
    return found, dimensions


def _scaled(values: Tensor, generator: torch.Generator, middle: float, apart: float) -> Tensor:
    """Each row times a power of ten of its own."""
    if not values.is_floating_point() or (middle, apart) == (0.0, 0.0):
        return values
    rows = values.shape[:1] + (1,) * (values.dim() - 1)
    powers = middle + apart * (torch.rand(rows, generator=generator, dtype=torch.float64) - 0.5)
    return values * (10**powers).to(values)


@dataclass(frozen=True)
class _Try:
    """The runs on one choice of made-up values.

    Attributes:
        parts: For each micro-batch.
        whole: For the batch.
        dimensions: That hold the samples of values.
        sizes: Samples of each micro-batch.
    """

    parts: Sequence[_Found]
    whole: _Found
    dimensions: Sequence[int | None]
    sizes: Sequence[float]

    def ratios(self) -> list[float | None]:
        """What the parts' gradients are multiplied with; None where no gradient says it."""
        found, starts = [], [0] * len(self.dimensions)
        for part, size in zip(self.parts, self.sizes, strict=True):
            theirs = []
            for place, (own, dimension) in enumerate(zip(part.values, self.dimensions, strict=True)):
                of_whole = self.whole.values[place]
                if dimension is None:
                    theirs.append((of_whole * (size / sum(self.sizes))).flatten())
                else:
                    length = own.shape[dimension]
                    theirs.append(of_whole.narrow(dimension, starts[place], length).flatten())
                    starts[place] += length
            rows = [own.flatten(1) if own.dim() > 1 else own.reshape(-1, 1) for own in part.values]
            pairs = [t.reshape(o.shape) for t, o in zip(theirs, rows, strict=True)]
            found.append(_ratio(rows, pairs, _tolerance(self.whole.loss)))
        return found

    def check(self, worth: Sequence[float]) -> None:
        """Refuse what does not add up to the loss of the batch, and its gradients."""
        precise = _tolerance(self.whole.loss)
        kept = [(weight, part) for weight, part in zip(worth, self.parts, strict=True) if weight]
        total = sum((part.loss * weight for weight, part in kept), torch.zeros_like(self.whole.loss))
        _check_alike(total.reshape(1, 1), self.whole.loss.reshape(1, 1), precise)
        for place, of_batch in enumerate(self.whole.weights):
            each = [(weight, part.weights[place]) for weight, part in kept]
            some = [gradient * weight for weight, gradient in each if gradient is not None]
            if of_batch is not None or some:
                like = some[0] if of_batch is None else of_batch
                added = sum(some, torch.zeros_like(like))
                wanted = torch.zeros_like(like) if of_batch is None else of_batch
                _check_alike(added.reshape(1, -1), wanted.reshape(1, -1), precise)


def _of_all(ratios: Sequence[float | None], precise: float) -> float | None:
    """What all tries say that say anything; None where a micro-batch never has a gradient."""
    known = [one for one in ratios if one is not None]
    if any(not math.isclose(one, known[0], rel_tol=precise, abs_tol=precise) for one in known):
        raise _NotASumError("what they are worth depends on what units return")
    return known[0] if known else None


def _with_constants(
    ratios: Sequence[float | None], parts: Sequence[_Found], sizes: Sequence[float]
) -> list[float]:
    """Losses that no value of units changes count by samples, if the others do; what is 0/0 for nothing."""
    by_sample = {one / size for one, size in zip(ratios, sizes, strict=True) if one is not None}
    usual = (
        max(by_sample) if by_sample and math.isclose(max(by_sample), min(by_sample), rel_tol=1e-9) else 0.0
    )
    count = [bool(part.loss) and bool(part.loss.isfinite()) for part in parts]
    constants = [usual * size if counts else 0.0 for counts, size in zip(count, sizes, strict=True)]
    return [constant if one is None else one for one, constant in zip(ratios, constants, strict=True)]


def _ratio(own: Sequence[Tensor], of_whole: Sequence[Tensor], precise: float) -> float | None:
    """The number that makes gradients of a micro-batch's loss those of the batch's; None where both are 0."""
    if not any(bool(one.any()) for one in (*own, *of_whole)):
        return None
    if not any(bool(one.any()) for one in of_whole):
        return 0.0
    largest = max(own, key=lambda one: float(one.abs().max()) if one.numel() else 0.0)
    place = int(largest.abs().argmax())
    number = next(n for n, one in enumerate(own) if one is largest)
    ratio = of_whole[number].flatten()[place].double() / largest.flatten()[place].double()
    for one, other in zip(own, of_whole, strict=True):
        _check_alike(one * ratio.to(one.dtype), other, precise)
    return float(ratio)


def _check_alike(one: Tensor, other: Tensor, precise: float) -> None:
    """Each number, up to what rounding leaves of the largest in its row."""
    scale = other.detach().abs().amax(1, keepdim=True) if other.numel() else other
    if not bool(((one - other).abs() <= precise * (other.abs() + 1e-2 * scale)).all()):
        raise _NotASumError("the whole is no sum of the parts")


def _tolerance(loss: Tensor) -> float:
    if loss.dtype not in _PRECISE:
        raise _NotASumError(f"{loss.dtype} is not precise enough to tell")
    return _PRECISE[loss.dtype]
