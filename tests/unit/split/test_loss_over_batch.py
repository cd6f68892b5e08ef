"""A loss that compares the samples of a batch is that of the whole batch on one device."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_pipeline.errors import PlaceholderError, SplitError
from tests.unit.split.pipe import Module, alone, assert_same, piped

SAMPLES, WIDTH = 10, 6


pytestmark = pytest.mark.usefixtures("float64")


def batch(samples: int = SAMPLES) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    image, text = torch.randn(2, samples, WIDTH, generator=generator)
    return {"image": image, "text": text}


def layers(number: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(number)))


def info_nce(one: Tensor, other: Tensor, temperature: Tensor | float) -> Tensor:
    logits = F.normalize(one) @ F.normalize(other).T / temperature
    return F.cross_entropy(logits, torch.arange(len(logits)))


class Contrastive(Module):
    """Two views through one encoder."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = layers(4)
        self.temperature = nn.Parameter(torch.tensor(0.5))
        self.criterion: nn.Module | None = None

    def both(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return self.net(batch["image"]), self.net(batch["text"])

    def loss(self, one: Tensor, other: Tensor) -> Tensor:
        return info_nce(one, other, self.temperature)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = self.loss(*self.both(batch))
        self.log("loss", loss)
        self.log("samples", len(batch["image"]))
        return loss

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        one, other = self.both(batch)
        return one @ other.T


class Clip(Contrastive):
    """Two towers, a learned scale, a loss in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.scale = layers(3), nn.Parameter(torch.tensor(1.3))
        self.to_image, self.to_text = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)

    def both(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return self.to_image(self.net(batch["image"])), self.to_text(self.text(batch["text"]))

    def loss(self, one: Tensor, other: Tensor) -> Tensor:
        temperature = torch.exp(-self.scale)
        return (info_nce(one, other, temperature) + info_nce(other, one, temperature)) / 2


class Criterion(nn.Module):
    """A loss that is a module, with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        return info_nce(one, other, self.temperature)


class WithCriterion(Contrastive):
    """The last unit compares samples, so it has to run once for the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.criterion = Criterion()

    def loss(self, one: Tensor, other: Tensor) -> Tensor:
        assert self.criterion is not None
        return self.criterion(one, other)


class WithHeadBehind(WithCriterion):
    """Units behind the loss: one reads what compares samples, one does not."""

    def __init__(self) -> None:
        super().__init__()
        self.similarity = nn.Bilinear(WIDTH, WIDTH, 1)
        self.head = nn.Linear(WIDTH, 1)

    def loss(self, one: Tensor, other: Tensor) -> Tensor:
        weight = self.similarity(one.mean(0), other.mean(0)).sigmoid().sum()
        return weight * super().loss(one, other) + self.head(one * other).var()


class BarlowTwins(Contrastive):
    """Correlations over the batch, skips from the first units, a region of activation checkpointing."""

    def loss(self, one: Tensor, other: Tensor) -> Tensor:
        one, other = (one - one.mean(0)) / one.std(0), (other - other.mean(0)) / other.std(0)
        found = one.T @ other / len(one)
        return (found - torch.eye(WIDTH)).pow(2).sum()

    def both(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        first = self.net[0](batch["image"])
        other = first
        for layer in list(self.net)[1:]:
            other = checkpoint(lambda h, f=layer: h + f(h).sin(), other, use_reentrant=False)
        return first, other


class Leaves(Contrastive):
    """Leaves behind what it had for the batch, and reads it in the next."""

    def __init__(self) -> None:
        super().__init__()
        self.before: Tensor | None = None
        self.norm = nn.BatchNorm1d(WIDTH, affine=False)

    def loss(self, one: Tensor, other: Tensor) -> Tensor:
        loss = info_nce(one, other, 0.5)
        if self.before is not None:
            loss = loss + (one - self.before).pow(2).mean()
        self.before = one.detach()
        return loss


MODELS = [Contrastive, Clip, WithCriterion, WithHeadBehind, BarlowTwins, Leaves]


CASES = [(make, *sizes) for make in MODELS for sizes in ((2, 4), (3, 7))]


@pytest.mark.parametrize(("make", "stages", "number"), [*CASES, (Clip, 2, 7), (Clip, 3, 4)])
def test_gradients_and_logs_are_those_of_the_whole_batch(make: Any, stages: int, number: int) -> None:
    how: Any = ["net.2", "similarity"] if stages == 3 and make is WithHeadBehind else "uniform"
    mine = piped(make(), batch(), stages, number, over_batch=True, steps=2, how=how)
    assert_same(mine, alone(make(), batch(), 1, steps=2))


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize(
    ("ranks", "split"), [([[0, 2], [1]], True), ([[0], [1, 2]], False), ([[0, 1, 2]], True)]
)
def test_with_several_stages_on_a_rank_and_a_split_backward(ranks: Any, split: bool, number: int) -> None:
    mine = piped(Clip(), batch(), 3, number, over_batch=True, ranks=ranks, split_backward=split)
    assert_same(mine, alone(Clip(), batch(), 1))


def test_one_stage_and_every_unit_in_the_loss() -> None:
    make = lambda: WithCriterion()  # noqa: E731
    mine = piped(make(), batch(), 1, 3, over_batch=True, units=["net", "criterion"])
    assert_same(mine, alone(make(), batch(), 1))
    last = piped(make(), batch(), 2, 3, over_batch=True, units=["net", "criterion"], how=["criterion"])
    assert_same(last, alone(make(), batch(), 1))


def test_a_model_of_hugging_face_with_its_own_loss() -> None:
    from transformers import CLIPConfig, CLIPModel

    class HuggingFace(Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            sizes = {
                "hidden_size": 8,
                "intermediate_size": 8,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
            }
            text = {**sizes, "vocab_size": 20, "max_position_embeddings": 6, "eos_token_id": 19}
            vision = {**sizes, "image_size": 8, "patch_size": 4}
            self.clip = CLIPModel(
                CLIPConfig(text_config=text, vision_config=vision, projection_dim=4)
            ).double()

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            return self.clip(**batch, return_loss=True).loss

    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 19, (6, 5), generator=generator)
    ids[:, -1] = 19
    data = {"input_ids": ids, "pixel_values": torch.randn(6, 3, 8, 8, generator=generator)}
    for stages, number in ((2, 4), (3, 3)):
        mine = piped(HuggingFace(), data, stages, number, over_batch=True)
        assert_same(mine, alone(HuggingFace(), data, 1))


def test_evaluation_returns_what_one_device_returns() -> None:
    mine = piped(Clip(), batch(), 2, 4, over_batch=True, step="predict_step", split_by="training_step")
    (theirs,) = alone(Clip(), batch(), 1, step="predict_step").outputs
    torch.testing.assert_close(mine.outputs, [theirs], rtol=1e-10, atol=1e-10)


class Noisy(Contrastive):
    """Draws noise before the first unit; `read`: and again in the loss."""

    def __init__(self, read: bool) -> None:
        super().__init__()
        self.read = read

    def both(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        noise = torch.randn_like(batch["image"])
        one, other = self.net(batch["image"] + noise), self.net(batch["text"])
        return (one * noise if self.read else one), F.dropout(other, 0.5)


def test_noise_before_the_units_is_drawn_for_each_micro_batch_and_not_to_be_read_after() -> None:
    assert piped(Noisy(False), batch(), 2, 4, over_batch=True).losses[0].isfinite()
    with pytest.raises(PlaceholderError, match="(?s)drawn between units is drawn for each micro-batch.*last"):
        piped(Noisy(True), batch(), 2, 4, over_batch=True)


class Auxiliary(Contrastive):
    """The first layer returns a number for all samples beside its rows."""

    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), x.pow(2).mean()

    def __init__(self) -> None:
        super().__init__()
        self.net[0] = Auxiliary.Layer(WIDTH, WIDTH)

    def both(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, self.number = self.net[0](batch["image"])
        for layer in list(self.net)[1:]:
            hidden = layer(hidden)
        return hidden, hidden * self.number


def test_a_number_for_all_samples_is_refused_with_the_unit() -> None:
    with pytest.raises(
        SplitError, match=r"unit 'net.0' returns .*no row for each sample.*after the last unit"
    ):
        piped(Auxiliary(), batch(), 2, 4, over_batch=True)


class Skips(Contrastive):
    """Returns None for batches, or micro-batches, without a sample above a number."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        if batch["image"].max() < self.above:
            return None
        return super().training_step(batch, batch_idx)


def test_a_step_returns_none_for_the_batch_or_for_no_part_of_it() -> None:
    def made(above: float) -> Skips:
        module = Skips()
        module.above = above
        return module

    assert piped(made(9.0), batch(), 2, 4, over_batch=True).losses == [None]
    with pytest.raises(SplitError, match="takes another way through the model than the whole batch"):
        piped(made(float(batch()["image"][-1].max()) + 1e-9), batch(), 2, 7, over_batch=True)
