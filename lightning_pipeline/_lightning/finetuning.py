"""Lightning's finetuning callbacks: every rank's optimizer gets the same parameter groups."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn
from torch.optim import Optimizer

_METHOD = "unfreeze_and_add_param_group"


def equal_groups(any_of: Callable[..., list[bool]]) -> Callable[[], None]:
    """Let a rank add an empty group where others unfreeze parameters and it holds none of them.

    Lightning's `BaseFinetuning.unfreeze_and_add_param_group` adds none then, and `BackboneFinetuning` goes
    on to set the learning rate of the last group, whichever that is. Could go if it always added one.

    Args:
        any_of: For each flag whether any rank of the world raised it.

    Returns:
        Undoes it.
    """
    original = vars(BaseFinetuning)[_METHOD]

    def unfreeze(modules: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        before = len(optimizer.param_groups)
        original.__func__(modules, optimizer, *args, **kwargs)
        added = len(optimizer.param_groups) > before
        if any_of(added)[0] and not added:
            original.__func__(nn.LayerNorm(1), optimizer, *args, **kwargs)
            optimizer.param_groups[-1]["params"] = []

    setattr(BaseFinetuning, _METHOD, staticmethod(unfreeze))
    return lambda: setattr(BaseFinetuning, _METHOD, original)
