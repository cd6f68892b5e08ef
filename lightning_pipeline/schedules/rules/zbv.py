"""ZB-V: two stages per rank laid in a V, no bubble in the span at 1F1B's memory."""

from lightning_pipeline.schedules.plans import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    Plan,
    Schedule,
    require_sizes,
)


class ZBV(Schedule):
    """Zero bubble in V placement: rank r holds stages r and 2p - 1 - r, so the loss is on rank 0.

    Serves every size; made for m >= 2p - 1, and for forward, input and weight halves that cost about
    the same. With fewer micro-batches it is the order for 2p - 1 with the surplus left out.

    Source:
        Qi et al. 2024, Pipeline Parallelism with Controllable Memory, arXiv 2405.15362.

    Example:
        >>> print(ZBV().plan(num_ranks=1, num_microbatches=2))
        0F0 1F0 1I0 1W0 0F1 0I0 0W0 1F1 1I1 1W1 0I1 0W1
    """

    stages_per_rank = 2

    def plan(self, num_ranks: int, num_microbatches: int) -> Plan:
        """Work the rule out for any number of ranks and micro-batches, at least 1 each."""
        require_sizes(num_ranks, num_microbatches)
        whole = max(num_microbatches, 2 * num_ranks - 1)
        return Plan(_order(rank, num_ranks, whole) for rank in range(num_ranks)).first(num_microbatches)


def _order(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    """One rank's order for at least 2p - 1 micro-batches, in the seven parts of the source."""
    write = Writer(rank, 2 * num_ranks - 1 - rank)
    write("F0", 2 * (num_ranks - rank) - 1)
    write("F1 F0", rank)
    write("F1 I1 W1", num_ranks - rank)
    while write.count["F", 0] < num_microbatches:
        write("F0 I0 W0 F1 I1 W1")
    write("I0 W0 F1 I1 W1", num_microbatches - write.count["F", 1])
    write("I0 I1", rank)
    write("I0 W0", num_ranks - rank)
    write("W1", num_microbatches - write.count["W", 1])
    write("W0", num_microbatches - write.count["W", 0])
    return write.order


class Writer:
    """Writes down actions of a rank's two stages; each kind takes the next micro-batch by itself.

    Args:
        first: Stage that `F0`, `I0`, `W0` and `B0` speak of.
        second: Stage that `F1`, `I1`, `W1` and `B1` speak of.
    """

    def __init__(self, first: int, second: int) -> None:
        kinds = (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
        self.stages = (first, second)
        self.count = {(kind, local): 0 for kind in kinds for local in (0, 1)}
        self.order: list[Action] = []

    def __call__(self, text: str, times: int = 1) -> None:
        for word in text.split() * times:
            kind, local = word[0], int(word[1])
            self.order.append(Action(self.stages[local], kind, self.count[kind, local]))
            self.count[kind, local] += 1
