"""What a run has from its first moment on: others are told of failures, and a job goes on where one was."""

import sys
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn

from lightning_pipeline import _lightning
from lightning_pipeline.checkpoint import newest_verified
from lightning_pipeline.errors import CheckpointError
from lightning_pipeline.ranks import write_crash
from lightning_pipeline.run.in_step import is_refusal, quits, saver_of
from lightning_pipeline.run.run import Pipeline
from lightning_pipeline.settings import Settings


def save_before(refusal: BaseException, trainer: Trainer) -> None:
    """Save a run that a hook of all ranks ends by asking for what stages cannot do.

    Args:
        refusal: Gets a note of where.
        trainer: Of the run. One that saves nothing saves nothing here.
    """
    saver = saver_of(trainer)
    if saver is None or saver.save_on_exception or trainer.global_step == 0:
        return
    name = f"refused-epoch={trainer.current_epoch}-step={trainer.global_step}{saver.FILE_EXTENSION}"
    path = Path(saver.dirpath or "") / name
    try:
        trainer.save_checkpoint(path)
    except CheckpointError as error:
        refusal.add_note(f"the run could not be saved before: {error}")
    else:
        refusal.add_note(f"the run was saved before, and goes on from there with ckpt_path={str(path)!r}")


def begin(pipeline: Pipeline, trainer: Trainer, settings: Settings) -> None:
    """Let the other ranks know of an exception before any callback does, which may upload for minutes.

    Args:
        pipeline: Of the run.
        trainer: Of the run.
        settings: Of the strategy.
    """
    groups = pipeline.groups

    def tell() -> None:
        raised = sys.exc_info()[1]
        assert raised is not None, "Lightning calls this hook while it handles an exception"
        first = not pipeline.ends_together  # it is called once more before each callback
        pipeline.fail(raised)
        if first and pipeline.ends_together and is_refusal(raised):
            save_before(raised, trainer)
        if quits(raised) and not pipeline.ends_together:
            raised.code = 1  # others fail, for this rank has left them

    pipeline.at_last(_lightning.before_hooks(trainer, {("Callback", "on_exception"): tell}))
    groups.lookout.doing = lambda: _lightning.current_hook(trainer) or "code outside of hooks"
    pipeline.failure.report = lambda cause: write_crash(
        Path(trainer.default_root_dir), groups.global_rank, cause, groups.lookout.recent(), settings
    )

    def newest() -> str | None:
        folders = [
            Path(callback.dirpath)
            for callback in trainer.checkpoint_callbacks
            if isinstance(callback, ModelCheckpoint) and callback.dirpath is not None
        ]
        share = pipeline.members.from_zero.share
        path: str | None = share(lambda: newest_verified(folders), "choosing a checkpoint")
        return path

    if settings.resume == "auto" and trainer.state.fn == TrainerFn.FITTING:
        pipeline.at_end(_lightning.resume_from(trainer, newest))
