"""What a step returns is what it returns for the batch as one, in hooks after the batch."""

import warnings

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from torch.nn.functional import mse_loss, one_hot
from torch.utils.data import DataLoader, Dataset

from tests.ranks.lightning_cases import Regression, loader, trainer
from tests.unit.split.test_logged_as_one import WAYS

pytestmark = pytest.mark.usefixtures("no_group_is_left")


def total(out, y, index):
    return (out - y).abs().sum()


def root(out, y, index):
    return mse_loss(out, y).sqrt()


def read_root(out, y, index):
    return float(mse_loss(out, y).sqrt())


def array_of_sums(out, y, index):
    return (out - y).abs().sum(0).numpy()


def largest(out, y, index):
    return (out - y).abs().max()


def masked(out, y, index):
    kept = y[:, 0] > 0
    return ((out - y).square().mean(1) * kept).sum() / kept.sum()


def place(out, y, index):
    return index + 5  # what a micro-batch has of samples, in one of the ways


def count(out, y, index):
    return int((out > y).sum())


def any_is_large(out, y, index):
    return (out - y).abs().max() > 1.6


def text(out, y, index):
    return f"error {float((out - y).abs().max()):.4f}"


def confusion(out, y, index):
    found, there = one_hot(out.argmax(1), 3), one_hot(y.argmax(1), 3)
    return there.T @ found


def chosen(out, y, index):
    return out[y[:, 0] > 0]


def centered(out, y, index):
    return out - out.mean(0)


def ranks_of(out, y, index):
    return out[:, 0].argsort().tolist()


def by_name(out, y, index):
    return {"rows": out, "sums": [out.sum(), (out**2).sum()], "pair": (len(out), out.std())}


def for_few_alone(out, y, index):
    return out.sum() if len(out) < 5 else None


MADE = [
    total, root, read_root, array_of_sums, largest, masked, place, count, any_is_large, text, confusion,
    chosen, centered, ranks_of, by_name, for_few_alone,
]  # fmt: skip


class Returns(Regression):
    def __init__(self, made):
        super().__init__()
        self.made = made

    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        return {"loss": mse_loss(out, batch[1]), "made": self.made(out.detach(), batch[1], batch_idx)}

    def validation_step(self, batch, batch_idx):
        return self.made(self.net(batch[0]), batch[1], batch_idx)

    def predict_step(self, batch, batch_idx):
        return {"made": self.made(self.net(batch[0]), batch[1], batch_idx)}


class Keeps(Callback):
    """What hooks are given."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, outputs, *args):
        self.seen.append(outputs["made"])

    def on_validation_batch_end(self, trainer, pl_module, outputs, *args):
        self.seen.append(outputs)


def plain(value):
    if isinstance(value, dict | list | tuple):
        items = value.values() if isinstance(value, dict) else value
        return type(value).__name__, [plain(item) for item in items]
    if isinstance(value, torch.Tensor | np.ndarray):
        return type(value).__name__, np.round(np.asarray(value, dtype=float), 5).tolist()
    return round(value, 5) if isinstance(value, float) else value


def fitted(pipeline, made):
    module, keeps = Returns(made), Keeps()
    run = trainer(pipeline, callbacks=[keeps], max_epochs=2)
    run.fit(module, loader(samples=38), loader(seed=4))
    predicted = run.predict(module, loader(seed=5))
    return [plain(one) for one in [*keeps.seen, *predicted]]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("made", MADE)
def test_what_a_step_returns_is_one_devices(made, way):
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=r"(std|var)\(\): degrees of freedom"
        )  # of one sample, by torch
        found = fitted(WAYS[way], made)
    for one, other in zip(found, fitted(None, made), strict=True):
        assert one == other


def over_ranks(pipeline):
    return [fitted(pipeline, made)[:5] for made in (total, count)]


def test_every_rank_is_told_what_a_training_step_returns(ranks):
    expected = over_ranks(None)
    for on_rank in ranks(2)(over_ranks, {"stages": 2, "num_microbatches": 3}, group=False):
        assert on_rank == expected


class Named(Dataset):
    """Samples with a name, of which `default_collate` makes a tuple."""

    def __len__(self):
        return 7

    def __getitem__(self, index):
        return {
            "x": torch.full((6,), float(index)).double(),
            "name": f"sample {index}",
            "path": [f"a/{index}"],
        }


class NamesPredictions(Regression):
    def predict_step(self, batch, batch_idx):
        out = self.net(batch["x"])
        return {
            name: (float(row.sum()), path)
            for name, row, path in zip(batch["name"], out, batch["path"][0], strict=True)
        } | {"names": batch["name"]}


def predicted(pipeline):
    module = NamesPredictions()
    return trainer(pipeline).predict(module, DataLoader(Named(), batch_size=4))


def test_names_go_with_their_samples():
    assert predicted(WAYS["two"]) == predicted(None)
