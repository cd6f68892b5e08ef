"""What hooks draw between steps, from torch, NumPy and Python, is what one device draws, on all ranks."""

import random

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything

from tests.ranks.lightning_cases import Regression, loader, trainer, weights


class MixesUp(Regression):
    """As mixup does, by a share that is drawn when the batch has come."""

    def __init__(self):
        super().__init__()
        self.drawn = []

    def on_after_batch_transfer(self, batch, dataloader_idx):
        share = np.random.beta(0.4, 0.4)
        self.drawn += [share, random.random(), torch.rand(()).item()]
        inputs, targets = batch
        return share * inputs + (1 - share) * inputs.flip(0), share * targets + (1 - share) * targets.flip(0)

    def on_before_optimizer_step(self, optimizer):
        self.drawn.append(torch.rand(()).item())


class DrawsOnGlobalRankZero(MixesUp):
    def on_train_batch_end(self, *args):
        if self.trainer.is_global_zero:  # such as for a sample to show
            self.drawn.append(np.random.rand())


def fitted(pipeline, kind):
    seed_everything(3)
    module = kind()
    trainer(pipeline, max_epochs=2).fit(module, loader(), loader(seed=4))
    return weights(module), module.drawn


@pytest.mark.parametrize("kind", [MixesUp, DrawsOnGlobalRankZero])
def test_draws_of_hooks_are_those_of_one_device(ranks, kind):
    expected, drawn = fitted(None, kind)
    first, *others = ranks(2)(fitted, {"stages": 2, "num_microbatches": 2}, kind, group=False)
    assert first[1] == drawn
    for found, seen in (first, *others):
        assert kind is not MixesUp or seen == drawn
        for name, weight in expected.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-9, atol=1e-12)
