"""What a step of evaluation does and the training step does not: with a sanity check before, as users run it."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, TensorDataset

from tests.ranks.lightning_cases import FEATURES, TARGETS, Regression, loader, trainer, weights

PIPELINE = {"stages": 2, "num_microbatches": 2}
WORDS, WIDTH = 9, 8


class Norms(Regression):
    """Reads weights of all stages in validation alone."""

    def validation_step(self, batch, batch_idx):
        loss = mse_loss(self.net(batch[0]), batch[1])
        self.log("penalized", loss + 0.01 * sum(weight.norm() for weight in self.parameters()))
        self.log("first", float(self.net[0].weight.norm()))


class Decodes(Regression):
    """Chooses words one after the other in validation and prediction."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        kinds = {"dtype": torch.float64}
        self.words, self.middle = nn.Embedding(WORDS, WIDTH, **kinds), nn.Linear(WIDTH, WIDTH, **kinds)
        self.net, self.head = nn.Tanh(), nn.Linear(WIDTH, WORDS, **kinds)
        self.chosen = []

    def forward(self, tokens):
        return self.head(self.net(self.middle(self.words(tokens))))

    def decoded(self, tokens):
        for _ in range(3):
            tokens = torch.cat([tokens, self(tokens)[:, -1].argmax(-1, keepdim=True)], 1)
        return tokens

    def training_step(self, batch, batch_idx):
        tokens = batch[0]
        return cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def validation_step(self, batch, batch_idx):
        self.chosen.append(self.decoded(batch[0][:, :2]).tolist())
        self.log("last", self(batch[0])[:, -1].mean())

    def predict_step(self, batch, batch_idx):
        return self.decoded(batch[0][:, :2])


def tokens():
    made = torch.randint(0, WORDS, (14, 6), generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(made), batch_size=4)


def logged(run):
    return {name: float(value) for name, value in run.callback_metrics.items()}


def with_norms(pipeline):
    module, run = Norms(), trainer(pipeline, max_epochs=2)
    run.fit(module, loader(), loader(seed=4))
    return logged(run), weights(module)


def with_decoding(pipeline):
    module, run = Decodes(), trainer(pipeline, max_epochs=2)
    run.fit(module, tokens(), tokens())
    found = trainer(pipeline, enable_progress_bar=False).predict(module, tokens())
    return logged(run), weights(module), module.chosen, [one for one in found if one is not None]


@pytest.mark.parametrize("function", [with_norms, with_decoding])
def test_numbers_of_evaluation_are_those_of_one_device(ranks, function):
    expected = function(None)
    for number, found in enumerate(ranks(2)(function, PIPELINE, group=False)):
        assert found[0] == pytest.approx(expected[0], rel=1e-9)
        for name, weight in expected[1].items():
            torch.testing.assert_close(found[1][name], weight, rtol=1e-9, atol=1e-12)
        for mine, whole in zip(found[2:], expected[2:], strict=True):
            assert [torch.as_tensor(one).tolist() for one in mine] in (
                [],
                [torch.as_tensor(w).tolist() for w in whole],
            )
            assert mine or number


class Scaled(Regression):
    """Lightning takes the length of the first tensor for the size of a batch, which here is 1."""

    def training_step(self, batch, batch_idx):
        loss = mse_loss(self.net(batch["x"] * batch["scale"]), batch["y"])
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss


def scaled_batches():
    generator = torch.Generator().manual_seed(0)
    sizes, kind = (8, 8, 5), {"generator": generator, "dtype": torch.float64}
    return [
        {
            "scale": torch.tensor([2.0], dtype=torch.float64), "x": torch.randn(n, FEATURES, **kind),
            "y": torch.randn(n, TARGETS, **kind),
        }
        for n in sizes
    ]  # fmt: skip


def mean_of_an_epoch(pipeline):
    run = trainer(pipeline, max_epochs=1, limit_val_batches=0)
    run.fit(Scaled(), DataLoader(scaled_batches(), batch_size=None))
    return float(run.callback_metrics["loss"])


def test_the_mean_of_an_epoch_weighs_batches_as_lightning_does(ranks):
    expected = mean_of_an_epoch(None)
    for found in ranks(2)(mean_of_an_epoch, PIPELINE, group=False):
        assert found == pytest.approx(expected, rel=1e-6)


class Halves(Regression):
    """What a micro-batch rounds, the batch rounds otherwise."""

    def training_step(self, batch, batch_idx):
        loss = mse_loss(self.net(batch["x"]), batch["y"])
        self.log("loss", loss, on_step=False, on_epoch=True, batch_size=len(batch["x"]) // 2)
        return loss


def mean_of_halves(pipeline):
    run = trainer(pipeline, max_epochs=1, limit_val_batches=0)
    run.fit(Halves(), DataLoader(scaled_batches(), batch_size=None))
    return float(run.callback_metrics["loss"])


def test_a_batch_size_that_is_rounded_is_that_of_the_batch():
    found = mean_of_halves({"stages": 1, "schedule": "1F1B", "num_microbatches": 4})
    assert found == pytest.approx(mean_of_halves(None), rel=1e-6)
