"""Ranks that would train with different settings, numbers or code are told so before the first step."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from torch import nn

from lightning_pipeline import PipelineStrategy
from tests.faults.cases import whole
from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, loader

Ranks = Callable[[int], Pool]


class Odd(Regression):
    """Differs on one rank in what its name says."""

    def __init__(self, what: str, odd: bool) -> None:
        super().__init__()
        self.what, self.odd = what, odd
        if odd and what == "activation":
            self.net[3] = nn.ReLU()
        if odd and what == "frozen":
            self.net[0].weight.requires_grad = False
        if what == "dropout":
            self.net.append(nn.Dropout(0.2 if odd else 0.1))

    def configure_optimizers(self) -> Any:
        rate = 0.2 if self.odd and self.what == "lr" else 0.1
        if self.odd and self.what == "optimizer":
            return torch.optim.Adam(self.parameters(), rate)
        made = torch.optim.SGD(self.parameters(), rate, momentum=0.9)
        if self.what == "scheduler":
            return [made], [torch.optim.lr_scheduler.StepLR(made, 2 if self.odd else 1)] if self.odd else []
        return made


def differ(what: str, folder: str) -> int:
    rank = int(__import__("os").environ["RANK"])
    odd = rank == 1
    options: dict[str, Any] = {"max_epochs": 1, "default_root_dir": f"{folder}/{rank}"}
    strategy: dict[str, Any] = {"num_microbatches": 2, "init_timeout": 60, "step_timeout": 40}
    callbacks: list[Any] = []
    if odd and what == "version":
        lightning.__version__ = "2.0.0"  # in a process that is thrown away
    if odd:
        options |= {
            "accumulate": {"accumulate_grad_batches": 2}, "precision": {"precision": "bf16-mixed"},
            "clipping": {"gradient_clip_val": 0.5}, "epochs": {"max_epochs": 2},
            "limit": {"limit_val_batches": 1},
        }.get(what, {})  # fmt: skip
        strategy |= {
            "microbatches": {"num_microbatches": 4}, "data": {"data": "broadcast"},
            "partition": {"partition": "uniform"}, "schedule": {"schedule": "GPipe"},
        }.get(what, {})  # fmt: skip
        callbacks = {"callback": [EarlyStopping("val_loss")], "harmless": [LearningRateMonitor()]}.get(
            what, []
        )
    if what == "checkpoint":
        callbacks = [ModelCheckpoint(folder, every_n_train_steps=1 + odd)]
    logger = pl.loggers.CSVLogger(f"{folder}/{rank}") if what == "harmless" else False
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=PipelineStrategy(2, **strategy), logger=logger,
        enable_progress_bar=False, enable_model_summary=False, callbacks=callbacks,
        enable_checkpointing=what == "checkpoint", **options,
    )  # fmt: skip
    trainer.fit(Odd(what, odd), loader(), loader(seed=4))
    return trainer.global_step


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("version", r"version of lightning: 2\.\d+\.\S+ on global rank 0; 2.0.0 on global rank 1"),
        ("lr", r"optimizer 0, default lr: 0.1 on global rank 0; 0.2 on global rank 1"),
        whole("optimizer", r"optimizer 0: SGD on global rank 0; Adam on global rank 1"),
        whole("scheduler", r"scheduler 0: nothing on global rank 0; StepLR"),
        whole("accumulate", r"Trainer\(accumulate_grad_batches\): 1 on global rank 0; 2 on global rank 1"),
        ("precision", r"Trainer\(precision\): '32-true' on global rank 0; 'bf16-mixed' on global rank 1"),
        whole("clipping", r"gradient_clip_val\): None on global rank 0; 0.5 on global rank 1"),
        whole("epochs", r"max_epochs\): 1 on global rank 0; 2"),
        whole("limit", r"limit_val_batches"),
        ("microbatches", r"PipelineStrategy\(num_microbatches\): 2 on global rank 0; 4 on global rank 1"),
        whole("data", r"PipelineStrategy\(data\)"),
        whole("partition", r"PipelineStrategy\(partition\)"),
        ("schedule", r"PipelineStrategy\(schedule\)"),
        ("activation", r"module net.3: Tanh\(\) on global rank 0; ReLU\(\) on global rank 1"),
        whole("dropout", r"module net.7: Dropout\(p=0.1, .* on global rank 0; Dropout\(p=0.2"),
        whole(
            "frozen", r"parameter net.0.weight: .*requires_grad=True on global rank 0; .*requires_grad=False"
        ),
        ("callback", r"callbacks that wait for other ranks: \[\] on global rank 0; .*EarlyStopping"),
        whole("checkpoint", r"callbacks that wait for other ranks: .*'every_n_train_steps': 2"),
    ],
)
def test_a_difference_is_named_with_both_values(
    ranks: Ranks, tmp_path: Path, what: str, message: str
) -> None:
    for outcome in ranks(2).outcomes(differ, what, str(tmp_path), timeout=60, group=False):
        text = f"{type(outcome.error).__name__}: {outcome.error}"
        assert "ConfigMismatchError: the ranks of this run do not agree" in text, outcome
        assert re.search(message, text), text
        assert outcome.seconds < 30  # no time-out


def test_paths_loggers_and_callbacks_that_wait_for_nobody_may_differ(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2)(differ, "harmless", str(tmp_path), group=False) == [3, 3]
