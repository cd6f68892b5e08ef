"""V-Half and V-Min: about half and a third of 1F1B's memory, in V placement."""

from lightning_pipeline.schedules.plans import (
    Action,
    Costs,
    Plan,
    Schedule,
    Slots,
    pull_cool_down,
    pull_warm_up,
    require_sizes,
    simulate,
)

_PERIOD = 6


class VHalf(Schedule):
    """Half of 1F1B's memory: rank r holds stages r and 2p - 1 - r, so the loss is on rank 0.

    Peak memory is `floor((p + 2) / 2)` shares. Serves every size. Keeps its rate where
    `W + 2B >= 2F` and `W + 2F >= 2B`; outside that the bubble grows with the micro-batches.

    Source:
        Qi et al. 2024, Pipeline Parallelism with Controllable Memory, arXiv 2405.15362.
    """

    stages_per_rank = 2

    def plan(self, num_ranks: int, num_microbatches: int) -> Plan:
        """Work the rule out for any number of ranks and micro-batches, at least 1 each."""
        require_sizes(num_ranks, num_microbatches)
        p, shift = num_ranks, 3 if num_ranks % 2 == 0 else 0
        blocks = [(2 * r, 3 * p - 2 - r, 3 * p - 1 + shift + 2 * r, 6 * p - 2 + shift - r) for r in range(p)]
        return _build(blocks, num_microbatches)


class VMin(Schedule):
    """A third of 1F1B's memory: rank r holds stages r and 2p - 1 - r, so the loss is on rank 0.

    Peak memory is `floor((p + 4) / 3)` shares. Serves every size. Made for forward, input and weight
    halves that cost about the same; else the bubble grows with the micro-batches.

    Source:
        Qi et al. 2024, Pipeline Parallelism with Controllable Memory, arXiv 2405.15362.
    """

    stages_per_rank = 2

    def plan(self, num_ranks: int, num_microbatches: int) -> Plan:
        """Work the rule out for any number of ranks and micro-batches, at least 1 each."""
        require_sizes(num_ranks, num_microbatches)
        p, shift = num_ranks, 2 if num_ranks % 3 == 0 else 0
        blocks = [(r, 2 * p - 1 - r, 2 * p + shift + r, 4 * p + shift - 1 - r) for r in range(p)]
        return _build(blocks, num_microbatches)


def _build(blocks: list[tuple[int, int, int, int]], num_microbatches: int) -> Plan:
    """Repeat the block, fill in W's, pull the warm-up, re-time, pull the cool-down with W's taken out.

    Args:
        blocks: Per rank the slots of F first, F second, I second, I first of micro-batch 0.
        num_microbatches: How often to repeat them.
    """
    ranks = [_repeat(rank, blocks, num_microbatches).with_weights() for rank in range(len(blocks))]
    caps = [rank.peak() for rank in ranks]
    pull_warm_up(ranks, caps)
    ranks = _retimed(_plan(ranks))
    ranks = [rank.without_weights() for rank in ranks]
    pull_cool_down(ranks, caps)
    return _plan([rank.with_weights() for rank in ranks])


def _repeat(rank: int, blocks: list[tuple[int, int, int, int]], num_microbatches: int) -> Slots:
    second = 2 * len(blocks) - 1 - rank
    parts = list(zip(blocks[rank], ((rank, "F"), (second, "F"), (second, "I"), (rank, "I")), strict=True))
    return Slots(
        {
            slot + _PERIOD * i: Action(stage, kind, i)
            for i in range(num_microbatches)
            for slot, (stage, kind) in parts
        }
    )


def _plan(ranks: list[Slots]) -> Plan:
    return Plan([action for _, action in rank.in_order()] for rank in ranks)


def _retimed(plan: Plan) -> list[Slots]:
    """Each action in the slot where it starts when all of them, half a rank's share, take one slot."""
    ranks: list[dict[int, Action]] = [{} for _ in range(plan.num_ranks)]
    for action, rank, start, _ in simulate(plan, Costs(2, 2, 2)).actions:
        ranks[rank][round(start)] = action
    return [Slots(slots) for slots in ranks]
