"""Ranks' clocks are aligned, and a step of all ranks comes out on one clock."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch import Callback

from lightning_pipeline.measure.pipeline_run import run_of
from lightning_pipeline.measure.steps import RankStep, gather_step
from lightning_pipeline.ranks.alignment import GroupWire, Offset, align
from lightning_pipeline.recording import clock
from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, loader, trainer

Ranks = Callable[[int], Pool]


def align_shifted(shifts: list[int]) -> list[Offset]:
    rank = dist.get_rank()
    wire = GroupWire(dist.group.WORLD, list(range(len(shifts))))
    return align(wire, rank, len(shifts), clock=lambda: clock.now() + shifts[rank])


def test_a_shifted_clock_is_found_over_gloo(ranks: Ranks) -> None:
    found = ranks(2)(align_shifted, [0, 12_345_678_901])
    assert found[0] == found[1]
    assert abs(found[0][1].nanoseconds - 12_345_678_901) <= found[0][1].round_trip / 2 + 1
    assert found[0][1].round_trip < 50_000_000


def test_on_one_machine_clocks_are_the_same(ranks: Ranks) -> None:
    assert [o.nanoseconds for o in ranks(4)(align_shifted, [0, 0, 0, 0])[0]] == [0, 0, 0, 0]


class Keeps(Callback):
    """Gathers every step of the whole pipeline, twice."""

    def __init__(self) -> None:
        self.steps: list[list[RankStep]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        run = run_of(trainer, self)
        self.steps += [gather_step(run), gather_step(run)]


def keep_steps() -> Any:
    keeps = Keeps()
    run = trainer(
        {"stages": 2, "num_microbatches": 4}, max_epochs=1, limit_train_batches=2, callbacks=[keeps]
    )
    run.fit(Regression(), loader())
    return keeps.steps


def test_a_step_of_all_ranks_is_gathered_as_often_as_one_likes(ranks: Ranks) -> None:
    found = ranks(2)(keep_steps)
    assert found[0] == found[1]
    first, again, *_ = found[0]
    assert first == again
    assert [(step.rank, step.stages, len(step.events)) for step in first] == [(0, (0,), 8), (1, (1,), 8)]
    ended = {str(event.action): event.ended for step in first for event in step.events}
    started = {str(event.action): event.started for step in first for event in step.events}
    for microbatch in range(4):
        assert ended[f"0F{microbatch}"] <= started[f"1F{microbatch}"]
        assert ended[f"1B{microbatch}"] <= started[f"0B{microbatch}"]
