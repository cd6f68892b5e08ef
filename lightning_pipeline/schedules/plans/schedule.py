"""What a schedule is: a class with one method."""

from abc import ABC, abstractmethod

from lightning_pipeline.errors import ScheduleError
from lightning_pipeline.schedules.plans.action import BACKWARD, BACKWARD_INPUT
from lightning_pipeline.schedules.plans.plan import Plan


class Schedule(ABC):
    """A rule that orders the work of a pipeline. Write `plan` and it is one.

    A rank of a plan is a position on the pipeline axis. With one stage per rank, rank r holds stage r.
    """

    stages_per_rank: int = 1
    """Stages that each rank holds."""

    @abstractmethod
    def plan(self, num_ranks: int, num_microbatches: int) -> Plan:
        """Work the rule out.

        Args:
            num_ranks: Ranks of the pipeline. At least 1.
            num_microbatches: Micro-batches per batch. At least 1.

        Raises:
            ScheduleError: The rule does not serve these sizes. Says which it serves.
        """

    def placement(self, num_ranks: int) -> tuple[int, ...]:
        """The rank of each stage. Default: read off the smallest plan that the rule serves.

        Args:
            num_ranks: Ranks of the pipeline. At least 1.
        """
        refusal: ScheduleError | None = None
        for num_microbatches in (*range(1, 2 * num_ranks + 1), 4 * num_ranks):
            try:
                plan = self.plan(num_ranks, num_microbatches)
            except ScheduleError as error:
                refusal = error
                continue
            return tuple(plan.rank_of(stage) for stage in range(plan.num_stages))
        assert refusal is not None, "some number of micro-batches was tried"
        raise refusal

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({options})"


def training_plan(schedule: Schedule, num_ranks: int, num_microbatches: int) -> Plan:
    """Work a rule out for training.

    Args:
        schedule: The rule.
        num_ranks: Ranks of the pipeline.
        num_microbatches: Micro-batches per batch.

    Raises:
        ScheduleError: The rule does not serve these sizes, or has no backwards.
    """
    plan = schedule.plan(num_ranks, num_microbatches)
    if not any(action.kind in (BACKWARD, BACKWARD_INPUT) for actions in plan for action in actions):
        raise ScheduleError(
            f"{schedule!r} has no backwards, so that nothing would be trained: choose another schedule. "
            "Validation, test and predict run forwards alone with every schedule"
        )
    return plan


def require_sizes(num_ranks: int, num_microbatches: int) -> None:
    """Refuse sizes that no schedule serves.

    Raises:
        ScheduleError: Fewer than one rank or micro-batch.
    """
    if num_ranks < 1 or num_microbatches < 1:
        raise ScheduleError(
            f"{num_ranks} ranks and {num_microbatches} micro-batches were asked for: "
            f"a plan needs at least 1 of each"
        )
