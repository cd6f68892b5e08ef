"""ZB-H1 and ZB-H2: 1F1B with a split backward whose weight gradients fill the bubbles."""

from lightning_pipeline.schedules.plans import BACKWARD_INPUT, FORWARD, Action, Plan, Schedule, require_sizes
from lightning_pipeline.schedules.rules.interleaved import one_by_one, with_late_weights


class ZBH1(Schedule):
    """1F1B with a split backward, at 1F1B's memory. Serves every size; made for m >= 2p.

    Rank r does each weight gradient r micro-batches late.

    Source:
        Qi et al. 2023, Zero Bubble Pipeline Parallelism, arXiv 2401.10241, figure 2.

    Example:
        >>> print(ZBH1().plan(num_ranks=2, num_microbatches=3))
        0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
        1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
    """

    def plan(self, num_ranks: int, num_microbatches: int) -> Plan:
        """Work the rule out for any number of ranks and micro-batches, at least 1 each."""
        require_sizes(num_ranks, num_microbatches)
        return Plan(
            _order(rank, num_microbatches, warm_up=num_ranks - rank - 1, late_by=rank)
            for rank in range(num_ranks)
        )


class ZBH2(Schedule):
    """ZB-H1 with a warm-up twice as deep, for twice the memory: no bubble within any rank's span.

    Serves every size; made for m >= 2p - 1. Its gain is in the span: it pays where the next step may
    start before the last rank has finished this one.

    Source:
        Qi et al. 2023, Zero Bubble Pipeline Parallelism, arXiv 2401.10241, figure 3.

    Example:
        >>> print(ZBH2().plan(num_ranks=2, num_microbatches=3))
        0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2
        1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2
    """

    def plan(self, num_ranks: int, num_microbatches: int) -> Plan:
        """Work the rule out for any number of ranks and micro-batches, at least 1 each."""
        require_sizes(num_ranks, num_microbatches)
        return Plan(
            _order(rank, num_microbatches, warm_up=2 * (num_ranks - rank - 1), late_by=2 * rank)
            for rank in range(num_ranks)
        )


def _order(rank: int, num_microbatches: int, *, warm_up: int, late_by: int) -> list[Action]:
    forwards = [Action(rank, FORWARD, i) for i in range(num_microbatches)]
    inputs = [Action(rank, BACKWARD_INPUT, i) for i in range(num_microbatches)]
    return with_late_weights(one_by_one(forwards, inputs, warm_up), late_by)
