"""Samples of a batch that a step mixes with each other, before and after its units."""

import pytest
import torch
from torch import nn

from lightning_pipeline.model.trace import trace_step
from lightning_pipeline.model.trace.units import find_units
from tests.ranks.lightning_cases import Regression, loader, trainer
from tests.unit.split.nets import seeded
from tests.unit.split.pipe import Module

SAMPLES = 4
order = torch.tensor([2, 0, 3, 1])


class Mixes(Module):
    """Applies a function to its input first."""

    def __init__(self, function):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)).double()
        self.function = function

    def training_step(self, batch, batch_idx):
        h = self.function(batch["x"] * 2)
        for layer in self.layers:
            h = layer(h)
        return (h - batch["x"]).pow(2).mean()


def mixed(function):
    module = seeded(lambda: Mixes(function))
    x = torch.randn(SAMPLES, 4, dtype=torch.float64)
    return trace_step(module, "training_step", ({"x": x}, 0), {}, units=find_units(module)).mixed


MIXING = {
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(1, 0),
    "permutation": lambda x: 0.7 * x + 0.3 * x[order],
    "index_select": lambda x: x.index_select(0, order),
    "sort": lambda x: x.sort(0).values,
    "cumsum": lambda x: x.cumsum(0),
    "gather": lambda x: x.gather(0, order[:, None].expand(SAMPLES, 4)),
}
APART = {
    "flip of features": lambda x: x.flip(1),
    "roll of features": lambda x: x.roll(1, 1),
    "features by index": lambda x: x[:, order],
    "one of each": lambda x: x * x[torch.arange(SAMPLES), order][:, None],
    "in order": lambda x: x[torch.arange(SAMPLES)],
    "sort of features": lambda x: x.sort(1).values,
    "weights by index": lambda x: x + torch.randn(9, 4, dtype=torch.float64)[order],
    "first": lambda x: x + x[0],
}


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_samples_is_seen_with_its_line(name):
    ((line, _),) = mixed(MIXING[name]).items()
    assert "test_mixing.py" in line


@pytest.mark.parametrize("name", APART)
def test_what_keeps_samples_apart_is_not(name):
    assert mixed(APART[name]) == {}


class Mixup(Regression):
    """Mixes in the step."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        permutation = torch.randperm(len(x))
        return nn.functional.mse_loss(
            self.net(0.6 * x + 0.4 * x[permutation]), 0.6 * y + 0.4 * y[permutation]
        )


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_step_that_mixes_is_warned_of_where_there_are_micro_batches(num_microbatches, recwarn):
    run = trainer(
        {"stages": 1, "stages_per_rank": 2, "schedule": "Interleaved1F1B", "num_microbatches": num_microbatches},
        max_epochs=1, limit_train_batches=1, limit_val_batches=0,
    )  # fmt: skip
    torch.manual_seed(3)
    run.fit(Mixup(), loader(8))
    told = [str(one.message) for one in recwarn if "mixes samples of the batch" in str(one.message)]
    assert len(told) == (num_microbatches > 1)
    assert not told or "test_mixing.py" in told[0]
