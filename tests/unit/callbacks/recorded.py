"""A recorded step made up from a simulation, for tests of what is made of it."""

from lightning_pipeline.measure.steps import RankStep
from lightning_pipeline.recording.timeline import Event, Message
from lightning_pipeline.schedules import Action, Costs, Plan, simulate

START = 7_000_000_000  # of the step on the clock, in nanoseconds
HOP = 1_000  # how long a message takes
PACKED = 100  # how long it takes to send it off


def recorded(plan: Plan, costs: Costs | None = None) -> list[RankStep]:
    """A step of a plan; costs are in milliseconds."""
    run = simulate(plan, costs or Costs(1.0, 1.0, 1.0))
    ends = {timed.action: START + round(timed.end * 1e6) for timed in run.actions}
    steps = []
    for rank in range(plan.num_ranks):
        events, messages, free = [], [], START
        for timed in run.actions:
            if timed.rank == rank:
                started = START + round(timed.start * 1e6)
                events.append(Event(timed.action, free, started, ends[timed.action]))
                messages += _messages(plan, timed.action, free, ends)
                free = ends[timed.action]
        steps.append(
            RankStep(rank, plan.stages_of(rank), START - 50, free + 50, tuple(events), tuple(messages))
        )
    return steps


def _messages(plan: Plan, action: Action, asked: int, ends: dict[Action, int]) -> list[Message]:
    """What an action receives, waited for since its rank was free, and what it sends."""
    stage, kind, microbatch = action
    if kind == "W":
        return []
    letter, ahead = ("F", 1) if kind == "F" else ("B", -1)
    found = []
    before, after = stage - ahead, stage + ahead
    if 0 <= before < plan.num_stages and plan.rank_of(before) != plan.rank_of(stage):
        sent = next(ends[Action(before, k, microbatch)] for k in ("F", "B", "I")
                    if Action(before, k, microbatch) in ends and (k == "F") == (letter == "F"))  # fmt: skip
        found.append(
            Message(
                Action(stage, f"RECV_{letter}", microbatch),
                plan.rank_of(before),
                64,
                asked,
                max(asked, sent) + HOP,
            )
        )
    if 0 <= after < plan.num_stages and plan.rank_of(after) != plan.rank_of(stage):
        end = ends[action]
        found.append(
            Message(Action(stage, f"SEND_{letter}", microbatch), plan.rank_of(after), 64, end, end + PACKED)
        )
    return found
