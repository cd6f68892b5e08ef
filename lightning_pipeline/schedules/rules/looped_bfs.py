"""Looped breadth-first: all micro-batches through a rank's first stage, then through its next."""

from lightning_pipeline.schedules.plans import BACKWARD, FORWARD, Action, Plan, Schedule, require_sizes
from lightning_pipeline.schedules.rules.interleaved import at_least_one


class LoopedBFS(Schedule):
    """GPipe over several stages per rank: rank r holds r, r + p, r + 2p and so on. Serves every size.

    A stage's work comes in one piece, which suits sharded parameters. Micro-batches go backward in the
    order in which they went forward; torch's goes the other way round.

    Args:
        stages_per_rank: Stages that each rank holds. Default: 2.

    Source:
        Lamy-Poirier 2022, Breadth-First Pipeline Parallelism, arXiv 2211.05953.

    Example:
        >>> print(LoopedBFS().plan(num_ranks=2, num_microbatches=2))
        0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
        1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1
    """

    def __init__(self, stages_per_rank: int = 2) -> None:
        self.stages_per_rank = at_least_one(stages_per_rank)

    def plan(self, num_ranks: int, num_microbatches: int) -> Plan:
        """Work the rule out for any number of ranks and micro-batches, at least 1 each."""
        require_sizes(num_ranks, num_microbatches)
        ranks = []
        for rank in range(num_ranks):
            stages = range(rank, num_ranks * self.stages_per_rank, num_ranks)
            order = [Action(stage, FORWARD, i) for stage in stages for i in range(num_microbatches)]
            order += [Action(stage, BACKWARD, i) for stage in stages[::-1] for i in range(num_microbatches)]
            ranks.append(order)
        return Plan(ranks)
