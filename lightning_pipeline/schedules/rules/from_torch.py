"""Any schedule of `torch.distributed.pipelining`, its order read as a plan. Torch is imported when used."""

import re
from types import SimpleNamespace
from typing import Any

from lightning_pipeline.errors import ScheduleError
from lightning_pipeline.schedules.plans import Plan, Schedule, check, require_sizes
from lightning_pipeline.schedules.rules.interleaved import at_least_one


class FromTorch(Schedule):
    """The order that a schedule class of torch writes down, on our runtime.

    Args:
        schedule: A class of `torch.distributed.pipelining`, one derived from it, or its name.
        stages_per_rank: Stages that each rank holds. Default: 1 or 2, as the class needs.

    Raises:
        ScheduleError: Torch knows no schedule of this name.
    """

    def __init__(self, schedule: Any, stages_per_rank: int | None = None) -> None:
        self.schedule = _find(schedule)
        self._single = _is_single(self.schedule)
        self.stages_per_rank = at_least_one(stages_per_rank or (1 if self._single else 2))

    def plan(self, num_ranks: int, num_microbatches: int) -> Plan:
        """Work torch's rule out.

        Raises:
            ScheduleError: Torch refuses these sizes, or its order cannot be run. Says why.
        """
        require_sizes(num_ranks, num_microbatches)
        try:
            rows = [self._row(rank, num_ranks, num_microbatches) for rank in range(num_ranks)]
            plan = Plan.from_cells(rows)
            check(plan)
        except (ValueError, RuntimeError, AssertionError, KeyError) as error:
            raise ScheduleError(
                f"torch's {self.schedule.__name__} does not serve {num_ranks} ranks and "
                f"{num_microbatches} micro-batches: {error}"
            ) from error
        return plan

    def _row(self, rank: int, num_ranks: int, num_microbatches: int) -> list[str]:
        count = self.stages_per_rank
        # torch asks a stage for its place only, until it runs
        stages = [
            SimpleNamespace(
                stage_index=rank + local * num_ranks,
                num_stages=num_ranks * count,
                group_size=num_ranks,
                group_rank=rank,
                submod=None,
                has_backward=True,
            )
            for local in range(count)
        ]
        made = self.schedule(stages[0] if self._single else stages, num_microbatches)
        if not made.pipeline_order:
            raise ScheduleError("the class writes no order down")
        row = ["" if action is None else str(action) for action in made.pipeline_order[rank]]
        return _mended(row, num_microbatches)

    def __repr__(self) -> str:
        return f"FromTorch({self.schedule.__name__!r}, stages_per_rank={self.stages_per_rank})"


def _mended(row: list[str], num_microbatches: int) -> list[str]:
    """Number the forwards from 0 where torch began with 1.

    torch 2.13's `Schedule1F1B._get_pipeline_order` does so on a rank without warm-up (its runtime does
    not read that list). Delete this when it writes `3F0` first on the last of four ranks.
    """
    forwards = [cell for cell in row if re.fullmatch(r"\d+F\d+", cell)]
    if not any(cell.endswith(f"F{num_microbatches}") for cell in forwards):
        return row
    lower = {cell: f"{cell.split('F')[0]}F{int(cell.split('F')[1]) - 1}" for cell in forwards}
    return [lower.get(cell, cell) for cell in row]


def _find(schedule: Any) -> Any:
    from torch.distributed.pipelining.schedules import get_schedule_class

    if not isinstance(schedule, str):
        return schedule
    try:
        return get_schedule_class(schedule.removeprefix("Schedule"))
    except ValueError as error:
        raise ScheduleError(f"torch has no schedule {schedule!r}: {error}") from error


def _is_single(schedule: Any) -> bool:
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle

    return issubclass(schedule, PipelineScheduleSingle)
