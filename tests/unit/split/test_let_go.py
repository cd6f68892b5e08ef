"""What the step of a micro-batch made is let go of when the stage's part of it is over, not some time later."""

import gc
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_pipeline import PipelineStrategy
from lightning_pipeline.model.replay.stage import StageProgram
from tests.ranks.lightning_cases import Regression, loader


class Local:
    """Stands for what the frames of a step hold."""


class Stays(Regression):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        local = Local()
        loss = super().training_step(batch, batch_idx)
        assert isinstance(local, Local)
        return loss


class Uncollected(Callback):
    """From the second batch on nothing is collected."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        gc.collect()
        gc.disable()


def test_a_stage_that_is_done_keeps_no_frame(tmp_path: Path, monkeypatch: Any) -> None:
    """A context manager that swallows what ends a step is part of a circle from Python 3.12 on."""
    alive: list[int] = []
    forward = StageProgram.forward

    def counted(self: StageProgram, microbatch: int, incoming: Any) -> Any:
        values = forward(self, microbatch, incoming)
        alive.append(sum(type(one) is Local for one in gc.get_objects()))
        return values

    monkeypatch.setattr(StageProgram, "forward", counted)
    strategy = PipelineStrategy(stages=1, stages_per_rank=3, schedule="LoopedBFS", num_microbatches=2)
    run = pl.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, default_root_dir=tmp_path, max_epochs=1,
        callbacks=[Uncollected()],
    )  # fmt: skip
    try:
        run.fit(Stays(), loader())
    finally:
        gc.enable()
    assert len(alive) == 3 * 3 * 2  # batches, stages, micro-batches
    assert not any(alive)
