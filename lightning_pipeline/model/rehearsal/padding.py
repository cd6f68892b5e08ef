"""Padding of a batch that its micro-batches do not have: does what follows go by it?

A unit may give as many words as its longest sample has, such as an encoder that packs its input, so that a
batch has padding which a micro-batch has not. Whether that matters is tried once: a step runs for the batch
on made-up values, and for a micro-batch on its part of them. What later units are given has to be the same.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeline.model.cut import Microbatch, TracedOutputs
from lightning_pipeline.model.rehearsal.made_up_runs import AsOne, MadeUpRuns
from lightning_pipeline.model.replay import Step
from lightning_pipeline.model.rules import LARGEST, MadeUp, Observed, Outputs, bytes_of, made_up_values
from lightning_pipeline.model.trace import Trace

_log = logging.getLogger(__name__)


class Padding:
    """Tries whether padding has a part in what later units are given.

    Args:
        runs: Makes runs of a step.
        outputs: Gives what units return for a micro-batch, on a way and with its random numbers.

    Attributes:
        counted: By step, units whose padding has, by name.
    """

    def __init__(self, runs: MadeUpRuns, outputs: Callable[..., TracedOutputs]) -> None:
        self._runs, self._outputs = runs, outputs
        self._tried: set[tuple[str, tuple[int, ...]]] = set()
        self.counted: dict[str, list[str]] = {}

    def look(self, step: Step, whole: Microbatch, sizes: Sequence[int], as_one: AsOne) -> None:
        """A batch begins: try it, in the first one that has padding which a micro-batch has not.

        Args:
            step: The batch.
            whole: Its arguments as one.
            sizes: Samples of each micro-batch.
            as_one: Gives its trace as one, and what units return for it.
        """
        route = step.routes[0]
        key = step.name, route.trace.path
        goes_one_way = all(one is route for one in step.routes)
        if key in self._tried or not (route.trace.follows_values and goes_one_way):
            return
        try:
            trace, outputs = as_one(whole)
            for number, padded in self._narrower(step, sizes, outputs):
                self._tried.add(key)
                if bytes_of(outputs) <= LARGEST and self._counts(step, whole, trace, outputs, number, padded):
                    self.counted[step.name] = [trace.units[unit].name for unit in padded.units]
                    return
        except Exception as error:  # the user's code, on made-up values
            self._tried.add(key)
            _log.debug("whether padding has a part in %s cannot be tried: %s", step.name, error)

    def _narrower(
        self, step: Step, sizes: Sequence[int], outputs: Outputs
    ) -> Iterator[tuple[int, "_Padded"]]:  # fmt: skip
        """Micro-batches for which units give less for each sample than for the batch, by number."""
        route = step.routes[0]
        by_values = {(call.unit, call.nth) for call in route.trace.calls if call.by_values}
        decided = {call: one for call, one in outputs.items() if call in by_values}
        for number, batch in enumerate(step.microbatches):
            own = self._outputs(route, batch, partial(step.seeds.microbatch, number))
            padded = _Padded(sum(sizes[:number]), sizes[number], sum(sizes), decided, own)
            if padded.units:
                yield number, padded

    def _counts(
        self, step: Step, whole: Microbatch, trace: Trace, outputs: Outputs, number: int, padded: "_Padded"
    ) -> bool:  # fmt: skip
        """Whether a micro-batch comes to something else without the padding than with it."""
        values = made_up_values(outputs)

        def run(batch: Microbatch, given: Mapping[Any, Any], like: Trace, seed: int = 0) -> Observed:
            runner = MadeUp(given, like, frozenset())
            with self._runs.apart(step), _in_evaluation(self._runs.root):  # a dropout draws for other sizes
                self._runs.run(step, batch, runner, torch.no_grad(), seed=seed)
            return runner.seen

        theirs, drawn = run(whole, values, trace), run(whole, values, trace, seed=1)
        mine = run(step.microbatches[number], padded.cut(values), step.routes[0].trace)
        return not padded.are_alike(theirs, mine, drawn)


@contextmanager
def _in_evaluation(root: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in root.modules()]
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, training in modes:
            module.training = training


class _Padded:
    """What units give for the batch, beside a micro-batch which may have less padding.

    Args:
        start: Its first sample in the batch.
        size: Its samples.
        total: Those of the batch.
        outputs: What units return for the batch, of which values decide how much that is.
        own: What all of them return for the micro-batch.

    Attributes:
        units: Those that give fewer of something, by number.
    """

    def __init__(self, start: int, size: int, total: int, outputs: Outputs, own: Outputs) -> None:
        self._start, self._size, self._total, self._own = start, size, total, own
        self._lengths: set[tuple[int, int]] = set()
        self.units: list[int] = []
        for call, (_, specs) in outputs.items():
            pairs = zip(specs, own[call][1] if call in own else (), strict=False)
            found = {one for theirs, mine in pairs for one in self._shorter(theirs.shape, mine.shape)}
            if found and call[0] not in self.units:
                self.units.append(call[0])
            self._lengths |= found

    def _shorter(self, theirs: Sequence[int], mine: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Sizes for the batch and for the micro-batch, of dimensions that are no samples'."""
        if len(theirs) == len(mine):
            pairs = zip(theirs, mine, strict=True)
            yield from (one for one in pairs if one[0] > one[1] and one != (self._total, self._size))

    def _rows(self, tensor: Tensor, shape: Sequence[int]) -> Tensor | None:
        """What the micro-batch has of a tensor of the batch, by its shape; None where that is not clear."""
        if tensor.dim() != len(shape):
            return None
        has_samples = False
        for dim, (there, here) in enumerate(zip(tensor.shape, shape, strict=True)):
            if not has_samples and (there, here) == (self._total, self._size):
                tensor, has_samples = tensor.narrow(dim, self._start, here), True
            elif (there, here) in self._lengths:
                tensor = tensor.narrow(dim, 0, here)
            elif there != here:
                return None
        return tensor

    def cut(self, values: Mapping[Any, Any]) -> dict[Any, Any]:
        """Those of the micro-batch."""
        found = {}
        for call, (tensors, structure) in values.items():
            pairs = zip(tensors, self._own[call][1], strict=True)
            parts = [self._rows(tensor, spec.shape) for tensor, spec in pairs]
            found[call] = ([one for one in parts if one is not None], structure)
        return found

    def are_alike(self, theirs: Observed, mine: Observed, drawn: Observed) -> bool:
        """Whether units are given the same samples by a run for the batch and one for the micro-batch.

        Args:
            theirs: What the first has seen.
            mine: What the second has.
            drawn: What the first would have with other random numbers; what differs there says nothing.
        """
        for (unit, whole), (same, part), (_, others) in zip(theirs, mine, drawn, strict=False):
            for one, other, again in zip(whole, part, others, strict=False):
                known = unit == same and one.dtype == other.dtype and torch.equal(one, again)
                rows = self._rows(one, other.shape) if known else None
                if rows is not None and not torch.allclose(rows, other, rtol=1e-5, atol=1e-9, equal_nan=True):
                    return False
        return True
