"""An optimizer's state by parameter name, so that it does not depend on the number of stages."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def names_by_identity(parameters: Iterable[tuple[str, Tensor]]) -> dict[int, str]:
    """The name of each parameter, by `id`; the first where it has several."""
    names: dict[int, str] = {}
    for name, parameter in parameters:
        names.setdefault(id(parameter), name)
    return names


def bare(optimizer: Any) -> Optimizer:
    """The optimizer inside Lightning's wrapper."""
    found: Optimizer = getattr(optimizer, "_optimizer", optimizer)
    return found


def flat_state(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """An optimizer's state by parameter name, flat: no two stages write the same key.

    The layout is that of `StateDictOptions(flatten_optimizer_state_dict=True)`, which itself raises on a
    stage without trainable parameters.

    Args:
        optimizer: Whose parameters are this rank's.
        names: Of the parameters that this rank writes, by `id`.

    Returns:
        `state.<name>.<key>` and `param_groups.<name>.<key>`.
    """
    flat: dict[str, Any] = {}
    for group in optimizer.param_groups:
        options = _options(group)
        for parameter in group["params"]:
            name = names.get(id(parameter))
            if name is None:
                continue
            flat.update({f"param_groups.{name}.{key}": value for key, value in options.items()})
            state = optimizer.state.get(parameter, {})
            flat.update({f"state.{name}.{key}": value for key, value in state.items()})
    return flat


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def groups_of(optimizer: Optimizer, names: Mapping[int, str]) -> list[dict[str, Any]]:
    """The parameter groups with names in the place of parameters."""
    return [
        {"names": [names[id(p)] for p in group["params"]], "options": _options(group)}
        for group in optimizer.param_groups
    ]


def names_of(optimizer: Optimizer, names: Mapping[int, str]) -> list[str]:
    """Names of an optimizer's parameters."""
    return [names[id(p)] for group in optimizer.param_groups for p in group["params"] if id(p) in names]


def fill(
    optimizer: Optimizer, names: Mapping[int, str], flat: Mapping[str, Any], groups: Sequence[Any] = ()
) -> None:
    """Put flat state into an optimizer, in place.

    Args:
        optimizer: To fill.
        names: Of this rank's parameters, by `id`.
        flat: From `flat_state`.
        groups: Stored groups, by position; for those that have no parameter here.
    """
    by_name = _by_parameter(flat, set(names_of(optimizer, names)))
    for index, group in enumerate(optimizer.param_groups):
        if not group["params"] and index < len(groups):
            group.update(groups[index]["options"])
        for parameter in group["params"]:
            state, options = by_name.get(names[id(parameter)], ({}, {}))
            if state:
                optimizer.state[parameter] = {
                    key: _beside(key, value, parameter) for key, value in state.items()
                }
            group.update(options)


def _by_parameter(
    flat: Mapping[str, Any], names: set[str]
) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """State and group options of each parameter."""
    found: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    for full, value in flat.items():
        kind, rest = full.split(".", 1)
        name, _, key = rest.rpartition(".")
        if name in names:
            found.setdefault(name, ({}, {}))[kind == "param_groups"][key] = value
    return found


def _beside(key: str, value: Any, parameter: Tensor) -> Any:
    if isinstance(value, Tensor) and key != "step":  # the count of steps stays where torch keeps it
        return value.to(parameter.device)
    return value


def merged_groups(
    by_rank: Sequence[Sequence[Any]], order: Sequence[str], sizes: Sequence[int] | None = None
) -> list[dict[str, Any]]:
    """The groups of the whole module's optimizer from those of the stages.

    Groups of one position belong together where all ranks have as many, with the same options. Elsewhere
    they were made per layer, and follow each other in the order of the module.

    Args:
        by_rank: The groups of each rank, as `groups_of` gives them.
        order: All parameter names of the module.
        sizes: Parameters in each group of the whole module's optimizer, where that is known.
    """
    rank_of = {name: number for number, name in enumerate(order)}
    alike = len({len(groups) for groups in by_rank}) == 1
    together = [_sorted(same, rank_of) for same in zip(*by_rank, strict=True)] if alike else []
    filled = [group for groups in by_rank for group in groups if group["names"]]
    apart = [_sorted([group], rank_of) for group in filled]
    apart.sort(key=lambda group: rank_of[group["names"][0]])
    if sizes is not None and [len(group["names"]) for group in apart] == list(sizes):
        return apart
    if sizes is None and alike:
        alike = all(len({repr(g["options"]) for g in same}) == 1 for same in zip(*by_rank, strict=True))
    return together if alike else apart


def _sorted(same: Sequence[Any], rank_of: Mapping[str, int]) -> dict[str, Any]:
    """One group from several; a parameter that stages share is in it once."""
    names = dict.fromkeys(name for group in same for name in group["names"])
    options = next((group["options"] for group in same if group["names"]), same[0]["options"])
    return {"names": sorted(names, key=rank_of.__getitem__), "options": options}


def from_numbered(state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Flat state from a plain optimizer's `state_dict`.

    Args:
        state: With parameters by number.
        groups: The whole module's groups, from `merged_groups`.

    Raises:
        ValueError: The numbers of groups or parameters differ.
    """
    saved = state["param_groups"]
    ours, theirs = [len(g["names"]) for g in groups], [len(g["params"]) for g in saved]
    if ours != theirs:
        raise ValueError(f"its parameter groups have {theirs} parameters, this run's have {ours}")
    flat: dict[str, Any] = {}
    for group, stored in zip(groups, saved, strict=True):
        options = _options(stored)
        for name, number in zip(group["names"], stored["params"], strict=True):
            flat.update({f"param_groups.{name}.{key}": value for key, value in options.items()})
            flat.update({f"state.{name}.{k}": v for k, v in state["state"].get(number, {}).items()})
    return flat


def to_numbered(flat: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A plain optimizer's `state_dict` from flat state.

    Args:
        flat: From all stages.
        groups: The whole module's groups, from `merged_groups`.
    """
    by_name = _by_parameter(flat, {name for group in groups for name in group["names"]})
    state: dict[int, Any] = {}
    stored, number = [], 0
    for group in groups:
        numbers = list(range(number, number + len(group["names"])))
        number += len(numbers)
        options = dict(group["options"])
        for index, name in zip(numbers, group["names"], strict=True):
            found, own = by_name.get(name, ({}, {}))
            options.update(own)
            if found:
                state[index] = found
        stored.append({**options, "params": numbers})
    return {"state": state, "param_groups": stored}


def on_host(flat: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of flat state whose tensors are in host memory and shared with nothing."""
    return {
        key: value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
        for key, value in flat.items()
    }
