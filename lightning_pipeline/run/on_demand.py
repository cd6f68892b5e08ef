"""Optimizers for a step that is traced before they are made: `self.optimizers()` in it is what it will be."""

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch.optim import Optimizer

from lightning_pipeline import _lightning


class OptimizersOnDemand:
    """The lists of optimizers and schedulers of a strategy, which inherits this.

    While a module is traced the lists are filled when the step asks for them, by a call of
    `configure_optimizers` of the whole module, and emptied afterwards.
    """

    _own_optimizers: list[Optimizer]  # set by the strategy's own `__init__`, as are the others
    _wrapped_optimizers: list[LightningOptimizer]
    _schedulers: list[Any]
    _asks: LightningModule | None = None
    asked = False  # whether the last step that was traced did

    @contextmanager
    def optimizers_on_demand(self, module: LightningModule) -> Iterator[None]:
        """Inside, a step that asks for them gets optimizers that nothing else will have.

        Args:
            module: To be traced.
        """
        self._asks, self.asked = module, False
        self._fill([], [])
        try:
            yield
        finally:
            self._asks = None
            self._fill([], [])

    def _fill(self, optimizers: list[Optimizer], schedulers: list[Any]) -> None:
        self.optimizers, self.lr_scheduler_configs = optimizers, schedulers

    def _ask(self) -> None:
        module, self._asks = self._asks, None
        if module is not None:
            self.asked = True
            with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
                warnings.simplefilter("ignore")
                self._fill(*_lightning.init_optimizers(module))

    @property
    def optimizers(self) -> list[Optimizer]:
        """As `configure_optimizers` made them."""
        self._ask()
        return self._own_optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        self._own_optimizers = optimizers
        self._wrapped_optimizers = [
            LightningOptimizer._to_lightning_optimizer(one, self)  # type: ignore[arg-type]  # of the strategy
            for one in optimizers
        ]

    @property
    def _optimizers(self) -> list[Optimizer]:
        return self.optimizers

    @_optimizers.setter
    def _optimizers(self, optimizers: list[Optimizer]) -> None:
        self._own_optimizers = optimizers

    @property
    def _lightning_optimizers(self) -> list[LightningOptimizer]:
        self._ask()
        return self._wrapped_optimizers

    @_lightning_optimizers.setter
    def _lightning_optimizers(self, optimizers: list[LightningOptimizer]) -> None:
        self._wrapped_optimizers = optimizers

    @property
    def lr_scheduler_configs(self) -> list[Any]:
        """As Lightning keeps them."""
        self._ask()
        return self._schedulers

    @lr_scheduler_configs.setter
    def lr_scheduler_configs(self, configs: list[Any]) -> None:
        self._schedulers = configs
