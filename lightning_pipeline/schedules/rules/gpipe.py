"""GPipe: all forwards, then all backwards."""

from lightning_pipeline.schedules.plans import BACKWARD, FORWARD, Action, Plan, Schedule, require_sizes


class GPipe(Schedule):
    """All forwards, then all backwards, both in the order of the micro-batches.

    A rank holds the activations of all micro-batches. Serves every size.

    Source:
        Huang et al. 2019, GPipe, arXiv 1811.06965.

    Example:
        >>> print(GPipe().plan(num_ranks=2, num_microbatches=2))
        0F0 0F1 0B0 0B1
        1F0 1F1 1B0 1B1
    """

    def plan(self, num_ranks: int, num_microbatches: int) -> Plan:
        """Work the rule out for any number of ranks and micro-batches, at least 1 each."""
        require_sizes(num_ranks, num_microbatches)
        return Plan(
            [Action(rank, kind, i) for kind in (FORWARD, BACKWARD) for i in range(num_microbatches)]
            for rank in range(num_ranks)
        )
