"""An optimizer's state by parameter name, so that it does not depend on the number of stages."""

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipeline.checkpoint.contents.nested import flattened, restored
from lightning_pipeline.errors import CheckpointError, CheckpointWriteError

_LIKE_THE_PARAMETER = frozenset({
    "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg",
    "acc_delta", "sum", "ax", "prev", "step_size",
})  # fmt: skip
"""State of torch's own optimizers that has its parameter's shape and data type."""


def is_like_parameter(optimizer: Optimizer, key: str) -> bool:
    """Whether an entry of state surely has its parameter's shape: others' optimizers may do as they like."""
    own = any(c is not Optimizer and c.__module__.startswith("torch.optim.") for c in type(optimizer).__mro__)
    return own and key in _LIKE_THE_PARAMETER


def misplaced(
    optimizer: Optimizer, shapes: Mapping[str, tuple[int, ...]], by_name: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """State whose shape is not its parameter's.

    Args:
        optimizer: Of the kind that it is for.
        shapes: Of the parameters, by name.
        by_name: State by parameter name.
    """
    return [
        f"{name}.{key} ({tuple(value.shape)} stored, {shapes[name]} here)"
        for name, state in by_name.items()
        for key, value in state.items()
        if isinstance(value, Tensor) and is_like_parameter(optimizer, key) and value.shape != shapes[name]
    ]


def shapes_of(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter of an optimizer, by name."""
    own = [p for group in optimizer.param_groups for p in group["params"] if id(p) in names]
    return {names[id(parameter)]: tuple(parameter.shape) for parameter in own}


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
        `state.<name>.<key>` and `param_groups.<name>.<key>`; see `flattened` for values in containers.

    Raises:
        CheckpointWriteError: The optimizer keeps what cannot be stored.
    """
    _refuse_common_state(optimizer)
    flat: dict[str, Any] = {}
    for group in optimizer.param_groups:
        options = group_options(group)
        for parameter in group["params"]:
            name = names.get(id(parameter))
            if name is None:
                continue
            state = optimizer.state.get(parameter, {})
            try:
                flat.update({f"param_groups.{name}.{k}": v for k, v in flattened(options).items()})
                flat.update({f"state.{name}.{k}": v for k, v in flattened(state).items()})
            except TypeError as error:
                raise CheckpointWriteError(
                    f"{type(optimizer).__name__} keeps {error} in its state of {name}, which a checkpoint of "
                    "stages cannot hold: plain numbers, strings, tensors, and dicts, lists and tuples of them"
                ) from None
    return flat


def _refuse_common_state(optimizer: Optimizer) -> None:
    common = [key for key in optimizer.state if not isinstance(key, Tensor)]
    if common:
        raise CheckpointWriteError(
            f"{type(optimizer).__name__} keeps state of no parameter, {common[0]!r}, of which each stage "
            "has its own: keep it in the parameter groups"
        )


def group_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a parameter group says beside its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def groups_of(optimizer: Optimizer, names: Mapping[int, str]) -> list[dict[str, Any]]:
    """The parameter groups with names in the place of parameters."""
    return [{**_named(group, names), "options": group_options(group)} for group in optimizer.param_groups]


def _named(group: Mapping[str, Any], names: Mapping[int, str]) -> dict[str, Any]:
    """The names of a group, and with `param_names` what the user calls each."""
    own = [names.get(id(parameter)) for parameter in group["params"]]
    found: dict[str, Any] = {"names": [name for name in own if name is not None]}
    called = group.get("param_names")
    if called is not None and len(called) == len(own):
        found["called"] = {n: given for n, given in zip(own, called, strict=True) if n is not None}
    return found


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
        if index < len(groups) and not any(id(p) in names for p in group["params"]):
            _set_options(optimizer, group, groups[index]["options"])
        for parameter in (p for p in group["params"] if id(p) in names):
            state, options = by_name.get(names[id(parameter)], ({}, {}))
            _set_options(optimizer, group, restored(options))
            optimizer.state.pop(parameter, None)  # such as that of a search for a learning rate
            if state:
                placed = {k: _beside(optimizer, group, k, v, parameter) for k, v in state.items()}
                optimizer.state[parameter] = restored(placed)


def _set_options(optimizer: Optimizer, group: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Have these alone, as torch's `load_state_dict` has: not what a schedule has left since."""
    if options:
        lasting = {"params", "param_names", *optimizer.defaults, *options}
        for key in [key for key in group if key not in lasting]:
            del group[key]
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


def _beside(optimizer: Optimizer, group: Mapping[str, Any], key: str, value: Any, parameter: Tensor) -> Any:
    """Where and what torch's `load_state_dict` makes of an entry of state."""
    if not isinstance(value, Tensor):
        return value
    if key == "step":
        on_device = group.get("fused") or group.get("capturable")
        return value.to(parameter.device, torch.float32) if on_device else value
    cast = is_like_parameter(optimizer, key) and parameter.is_floating_point()
    return value.to(parameter.device, parameter.dtype if cast else value.dtype)


def from_numbered(state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Flat state from a plain optimizer's `state_dict`.

    Args:
        state: With parameters by number.
        groups: The whole module's groups, from `numbered_groups`.
    """
    flat: dict[str, Any] = {}
    for group, stored in zip(groups, state["param_groups"], strict=True):
        options = group_options(stored)
        for name, number in zip(group["names"], stored["params"], strict=True):
            own = flattened(state["state"].get(number, {}))
            flat.update({f"param_groups.{name}.{k}": v for k, v in flattened(options).items()})
            flat.update({f"state.{name}.{k}": v for k, v in own.items()})
    return flat


def to_numbered(flat: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A plain optimizer's `state_dict` from flat state.

    Args:
        flat: From all stages.
        groups: The whole module's groups, from `whole_groups`.

    Raises:
        CheckpointError: There is state of a parameter that is in no group.
    """
    listed = {name for group in groups for name in group["names"]}
    unlisted = {key.split(".", 1)[1].rpartition(".")[0] for key in flat} - listed
    if unlisted:
        raise CheckpointError(
            f"an optimizer has state of {', '.join(sorted(unlisted))}, which none of its parameter "
            "groups lists: it would be lost"
        )
    by_name = _by_parameter(flat, listed)
    state: dict[int, Any] = {}
    stored, number = [], 0
    for group in groups:
        numbers = list(range(number, number + len(group["names"])))
        number += len(numbers)
        options = dict(group["options"])
        for index, name in zip(numbers, group["names"], strict=True):
            found, own = by_name.get(name, ({}, {}))
            options.update(restored(own))
            if found:
                state[index] = restored(found)
        called = group.get("called", {})
        if called and called.keys() >= set(group["names"]):
            options["param_names"] = [called[name] for name in group["names"]]
        stored.append({**options, "params": numbers})
    return {"state": state, "param_groups": stored}


def on_host(flat: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of flat state whose tensors are in host memory and shared with nothing."""
    return {
        key: value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else deepcopy(value)
        for key, value in flat.items()
    }
