"""Measures a rank that has the whole module. Nothing is traced there: what is planned is what was counted."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pipeline.measure.memory import MemoryMeter
from lightning_pipeline.model.cut import StageActivations
from lightning_pipeline.model.tensors import Held, Peaks, SavedCount, tensors_in
from lightning_pipeline.registry import named_parameters_of, parameters_of


class _Whole:
    """The module as its meter sees it: one stage, on one rank."""

    def __init__(self, module: LightningModule) -> None:
        self.module = module
        self.stages = (0,)
        self.counts_next = False
        self.count: SavedCount | None = None
        self.worst = Peaks()

    def owned_parameters(self) -> Iterator[tuple[str, Tensor]]:
        return named_parameters_of(self.module)

    def stages_of(self, name: str) -> tuple[int, ...]:
        return (0,)

    def counted_now(self) -> dict[int, Held] | None:
        if self.count is None:
            return None
        self.count.settle()
        return self.count.held()


class WholeMeter(MemoryMeter):
    """Measures one device. Nothing is traced there: what is planned is what was counted.

    Args:
        module: Whole.
        optimizers: Gives those of the run.
        device: Of the rank.
    """

    def __init__(
        self, module: LightningModule, optimizers: Callable[[], Iterable[Optimizer]], device: torch.device
    ) -> None:
        self._whole = _Whole(module)
        super().__init__(self._whole, self._whole.stages, optimizers, device)

    def begin_batch(self, batch: Any) -> None:
        """A training batch begins; its activations are counted if that was asked for."""
        whole = self._whole
        self._counting: SavedCount | None = None
        if whole.counts_next:
            tensors = [*parameters_of(whole.module), *whole.module.buffers(), *tensors_in(batch)]
            self._counting = whole.count = SavedCount(tensors)
            whole.counts_next = False

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Inside, what autograd saves counts."""
        with nullcontext() if self._counting is None else self._counting.forward(0, 0, ()):
            yield
        self._rise()

    def backward_begins(self) -> None:
        """All is held that the backward needs."""
        self._rise()

    def backward_done(self) -> None:
        """A backward is over."""
        if self._counting is not None:
            self._counting.done(0, 0)
            self._rise()

    def _rise(self) -> None:
        if self._counting is not None:
            self._counting.settle()
            self._whole.worst.rise_to(self._counting.peaks)

    @override
    def _held_now(self) -> dict[int, Held]:
        return self._whole.counted_now() or {}

    @override
    def foreseen(self) -> list[StageActivations]:
        return []

    @override
    def _planned(self) -> tuple[dict[int, Held], Held]:
        return dict(self._whole.worst.stages), self._whole.worst.rank
