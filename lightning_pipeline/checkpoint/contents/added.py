"""Entries of a state_dict that are no parameter or buffer of one stage: each is stored once."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_pipeline.checkpoint.contents.extra_state import is_another
from lightning_pipeline.checkpoint.contents.meta_file import as_bytes
from lightning_pipeline.errors import CheckpointWriteError
from lightning_pipeline.model.tensors import is_placeholder


@dataclass(frozen=True)
class Added:
    """One entry on one rank.

    Attributes:
        digest: The same where the value is.
        is_tensor: Whether it is stored as one.
        value: Of an entry that is no tensor.
    """

    digest: str
    is_tensor: bool
    value: Any


def added_to(given: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Added]:
    """What a rank would store beside the parameters and buffers that it owns.

    Args:
        given: Its `state_dict`, after `on_save_checkpoint`.
        own: Its parameters and buffers.
    """
    return {
        name: _entry(value)
        for name, value in given.items()
        if name not in own or not isinstance(value, Tensor)
    }


def replaced_in(given: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Tensor]:
    """What stands in place of a rank's own parameters and buffers.

    Args:
        given: Its `state_dict`, after `on_save_checkpoint`.
        own: Its parameters and buffers.
    """
    return {
        name: value
        for name, value in given.items()
        if isinstance(value, Tensor) and name in own and is_another(value, own[name])
    }


def contested(by_rank: Sequence[Mapping[str, Any]]) -> set[str]:
    """Names under which one rank replaces its own tensor, and another, which has it not, sets one.

    Args:
        by_rank: The names that each has `added` and `replaced`.
    """
    return {n for told in by_rank for n in told["added"]} & {n for told in by_rank for n in told["replaced"]}


def entries_of(values: Mapping[str, Tensor], names: set[str]) -> dict[str, Added]:
    """Some values as they are compared with those of other ranks."""
    return {name: _entry(value) for name, value in values.items() if name in names}


def _entry(value: Any) -> Added:
    is_tensor = isinstance(value, Tensor)
    return Added(digest(value), is_tensor, None if is_tensor else value)


def digest(value: Any) -> str:
    """A checksum of a value that may hold tensors; the same on every device."""
    return hashlib.sha256(as_bytes({"value": copied_to_host(value)})).hexdigest()


def copied_to_host(value: Any) -> Any:
    """A value with copies of its tensors in host memory, in dicts, lists and tuples."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: copied_to_host(item) for key, item in value.items()}
    return type(value)(map(copied_to_host, value)) if type(value) in (list, tuple) else value


def held_here(value: Any) -> Any:
    """A value without the placeholders in its dicts and lists: what they stand for is written elsewhere."""
    if isinstance(value, dict):
        return {k: held_here(item) for k, item in value.items() if not is_placeholder(item)}
    if type(value) in (list, tuple):
        return type(value)(held_here(item) for item in value if not is_placeholder(item))
    return value


def writers_of(by_rank: Sequence[Mapping[str, Added]]) -> dict[str, int]:
    """The rank that stores each entry: the first one.

    Args:
        by_rank: By pipeline rank.

    Raises:
        CheckpointWriteError: Ranks have different values under one name.
    """
    first: dict[str, int] = {}
    differ: dict[str, tuple[int, int]] = {}
    for rank, entries in enumerate(by_rank):
        for name, entry in entries.items():
            known = first.setdefault(name, rank)
            if by_rank[known][name].digest != entry.digest:
                differ[name] = (known, rank)
    if differ:
        shown = ", ".join(f"{name} (pipeline ranks {a} and {b})" for name, (a, b) in list(differ.items())[:8])
        raise CheckpointWriteError(
            f"{len(differ)} name(s) were set in checkpoint['state_dict'] to different values: {shown}. "
            "on_save_checkpoint sees its own stage's part: set the same value on all, or other names"
        )
    return first
