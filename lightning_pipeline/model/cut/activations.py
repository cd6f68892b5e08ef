"""What each stage will hold for one micro-batch between its forward and its backward, from the trace."""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_pipeline.model.cut.partitioning import Partition
from lightning_pipeline.model.cut.ways import ValueKey
from lightning_pipeline.model.tensors import Held
from lightning_pipeline.model.trace import Trace
from lightning_pipeline.schedules import Plan


@dataclass(frozen=True, slots=True)
class StageActivations:
    """What one stage holds for one micro-batch like the traced one.

    Attributes:
        until_backward: Bytes from the forward to the backward, or to its input half.
        until_weight: Bytes from the input half of a split backward to the weight half.
    """

    until_backward: int
    until_weight: int


def stage_activations(cut: Partition, rank_of: Sequence[int] | None = None) -> list[StageActivations]:
    """What every stage holds: what autograd saves there, each piece of memory once, and what it was sent.

    Code between units counts on every stage that uses its result; so does the loss, on the last one.
    Parameters, buffers and the batch do not count.

    Args:
        cut: The partition, with its trace.
        rank_of: The rank of each stage. What is handed over within a rank is held once, by the earlier
            stage. Default: a rank for each stage.
    """
    ranks = list(rank_of if rank_of is not None else range(cut.num_stages))
    messages = cut.liveness().messages
    found: list[StageActivations] = []
    before: set[int] = set()
    for stage in range(cut.num_stages):
        saved, waiting, gradients = _kept(cut, stage)
        received = _received(cut.trace, messages[stage])
        if stage and ranks[stage] == ranks[stage - 1]:
            received = {number: size for number, size in received.items() if number not in before}
            saved, waiting = saved - before, waiting - before
        sizes = {**cut.trace.sizes, **received}
        found.append(
            StageActivations(
                sum(sizes[number] for number in saved | set(received)),
                sum(sizes[number] for number in waiting) + gradients,
            )
        )
        before = saved | set(received)
    return found


def peak_activations(
    plan: Plan, activations: Sequence[StageActivations]
) -> tuple[dict[int, Held], list[Held]]:
    """The most that a plan lets stages and ranks hold.

    Args:
        plan: Of a training step.
        activations: Of each stage.

    Returns:
        The worst moment by stage, and that of all its stages together by rank.
    """
    stages: dict[int, Held] = {stage: Held() for stage in range(plan.num_stages)}
    ranks = [Held() for _ in range(plan.num_ranks)]
    for rank, actions in enumerate(plan):
        now = {stage: Held() for stage in plan.stages_of(rank)}
        for stage, kind, _ in actions:
            num_bytes, microbatches = _growth(kind, activations[stage])
            now[stage].num_bytes += num_bytes
            now[stage].microbatches += microbatches
            stages[stage].rise_to(now[stage])
            ranks[rank].rise_to(Held.together(now.values()))
    return stages, ranks


def _growth(kind: str, held: StageActivations) -> tuple[int, int]:
    return {
        "F": (held.until_backward, 1),
        "B": (-held.until_backward, -1),
        "I": (held.until_weight - held.until_backward, 0),
        "W": (-held.until_weight, -1),
    }[kind]


def _kept(cut: Partition, stage: int) -> tuple[set[int], set[int], int]:
    """Numbers of what a stage saves, of the part that waits for W, and bytes of gradients that do."""
    units = set(cut.units_of(stage))
    calls = [call for call in cut.trace.calls if call.unit in units]
    tags = set().union(*(call.reads for call in calls))
    if stage == cut.num_stages - 1:
        tags |= cut.trace.result
    saved = {tag.call for tag in tags if tag.kind == "saved"}.union(*(call.saved for call in calls))
    waiting = set().union(*(call.deferred for call in calls))
    return saved, waiting, sum(call.deferred_gradients for call in calls)


def _received(trace: Trace, message: Sequence[ValueKey]) -> dict[int, int]:
    """Bytes of the message by the memory that it stands for; none where no gradient goes back."""
    calls = {(call.unit, call.nth): call for call in trace.calls}
    found: dict[int, int] = {}
    specs = [(calls[unit, nth], leaf) for unit, nth, leaf in message]
    if any(call.specs[leaf].requires_grad for call, leaf in specs):
        for call, leaf in specs:
            number = trace.handed[call.index, leaf]
            found[number] = found.get(number, 0) + call.specs[leaf].num_bytes
    return found
