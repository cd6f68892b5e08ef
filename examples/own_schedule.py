"""A schedule of your own: a class with one method.

    python examples/own_schedule.py

`HeldBack1F1B` is 1F1B with a limit on how many micro-batches a rank holds: less memory for more bubble.
Pass it to a run as `PipelineStrategy(stages=4, schedule=HeldBack1F1B(2))`, or by its class path.
"""

from lightning_pipeline.schedules import Action, Costs, OneFOneB, Plan, Schedule, check, draw, simulate


class HeldBack1F1B(Schedule):
    """1F1B in which no rank holds more than `limit` micro-batches.

    Args:
        limit: Most micro-batches in flight on a rank. At least 1.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def plan(self, num_ranks: int, num_microbatches: int) -> Plan:
        """Warm up with fewer forwards, then one forward and one backward in turn."""
        ranks = []
        for rank in range(num_ranks):
            warm_up = min(num_ranks - rank, self.limit, num_microbatches) - 1
            order = [Action(rank, "F", i) for i in range(warm_up)]
            for i in range(num_microbatches):
                if warm_up + i < num_microbatches:
                    order.append(Action(rank, "F", warm_up + i))
                order.append(Action(rank, "B", i))
            ranks.append(order)
        return Plan(ranks)


def main() -> None:
    """Compare it with 1F1B."""
    for schedule in (OneFOneB(), HeldBack1F1B(2)):
        plan = schedule.plan(num_ranks=4, num_microbatches=6)
        check(plan)
        run = simulate(plan, Costs(forward=1, backward_input=1, backward_weight=1))
        print(f"{schedule}: bubble {run.bubble:.3f}, peak memory {run.peak_memory}")
        print(draw(run), end="\n\n")


if __name__ == "__main__":
    main()
