"""Metrics that make probabilities of logits where a logit of the call is none: given those of the batch."""

import pytest
from torch import nn
from torch.nn.functional import mse_loss
from torchmetrics import AUROC, Accuracy, AveragePrecision, F1Score

from tests.ranks.lightning_cases import TARGETS, Regression, loader, trainer
from tests.unit.split.test_logged_as_one import WAYS

pytestmark = pytest.mark.usefixtures("no_group_is_left")


class Measures(Regression):
    """Of some micro-batches all logits may be probabilities, of their batch not."""

    def __init__(self):
        super().__init__()
        several = {"task": "multilabel", "num_labels": TARGETS}
        self.metrics = nn.ModuleDict({
            "f1": F1Score(**several), "accuracy": Accuracy(**several), "precision": AveragePrecision(**several),
            "auroc": AUROC(task="multiclass", num_classes=TARGETS),
        })  # fmt: skip

    def training_step(self, batch, batch_idx):
        return mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        logits = self.net(batch[0]).float() + 0.5
        for name, metric in self.metrics.items():
            metric.update(logits, batch[1].argmax(1) if name == "auroc" else (batch[1] > 0).long())
            self.log(name, metric)


def measured(pipeline):
    run = trainer(pipeline, max_epochs=1)
    run.fit(Measures(), loader(samples=38), loader(samples=60, seed=4))
    return {name: value.item() for name, value in run.callback_metrics.items()}


@pytest.mark.parametrize("way", WAYS)
def test_metrics_are_given_the_logits_of_the_batch(way):
    assert measured(WAYS[way]) == pytest.approx(measured(None), rel=1e-6)
