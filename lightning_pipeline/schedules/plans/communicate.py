"""The pass that adds messages: each send and receive, at one point of a single global order."""

from collections.abc import Iterator

from lightning_pipeline.errors import ScheduleError
from lightning_pipeline.schedules.plans.action import (
    BACKWARD,
    BACKWARD_INPUT,
    FORWARD,
    RECV_B,
    RECV_F,
    SEND_B,
    SEND_F,
    Action,
)
from lightning_pipeline.schedules.plans.plan import Plan

Result = tuple[int, bool, int]
"""What messages carry: (stage, is it a forward's, micro-batch)."""


def communicate(plan: Plan) -> Plan:
    """Add sends and receives to a plan of computations.

    The actions are put into one global order that respects every dependency. Right where a result
    appears in it, the message is written down on both ranks. Each rank's list is then a part of one
    common order, so it runs even when a send blocks until it is received. Stages of one rank hand
    results over directly, without a message.

    Args:
        plan: A plan without messages.

    Raises:
        ScheduleError: No global order exists: ranks wait for each other. Names rank and position.
    """
    ranks: list[list[Action]] = [[] for _ in range(plan.num_ranks)]
    last = plan.num_stages - 1
    for rank, group in global_order(plan):
        ranks[rank].extend(group)
        for action in group:
            for message, peer in _messages(plan, action, last):
                if peer != rank:
                    ranks[rank].append(message)
                    ranks[peer].append(other_end(message))
    return Plan(ranks)


def other_end(message: Action) -> Action:
    """The receive of a send, or the send of a receive."""
    stage, kind, microbatch = message
    step = {SEND_F: 1, RECV_F: -1, SEND_B: -1, RECV_B: 1}[kind]
    other = {SEND_F: RECV_F, RECV_F: SEND_F, SEND_B: RECV_B, RECV_B: SEND_B}[kind]
    return Action(stage + step, other, microbatch)


def _messages(plan: Plan, action: Action, last: int) -> Iterator[tuple[Action, int]]:
    stage, kind, microbatch = action
    if kind == FORWARD and stage < last:
        yield Action(stage, SEND_F, microbatch), plan.rank_of(stage + 1)
    if kind in (BACKWARD, BACKWARD_INPUT) and stage > 0:
        yield Action(stage, SEND_B, microbatch), plan.rank_of(stage - 1)


def groups(plan: Plan, rank: int) -> list[tuple[Action, ...]]:
    """A rank's actions, those that run as one together."""
    actions, pairs = plan[rank], plan.pairs_of(rank)
    if not pairs:
        return [(action,) for action in actions]
    return [
        actions[position : position + 2] if position in pairs else (action,)
        for position, action in enumerate(actions)
        if position - 1 not in pairs
    ]


def global_order(plan: Plan) -> list[tuple[int, tuple[Action, ...]]]:
    """Every action of every rank in one order that respects all dependencies.

    Returns:
        (rank, actions that run as one), each after everything that it needs.

    Raises:
        ScheduleError: Ranks wait for each other. Names rank and position.
    """
    todo = [groups(plan, rank) for rank in range(plan.num_ranks)]
    position = [0] * plan.num_ranks
    done: set[Result] = set()
    order: list[tuple[int, tuple[Action, ...]]] = []
    last = plan.num_stages - 1
    ran = True
    while ran:
        ran = False
        for rank, queue in enumerate(todo):
            if position[rank] < len(queue) and not missing(queue[position[rank]], done, last):
                group = queue[position[rank]]
                done.update((a.stage, a.kind == FORWARD, a.microbatch) for a in group if a.kind != "W")
                order.append((rank, group))
                position[rank] += 1
                ran = True
    if any(position[rank] < len(queue) for rank, queue in enumerate(todo)):
        raise ScheduleError(_circle(plan, todo, position, done))
    return order


def missing(group: tuple[Action, ...], done: set[Result], last: int) -> list[str]:
    """What a group of actions that run as one needs and `done` does not have yet."""
    needs: list[Result] = []
    for stage, kind, microbatch in group:
        if kind == FORWARD:
            if stage > 0:
                needs.append((stage - 1, True, microbatch))
        elif kind == "W":
            needs.append((stage, False, microbatch))
        else:
            needs.append((stage, True, microbatch))
            if stage < last:
                needs.append((stage + 1, False, microbatch))
    return [
        f"{stage}F{microbatch}" if forward else f"the backward {stage}B{microbatch} or {stage}I{microbatch}"
        for stage, forward, microbatch in needs
        if (stage, forward, microbatch) not in done
    ]


def _circle(
    plan: Plan,
    todo: list[list[tuple[Action, ...]]],
    position: list[int],
    done: set[Result],
) -> str:
    last = plan.num_stages - 1
    stuck = [
        f"rank {rank}, position {sum(map(len, queue[: position[rank]]))}: "
        f"{';'.join(map(str, queue[position[rank]]))} waits for "
        f"{' and '.join(missing(queue[position[rank]], done, last))}"
        for rank, queue in enumerate(todo)
        if position[rank] < len(queue)
    ]
    return "the ranks wait for each other for ever: " + "; ".join(stuck)
