"""The module of a run that has no data, and before it is split: it is whole, and nothing runs."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipeline.checkpoint.contents import Owns, names_by_identity, owned_by
from lightning_pipeline.hooks import refuse_unserved
from lightning_pipeline.model.cut import StageTable
from lightning_pipeline.run.setup import held_states
from lightning_pipeline.schedules import Plan


class Whole:
    """What `Stages` answers, of a module that is not split.

    Args:
        module: Of the run.

    Attributes:
        table: There are no stages.
        says: What the run does.
        last_plan: Of no training batch.
        batch_size: Of no training batch.
    """

    table: StageTable | None = None
    says = ""
    last_plan: Plan | None = None
    batch_size: int | None = None

    def __init__(self, module: LightningModule) -> None:
        self._module = module

    def to_device(self, device: torch.device) -> None:
        """It stays where it is."""

    def adopt(self, optimizers: Sequence[Optimizer]) -> None:
        """Refuse optimizers that cannot be served."""
        refuse_unserved(optimizers)

    def take_in(self) -> None:
        """What hooks add to it is there."""

    def names(self) -> dict[int, str]:
        """Names of the parameters, by `id`."""
        return names_by_identity(self._module.named_parameters())

    def written_names(self) -> dict[int, str]:
        """Those whose optimizer state this rank writes."""
        return self.names()

    def own_state(self) -> dict[str, Tensor]:
        """What this rank writes into a checkpoint."""
        return held_states(self._module)

    def owns(self) -> Owns:
        """Whether this rank has the true state of a module that is neither parameter nor buffer."""
        return owned_by(None, ())

    def units_by_stage(self) -> list[list[str]]:
        """None: there are no stages."""
        return []

    def in_hook(self) -> AbstractContextManager[None]:
        """Around code of the user that sees the module."""
        return nullcontext()

    def aside(self) -> AbstractContextManager[None]:
        """Inside a hook: around what is no code of the user's."""
        return nullcontext()

    def meet(self) -> None:
        """Nobody calls units of another rank."""

    def complete(self, value: Any) -> Any:
        """Values are whole."""
        return value

    def reseed(self, seed: int) -> None:
        """Nothing draws."""
