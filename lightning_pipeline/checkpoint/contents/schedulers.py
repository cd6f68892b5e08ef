"""LR-scheduler state that does not depend on the number of stages."""

import pickle
from collections.abc import Mapping, Sequence
from typing import Any


def schedulers_for(
    stored: Sequence[Mapping[str, Any]],
    groups: Sequence[Sequence[Mapping[str, Any]]],
    optimizer_of: Sequence[int],
) -> list[Any]:
    """The scheduler states for one rank.

    A scheduler keeps lists with one entry per parameter group. Where the groups differ between stages (a
    group per layer), the entries of this rank's groups are looked up by the name of a parameter.

    Args:
        stored: Of each rank that saved, in order of the pipeline: `lr_schedulers` and `groups`.
        groups: Of each of this rank's optimizers, from `groups_of`.
        optimizer_of: The index of the optimizer of each scheduler.

    Returns:
        For each scheduler, what its `load_state_dict` takes.
    """
    last: list[Any] = stored[-1]["lr_schedulers"] or []
    counts = [[len(of) for of in rank["groups"]] for rank in stored]
    if all(count == [len(of) for of in groups] for count in counts):
        return last
    return [
        _rebuilt(state, index, groups[optimizer_of[index]], stored, optimizer_of[index])
        for index, state in enumerate(last)
    ]


def as_read(states: Sequence[Any]) -> list[dict[str, bytes]]:
    """What scheduler states are before the user sees them, to tell later what has been edited."""
    return [{key: pickle.dumps(value) for key, value in state.items()} for state in states]


def with_edits(
    rebuilt: Sequence[Any], edited: Sequence[Any], read: Sequence[Mapping[str, bytes]]
) -> Sequence[Any]:
    """States for the groups that there are now, with what the user has put in, changed or taken out since.

    Args:
        rebuilt: As stored, for the groups that there are.
        edited: As the user has left them.
        read: What `as_read` gave before.
    """
    if not len(rebuilt) == len(edited) == len(read):
        return edited
    return [
        {
            key: new[key] if key in new and pickle.dumps(value) == old.get(key) else value
            for key, value in own.items()
        }
        for new, own, old in zip(rebuilt, edited, read, strict=True)
    ]


def _rebuilt(
    state: Mapping[str, Any], scheduler: int, groups: Sequence[Any], stored: Sequence[Any], optimizer: int
) -> dict[str, Any]:
    length = len(stored[-1]["groups"][optimizer])
    return {
        key: [_entry(key, group, scheduler, stored, optimizer, value) for group in groups]
        if isinstance(value, list) and len(value) == length
        else value
        for key, value in state.items()
    }


def _entry(
    key: str, group: Mapping[str, Any], scheduler: int, stored: Sequence[Any], optimizer: int, default: Any
) -> Any:
    """The stored entry of the group that holds one of this group's parameters."""
    wanted = set(group["names"])
    for rank in stored:
        for position, candidate in enumerate(rank["groups"][optimizer]):
            if wanted & set(candidate["names"]):
                return rank["lr_schedulers"][scheduler][key][position]
    return default[-1] if default else None
