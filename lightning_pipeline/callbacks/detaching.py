"""A callback that is attached to a run, and lets go of it when the run ends, whole or by an exception."""

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_pipeline.errors import ConfigurationError


class DetachingCallback(Callback):
    """Calls `detach` at the end of a run; Lightning has one hook for a whole run and one for a failed one.

    Raises:
        ConfigurationError: When a run begins: it has no schedule whose actions could be measured.
    """

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        one_device = getattr(trainer.strategy, "is_one_device", True)  # other strategies are refused later
        if stage == "fit" and getattr(trainer.strategy, "trains_whole", False) and not one_device:
            raise ConfigurationError(
                f"{type(self).__name__} measures the actions of a schedule, and with manual optimization or "
                "whole_steps=True every rank runs whole batches, layers called one after the other: leave it "
                "out, or use StageMemoryMonitor, which works with both"
            )

    def detach(self) -> None:
        """Let go of the run; called again it does nothing."""
        raise NotImplementedError

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.detach()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.detach()
