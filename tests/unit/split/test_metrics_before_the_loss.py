"""What a step works out before its loss, and calls by what is in the batch, is none of the loss's business."""

import pytest
import torch
import torchmetrics.functional as measures
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipeline.errors import SplitError
from tests.ranks.lightning_cases import FEATURES, Regression, trainer

pytestmark = pytest.mark.usefixtures("no_group_is_left")

WAYS = {
    "two stages": {"stages": 1, "stages_per_rank": 2, "schedule": "Interleaved1F1B", "num_microbatches": 2},
    "three": {"stages": 1, "schedule": "1F1B", "num_microbatches": 3},
}
CLASSES = {"task": "multiclass", "num_classes": 3}


def accuracy(out, y):
    return measures.accuracy(out.argmax(-1), y, **CLASSES)


def accuracy_of_some(out, y):
    return measures.accuracy(out.argmax(-1), y, ignore_index=0, **CLASSES)


def correlation(out, y):
    return measures.matthews_corrcoef(out.argmax(-1), y, **CLASSES)


def area(out, y):
    return measures.auroc(out.softmax(-1), y, **CLASSES)


def checked(out, y):
    if len(out.argmax(-1).unique()) > 3:
        raise ValueError("there are three classes")
    return (out.argmax(-1) == y).double().mean()


def by_class(out, y):
    each = cross_entropy(out, y, reduction="none")
    return torch.stack([each[y == k].mean() for k in y.unique()]).max()


def if_all(out, y):
    return out.max() if bool((y > 0).all()) else out.min()


class Measures(Regression):
    """The number is logged where `is_logged`; else it is worked out in vain."""

    def __init__(self, number, is_logged):
        super().__init__()
        self.number, self.is_logged = number, is_logged
        self.head, self.never = nn.Linear(3, 3).double(), nn.Linear(3, 3)

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self.head(self.net(x))
        number = self.number(out.detach(), y)
        loss = cross_entropy(out, y, ignore_index=2)
        self.log("loss", loss)
        if self.is_logged:
            self.log("number", number)
        return loss


def batches():
    x = torch.randn(36, FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, torch.arange(36) * 7 // 3 % 3), batch_size=12)


def fitted(number, is_logged, pipeline):
    torch.manual_seed(3)
    module = Measures(number, is_logged)
    run = trainer(pipeline, max_epochs=1)
    run.fit(module, batches())
    return module, run.callback_metrics


@pytest.mark.filterwarnings("ignore:No positive samples in targets")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("number", "is_logged"),
    [
        (accuracy, True), (accuracy_of_some, False), (correlation, True), (area, False), (checked, True),
        (by_class, False), (if_all, True),
    ],
)  # fmt: skip
def test_the_loss_is_one_devices(recwarn, number, is_logged, way):
    expected, logged = fitted(number, is_logged, None)
    recwarn.clear()
    found, told = fitted(number, is_logged, WAYS[way])
    said = [str(one.message) for one in recwarn if "micro-batch" in str(one.message)]
    assert not said
    for name, weight in expected.named_parameters():
        torch.testing.assert_close(found.get_parameter(name), weight)
    assert {name: float(value) for name, value in told.items()} == pytest.approx(
        {name: float(value) for name, value in logged.items()}, rel=1e-5
    )


class AddsMore(Regression):
    """Calls by what is in the batch, makes a loss to which that of all classes adds, and calls one more layer."""

    def __init__(self):
        super().__init__()
        self.head, self.last = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()
        self.marks = nn.Embedding.from_pretrained(torch.eye(3))

    def training_step(self, batch, batch_idx):
        x, y = batch
        h = self.net(x)
        kinds, out = self.marks(y).argmax(-1).unique(), self.head(h)
        _ = [out.detach()[:, int(k)].mean() for k in kinds]
        loss = cross_entropy(out, y)
        if len(kinds) > 2:
            loss = loss + 0.1 * out.square().mean()
        loss = loss + cross_entropy(self.last(h), y, ignore_index=2)
        self.log("loss", loss)
        return loss


def test_a_loss_to_which_the_batch_adds_before_another_layer_is_not_taken_for_the_micro_batches():
    x = torch.randn(24, FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = torch.tensor([0, 1, 0, 1, 0, 1, 2, 2, 2, 2, 2, 1] * 2)  # three classes in the batch, two in each part
    loader = DataLoader(TensorDataset(x, y), batch_size=12)
    run = trainer({"stages": 1, "num_microbatches": 2}, max_epochs=1)
    with pytest.raises(
        SplitError, match=r"from .*test_metrics_before_the_loss\.py.* on, a micro-batch calls"
    ):
        run.fit(AddsMore(), loader)


class RootOfTheLast(AddsMore):
    """What it calls by what is in the batch comes before a layer, and a root of a mean after it."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        h = self.net(x)
        kinds, out = self.marks(y).argmax(-1).unique(), self.head(h)
        _ = [out.detach()[:, int(k)].mean() for k in kinds]
        loss = cross_entropy(self.last(h), y)
        self.log("root", loss.sqrt())
        return loss


def test_a_root_after_the_next_layer_is_one_devices(recwarn):
    x = torch.randn(24, FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = torch.tensor([0, 1, 0, 1, 0, 1, 2, 2, 2, 2, 2, 1] * 2)
    logged = []
    for pipeline in (None, {"stages": 1, "num_microbatches": 2}):
        torch.manual_seed(3)
        run = trainer(pipeline, max_epochs=1)
        run.fit(RootOfTheLast(), DataLoader(TensorDataset(x, y), batch_size=12))
        logged.append(float(run.callback_metrics["root"]))
    assert logged[1] == pytest.approx(logged[0], rel=1e-10)
    assert not [one for one in recwarn if "self.log" in str(one.message)]
