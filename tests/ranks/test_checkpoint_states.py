"""What a checkpoint keeps beside parameters: buffers, extra state, state of callbacks and optimizers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import LearningRateFinder

from tests.pool import Pool
from tests.ranks.checkpoint_cases import state_of
from tests.ranks.lightning_cases import Regression, loader, trainer

Ranks = Callable[[int], Pool]
TWO = {"stages": 2, "num_microbatches": 1}


class Small(Regression):
    def __init__(self) -> None:
        super().__init__()
        del self.error

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...


def fit_after_a_search(folder: str) -> set[float]:
    module = Small()
    search = LearningRateFinder(num_training_steps=5, early_stop_threshold=None)
    run = trainer(TWO, max_epochs=-1, max_steps=1, callbacks=[search], default_root_dir=folder)
    run.fit(module, loader(40))
    return {float(value) for name, value in state_of(run, module).items() if name.endswith(".step")}


def test_a_search_for_a_learning_rate_leaves_no_state(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2)(fit_after_a_search, str(tmp_path)) == [{1.0}, {1.0}]
