"""Proof that a plan is complete, legal, and cannot deadlock even when every send blocks."""

from collections import defaultdict

from lightning_pipeline.errors import ScheduleError
from lightning_pipeline.schedules.plans.action import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    COMPUTE,
    FORWARD,
    MESSAGES,
    SEND_B,
    SEND_F,
    Action,
)
from lightning_pipeline.schedules.plans.communicate import Result, communicate, missing, other_end
from lightning_pipeline.schedules.plans.plan import Plan

_Seen = dict[tuple[int, int], dict[str, int]]


def check(plan: Plan) -> None:
    """Prove that a plan can be run.

    Complete: each stage does one forward and one backward (`B`, or `I` and `W`) of each micro-batch;
    a plan without any backward is an evaluation and needs forwards only. Legal: a stage lives on one
    rank, forward comes before backward, `I` before `W`. Free of deadlock: both ends of each message are
    put at one point of a single global order, and that is run with no buffering at all, every send
    blocking until it is received.

    Args:
        plan: Without messages, as a schedule returns it, or with those that `communicate` adds.

    Raises:
        ScheduleError: The plan cannot be run. Names rank and position (from 0) of the first offence.
    """
    has_messages = any(action.kind in MESSAGES for actions in plan for action in actions)
    compute = _without_messages(plan) if has_messages else plan
    _check_placement(plan)
    _check_actions(compute)
    rendezvous(plan if has_messages else communicate(plan))


def _without_messages(plan: Plan) -> Plan:
    return Plan([action for action in actions if action.kind in COMPUTE] for actions in plan)


def _check_placement(plan: Plan) -> None:
    if plan.num_ranks == 0:
        raise ScheduleError("the plan has no ranks")
    for rank, actions in enumerate(plan):
        if not actions:
            raise ScheduleError(f"rank {rank} has no actions: give every rank at least one stage")
        for position, action in enumerate(actions):
            if action.kind not in COMPUTE + MESSAGES:
                raise ScheduleError(f"rank {rank}, position {position}: unknown kind {action.kind!r}")
            if plan.rank_of(action.stage) != rank:
                raise ScheduleError(
                    f"rank {rank}, position {position}: {action} belongs to stage {action.stage}, which "
                    f"rank {plan.rank_of(action.stage)} holds: a stage lives on one rank"
                )
        if max(plan.pairs_of(rank), default=-1) >= len(actions) - 1:
            raise ScheduleError(f"rank {rank}: its last action cannot run as one with the action after it")
    for stage in range(plan.num_stages):
        plan.rank_of(stage)


def _check_actions(plan: Plan) -> None:
    forward_only = not any(action.kind != FORWARD for actions in plan for action in actions)
    for rank, actions in enumerate(plan):
        seen: _Seen = defaultdict(dict)
        for position, action in enumerate(actions):
            _check_order(action, seen[action.stage, action.microbatch], rank, position)
            seen[action.stage, action.microbatch][action.kind] = position
        _check_complete(plan, seen, rank, forward_only)


def _check_order(action: Action, before: dict[str, int], rank: int, position: int) -> None:
    stage, kind, microbatch = action
    where = f"rank {rank}, position {position}: {action}"
    clashing = {BACKWARD: "BIW", BACKWARD_INPUT: "BI", BACKWARD_WEIGHT: "BW"}.get(kind, kind)
    for other in clashing:
        if other in before:
            again = "again" if other == kind else f"although {stage}{other}{microbatch} did that already"
            raise ScheduleError(f"{where} is there {again}, after position {before[other]}")
    needed = BACKWARD_INPUT if kind == BACKWARD_WEIGHT else FORWARD
    if kind != FORWARD and needed not in before:
        raise ScheduleError(f"{where} comes before {stage}{needed}{microbatch}, which it needs")


def _check_complete(plan: Plan, seen: _Seen, rank: int, forward_only: bool) -> None:
    end = f"rank {rank}, position {len(plan[rank])} (its end)"
    for stage in plan.stages_of(rank):
        for microbatch in range(plan.num_microbatches):
            kinds = set(seen[stage, microbatch])
            if FORWARD not in kinds:
                raise ScheduleError(f"{end}: {stage}F{microbatch} is missing")
            if forward_only or BACKWARD in kinds:
                continue
            if BACKWARD_INPUT not in kinds:
                raise ScheduleError(f"{end}: the backward {stage}B{microbatch} is missing")
            if BACKWARD_WEIGHT not in kinds:
                raise ScheduleError(
                    f"{end}: {stage}W{microbatch} is missing, only {stage}I{microbatch} is there"
                )


def rendezvous(plan: Plan) -> None:
    """Run a plan with messages and no buffers: a send ends when its receive does.

    Raises:
        ScheduleError: No rank can go on. Names each rank's position and what it waits for.
    """
    position = [0] * plan.num_ranks
    has: list[set[Result]] = [set() for _ in range(plan.num_ranks)]
    waiting = list(range(plan.num_ranks))
    while waiting:
        rank = waiting.pop()
        while position[rank] < len(plan[rank]):
            action = plan[rank][position[rank]]
            if action.kind in MESSAGES:
                peer = _meet(plan, position, rank, action, has)
                if peer is None:
                    break
                position[peer] += 1
                waiting.append(peer)
            elif missing((action,), has[rank], plan.num_stages - 1):
                break
            elif action.kind != BACKWARD_WEIGHT:
                has[rank].add((action.stage, action.kind == FORWARD, action.microbatch))
            position[rank] += 1
    stuck = [rank for rank in range(plan.num_ranks) if position[rank] < len(plan[rank])]
    if stuck:
        lines = (f"rank {rank}, position {position[rank]}: {plan[rank][position[rank]]}" for rank in stuck)
        raise ScheduleError("with blocking sends no rank can go on: " + "; ".join(lines))


def _meet(plan: Plan, position: list[int], rank: int, action: Action, has: list[set[Result]]) -> int | None:
    """Hand a message over if its other end is next on the other rank; that rank, or None."""
    end = other_end(action)
    peer = plan.rank_of(end.stage)
    if position[peer] >= len(plan[peer]) or plan[peer][position[peer]] != end:
        return None
    sends = action.kind in (SEND_F, SEND_B)
    send, sender, receiver = (action, rank, peer) if sends else (end, peer, rank)
    result = (send.stage, send.kind == SEND_F, send.microbatch)
    if result not in has[sender]:
        return None
    has[receiver].add(result)
    return peer
