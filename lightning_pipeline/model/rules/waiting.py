"""What no rule puts together: code between units runs once more when a batch ends, on what units gave.

Every micro-batch reads what the batch found, as one device does that reads a queue and then writes its
samples to it. What stands there afterwards is worked out by one run of the step for the whole batch, in which
each unit answers with the rows that it gave the micro-batches.
"""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_pipeline.model.places import Replayed
from lightning_pipeline.model.rules.made_up import Observed
from lightning_pipeline.model.rules.runs import Question, Runs, is_whole, values_for
from lightning_pipeline.model.rules.values import equal
from lightning_pipeline.model.tensors import ModuleState, is_placeholder
from lightning_pipeline.model.trace import Trace

_log = logging.getLogger(__name__)


class Wait(NamedTuple):
    """Whether what stands in some places may be worked out at the end of the batch.

    Attributes:
        can: It may.
        is_read: The step computes with what it has written there.
        is_told: It logs what it has written there, and the batch as one logs something else.
    """

    can: bool
    is_read: bool = False
    is_told: bool = False


def waiting(run: Runs, question: Question, labels: Collection[str], left: Mapping[str, Any]) -> Wait:
    """Find out whether what stands in some places may be worked out at the end of the batch.

    It may where micro-batches that all read what the batch found compute what the batch as one does: now,
    with what one batch leaves, and where numbers are at or before the length of a tensor, such as the place
    in a queue; and where nothing depends on outputs of units that the last stage does not have. What they
    log is the batch's where each batch is looked at as one; where none is, it has to be theirs, too.

    Args:
        run: Runs the step.
        question: What to run.
        labels: Of the places.
        left: What the batch as one leaves in them.
    """
    values = values_for(question, 3)
    parts = list(zip((question.one[0], question.other[0], question.whole[0]), values, strict=True))
    root = run.listens = question.whole[1].root
    is_told = False
    try:
        for number, carried in enumerate(_beginnings(run, labels, left)):
            seen, told = list[Observed](), list[Observed]()
            try:
                for part in parts:
                    stood = ModuleState(root)  # such as a flag that is set where a queue is full
                    try:
                        found = run([part], carried=carried)
                    finally:
                        stood.restore()
                    seen.append(run.observed)
                    told.append([(None, run.told)])
            except Exception as error:  # the user's code: a queue may not be written at its end
                _log.debug("the step does not begin with %s: %s", carried, error)
                if not number:
                    return Wait(False)
                continue
            if not _is_whole(seen, question):
                return Wait(False, is_read=True)
            is_told |= not _is_whole(told, question)
            if is_told and _is_never_looked_at(question.whole[1]):
                return Wait(False, is_read=True)
            if not number:
                again = run([(parts[2][0], values[2].but(question.given or ()))])
                if not all(equal(found[label], again[label]) for label in labels):
                    return Wait(False)
    finally:
        run.listens = None
    return Wait(True, is_told=is_told)


def _is_never_looked_at(trace: Trace) -> bool:
    """Whether no batch is looked at as one: the step takes from an iterator, or changes what units do."""
    return trace.is_shared or any(isinstance(effect.place.get(), Replayed) for effect in trace.effects)


def _is_whole(seen: Sequence[Observed], question: Question) -> bool:
    one, other, whole = seen
    return is_whole(one, other, whole, question.sizes)


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
