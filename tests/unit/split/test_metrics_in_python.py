"""What a step makes of a metric's answer in Python is made of the batch's answer."""

import warnings

import pytest
from torch.nn.functional import mse_loss
from torchmetrics import MeanSquaredError, MetricCollection, R2Score

from tests.ranks.lightning_cases import Regression, assert_same, loader, trainer, weights
from tests.unit.split.test_logged_as_one import WAYS

pytestmark = pytest.mark.usefixtures("no_group_is_left")


class Reads(Regression):
    """Keeps, returns and logs numbers that it has read of answers."""

    def __init__(self):
        super().__init__()
        self.own = MeanSquaredError().double()
        self.several = MetricCollection({"r2": R2Score(), "mse": MeanSquaredError()}).double()
        self.kept, self.best = [], float("inf")

    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        loss = mse_loss(out, batch[1])
        answer = float(self.own(out.detach(), batch[1]))
        self.several.update(out.detach(), batch[1])
        found = self.several.compute()
        self.kept += [answer, float(found["r2"])]
        self.best = min(self.best, answer)
        self.log("root", answer**0.5)
        return {"loss": loss, "quality": f"{float(found['r2']):.6f}"}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.kept.append(float(outputs["quality"]))


def fitted(pipeline):
    module, run = Reads(), trainer(pipeline, max_epochs=2, limit_val_batches=0)
    run.fit(module, loader(samples=30))
    logged = {name: float(value) for name, value in run.callback_metrics.items()}
    return weights(module), logged | {"best": module.best}, module.kept


@pytest.mark.parametrize("way", WAYS)
def test_numbers_made_of_answers_are_one_devices(way):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*micro-batch")
        *found, kept = fitted(WAYS[way])
    *expected, there = fitted(None)
    assert_same(found, expected, tolerance=1e-6)
    assert kept == pytest.approx(there, rel=1e-6)
