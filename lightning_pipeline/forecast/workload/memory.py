"""What each rank of a plan would hold."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from lightning_pipeline.forecast.machine import DEFAULT_COPIES, Assumptions
from lightning_pipeline.forecast.workload.profile import StageProfile, State
from lightning_pipeline.model.cut import StageActivations, peak_activations
from lightning_pipeline.schedules import Plan


@dataclass(frozen=True)
class PredictedMemory:
    """Bytes of one rank.

    Attributes:
        parameters: Of its stages; what several of them share counts once.
        gradients: As large as the trained parameters.
        optimizer: What the optimizer keeps.
        buffers: Of the module.
        activations: The most that is held for backwards.
        recomputed: The largest checkpointed region while it is computed again.
        messages: One value and one gradient, in and out.
    """

    parameters: float
    gradients: float
    optimizer: float
    buffers: float
    activations: float
    recomputed: float
    messages: float

    @property
    def total(self) -> float:
        """All of it."""
        return float(sum(getattr(self, field.name) for field in fields(self)))


def memory_of(
    plan: Plan,
    held: Sequence[StageActivations],
    stages: Sequence[StageProfile],
    assumptions: Assumptions,
    optimizer_states: Mapping[str, float] | None = None,
) -> tuple[PredictedMemory, ...]:
    """By rank, with activations at their peak.

    Args:
        plan: Whose order decides on the peak.
        held: Activations of each stage, for these ranks.
        stages: The same, looked at.
        assumptions: For the optimizer.
        optimizer_states: Bytes that it keeps, by parameter; where `assumptions` do not say it.
    """
    _, peaks = peak_activations(plan, held)
    ends = [*(stage.message_bytes for stage in stages), 0]  # the last stage sends nothing
    return tuple(
        _rank(
            [stages[stage] for stage in plan.stages_of(rank)],
            peak.num_bytes,
            2.0 * max((ends[stage] + ends[stage + 1] for stage in plan.stages_of(rank)), default=0.0),
            assumptions,
            optimizer_states,
        )
        for rank, peak in enumerate(peaks)
    )


def alone(
    whole: StageProfile, assumptions: Assumptions, optimizer_states: Mapping[str, float] | None = None
) -> PredictedMemory:
    """On one device that runs the micro-batches one after another.

    Args:
        whole: The only stage.
        assumptions: For the optimizer.
        optimizer_states: Bytes that it keeps, by parameter.
    """
    return _rank([whole], whole.activation_bytes, 0.0, assumptions, optimizer_states)


def _rank(
    stages: Sequence[StageProfile],
    activations: float,
    messages: float,
    assumptions: Assumptions,
    optimizer_states: Mapping[str, float] | None,
) -> PredictedMemory:
    states: dict[str, State] = {state.name: state for stage in stages for state in stage.states}
    trained = {
        name: state.num_bytes for name, state in states.items() if state.is_parameter and state.trained
    }
    copies = assumptions.optimizer_copies
    if copies is None and optimizer_states is not None:
        kept = sum(optimizer_states.get(name, 0.0) for name in trained)
    else:
        kept = (DEFAULT_COPIES if copies is None else copies) * sum(trained.values())
    return PredictedMemory(
        parameters=sum(state.num_bytes for state in states.values() if state.is_parameter),
        gradients=sum(trained.values()),
        optimizer=kept,
        buffers=sum(state.num_bytes for state in states.values() if not state.is_parameter),
        activations=activations,
        recomputed=max((stage.recomputed_bytes for stage in stages), default=0),
        messages=messages,
    )
