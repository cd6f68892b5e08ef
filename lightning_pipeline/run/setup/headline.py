"""What a run says about itself: once at its start, and at its end where a pipeline did not pay."""

from collections.abc import Iterable

from lightning_pipeline.recording import Event
from lightning_pipeline.schedules import Costs, Plan, Schedule, simulate

_PAYS_FROM = 2e-3  # seconds of a stage's forward; below it handing work out takes longer than the work


def runs_whole(why: str) -> str:
    """Of a run whose training steps are not cut.

    Args:
        why: What asks for it.
    """
    return (
        f"{why}: every rank runs training_step on its replica's whole batch, without micro-batches, and "
        "calls layers of other stages by message. The numbers are those of one device; the stages work one "
        "after the other"
    )


def headline(
    plan: Plan, schedule: Schedule, *, batch_size: int | None, replicas: int, asked: int | None, trains: bool
) -> str:
    """Schedule, sizes and layout in a line, and what `trainer.world_size` counts.

    Args:
        plan: Of the first batch.
        schedule: That made it.
        batch_size: Samples of the first batch; `None` where it does not tell.
        replicas: Of the pipeline.
        asked: The number of micro-batches that was asked for; `None` where it was the strategy's choice.
        trains: Whether batches are trained on.
    """
    parts = [_counted(plan.num_microbatches, "micro-batch", "es")]
    parts[0] += " (num_microbatches='auto')" if asked is None else ""
    parts[0] += f" of a batch of {batch_size}" if batch_size is not None else ""
    if asked is not None and asked > plan.num_microbatches:
        parts[0] += f", which is not enough for num_microbatches={asked}"
    stages, ranks = _counted(plan.num_stages, "stage"), _counted(plan.num_ranks, "rank")
    parts.append(f"{stages} on {ranks} x {_counted(replicas, 'replica')}")
    text = f"{schedule!r}: {', '.join(parts)}"
    if trains:
        text += f"; at equal stages {simulate(plan, Costs(1, 1, 1)).bubble:.0%} of the time is idle"
    if plan.num_ranks == 1:
        return text
    return (
        f"{text}. Every rank sees its replica's whole batch: trainer.world_size counts stages too, so divide "
        "batches and scale learning rates by strategy.num_replicas"
    )


def batch_statistics(plan: Plan, batch_size: int | None) -> str:
    """What batch norms see, where a batch is cut.

    Args:
        plan: Of the first batch.
        batch_size: Its samples; `None` where it does not tell.
    """
    of = "" if batch_size is None else f" of {batch_size / plan.num_microbatches:.3g} samples"
    return (
        f"Batch norms see micro-batches{of}, as under gradient accumulation: the numbers are those of one "
        f"device with PipelineStrategy(stages=1, num_microbatches={plan.num_microbatches}), and those of a "
        "plain run with num_microbatches=1"
    )


def steered(line: str, num_microbatches: int) -> str:
    """What decides, where code between units reads what they compute and a batch is cut.

    Args:
        line: The first that does.
        num_microbatches: Of the first batch.
    """
    return (
        f"A value computed by the model steers the code at {line}: each of {num_microbatches} micro-batches "
        "decides by its own values, as under gradient accumulation, and with num_microbatches=1 the batch "
        "does. Later stages are sent what the value is computed from"
    )


def _counted(number: int, what: str, ending: str = "s") -> str:
    return f"{number} {what}{ending if number != 1 else ''}"


def too_small(events: Iterable[Event]) -> str | None:
    """What to say where the actions of this rank are so short that one device may well be faster.

    Args:
        events: Of a step.
    """
    shortest: dict[int, float] = {}  # by stage: the one that other work on the machine disturbed least
    for event in events:
        if event.action.kind == "F":
            seconds, stage = (event.ended - event.started) / 1e9, event.action.stage
            shortest[stage] = min(seconds, shortest.get(stage, seconds))
    longest = max(shortest.values(), default=_PAYS_FROM)
    if longest >= _PAYS_FROM:
        return None
    return (
        f"A stage's forward of one micro-batch takes {1e3 * longest:.1f} ms here. "
        f"Below some {1e3 * _PAYS_FROM:.0f} ms a pipeline does not pay: use larger batches, fewer "
        "micro-batches or fewer stages. Models this small train faster on one device"
    )
