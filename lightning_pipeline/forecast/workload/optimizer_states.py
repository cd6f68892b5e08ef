"""What the module's own optimizer keeps, found out by one step without weights."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_pipeline.model.tensors import tensors_in
from lightning_pipeline.registry import named_parameters_of


def optimizer_states(root: nn.Module, configure: Callable[[], Any] | None = None) -> dict[str, float] | None:
    """Bytes of state that the optimizers of `configure_optimizers` keep for each trained parameter.

    They take a step on the meta device, on stand-ins of the parameters; the module's are not touched.

    Args:
        root: The module, with its weights or on the meta device.
        configure: Gives its optimizers. Default: its `configure_optimizers`.

    Returns:
        By the parameter's first name; `None` where there is no such optimizer, it needs a Trainer, or it does
        not run without weights.
    """
    configure = configure or getattr(root, "configure_optimizers", None)
    if not callable(configure):
        return None
    try:
        with warnings.catch_warnings(action="ignore"):  # Lightning's own hook, where there is no other
            optimizers = _found(configure())
        names = {parameter: name for name, parameter in named_parameters_of(root)}
        kept: dict[str, float] = {}
        for optimizer in optimizers:
            kept.update(_stepped(optimizer, names))
    except Exception:  # the user's code without a Trainer, and optimizers that look at values: not known then
        return None
    return kept if optimizers else None


def _found(given: Any) -> list[Optimizer]:
    """The optimizers among what Lightning lets the hook return."""
    if isinstance(given, Optimizer):
        return [given]
    if isinstance(given, dict):
        return _found(given.get("optimizer"))
    if isinstance(given, list | tuple):
        return [optimizer for one in given for optimizer in _found(one)]
    return []


def _stepped(optimizer: Optimizer, names: dict[nn.Parameter, str]) -> dict[str, float]:
    optimizer = copy.copy(optimizer)
    groups, stand_ins = [], {}
    for group in optimizer.param_groups:
        trained = [parameter for parameter in group["params"] if parameter.requires_grad]
        mine = {_stand_in(parameter): names[parameter] for parameter in trained}
        stand_ins.update(mine)
        groups.append({**group, "params": list(mine)})
    optimizer.param_groups, optimizer.state = groups, type(optimizer.state)(optimizer.state.default_factory)
    with torch.no_grad():
        type(optimizer).step(optimizer)
    return {
        name: float(
            sum(t.numel() * t.element_size() for t in tensors_in(dict(optimizer.state[one])) if t.dim())
        )
        for one, name in stand_ins.items()
    }


def _stand_in(parameter: nn.Parameter) -> nn.Parameter:
    made = nn.Parameter(torch.empty_like(parameter, device="meta"))
    made.grad = torch.empty_like(made)
    return made
