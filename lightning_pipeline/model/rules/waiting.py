"""What no rule puts together: code between units runs once more when a batch ends, on what units gave.

Every micro-batch reads what the batch found, as one device does that reads a queue and then writes its
samples to it. What stands there afterwards is worked out by one run of the step for the whole batch, in which
each unit answers with the rows that it gave the micro-batches.
"""

import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_pipeline.model.rules.made_up import MadeUp, Observed, joined_values, made_up
from lightning_pipeline.model.rules.runs import Arguments, Question, Runs, is_whole, values_for
from lightning_pipeline.model.rules.trial import Merge, NoFit
from lightning_pipeline.model.rules.values import equal
from lightning_pipeline.model.tensors import ModuleState, Structure, TensorSpec, is_placeholder
from lightning_pipeline.model.trace import Trace

_log = logging.getLogger(__name__)
ValueKey = tuple[int, int, int]
"""Unit, which call of it, which output tensor."""
Outputs = Mapping[tuple[int, int], tuple[Structure, Sequence[TensorSpec]]]
"""What each call of a unit returns, by unit and number of the call."""


def at_end(start: Any, results: list[Any], sizes: list[int], merge: Merge) -> Any:
    """Instead of a rule: it is worked out at the end of the batch."""
    raise NoFit


def values_at_end(trace: Trace) -> frozenset[ValueKey]:
    """Outputs of units that the last stage has when a step ends: it, or what it leaves, depends on them."""
    found = ((trace.calls[tag.call], tag.leaf) for tag in trace.tail if tag.kind == "value")
    return frozenset((call.unit, call.nth, leaf) for call, leaf in found)


class Wait(NamedTuple):
    """Whether what stands in some places may be worked out at the end of the batch.

    Attributes:
        can: It may.
        is_read: The step reads, or logs, what it has written there.
    """

    can: bool
    is_read: bool = False


def waiting(run: Runs, question: Question, labels: Collection[str], left: Mapping[str, Any]) -> Wait:
    """Find out whether what stands in some places may be worked out at the end of the batch.

    It may where micro-batches that all read what the batch found compute and log what the batch as one does:
    now, with what one batch leaves, and where numbers are at or before the length of a tensor, such as the
    place in a queue; and where nothing depends on outputs of units that the last stage does not have.

    Args:
        run: Runs the step.
        question: What to run.
        labels: Of the places.
        left: What the batch as one leaves in them.
    """
    values = values_for(question, 3)
    parts = list(zip((question.one[0], question.other[0], question.whole[0]), values, strict=True))
    root = run.listens = question.whole[1].root
    try:
        for number, carried in enumerate(_beginnings(run, labels, left)):
            seen: list[Observed] = []
            try:
                for part in parts:
                    stood = ModuleState(root)  # such as a flag that is set where a queue is full
                    try:
                        found = run([part], carried=carried)
                    finally:
                        stood.restore()
                    seen.append([*run.observed, (None, run.told)])
            except Exception as error:  # the user's code: a queue may not be written at its end
                _log.debug("the step does not begin with %s: %s", carried, error)
                if not number:
                    return Wait(False)
                continue
            one, other, whole = seen
            if not is_whole(one, other, whole, question.sizes):
                return Wait(False, is_read=True)
            if not number:
                again = run([(parts[2][0], values[2].but(question.given or ()))])
                if not all(equal(found[label], again[label]) for label in labels):
                    return Wait(False)
    finally:
        run.listens = None
    return Wait(True)


def _beginnings(run: Runs, labels: Collection[str], left: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    yield {}
    yield {label: left[label] for label in labels}
    starts = {label: run.start_of(label) for label in labels}
    sizes = {size for one in starts.values() if isinstance(one, Tensor) for size in one.shape}
    numbers = [label for label, start in starts.items() if _is_whole_number(start)]
    for size in sorted(sizes):
        for number in (size - 1, size) if size > 1 else ():
            yield from ({label: _like(starts[label], number)} for label in numbers)


def _is_whole_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        whole = value.numel() == 1 and not (value.is_floating_point() or value.is_complex())
        return whole and value.dtype is not torch.bool and not is_placeholder(value)
    return type(value) is int


def _like(start: Any, number: int) -> Any:
    return torch.full_like(start, number) if isinstance(start, Tensor) else number


class Gathered:
    """What units gave the micro-batches of one batch.

    Args:
        whole: Arguments of the batch as one.
        trace: Of the step on its way.
        outputs: What units return for the whole batch.
        sizes: Samples of each micro-batch.
        copied: Whether copies are kept, so that activations go with their backward, and count as in others.

    Attributes:
        keys: Of what is gathered.
        whole: The arguments.
        takes_means: After `values`, whether it took numbers that units gave micro-batches for their mean.
    """

    def __init__(
        self, whole: Arguments, trace: Trace, outputs: Outputs, sizes: Sequence[int], *, copied: bool = False
    ) -> None:
        self._copied = copied
        self.keys: Collection[ValueKey] = values_at_end(trace)
        self.whole, self._trace, self._outputs, self._sizes = whole, trace, outputs, sizes
        self._given: dict[int, Mapping[ValueKey, Tensor]] = {}
        self.takes_means = False

    def take(self, microbatch: int, given: Mapping[ValueKey, Tensor]) -> None:
        """Keep what a micro-batch was given, in no graph."""
        self._given[microbatch] = {
            key: tensor.detach().clone() if self._copied else tensor.detach() for key, tensor in given.items()
        }

    def work_out(self, run: Runs) -> dict[str, Any]:
        """What the batch as one leaves, by label.

        Args:
            run: Runs the step, from what the batch found.

        Raises:
            NoFit: Units did not give each micro-batch the same kind of values.
        """
        return run([(self.whole, self.values())])

    def values(self) -> MadeUp:
        """What units give the batch as one; nothing of it is kept any longer.

        Raises:
            NoFit: Units did not give each micro-batch the same kind of values.
        """
        found = {call: (self._joined(call), structure) for call, (structure, _) in self._outputs.items()}
        self._given.clear()
        return MadeUp(found, self._trace, frozenset(), sees=False)

    @property
    def bytes(self) -> int:
        """Of all that is gathered."""
        specs = [self._outputs[unit, nth][1][leaf] for unit, nth, leaf in self.keys]
        return sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs)

    def _joined(self, call: tuple[int, int]) -> list[Tensor]:
        made, generator = [], torch.Generator().manual_seed(0)  # for what nothing depends on
        for leaf, spec in enumerate(self._outputs[call][1]):
            parts = [given.get((*call, leaf)) for _, given in sorted(self._given.items())]
            there = [part for part in parts if part is not None]
            if there and len(there) < len(self._sizes):
                raise NoFit("units have not run for all of its micro-batches")
            try:
                blocks = self._trace.blocks.get((*call, leaf), 1)
                joins = partial(joined_values, there, spec, self._sizes, blocks)
                tensor = joins() if there else made_up(spec, generator)
            except ValueError as error:
                raise NoFit(str(error)) from error
            self.takes_means |= _is_mean(tensor, there)
            made.append(tensor.requires_grad_(spec.requires_grad))
        return made


def _is_mean(joined: Tensor, parts: Sequence[Tensor]) -> bool:
    plain = joined.is_floating_point() and len(parts) > 1 and joined.shape == parts[0].shape
    return plain and not all(torch.equal(part, parts[0]) for part in parts)
