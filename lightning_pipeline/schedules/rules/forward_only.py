"""Forwards alone, for validation, test and predict."""

from lightning_pipeline.errors import ScheduleError
from lightning_pipeline.schedules.plans import FORWARD, Action, Plan, Schedule, require_sizes


class ForwardOnly(Schedule):
    """Forwards alone, on the ranks where another schedule has its stages.

    Serves every number of micro-batches, also where `like` does not.

    Args:
        like: The schedule, or the plan, whose placement to keep. Default: one stage per rank.

    Example:
        >>> print(ForwardOnly().plan(num_ranks=2, num_microbatches=3))
        0F0 0F1 0F2
        1F0 1F1 1F2
    """

    def __init__(self, like: Schedule | Plan | None = None) -> None:
        self.like = like
        if isinstance(like, Plan):
            self.stages_per_rank = len(like.stages_of(0))
        else:
            self.stages_per_rank = 1 if like is None else like.stages_per_rank

    def placement(self, num_ranks: int) -> tuple[int, ...]:
        """The rank of each stage, as `like` has it.

        Raises:
            ScheduleError: `like` is a plan for another number of ranks.
        """
        if self.like is None:
            return tuple(range(num_ranks))
        if isinstance(self.like, Schedule):
            return self.like.placement(num_ranks)
        if self.like.num_ranks != num_ranks:
            raise ScheduleError(f"the plan to be like has {self.like.num_ranks} ranks, not {num_ranks}")
        return tuple(self.like.rank_of(stage) for stage in range(self.like.num_stages))

    def plan(self, num_ranks: int, num_microbatches: int) -> Plan:
        """Work the rule out for any number of ranks and micro-batches, at least 1 each."""
        require_sizes(num_ranks, num_microbatches)
        placement = self.placement(num_ranks)
        forwards = _in_slots(placement, num_ranks, num_microbatches)
        return Plan([a for a in forwards if placement[a.stage] == rank] for rank in range(num_ranks))


def _in_slots(placement: tuple[int, ...], num_ranks: int, num_microbatches: int) -> list[Action]:
    """All forwards in the order in which they are ready if each takes one slot; later stages go first."""
    sent = [0] * len(placement)
    order: list[Action] = []
    while sent[-1] < num_microbatches:
        arrived = (num_microbatches, *sent)
        for rank in range(num_ranks):
            ready = [s for s, at in enumerate(placement) if at == rank and sent[s] < arrived[s]]
            if ready:
                order.append(Action(ready[-1], FORWARD, sent[ready[-1]]))
                sent[ready[-1]] += 1
    return order
