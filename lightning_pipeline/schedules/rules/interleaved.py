"""Several stages per rank, laid in a loop: interleaved 1F1B, fused and with a split backward."""

from lightning_pipeline.errors import ConfigurationError
from lightning_pipeline.schedules.plans import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    Plan,
    Schedule,
    require_sizes,
)


class Interleaved1F1B(Schedule):
    """1F1B over several stages per rank: rank r holds r, r + p, r + 2p and so on.

    Micro-batches go through in equal rounds of about as many as there are ranks. Serves every size;
    where there are no equal rounds, it is the order for the next multiple of p with the surplus left out.

    Args:
        stages_per_rank: Stages that each rank holds. Default: 2.

    Source:
        Narayanan et al. 2021, arXiv 2104.04473, section 2.2; the rounds are torch's.

    Example:
        >>> print(Interleaved1F1B().plan(num_ranks=2, num_microbatches=2))
        0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
        1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
    """

    def __init__(self, stages_per_rank: int = 2) -> None:
        self.stages_per_rank = at_least_one(stages_per_rank)

    def plan(self, num_ranks: int, num_microbatches: int) -> Plan:
        """Work the rule out for any number of ranks and micro-batches, at least 1 each."""
        require_sizes(num_ranks, num_microbatches)
        size, whole = _rounds(num_ranks, num_microbatches)
        forwards, backwards = _loop_orders(num_ranks, self.stages_per_rank, size, whole)
        ranks = []
        for rank in range(num_ranks):
            warm_up = (self.stages_per_rank - 1) * size
            warm_up += 2 * (num_ranks - rank - 1)
            fs = [Action(stage + rank, FORWARD, i) for stage, i in forwards]
            bs = [Action(stage + rank, BACKWARD, i) for stage, i in backwards]
            ranks.append(one_by_one(fs, bs, warm_up))
        return Plan(ranks).first(num_microbatches)


class InterleavedZeroBubble(Schedule):
    """Interleaved 1F1B with a split backward: a shorter warm-up, and weight gradients late.

    Needs no more memory than 1F1B. Serves every size, as `Interleaved1F1B` does.

    Args:
        stages_per_rank: Stages that each rank holds. Default: 2.

    Source:
        torch.distributed.pipelining's order, after Qi et al. 2023, arXiv 2401.10241.

    Example:
        >>> print(InterleavedZeroBubble().plan(num_ranks=2, num_microbatches=2))
        0F0 0F1 2F0 2F1 2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1
        1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1
    """

    def __init__(self, stages_per_rank: int = 2) -> None:
        self.stages_per_rank = at_least_one(stages_per_rank)

    def plan(self, num_ranks: int, num_microbatches: int) -> Plan:
        """Work the rule out for any number of ranks and micro-batches, at least 1 each."""
        require_sizes(num_ranks, num_microbatches)
        size, whole = _rounds(num_ranks, num_microbatches)
        forwards, backwards = _loop_orders(num_ranks, self.stages_per_rank, size, whole)
        ranks = []
        for rank in range(num_ranks):
            warm_up = (self.stages_per_rank - 1) * size
            warm_up += num_ranks - rank - 1
            fs = [Action(stage + rank, FORWARD, i) for stage, i in forwards]
            bs = [Action(stage + rank, BACKWARD_INPUT, i) for stage, i in backwards]
            ranks.append(with_late_weights(one_by_one(fs, bs, warm_up), late_by=rank))
        return Plan(ranks).first(num_microbatches)


def at_least_one(stages_per_rank: int) -> int:
    """The number itself.

    Raises:
        ConfigurationError: It is less than 1.
    """
    if stages_per_rank < 1:
        raise ConfigurationError(f"stages_per_rank={stages_per_rank}: a rank holds at least 1 stage")
    return stages_per_rank


def one_by_one(forwards: list[Action], backwards: list[Action], warm_up: int) -> list[Action]:
    """First `warm_up` forwards, then one forward and one backward in turn, then what is left."""
    warm_up = min(warm_up, len(forwards))
    order = forwards[:warm_up]
    for position, backward in enumerate(backwards):
        order.extend(forwards[warm_up + position : warm_up + position + 1])
        order.append(backward)
    return order


def with_late_weights(order: list[Action], late_by: int) -> list[Action]:
    """Put each W right after the I that comes `late_by` after its own, and the last ones at the end."""
    waiting: list[Action] = []
    result: list[Action] = []
    for action in order:
        result.append(action)
        if action.kind == BACKWARD_INPUT:
            waiting.append(Action(action.stage, BACKWARD_WEIGHT, action.microbatch))
            if len(waiting) > late_by:
                result.append(waiting.pop(0))
    return result + waiting


def _rounds(num_ranks: int, num_microbatches: int) -> tuple[int, int]:
    """Micro-batches per round, and of all rounds, which may be a few more than there are."""
    rounds = max(1, num_microbatches // num_ranks)
    if num_microbatches % rounds == 0:
        return num_microbatches // rounds, num_microbatches
    return num_ranks, (rounds + 1) * num_ranks


def _loop_orders(
    num_ranks: int, stages_per_rank: int, size: int, num_microbatches: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Rank 0's forwards and backwards as (stage, micro-batch), in rounds of `size` micro-batches."""
    firsts = [num_ranks * local for local in range(stages_per_rank)]
    rounds = [range(start, start + size) for start in range(0, num_microbatches, size)]
    forwards = [(stage, i) for microbatches in rounds for stage in firsts for i in microbatches]
    backwards = [(stage, i) for microbatches in rounds for stage in firsts[::-1] for i in microbatches]
    return forwards, backwards
