"""Actions on a grid of unit slots, and the passes that pull them earlier."""

from collections.abc import Callable

from lightning_pipeline.schedules.plans.action import Action


class Slots:
    """One rank's actions by slot, each of which takes one slot and holds one unit of memory from F to W.

    Args:
        actions: The action in each slot that is taken.
    """

    def __init__(self, actions: dict[int, Action]) -> None:
        self.actions = actions

    def in_order(self) -> list[tuple[int, Action]]:
        """Slots and their actions, ascending."""
        return sorted(self.actions.items())

    def without_weights(self) -> "Slots":
        """The same without the W's."""
        return Slots({slot: a for slot, a in self.actions.items() if a.kind != "W"})

    def with_weights(self) -> "Slots":
        """The same with each W in the next free slot, oldest first."""
        result: dict[int, Action] = {}
        waiting: list[Action] = []
        free = 0
        for slot, action in self.in_order():
            while waiting and free < slot:
                result[free] = waiting.pop(0)
                free += 1
            result[slot] = action
            free = slot + 1
            if action.kind == "I":
                waiting.append(Action(action.stage, "W", action.microbatch))
        result.update(zip(range(free, free + len(waiting)), waiting, strict=True))
        return Slots(result)

    def peak(self) -> int:
        """The most memory held, in units."""
        held = peak = 0
        for _, action in self.in_order():
            held += (action.kind == "F") - (action.kind == "W")
            peak = max(peak, held)
        return peak

    def fits(self, cap: int) -> bool:
        """Whether the memory stays within a cap once W's are put into free slots."""
        return self.with_weights().peak() <= cap

    def room(self, cap: int, begin: int, end: int) -> int:
        """The first slot, from `begin` on, from which until `end` one unit more fits within a cap."""
        held, first, full = 0, begin, cap <= 0
        for slot, action in self.in_order():
            if slot >= end:
                break
            held += (action.kind == "F") - (action.kind == "W")
            if full:
                first = max(first, slot + 1)
            full = held >= cap
        return end if full else first


def pull_warm_up(ranks: list[Slots], caps: list[int]) -> None:
    """Pull what comes before the first backward of stage 0 as early as dependencies and memory allow.

    The W's have their slots and may be pulled too. Only a forward that comes earlier needs more memory.
    """
    end = min(slot for slot, a in ranks[0].actions.items() if a.kind == "I" and a.stage == 0)
    heads = [Slots({slot: a for slot, a in rank.actions.items() if slot < end}) for rank in ranks]

    def move(rank: int, slot: int, action: Action, earliest: int) -> int:
        head = heads[rank]
        if action.kind == "F":
            earliest = head.room(caps[rank], earliest, slot)
        del head.actions[slot]
        free = next((s for s in range(earliest, slot) if s not in head.actions), slot)
        head.actions[free] = action
        return free

    _pull(heads, range(end), move)
    for rank, head in zip(ranks, heads, strict=True):
        head.actions.update((slot, a) for slot, a in rank.actions.items() if slot >= end)
        rank.actions = head.actions


def pull_cool_down(ranks: list[Slots], caps: list[int]) -> None:
    """Pull what comes after the last forward of stage 0 as early as dependencies and memory allow.

    W's are taken out first; they must fit into the slots that stay free.
    """
    start = max(slot for slot, a in ranks[0].actions.items() if a.kind == "F" and a.stage == 0) + 1

    def move(rank: int, slot: int, action: Action, earliest: int) -> int:
        actions = ranks[rank].actions
        del actions[slot]
        for target in range(earliest, slot):
            if target in actions:
                continue
            actions[target] = action
            if ranks[rank].fits(caps[rank]):
                return target
            del actions[target]
        actions[slot] = action
        return slot

    _pull(ranks, range(start, max(max(rank.actions) for rank in ranks) + 1), move)


def _pull(ranks: list[Slots], window: range, move: Callable[[int, int, Action, int], int]) -> None:
    """Move what stands in a window, in the order of its slots.

    Args:
        move: Gets rank, slot, action and the slot from which on all that it needs is there; moves the
            action and returns its new slot.
    """
    slot_of = {action: slot for rank in ranks for slot, action in rank.actions.items()}
    last = max(action.stage for action in slot_of)
    queue = sorted((slot, r, a) for r, rank in enumerate(ranks) for slot, a in rank.actions.items())
    for slot, rank, action in queue:
        if slot in window:
            earliest = max((slot_of[needed] + 1 for needed in _needs(action, last)), default=0)
            slot_of[action] = move(rank, slot, action, earliest)


def _needs(action: Action, last: int) -> list[Action]:
    """What an action waits for: its data, and the micro-batch before it."""
    stage, kind, i = action
    needs = [Action(stage, kind, i - 1)] if i else []
    if kind == "F" and stage:
        needs.append(Action(stage - 1, "F", i))
    if kind == "I":
        needs.append(Action(stage, "F", i) if stage == last else Action(stage + 1, "I", i))
    if kind == "W":
        needs.append(Action(stage, "I", i))
    return needs
