"""Actions on a grid of unit slots, and the passes that pull them earlier."""

from lightning_pipeline.schedules.action import Action


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

    def has_weights(self) -> bool:
        """Whether W's have their slots."""
        return any(action.kind == "W" for action in self.actions.values())

    def fits(self, cap: int) -> bool:
        """Whether the memory stays within a cap, with W's in free slots if they have none yet."""
        return (self if self.has_weights() else self.with_weights()).peak() <= cap


def pull_warm_up(ranks: list[Slots], caps: list[int]) -> None:
    """Pull what comes before the first backward of stage 0 as early as dependencies and memory allow."""
    end = min(slot for slot, a in ranks[0].actions.items() if a.kind == "I" and a.stage == 0)
    heads = [Slots({slot: a for slot, a in rank.actions.items() if slot < end}) for rank in ranks]
    _pull(heads, caps, range(end))
    for rank, head in zip(ranks, heads, strict=True):
        head.actions.update((slot, a) for slot, a in rank.actions.items() if slot >= end)
        rank.actions = head.actions


def pull_cool_down(ranks: list[Slots], caps: list[int]) -> None:
    """Pull what comes after the last forward of stage 0 as early as dependencies and memory allow."""
    start = max(slot for slot, a in ranks[0].actions.items() if a.kind == "F" and a.stage == 0) + 1
    _pull(ranks, caps, range(start, max(max(rank.actions) for rank in ranks) + 1))


def _pull(ranks: list[Slots], caps: list[int], window: range) -> None:
    slot_of = {action: slot for rank in ranks for slot, action in rank.actions.items()}
    last = max(action.stage for action in slot_of)
    queue = sorted((slot, r, a) for r, rank in enumerate(ranks) for slot, a in rank.actions.items())
    for slot, r, action in queue:
        if slot not in window:
            continue
        earliest = max((slot_of[needed] + 1 for needed in _needs(action, last)), default=0)
        slot_of[action] = _move(ranks[r], slot, earliest, caps[r])


def _move(rank: Slots, slot: int, earliest: int, cap: int) -> int:
    """Move a slot's action to the first free slot from `earliest` on that keeps the cap; where it is then."""
    action = rank.actions.pop(slot)
    for target in range(earliest, slot):
        if target not in rank.actions:
            rank.actions[target] = action
            if rank.fits(cap):
                return target
            del rank.actions[target]
    rank.actions[slot] = action
    return slot


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
