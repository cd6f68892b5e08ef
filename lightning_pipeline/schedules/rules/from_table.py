"""A schedule read from a CSV file in torch's `compute_only` format."""

import os

from lightning_pipeline.errors import ScheduleError
from lightning_pipeline.schedules.plans import Plan, Schedule, check, require_sizes


class FromTable(Schedule):
    """The plan that stands in a CSV file: a row per rank, an action such as `2F0` per cell.

    `Plan.to_csv` writes such a file, and so does torch. It is checked when it is read.

    Args:
        path: The file.

    Raises:
        ScheduleError: The file cannot be read, or its plan cannot be run.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        try:
            self._plan = Plan.from_csv(path)
            check(self._plan)
        except (OSError, ScheduleError) as error:
            raise ScheduleError(f"{self.path} holds no plan that can be run: {error}") from error
        self.stages_per_rank = len(self._plan.stages_of(0))

    def plan(self, num_ranks: int, num_microbatches: int) -> Plan:
        """The plan of the file, with the surplus left out where fewer micro-batches are asked for.

        Raises:
            ScheduleError: It was written for other ranks, or for fewer micro-batches.
        """
        require_sizes(num_ranks, num_microbatches)
        plan = self._plan
        if num_ranks != plan.num_ranks or num_microbatches > plan.num_microbatches:
            raise ScheduleError(
                f"{self.path} serves {plan.num_ranks} ranks and up to {plan.num_microbatches} "
                f"micro-batches, not {num_ranks} and {num_microbatches}"
            )
        return plan.first(num_microbatches)

    def placement(self, num_ranks: int) -> tuple[int, ...]:
        """The rank of each stage in the file."""
        plan = self.plan(num_ranks, self._plan.num_microbatches)
        return tuple(plan.rank_of(stage) for stage in range(plan.num_stages))

    def __repr__(self) -> str:
        return f"FromTable(path={self.path!r})"
