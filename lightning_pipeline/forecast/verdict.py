"""Whether a pipeline pays at all, in one sentence."""

from collections.abc import Sequence

from lightning_pipeline.forecast.assumptions import Assumptions
from lightning_pipeline.forecast.memory import RankMemory, alone
from lightning_pipeline.forecast.predict import Prediction
from lightning_pipeline.forecast.profile import StageProfile
from lightning_pipeline.forecast.texts import seconds_text
from lightning_pipeline.model.cut import size_text


def verdict(
    predictions: Sequence[Prediction],
    chosen: Prediction,
    whole: StageProfile,
    seconds_alone: float,
    assumptions: Assumptions,
) -> str:
    """Compare the best schedule with one device, and with as many that each hold a replica.

    Args:
        predictions: Best first.
        chosen: The one that is shown; said to be too large where it is and another is not.
        whole: The model as one stage.
        seconds_alone: Of one micro-batch on one device.
        assumptions: About the machine.
    """
    best = predictions[0]
    need = alone(whole, assumptions)
    if not best.fits:
        return _nothing_fits(best, assumptions)
    return _too_large(chosen, best, assumptions) + _gain(best, need, seconds_alone, assumptions)


def _too_large(chosen: Prediction, best: Prediction, assumptions: Assumptions) -> str:
    if chosen.fits:
        return ""
    assert assumptions.memory is not None, "without a limit everything fits"
    return (
        f"{chosen.name} does not fit in {size_text(assumptions.memory)}: it needs {size_text(chosen.peak)}. "
        f"Of what fits, {best.name} is the fastest. "
    )


def _gain(best: Prediction, need: RankMemory, seconds_alone: float, assumptions: Assumptions) -> str:
    number, ranks = best.plan.num_microbatches, best.plan.num_ranks
    one_device = number * seconds_alone
    if assumptions.memory is not None and need.total > assumptions.memory:
        return (
            f"One device does not hold the model: it needs {size_text(need.total)} of "
            f"{size_text(assumptions.memory)}. {_speed(best, one_device)}"
        )
    return _one_device_holds_it(
        best, need, one_device, _replicas(need, one_device, ranks, number, assumptions)
    )


def _nothing_fits(best: Prediction, assumptions: Assumptions) -> str:
    assert assumptions.memory is not None, "without a limit everything fits"
    rank = max(range(len(best.memory)), key=lambda rank: best.memory[rank].total)
    parts = best.memory[rank]
    fixed = parts.total - parts.activations
    mend = (
        "more stages"
        if fixed > assumptions.memory
        else "more micro-batches, more stages, or recomputed activations"
    )
    return (
        f"No schedule fits in {size_text(assumptions.memory)}: {best.name} needs {size_text(parts.total)} on "
        f"rank {rank}, {size_text(parts.activations)} of it activations. It takes {mend}."
    )


def _replicas(
    need: RankMemory, one_device: float, ranks: int, number: int, assumptions: Assumptions
) -> float | None:
    """Seconds of a step with a whole replica on each rank; `None` where the batch is too small for that."""
    if number < ranks:
        return None
    exchange = 2 * need.gradients * (ranks - 1) / ranks / assumptions.link_bytes
    return -(-number // ranks) / number * one_device + exchange


def _one_device_holds_it(
    best: Prediction, need: RankMemory, one_device: float, replicas: float | None
) -> str:
    ranks = best.plan.num_ranks
    holds = f"One device holds the model ({size_text(need.total)})"
    if ranks > 1 and best.step >= one_device:
        return (
            f"Pipelining does not pay: {holds[0].lower()}{holds[1:]} and takes {seconds_text(one_device)} a "
            f"step; {ranks} devices with {best.name} take {seconds_text(best.step)}."
        )
    if ranks > 1 and replicas is not None and replicas < best.step:
        return (
            f"{holds}, and {ranks} replicas that average their gradients would take about "
            f"{seconds_text(replicas)} a step, less than {seconds_text(best.step)} with {best.name}: data "
            "parallelism pays more."
        )
    return f"{holds}. {_speed(best, one_device)}"


def _speed(best: Prediction, one_device: float) -> str:
    ranks = best.plan.num_ranks
    if ranks == 1:
        return f"A step takes {seconds_text(best.step)}."
    return (
        f"{best.name} on {ranks} devices takes {seconds_text(best.step)} a step, "
        f"{one_device / best.step if best.step else 1.0:.1f} times as fast as one device would be."
    )
