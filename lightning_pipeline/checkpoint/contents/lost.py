"""Whether the ranks together write all that they hold of parameters and their optimizers."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning_pipeline.errors import CheckpointWriteError

_SHOWN = 8


def kept_by_optimizers(states: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Parameters by name that a rank writes something of, for each optimizer.

    Args:
        states: Flat, as `flat_state` gives them.
    """
    return [sorted({key.split(".", 1)[1].rpartition(".")[0] for key in flat}) for flat in states]


def refuse_losses(told: Sequence[Mapping[str, Any]], order: Iterable[str]) -> None:
    """Raise where something would be missing.

    Args:
        told: By each rank of a replica: `owned` and `given`, names of parameters and buffers whose values it
            has; `groups`, those of its optimizers; `kept`, from `kept_by_optimizers`. An optimizer of which
            no rank writes anything is one whose state the user's hooks have taken out.
        order: All parameter names of the module.

    Raises:
        CheckpointWriteError: Naming it.
    """
    owned = {name for rank in told for name in (*rank["owned"], *rank["given"])}
    problems = _told("parameters", [name for name in order if name not in owned])
    for index in range(max((len(rank["kept"]) for rank in told), default=0)):
        kept = {name for rank in told for own in rank["kept"][index : index + 1] for name in own}
        groups = [group for rank in told for own in rank["groups"][index : index + 1] for group in own]
        listed = {name for group in groups for name in group["names"]}
        if kept:
            problems += _told(f"state of optimizer {index}", sorted(listed - kept))
    if problems:
        raise CheckpointWriteError(
            f"no rank would write what the run holds: {'; '.join(problems)}. Nothing was written"
        )


def _told(what: str, names: Sequence[str]) -> list[str]:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return [f"{what}: {', '.join(names[:_SHOWN])}{more}"] if names else []
