"""1F1B: one forward, one backward in turn, once the pipeline is full."""

from lightning_pipeline.schedules.plans import BACKWARD, FORWARD, Action, Plan, Schedule, require_sizes


class OneFOneB(Schedule):
    """One forward, one backward in turn after a warm-up of as many forwards as ranks follow.

    Rank r holds the activations of at most `num_ranks - r` micro-batches. Serves every size.

    Source:
        Narayanan et al. 2019, PipeDream; as a schedule with a flush: Narayanan et al. 2021,
        arXiv 2104.04473, figure 4 top.

    Example:
        >>> print(OneFOneB().plan(num_ranks=2, num_microbatches=3))
        0F0 0F1 0B0 0F2 0B1 0B2
        1F0 1B0 1F1 1B1 1F2 1B2
    """

    def __repr__(self) -> str:
        return "1F1B"

    def plan(self, num_ranks: int, num_microbatches: int) -> Plan:
        """Work the rule out for any number of ranks and micro-batches, at least 1 each."""
        require_sizes(num_ranks, num_microbatches)
        return Plan(_order(rank, num_ranks, num_microbatches) for rank in range(num_ranks))


def _order(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    warm_up = min(num_microbatches, num_ranks - rank - 1)
    order = [Action(rank, FORWARD, i) for i in range(warm_up)]
    for i in range(num_microbatches):
        if warm_up + i < num_microbatches:
            order.append(Action(rank, FORWARD, warm_up + i))
        order.append(Action(rank, BACKWARD, i))
    return order
