"""`trainer.should_stop` on one rank stops all of them, after the same batch."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override


class StopTogether(Callback):
    """Added by the strategy. Lightning reads `should_stop` per rank; one that stops alone leaves the others waiting.

    Args:
        any_of: Whether a flag is set on any rank; all ranks must call.
    """

    def __init__(self, any_of: Callable[[bool], bool]) -> None:
        self._any_of = any_of

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        trainer.should_stop = self._any_of(trainer.should_stop)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.should_stop = self._any_of(trainer.should_stop)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.training or trainer.state.fn == "fit":
            trainer.should_stop = self._any_of(trainer.should_stop)
