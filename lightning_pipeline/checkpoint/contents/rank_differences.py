"""State of callbacks and hooks that holds tensors, and differs between stages: each saw its own part."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_pipeline.checkpoint.contents.added import copied_to_host, digest

Path = tuple[str, ...]
_CALLBACKS = "callbacks"


def tensor_digests(dumped: Mapping[str, Any]) -> dict[Path, str]:
    """Checksums of what holds tensors, by where it is: of a callback, or under a key of a hook's own.

    Args:
        dumped: What Lightning dumped, without model and optimizers.
    """
    return {path: digest(_tensors_in(value)) for path, value in _places(dumped).items() if _tensors_in(value)}


def _places(dumped: Mapping[str, Any]) -> dict[Path, Any]:
    places: dict[Path, Any] = {
        (key,): value for key, value in dumped.items() if key not in (_CALLBACKS, "loops", "lr_schedulers")
    }
    places.update({(_CALLBACKS, key): value for key, value in dumped.get(_CALLBACKS, {}).items()})
    return places


def _tensors_in(value: Any, path: Path = ()) -> dict[Path, Tensor]:
    if isinstance(value, Tensor):
        return {path: value}
    items: Any = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    return {p: t for key, item in items for p, t in _tensors_in(item, (*path, str(key))).items()}


def different(by_rank: Sequence[Mapping[Path, str]]) -> list[Path]:
    """Where ranks hold different tensors.

    Args:
        by_rank: From `tensor_digests`.
    """
    places = {path: None for digests in by_rank for path in digests}
    return [path for path in places if len({digests.get(path) for digests in by_rank}) > 1]


def at(dumped: Mapping[str, Any], places: Sequence[Path]) -> dict[Path, Any]:
    """What a rank has at some places, in host memory."""
    found = _places(dumped)
    return {path: copied_to_host(found[path]) for path in places if path in found}


def joined(
    dumped: Mapping[str, Any], by_rank: Mapping[int, Mapping[Path, Any]], owners: Mapping[str, int]
) -> dict[str, Any]:
    """What Lightning dumped on the leader, with what differs put together from all stages.

    An entry under the name of a parameter or buffer is that of the stage which owns it. An entry that one
    stage has is kept. Of others the leader's is kept, with a warning.

    Args:
        dumped: Of the leader.
        by_rank: Of each pipeline rank, from `at`; the leader's first.
        owners: The pipeline rank that owns a parameter or buffer, by name.
    """
    result = {**dumped, _CALLBACKS: dict(dumped.get(_CALLBACKS, {}))}
    for path in {path: None for places in by_rank.values() for path in places}:
        values = {rank: places[path] for rank, places in by_rank.items() if path in places}
        refused: list[str] = []
        value = _merged(values, owners, "", refused.append)
        (result[_CALLBACKS] if path[0] == _CALLBACKS else result)[path[-1]] = value
        if refused:
            rank_zero_warn(
                f"the state of {path[-1]} differs between stages in {', '.join(refused[:8])}, and that of "
                "global rank 0 is saved: keep such tensors in a dict by the name of the parameter they are of"
            )
    if _CALLBACKS not in dumped and not result[_CALLBACKS]:
        del result[_CALLBACKS]
    return result


def _merged(
    values: Mapping[int, Any], owners: Mapping[str, int], where: str, refuse: Callable[[str], None]
) -> Any:
    """One value from those of several ranks."""
    found = list(values.values())
    if len(found) == 1 or not any(_tensors_in(value) for value in found):
        return found[0]
    if not all(isinstance(value, Mapping) for value in found):
        if len({digest(_tensors_in(value)) for value in found}) > 1:
            refuse(where.removeprefix(".") or "a tensor")
        return found[0]
    merged = {}
    for key in {key: None for value in found for key in value}:
        parts = {rank: value[key] for rank, value in values.items() if key in value}
        owner = owners.get(key) if isinstance(key, str) else None
        merged[key] = parts[owner] if owner in parts else _merged(parts, owners, f"{where}.{key}", refuse)
    return merged
