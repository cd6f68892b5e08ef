"""How a unit stands when it is called."""

from collections.abc import Hashable

import torch
from torch import nn

from lightning_pipeline._torch import DisableTorchFunction
from lightning_pipeline.registry import parameters_of

_FLAGS = (bool, str, type(None))
_PLAIN = (*_FLAGS, float)


def trained_in(root: nn.Module) -> tuple[bool, ...]:
    """Which parameters a backward gives gradients to, in their order.

    Args:
        root: The LightningModule.
    """
    with DisableTorchFunction():  # no function of the step's is among them
        return tuple(parameter.requires_grad for parameter in parameters_of(root))


def standing_of(unit: nn.Module, *, numbers: bool = True) -> Hashable:
    """What decides how a unit computes and what has gradients: flags, and numbers that are no sizes.

    Args:
        unit: The module.
        numbers: Whether these count, which may be others in each batch.
    """
    found: list[Hashable] = [torch.is_grad_enabled()]
    kinds = _PLAIN if numbers else _FLAGS
    with DisableTorchFunction():  # no function of the step's is among them
        for module in unit.modules():
            found += [(name, one) for name, one in vars(module).items() if type(one) in kinds]
            found += [parameter.requires_grad for parameter in module.parameters(recurse=False)]
    return tuple(found)
