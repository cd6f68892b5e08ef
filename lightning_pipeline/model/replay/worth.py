"""What the loss of each micro-batch is worth in the batch, tried where it cannot be read from the code.

The units answer with made-up values: for the batch as a whole those of all micro-batches, joined. Where the
whole's loss is a sum of the micro-batches' losses, each times a number, its gradients with respect to the
values of one micro-batch are that number times the gradients of this micro-batch's own loss.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeline.model.cut import Microbatch, Route, TracedOutput
from lightning_pipeline.model.random import MicrobatchSeeds
from lightning_pipeline.model.replay.view import Step
from lightning_pipeline.model.state import MadeUp, dimension_of, joined_values, made_up
from lightning_pipeline.model.tensors import is_placeholder, map_tensors
from lightning_pipeline.model.trace import Trace, UnitPatches

_log = logging.getLogger(__name__)
Outputs = Mapping[tuple[int, int], TracedOutput]
"""By unit and number of the call."""
_LARGEST = 1 << 28  # bytes of made-up values for a batch
_PRECISE = {torch.float64: 1e-8, torch.float32: 1e-3}  # how far apart two results that are alike may be


class _NotASumError(Exception):
    """The loss of the batch is no sum of the micro-batches' losses, each times a number."""


@dataclass(frozen=True)
class _Found:
    """One run of the step.

    Attributes:
        loss: That it returned.
        values: Its gradients with respect to each made-up value.
        weights: Its gradients with respect to parameters that code between the units uses.
    """

    loss: Tensor
    values: list[Tensor]
    weights: list[Tensor]


class Worth:
    """Tries what losses are worth, on the stage that has them.

    Args:
        root: The LightningModule.
        patches: The patched units.
        outputs: What units return for arguments, on a way through the model.
        apart: Inside, runs of a step leave nothing behind.
        quiet: Inside, they log nothing, and keep random states.
    """

    def __init__(
        self, root: nn.Module, patches: UnitPatches,
        outputs: Callable[[Route, Microbatch, Callable[[], MicrobatchSeeds]], Outputs],
        apart: Callable[[str], AbstractContextManager[None]],
        quiet: Callable[[], AbstractContextManager[None]],
    ) -> None:  # fmt: skip
        self._root, self._patches, self._outputs = root, patches, outputs
        self._apart, self._quiet = apart, quiet

    def of(self, step: Step, whole: Microbatch, sizes: Sequence[float]) -> list[float] | None:
        """What each micro-batch's loss is multiplied with in the batch's; None where it is no sum of them.

        Args:
            step: The batch.
            whole: Its arguments as one.
            sizes: Samples of each micro-batch, or what share of the batch's they are.
        """
        try:
            with self._apart(step.name), self._quiet():
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
        if _bytes_of(outputs[-1]) > _LARGEST:
            raise _NotASumError("the batch's values are too large")
        tried = []
        for seed in (0, 1):
            values, dimensions = _values(outputs, sizes, seed)
            run = partial(self._run, step, route.trace, whole)
            found = [run(batch, given) for batch, given in zip(batches, values, strict=True)]
            tried.append(_weights(found[:-1], found[-1], dimensions, sizes))
        precise = max(_tolerance(found.loss) for found in found)
        first, second = (torch.tensor(one, dtype=torch.float64) for one in tried)
        if not torch.allclose(first, second, rtol=precise, atol=precise):
            raise _NotASumError("what they are worth depends on what units return")
        return tried[0]

    def _run(
        self, step: Step, trace: Trace, whole: Microbatch, batch: Microbatch, values: Mapping[Any, Any]
    ) -> _Found:  # fmt: skip
        made = MadeUp(values, trace, frozenset(), self._patches.originals)
        args, kwargs = map_tensors(lambda t: t.detach().clone().requires_grad_(t.requires_grad), batch)
        before, self._patches.runner = self._patches.runner, made
        try:
            torch.manual_seed(0)
            with step.context(), torch.enable_grad():
                result = step.function(*args, **kwargs)
        finally:
            self._patches.runner = before
        loss = result["loss"] if isinstance(result, dict) else result
        if isinstance(loss, int | float) and batch is not whole:  # where no sample of it counts
            loss = torch.tensor(float(loss))
        if not isinstance(loss, Tensor) or is_placeholder(loss) or loss.numel() != 1:
            raise _NotASumError("there is no loss")
        given = [t for tensors, _ in values.values() for t in tensors if t.is_floating_point()]
        own = [p for p in self._root.parameters() if p.requires_grad and not is_placeholder(p)]
        return _Found(loss.detach().reshape(()), *_gradients(loss, given, own))


def _gradients(loss: Tensor, given: list[Tensor], own: list[Any]) -> tuple[list[Tensor], list[Tensor]]:
    asked = [tensor for tensor in (*given, *own) if tensor.requires_grad]
    found: Sequence[Tensor | None] = (
        torch.autograd.grad(loss.sum(), asked, allow_unused=True)
        if loss.requires_grad
        else [None] * len(asked)
    )
    by_id = {id(tensor): gradient for tensor, gradient in zip(asked, found, strict=True)}
    each = [by_id.get(id(t)) for t in (*given, *own)]
    full = [torch.zeros_like(t) if g is None else g for t, g in zip((*given, *own), each, strict=True)]
    return full[: len(given)], full[len(given) :]


def _values(
    outputs: Sequence[Outputs], sizes: Sequence[float], seed: int
) -> tuple[list[dict[Any, Any]], list[int | None]]:
    """What units return for each micro-batch and, last, for the batch; where the floating ones are joined."""
    generator = torch.Generator().manual_seed(seed)
    found: list[dict[Any, Any]] = [{} for _ in outputs]
    dimensions = []
    for call in outputs[-1]:
        structures, specs = zip(*(one[call] for one in outputs), strict=True)
        columns = []
        for *parts, whole in zip(*specs, strict=True):
            tensors = [made_up(spec, generator) for spec in parts]
            joined = joined_values(tensors, whole, sizes)
            columns.append([t.requires_grad_(whole.requires_grad) for t in (*tensors, joined)])
            if joined.is_floating_point():
                dimensions.append(dimension_of(tensors, whole))
        for number, (table, structure) in enumerate(zip(found, structures, strict=True)):
            table[call] = ([column[number] for column in columns], structure)
    return found, dimensions


def _weights(
    parts: Sequence[_Found], whole: _Found, dimensions: Sequence[int | None], sizes: Sequence[float]
) -> list[float]:
    """What the parts' losses are multiplied with to add up to that of the batch."""
    precise = _tolerance(whole.loss)
    found, starts = [], [0] * len(dimensions)
    for part, size in zip(parts, sizes, strict=True):
        theirs = []
        for place, (own, dimension) in enumerate(zip(part.values, dimensions, strict=True)):
            of_whole = whole.values[place]
            if dimension is None:
                theirs.append((of_whole * (size / sum(sizes))).flatten())
            else:
                length = own.shape[dimension]
                theirs.append(of_whole.narrow(dimension, starts[place], length).flatten())
                starts[place] += length
        found.append(_ratio(torch.cat([own.flatten() for own in part.values]), torch.cat(theirs), precise))
    kept = [(weight, part) for weight, part in zip(found, parts, strict=True) if weight]
    total = sum((part.loss * weight for weight, part in kept), torch.zeros_like(whole.loss))
    _check_alike(total, whole.loss, precise)
    for place, of_batch in enumerate(whole.weights):
        added = sum((part.weights[place] * weight for weight, part in kept), torch.zeros_like(of_batch))
        _check_alike(added, of_batch, precise)
    return found


def _ratio(own: Tensor, of_whole: Tensor, precise: float) -> float:
    """The number that makes gradients of a micro-batch's loss those of the batch's; 0 where it has none."""
    if not bool(of_whole.any()):
        return 0.0
    length = own.double().square().sum()
    ratio = (own.double() * of_whole.double()).sum() / length
    _check_alike(own * ratio.to(own.dtype), of_whole, precise)
    return float(ratio)


def _check_alike(one: Tensor, other: Tensor, precise: float) -> None:
    scale = float(other.detach().abs().max()) if other.numel() else 0.0
    if not torch.allclose(one, other, rtol=precise, atol=precise * scale):
        raise _NotASumError("the whole is no sum of the parts")


def _tolerance(loss: Tensor) -> float:
    if loss.dtype not in _PRECISE:
        raise _NotASumError(f"{loss.dtype} is not precise enough to tell")
    return _PRECISE[loss.dtype]


def _bytes_of(outputs: Outputs) -> int:
    specs = [spec for _, each in outputs.values() for spec in each]
    return sum(torch.Size(spec.shape).numel() * spec.dtype.itemsize for spec in specs)
