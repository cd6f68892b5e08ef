"""Two passes through the same layers, with micro-batches of different sizes."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from lightning_pipeline.data import signature_of
from lightning_pipeline.errors import SplitError
from lightning_pipeline.model.tensors import TensorSpec, fitted, sizes_between
from tests.unit.split.pipe import Module, alone, assert_same, piped


class TwoPasses(Module):
    """The second pass starts on the first stage, after code that reads the first pass's shape."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*[nn.Linear(6, 6, dtype=torch.float64) for _ in range(4)])

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        first = F.mse_loss(self.net(x), y)
        second = F.mse_loss(self.net(x.flip(0)), y)
        return first + 0.5 * second


def test_shapes_of_later_units_are_those_of_each_microbatch() -> None:
    torch.manual_seed(0)
    batch = (torch.randn(8, 6, dtype=torch.float64), torch.randn(8, 6, dtype=torch.float64))
    module = TwoPasses()
    for stages in (2, 4):
        assert_same(piped(module, batch, stages=stages, num_microbatches=3), alone(module, batch, 3))


class Looks(nn.Linear):
    """Looks at values, so that only a rank with its weights can find out what it returns."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 1.5 if x.sum() > 0 else x)


def test_a_unit_that_looks_at_values_meets_a_new_size_on_another_stage() -> None:
    torch.manual_seed(0)
    module, x = TwoPasses(), torch.randn(8, 6, dtype=torch.float64)
    module.net = nn.Sequential(*[Looks(6, 6, dtype=torch.float64) for _ in range(4)])

    def each(root: Module, number: int) -> tuple[Tensor, Tensor]:
        rows = x[: (8, 5)[number]]
        return rows, rows.cos()

    for stages in (2, 4):
        mine = piped(module, each(module, 0), stages=stages, num_microbatches=1, steps=2, each=each)
        assert_same(mine, alone(module, None, 1, steps=2, each=each))


class CountsInside(nn.Module):
    """A unit with a counter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(6, 6, dtype=torch.float64), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(self.layer(x))


class ReadsCounter(Module):
    """Reads it before the unit of this step has run."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(CountsInside(), CountsInside())

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        scale = 1.0 + self.net[1].calls
        return F.mse_loss(self.net(batch[0]), batch[1]) * scale


def test_an_attribute_of_a_unit_that_is_read_before_the_unit_sets_it_is_refused() -> None:
    batch = (torch.randn(4, 6, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64))
    with pytest.raises(SplitError, match=r"attribute 'net\.1\.calls' .* test_later_shapes\.py:\d+"):
        piped(ReadsCounter(), batch)


class SecondPassOfOne(TwoPasses):
    """The last stage's units are called before the first stages' last call."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Sequential(*[nn.Linear(6, 6, dtype=torch.float64) for _ in range(2)])

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = (self.net(x) * self.other(y) * self.net(x + 1)).mean()
        self.log("loss", loss.item())
        return loss


def test_the_last_call_may_be_that_of_a_stage_before_the_last() -> None:
    torch.manual_seed(0)
    batch = (torch.randn(8, 6, dtype=torch.float64), torch.randn(8, 6, dtype=torch.float64))
    module = SecondPassOfOne()
    for stages in (2, 3):
        assert_same(piped(module, batch, stages, 3), alone(module, batch, 3))


PADDED, LEFT_OUT = 8, -100


def padded_texts(number: int, samples: int = 4) -> dict[str, Tensor]:
    """Texts of other lengths for each number, all of one width."""
    generator = torch.Generator().manual_seed(number)
    lengths = torch.randint(2, PADDED + 1, (samples,), generator=generator)
    tokens = torch.randint(1, 20, (samples, PADDED), generator=generator)
    tokens[torch.arange(PADDED) >= lengths[:, None]] = 0
    return {"x": tokens, "y": torch.where(tokens > 0, tokens % 4, LEFT_OUT), "lengths": lengths}


class Packed(Module):
    """A layer is called with as many rows as there are words."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 6), nn.Linear(10, 4)
        self.recurrent = nn.LSTM(6, 5, bidirectional=True, batch_first=True)
        self.double()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        words = self.embedding(batch["x"])
        packed = pack_padded_sequence(words, batch["lengths"], batch_first=True, enforce_sorted=False)
        found, _ = pad_packed_sequence(
            self.recurrent(packed)[0], batch_first=True, total_length=batch["x"].shape[1]
        )
        return F.cross_entropy(self.head(found).mT, batch["y"], ignore_index=LEFT_OUT)


class Selected(Packed):
    """The same, by a mask."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        found, _ = self.recurrent(self.embedding(batch["x"]))
        mask = batch["x"] > 0
        return F.cross_entropy(self.head(found[mask]), batch["y"][mask])


@pytest.mark.filterwarnings("error:.*taken for a mean over samples")
@pytest.mark.parametrize("kind", [Packed, Selected])
@pytest.mark.parametrize("number", [1, 2])
def test_sizes_by_values_are_those_of_each_batch(kind: type[Packed], number: int) -> None:
    torch.manual_seed(0)
    module = kind()

    def each(root: Module, number: int) -> dict[str, Tensor]:
        return padded_texts(number)

    one = alone(module, None, 1, steps=number + 1, each=each)
    mine = piped(module, each(module, 0), 2, 2, steps=number + 1, follow=True, each=each)
    for name, gradient in one.gradients.items():
        torch.testing.assert_close(mine.gradients[name], gradient, rtol=1e-10, atol=1e-10)


def test_rows_that_are_as_many_as_targets_are_told_from_them() -> None:
    """Both are of size 3 where the step was traced: a run ahead of later batches had 6 targets, and ended there."""
    traced = signature_of((torch.zeros(3, 7), torch.zeros(3, 3)), {})
    spec = TensorSpec.of(torch.zeros(3, 3))
    rows = sizes_between(traced, signature_of((torch.zeros(6, 7), torch.zeros(6, 3)), {}))
    assert fitted(spec, rows).shape == (6, 3)
    attended = TensorSpec.of(torch.zeros(2, 7, 7))
    longer = sizes_between(traced, signature_of((torch.zeros(3, 9), torch.zeros(3, 3)), {}))
    assert fitted(attended, longer).shape == (2, 9, 9)
