"""Predictions are those of closed forms, and counts by hand."""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_pipeline.errors import ConfigurationError, PartitionError, ScheduleError
from lightning_pipeline.forecast.machine import Assumptions
from lightning_pipeline.forecast.outcome import Forecast, _axis_unit, forecast
from lightning_pipeline.forecast.predict import Prediction, predict
from lightning_pipeline.forecast.workload.memory import alone
from lightning_pipeline.forecast.workload.texts import number_text, operations_text, seconds_text
from lightning_pipeline.forecast.workload.workload import Workload
from lightning_pipeline.schedules import GPipe, Plan, Schedule, get_schedule
from tests.unit.split.pipe import Module

WIDTH, ROWS = 64, 16
FREE = {"link_bytes": 1e30, "latency": 0.0, "bandwidth": 1e30}  # arithmetic alone takes time


class Chain(Module):
    """Equal linear layers; `tied`: the last shares the weight of the first; `frozen`: how many of the first."""

    def __init__(self, layers: int, tied: bool = False, frozen: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))
        self.register_buffer("scale", torch.ones(WIDTH))
        if tied:
            self.layers[-1].weight = self.layers[0].weight
        for layer in self.layers[:frozen]:
            layer.requires_grad_(False)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        for layer in self.layers:
            batch = torch.tanh(layer(batch * self.scale))
        return batch.sum()


def workload(module: nn.Module, **options: Any) -> Workload:
    return Workload(module, (torch.zeros(ROWS, WIDTH), 0), **options)


def named(found: list[Prediction], name: str, stages_per_rank: int = 1) -> Prediction:
    return next(one for one in found if (one.name, one.stages_per_rank) == (name, stages_per_rank))


def test_bubbles_are_those_of_the_papers() -> None:
    found = predict(workload(Chain(8)), 4, 8, Assumptions(**FREE))
    shares = [stage.flops for stage in workload(Chain(8)).stages(4)]
    assert shares == [shares[0]] * 4
    # the first stage needs no input gradient: of 8 units of work before the first layer, none is spent there
    assert named(found, "GPipe").bubble == pytest.approx(named(found, "1F1B").bubble)
    assert named(found, "Interleaved1F1B", 2).bubble < named(found, "1F1B").bubble
    assert named(found, "ZBH1").bubble < named(found, "1F1B").bubble


def test_a_step_is_operations_over_speed() -> None:
    """1F1B where the first layer is frozen cheap: the last rank sets the pace, 3 forwards a micro-batch."""
    work = workload(Chain(2))
    forward = work.stages(2)[1].flops
    found = named(predict(work, 2, 4, Assumptions(flops=1e6, **FREE)), "1F1B")
    # F of stage 0, then 4 times F and B of stage 1, then the backward of stage 0, which is its weights' alone
    assert found.step == pytest.approx((1 + 4 * 3 + 1) * forward / 1e6)
    assert found.bubble == pytest.approx(1 - (4 * 2 + 4 * 3) / (2 * 14))


def test_messages_take_latency_and_bytes() -> None:
    work = workload(Chain(2))
    free = named(predict(work, 2, 1, Assumptions(flops=1e6, **FREE)), "1F1B").step
    slow = named(
        predict(work, 2, 1, Assumptions(flops=1e6, bandwidth=1e30, link_bytes=1e3, latency=0.5)), "1F1B"
    ).step
    assert slow - free == pytest.approx(2 * (0.5 + 4 * WIDTH * ROWS / 1e3))


def test_memory_is_counted_by_hand() -> None:
    found = named(predict(workload(Chain(4)), 2, 4, Assumptions(optimizer_copies=2)), "1F1B")
    first, last = found.memory
    weights = 2 * WIDTH * WIDTH * 4
    assert (first.parameters, first.gradients, first.optimizer) == (weights, weights, 2 * weights)
    assert first.buffers == last.buffers == WIDTH * 4
    assert first.messages == last.messages == 2 * ROWS * WIDTH * 4
    held = workload(Chain(4)).stages(2)
    assert (first.activations, last.activations) == (2 * held[0].activation_bytes, held[1].activation_bytes)
    assert first.total == first.parameters * 4 + first.buffers + first.messages + first.activations


def test_a_tied_weight_is_held_by_both_stages_and_once_by_one_device() -> None:
    work = workload(Chain(4, tied=True))
    stages = work.stages(2)
    assert [stage.num_parameters for stage in stages] == [2 * WIDTH**2, 2 * WIDTH**2]
    assert [len(stage.copies) for stage in stages] == [0, 1]
    assert alone(work.stages(1)[0], Assumptions()).parameters == 3 * WIDTH**2 * 4


def test_a_rank_with_both_stages_of_a_tied_weight_holds_it_once() -> None:
    found = named(predict(workload(Chain(4, tied=True)), 2, 4, Assumptions()), "ZBV", 2)
    assert found.plan.stages_of(0) == (0, 3)
    assert [rank.parameters for rank in found.memory] == [WIDTH**2 * 4, 2 * WIDTH**2 * 4]


def test_frozen_layers_have_cheap_backwards_and_no_gradients() -> None:
    stages = workload(Chain(4, frozen=2), how="uniform").stages(2)
    assert (stages[0].backward_input, stages[0].backward_weight) == ((), ())
    # the first trained layer passes no gradient on
    weights, inputs = (
        sum(work.flops for work in half) for half in (stages[1].backward_weight, stages[1].backward_input)
    )
    assert inputs == weights / 2 > 0
    found = named(predict(workload(Chain(4, frozen=2), how="uniform"), 2, 4, Assumptions()), "1F1B")
    assert [rank.gradients for rank in found.memory] == [0, found.memory[1].parameters]


def test_what_fits_comes_first_and_then_the_fastest() -> None:
    work = workload(Chain(8))
    everything = predict(work, 4, 8, Assumptions(**FREE))
    assert [one.step for one in everything] == sorted(one.step for one in everything)
    limit = named(everything, "1F1B").peak
    found = predict(work, 4, 8, Assumptions(memory=limit, **FREE))
    assert [one.fits for one in found] == sorted((one.fits for one in found), reverse=True)
    assert named(found, "1F1B").fits
    assert not named(found, "GPipe").fits


def test_every_registered_schedule_is_predicted() -> None:
    found = {(one.name, one.stages_per_rank) for one in predict(workload(Chain(8)), 4, 8, Assumptions())}
    assert found == {
        ("1F1B", 1), ("GPipe", 1), ("ZBH1", 1), ("ZBH2", 1), ("Auto", 1), ("DualPipeV", 2), ("VHalf", 2),
        ("Interleaved1F1B", 2), ("InterleavedZeroBubble", 2), ("LoopedBFS", 2), ("VMin", 2), ("ZBV", 2),
    }  # fmt: skip


def test_with_units_for_one_stage_per_rank_the_others_are_left_out() -> None:
    found = predict(workload(Chain(3)), 3, 4, Assumptions())
    assert {one.stages_per_rank for one in found} == {1}


class Even(Schedule):
    """A schedule of the user's."""

    def plan(self, num_ranks: int, num_microbatches: int) -> Plan:
        if num_microbatches % 2:
            raise ScheduleError("Even serves even numbers")
        return GPipe().plan(num_ranks, num_microbatches)


def test_a_schedule_of_the_user_is_shown_among_the_others() -> None:
    own = Even()
    found = forecast(workload(Chain(8)), 4, 8, Assumptions(), own=own)
    assert found.chosen.schedule is own
    assert "Even " in str(found)
    with pytest.raises(ScheduleError, match="serves even numbers"):
        forecast(workload(Chain(8)), 4, 7, Assumptions(), own=own)


def test_an_interleaved_schedule_that_is_asked_for_is_listed_once() -> None:
    found = predict(workload(Chain(12)), 4, 8, Assumptions(), own=get_schedule("Interleaved1F1B"))
    assert [one.name for one in found].count("Interleaved1F1B") == 1
    found = predict(
        workload(Chain(12)), 4, 8, Assumptions(), own=get_schedule("Interleaved1F1B", stages_per_rank=3)
    )
    assert [one.stages_per_rank for one in found if one.name == "Interleaved1F1B"] in ([2, 3], [3, 2])


def test_more_ranks_than_units_are_refused() -> None:
    with pytest.raises(PartitionError, match="4 stages were asked for, but the model has 3 units"):
        predict(workload(Chain(3)), 4, 8, Assumptions())


# ---- what it says in the end


def said(layers: int, ranks: int, number: int, **assumptions: Any) -> str:
    return forecast(workload(Chain(layers)), ranks, number, Assumptions(**assumptions)).verdict


def test_data_parallelism_is_named_where_one_device_holds_the_model() -> None:
    assert said(4, 2, 4, flops=1e6, memory=2**30).endswith("data parallelism pays more.")


def test_slow_links_make_one_device_faster() -> None:
    assert said(4, 2, 4, latency=1.0).startswith("Pipelining does not pay: one device holds the model (")


def test_replicas_are_out_of_the_question_for_few_micro_batches_or_slow_links() -> None:
    assert "times as fast as one device would be" in said(4, 4, 3, flops=1e6, link_bytes=1e12, latency=0)
    assert "times as fast as one device would be" in said(4, 2, 8, flops=1e8, link_bytes=2e5, latency=0)


def test_a_model_that_one_device_does_not_hold_needs_the_pipeline() -> None:
    need = alone(workload(Chain(8)).stages(1)[0], Assumptions()).total
    assert said(8, 4, 8, memory=0.9 * need, **FREE).startswith(
        "One device does not hold the model: it needs "
    )


def test_nothing_fits_says_what_it_takes() -> None:
    weights = 2 * WIDTH**2 * 4 * 4
    assert said(8, 4, 8, memory=0.5 * weights).endswith("It takes more stages.")
    assert "more micro-batches, more stages, or recomputed" in said(8, 4, 8, memory=weights + 20000)


def test_the_report_has_tables_picture_and_grounds() -> None:
    found = forecast(workload(Chain(8)), 4, 8, Assumptions(memory=2**30), batch_size=128)
    text = str(found)
    for part in (
        "Chain, 32,768 parameters, on 4 ranks; 8 micro-batches of a batch of 128",
        "layers.0, layers.1", "Memory with ", "Schedules, best first", "rank 0 | ", "100 TFLOP/s",
        "25 GB/s", "Memory of a device is 1.0 GiB",
    ):  # fmt: skip
        assert part in text
    strategy = f'PipelineStrategy(stages=4, num_microbatches=8, schedule="{found.chosen.name}")'
    assert found.strategy == found.to_dict()["strategy"] == strategy
    assert f"\nstrategy={strategy}\n" in text
    assert found.svg.startswith("<svg")
    assert [_axis_unit(seconds) for seconds in (38.6, 0.0386, 1.356e-4, 1e-9)] == [
        ("s", 1.0), ("ms", 1e3), ("us", 1e6), ("us", 1e6)
    ]  # fmt: skip
    assert isinstance(found, Forecast)


def test_assumptions_that_cannot_be_are_refused_together() -> None:
    with pytest.raises(ConfigurationError, match=r"flops=0 must be above 0; latency=-1 must not be below 0"):
        Assumptions(flops=0, latency=-1)


def test_a_schedule_that_trains_nothing_is_no_winner() -> None:
    with pytest.raises(ScheduleError, match="has no backwards"):
        predict(workload(Chain(4)), 2, 4, Assumptions(), own=get_schedule("ForwardOnly"))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"), (0.9994, "999 ms"), (0.9996, "1 s"), (0.9996e-3, "1 ms"), (12.346, "12.3 s"),
        (3571.2, "3,570 s"), (2e-5, "20 us"), (4.5e-8, "45 ns"), (1e-12, "0.001 ns"),
    ],
)  # fmt: skip
def test_times_have_three_digits_and_a_unit(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


def test_operations_and_rates_have_no_exponents() -> None:
    assert [operations_text(count) for count in (6140.0, 999.9e9, 3.57e12)] == [
        "6.14 kFLOP", "1 TFLOP", "3.57 TFLOP",
    ]  # fmt: skip
    assert [number_text(rate, 4) for rate in (114321.6, 332.71, 0.5)] == ["114,322", "332.7", "0.5"]
