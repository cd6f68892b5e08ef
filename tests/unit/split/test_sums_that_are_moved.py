"""Sums over samples that are transposed, picked from or multiplied by what is no number of the batch: sums, too."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import linear, one_hot, pad
from torch.utils.data import DataLoader, TensorDataset

from tests.ranks.lightning_cases import FEATURES, Regression, assert_same, trainer, weights

pytestmark = pytest.mark.usefixtures("no_group_is_left")

EYE = torch.eye(3, dtype=torch.bool)
ONES = torch.ones(3, dtype=torch.float64)
SUMS = {
    "transpose": lambda m: m.transpose(0, 1)[0], "T": lambda m: m.T[:2], "tril": lambda m: m.tril(),
    "triu": lambda m: m.triu(1), "diagonal": lambda m: m.diagonal(), "trace": lambda m: m.trace(),
    "fill_diagonal_": lambda m: m.fill_diagonal_(0), "masked_fill": lambda m: m.masked_fill(EYE, 0.0),
    "where": lambda m: torch.where(EYE, m, 0.0), "where not": lambda m: torch.where(EYE, 0.0, m),
    "masked_select": lambda m: m.masked_select(EYE), "mask": lambda m: m[~EYE],
    "index_select": lambda m: m.index_select(0, torch.tensor([0, 2])),
    "gather": lambda m: m.gather(0, torch.tensor([[0, 1, 2]])), "cumsum": lambda m: m.cumsum(0)[1],
    "roll": lambda m: (m - m.roll(1, 0))[0], "unbind": lambda m: m.unbind(0)[1], "chunk": lambda m: m.chunk(3)[0],
    "expand": lambda m: m.expand(2, 3, 3), "repeat": lambda m: m.repeat(2, 1), "pad": lambda m: pad(m, (1, 1)),
    "matmul": lambda m: m @ ONES, "rmatmul": lambda m: ONES @ m, "dot": lambda m: m[0].dot(ONES),
    "linear": lambda m: linear(m, ONES[None] * 2), "einsum": lambda m: torch.einsum("ij->j", m),
    "diff": lambda m: m.diff(dim=0).diff(dim=1), "outer": lambda m: torch.outer(m[0], ONES),
    "kron": lambda m: torch.kron(m, ONES[None]), "tensordot": lambda m: torch.tensordot(m, ONES[:, None], 1),
}  # fmt: skip
OTHERS = {
    "spread": lambda m: m.std(), "largest": lambda m: m.amax(0), "abs": lambda m: m.abs().sub(0.1).abs(),
    "padded by one": lambda m: pad(m, (1, 1), value=1.0) ** 2, "itself": lambda m: m @ m,
    "by the batch": lambda m: m @ m.detach().sum(0), "root": lambda m: m.T.add(0.1).sqrt(),
}  # fmt: skip


class Moves(Regression):
    def __init__(self, move):
        super().__init__()
        self.move = move

    def training_step(self, batch, batch_idx):
        x, y = batch
        table = self.net(x).softmax(1).T @ one_hot(y, 3).double() / len(x)
        return self.move(table).sum()


def batches():
    x = torch.randn(24, FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    return DataLoader(TensorDataset(x, torch.arange(24) * 5 % 7 % 3), batch_size=8)


def fitted(make, pipeline):
    torch.manual_seed(1)
    module = make()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(pipeline, max_epochs=1, limit_val_batches=0).fit(module, batches())
    said = [text for one in caught if "samples" in (text := str(one.message)) and "_step" in text]
    return (weights(module), {}), said


WAY = {"stages": 1, "schedule": "1F1B", "num_microbatches": 2}


@pytest.mark.parametrize("name", SUMS)
def test_it_is_one_devices(name):
    expected, _ = fitted(lambda: Moves(SUMS[name]), None)
    found, said = fitted(lambda: Moves(SUMS[name]), WAY)
    assert not said
    assert_same(found, expected)


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_sum_is_said(name):
    assert fitted(lambda: Moves(OTHERS[name]), WAY)[1]


ROWS = {
    "gather": lambda r, y: r.gather(1, y[:, None]), "T": lambda r, y: r.T[:2], "flip": lambda r, y: r.flip(1)[:, :2],
    "masked_fill": lambda r, y: r.masked_fill(y[:, None] == 1, 0), "unbind": lambda r, y: r.unbind(1)[1],
    "where": lambda r, y: torch.where(y[:, None] == 1, r, 0.0), "linear": lambda r, y: linear(r, ONES[None] * 2),
    "scatter": lambda r, y: r.scatter(1, y[:, None], 0.0), "chunk": lambda r, y: r.chunk(3, 1)[0],
    "transpose": lambda r, y: r.transpose(0, 1)[0], "cumsum": lambda r, y: r.cumsum(1), "pad": lambda r, y: pad(r, (1, 1)),
}  # fmt: skip


class MovesRows(Moves):
    def training_step(self, batch, batch_idx):
        x, y = batch
        return self.move(self.net(x) / x.abs().max(), y).mean()


@pytest.mark.parametrize("name", ROWS)
def test_rows_over_a_number_of_the_batch_are_one_devices(name):
    expected, _ = fitted(lambda: MovesRows(ROWS[name]), None)
    found, said = fitted(lambda: MovesRows(ROWS[name]), WAY)
    assert not said
    assert_same(found, expected)


class OfViews(Regression):
    """FastSiam: each view against the mean of the others."""

    def training_step(self, batch, batch_idx):
        views = torch.stack([self.net(batch[0] + 0.1 * view) for view in range(3)])
        loss = 0.0
        for view in range(3):
            others = views.detach()[torch.arange(3) != view].mean(0)
            loss = loss - nn.functional.cosine_similarity(views[view], others, 1).mean() / 3
        return loss


def test_a_mask_of_what_each_sample_has_picks_no_samples():
    expected, _ = fitted(OfViews, None)
    found, said = fitted(OfViews, WAY)
    assert not said
    assert_same(found, expected)


class Precision(Regression):
    """SNGP: a buffer is added to in place by values that have gradients."""

    def __init__(self):
        super().__init__()
        self.register_buffer("precision", torch.eye(3, dtype=torch.float64))
        self.table = torch.zeros(3, 3, dtype=torch.float64)

    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        self.precision += out.t() @ out
        self.table += out.t() @ out
        return nn.functional.cross_entropy(out, batch[1])


def test_a_tensor_may_be_added_to_with_gradients():
    (expected, _), _ = fitted(Precision, None)
    for way in (WAY, {**WAY, "stages_per_rank": 2, "schedule": "Interleaved1F1B"}):
        module = Precision()
        trainer(way, max_epochs=1, limit_val_batches=0).fit(module, batches())
        assert_same((weights(module), {}), (expected, {}))
        reference = Precision()
        trainer(None, max_epochs=1, limit_val_batches=0).fit(reference, batches())
        torch.testing.assert_close(module.precision, reference.precision)
        torch.testing.assert_close(module.table, reference.table)
