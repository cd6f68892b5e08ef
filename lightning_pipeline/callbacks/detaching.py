"""A callback that is attached to a run, and lets go of it when the run ends, whole or by an exception."""

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override


class DetachingCallback(Callback):
    """Calls `detach` at the end of a run; Lightning has one hook for a whole run and one for a failed one."""

    def detach(self) -> None:
        """Let go of the run; called again it does nothing."""
        raise NotImplementedError

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.detach()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.detach()
