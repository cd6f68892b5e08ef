"""The change that pays most is found, and nothing is advised that does not pay or cannot be done."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from lightning_pipeline.errors import ScheduleError
from lightning_pipeline.measure.advice import MeasuredRun, advise
from lightning_pipeline.model.cut.partitioning import Partition, partition
from lightning_pipeline.model.trace import trace_step
from lightning_pipeline.model.trace.units import find_units
from lightning_pipeline.schedules import Auto, GPipe, OneFOneB, Plan, Schedule, get_schedule
from tests.unit.split.pipe import Module

GIB = 2.0**30
FREE = (0.0,) * 4  # weight gradients that cost nothing: no zero-bubble schedule is better then


UNKNOWN = ", if their time falls with their size"


class Layers(Module):
    """Equal layers in a row."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(count))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        for layer in self.layers:
            batch = layer(batch)
        return batch.mean()


def cut(names: list[str], layers: int) -> Partition:
    module = Layers(layers)
    trace = trace_step(module, "training_step", (torch.zeros(2, 8), 0), units=find_units(module))
    return partition(trace, len(names) + 1, how=names)


def situation(schedule: Schedule, names: list[str], layers: int, number: int, **changes: Any) -> MeasuredRun:
    """Stages whose times are those of their layers: 1 s forward, 1 s each half of the backward, 1 GiB."""
    chosen = cut(names, layers)
    counts = tuple(float(len(chosen.units_of(stage))) for stage in range(chosen.num_stages))
    values: dict[str, Any] = dict(
        plan=schedule.plan(len(counts) // schedule.stages_per_rank, number), schedule=schedule, partition=chosen, forward=counts,
        backward_input=counts, backward_weight=counts, send=0.0,
        activation_bytes=tuple(GIB * count for count in counts), batch_size=None,
    )  # fmt: skip
    return MeasuredRun(**(values | changes))


def test_the_cuts_beside_one_move_a_layer_and_leave_no_stage_empty() -> None:
    moves = list(cut(["layers.1", "layers.3"], 4).moves())
    assert [(move.atom, move.source, move.to) for move in moves] == [(1, 1, 0), (2, 1, 2)]
    assert [move.cut.first_units() for move in moves] == [["layers.2", "layers.3"], ["layers.1", "layers.2"]]
    assert [move.cut.num_parameters for move in moves] == [(144, 72, 72), (72, 72, 144)]


def test_a_layer_is_moved_off_the_slow_stage() -> None:
    found = advise(situation(OneFOneB(), ["layers.2"], 6, 32))
    # before 32 * 4 + 2 layers' times of 3 s each, after 33 * 3: 1 - 99 / 130
    assert found == ("moving 'layers.2' from stage 1 to stage 0 would save 24%: partition=['layers.3']")


def test_a_layer_is_moved_to_a_later_stage() -> None:
    found = advise(situation(OneFOneB(), ["layers.4"], 6, 32))
    assert found is not None
    assert found.startswith("moving 'layers.3' from stage 0 to stage 1 would save 23%")


def test_more_micro_batches_are_advised_where_they_divide_the_batch() -> None:
    names = ["layers.1", "layers.2", "layers.3"]
    found = advise(situation(GPipe(), names, 4, 4, batch_size=24, backward_weight=FREE))
    # before 4 + 3 forwards and backwards, after 8 + 3 of half the size: 1 - 5.5 / 7
    assert found == "8 micro-batches instead of 4 would save 21% and need no more memory with GPipe" + UNKNOWN


def test_the_memory_that_more_micro_batches_save_is_told() -> None:
    found = advise(
        situation(OneFOneB(), ["layers.1", "layers.2", "layers.3"], 4, 4, batch_size=8, backward_weight=FREE)
    )
    assert found == "8 micro-batches instead of 4 would save 21% and need 2.0 GiB less with 1F1B" + UNKNOWN


def test_the_fixed_part_of_a_micro_batch_s_cost_is_known_to_the_advice() -> None:
    names = ["layers.1", "layers.2", "layers.3"]
    now = situation(GPipe(), names, 4, 4, batch_size=8, backward_weight=FREE)
    # after 8 + 3 of 0.6 the size: 0.2 are fixed, half of 0.8 is left: 1 - 6.6 / 7
    found = advise(dataclasses.replace(now, fixed_share=0.2))
    assert found == "8 micro-batches instead of 4 would save 6% and need no more memory with GPipe"
    assert advise(dataclasses.replace(now, fixed_share=1.0)) == (
        "1 micro-batches instead of 4 would save 43% and need no more memory with GPipe"
    )


def test_fewer_micro_batches_are_advised_where_hops_cost_much() -> None:
    found = advise(
        situation(OneFOneB(), ["layers.1"], 2, 8, batch_size=8, send=3.0, backward_weight=(0.0, 0.0))
    )
    assert found is not None
    assert found.startswith("2 micro-batches instead of 8 would save ")


def test_another_schedule_is_advised_in_no_more_memory() -> None:
    found = advise(situation(OneFOneB(), ["layers.1", "layers.2", "layers.3"], 4, 8))
    # ZBH1 hides 2 of the 3 thirds of a bubble of 3 forwards and backwards; 10 % more for split backwards
    assert found is not None
    assert found.startswith("schedule ZBH1 instead of 1F1B would save ")
    assert found.endswith(" in no more memory")


def test_a_schedule_that_needs_more_memory_is_not_advised() -> None:
    names = [f"layers.{layer}" for layer in range(1, 8)]
    now = situation(get_schedule("VMin"), names, 8, 4)
    assert advise(now) is None
    free = dataclasses.replace(now, activation_bytes=(0.0,) * 8)
    assert " instead of VMin would save 23%" in str(advise(free))


def test_schedules_with_several_stages_per_rank_are_compared_with_their_like() -> None:
    found = advise(
        situation(get_schedule("Interleaved1F1B"), [f"layers.{layer}" for layer in range(1, 8)], 8, 4)
    )
    assert found is not None
    assert " instead of Interleaved1F1B " in found


def test_nothing_is_advised_where_nothing_pays_five_percent() -> None:
    assert advise(situation(OneFOneB(), ["layers.3"], 6, 64, batch_size=64)) is None


def test_savings_are_told_and_judged_as_shares_of_the_step() -> None:
    whole = situation(OneFOneB(), ["layers.2"], 6, 32)
    half, tenth = (dataclasses.replace(whole, schedule_share=share) for share in (0.5, 0.1))
    assert "would save 12%" in str(advise(half)), "24 % of the schedule"
    assert advise(tenth) is None


def test_nothing_is_advised_for_one_rank() -> None:
    assert advise(situation(OneFOneB(), [], 4, 4, batch_size=8)) is None


class Rigid(OneFOneB):
    """Serves only some numbers of micro-batches."""

    def __init__(self, served: tuple[int, ...]) -> None:
        self.served = served

    def plan(self, num_ranks: int, num_microbatches: int) -> Plan:
        if num_microbatches not in self.served:
            raise ScheduleError("not served")
        return super().plan(num_ranks, num_microbatches)


def test_numbers_that_the_schedule_does_not_serve_are_not_advised() -> None:
    names = ["layers.1", "layers.2", "layers.3"]
    assert "8 micro-batches" not in str(
        advise(situation(Rigid((4,)), names, 4, 4, batch_size=8, backward_weight=FREE))
    )
    assert "8 micro-batches" in str(
        advise(situation(Rigid((4, 8)), names, 4, 4, batch_size=8, backward_weight=FREE))
    )


def test_numbers_that_do_not_divide_the_batch_are_not_advised() -> None:
    names = ["layers.1", "layers.2", "layers.3"]
    assert "micro-batches" not in str(advise(situation(GPipe(), names, 4, 5, batch_size=5)))


def test_the_planner_gets_advice_on_numbers_too() -> None:
    found = advise(situation(Auto(), ["layers.1", "layers.2", "layers.3"], 4, 4, batch_size=8))
    assert found is not None
    assert found.startswith("8 micro-batches instead of 4 would save ")
    assert found.endswith("with Auto" + UNKNOWN)


def test_a_batch_of_unknown_size_gets_no_advice_on_numbers() -> None:
    assert "micro-batches" not in str(advise(situation(GPipe(), ["layers.1"], 2, 2)))


@pytest.mark.parametrize("times", [(0.0, 0.0), (1.0, 0.0)])
def test_stages_without_work_do_no_harm(times: tuple[float, float]) -> None:
    now = situation(
        OneFOneB(),
        ["layers.1"],
        2,
        4,
        forward=times,
        backward_input=times,
        backward_weight=times,
        batch_size=8,
    )
    assert advise(now) is None or "nan" not in str(advise(now))
