"""Through the Trainer: a loss with a divisor of its own trains and logs as one device does with whole batches."""

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import MeanMetric

from lightning_pipeline.errors import ConfigurationError
from tests.ranks.lightning_cases import Regression, assert_same, fit, loader


class Masked(Regression):
    """Some targets do not count, in the first samples of a batch none; logs in training and validation."""

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        mask = (batch[1] > 0.3).double()
        error = (self.net(batch[0]) - batch[1]).pow(2)
        return (error * mask).sum() / (mask.sum() + 1e-9) + 0.1 * error.mean()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("number", loss.item(), on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))
        self.log("val_given", self.net(batch[0]).mean(), batch_size=3)
        self.error.update(self.net(batch[0]), batch[1])
        self.log("val_error", self.error)


class Summed(Masked):
    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(self.net(batch[0]), batch[1], reduction="sum") / 100


class Classified(Masked):
    """Class weights, and targets that are left out."""

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        target = batch[1].argmax(1).masked_fill(batch[1][:, 0] > 1, -100)
        return F.cross_entropy(self.net(batch[0]), target, weight=torch.tensor([1.0, 2.0, 3.0]).double())


class Hooked(Masked):
    """Counts what it divides by; where that is nothing the loss is nan, which adds nothing."""

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        mask = batch[1] > 0.9
        return torch.linalg.vector_norm((self.net(batch[0]) - batch[1])[mask]).square() / mask.sum()

    def microbatch_weight(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (batch[1] > 0.9).sum()

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.net(batch[0])


class Looped(Masked):
    """Goes through the samples one by one, of which some do not count, as detectors do."""

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        rows = zip(self.net(batch[0]), batch[1], strict=True)
        errors = [(row - target)[target > 0.3].square().sum() for row, target in rows]
        return torch.stack(errors).sum() / (batch[1] > 0.3).sum().clamp(min=1)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.net(batch[0])


SCHEDULES = [
    {"stages": 2, "num_microbatches": 4},
    {"stages": 3, "num_microbatches": 3, "schedule": "ZBH1"},
    {"stages": 2, "num_microbatches": 4, "schedule": "Interleaved1F1B", "stages_per_rank": 2},
    {"stages": 2, "num_microbatches": 4, "schedule": "ZBV"},
]


def run(pipeline: dict[str, Any] | None, make: Any, **options: Any) -> Any:
    return fit(pipeline, make, **options)


@pytest.mark.parametrize(
    ("make", "case"),
    [
        (Masked, 0),
        (Masked, 1),
        (Masked, 2),
        (Masked, 3),
        (Summed, 0),
        (Classified, 0),
        (Hooked, 0),
        (Looped, 1),
    ],
)
def test_weights_and_logs_are_those_of_whole_batches_on_one_device(ranks: Any, make: Any, case: int) -> None:
    pipeline = SCHEDULES[case]
    expected = run(None, make)
    for found in ranks(pipeline["stages"])(run, pipeline, make, group=False):
        assert_same(found, expected)


def one_step(pipeline: dict[str, Any] | None) -> float:
    return run(pipeline, Regression, max_steps=1)[1]["train_loss_step"]


@pytest.mark.parametrize(("how", "factor"), [("sum", 4.0), ("samples", 1.0)])
def test_the_user_can_choose_how_losses_add_up(ranks: Any, how: str, factor: float) -> None:
    pipeline = {"stages": 2, "num_microbatches": 4, "loss_weighting": how}
    expected = one_step(None)
    for loss in ranks(2)(one_step, pipeline, group=False):
        assert loss == pytest.approx(factor * expected, rel=1e-12)


class Chosen(Regression):
    """Logs, measures and keeps what is no mean over samples, beside a loss of which the user says what it is."""

    def __init__(self) -> None:
        super().__init__(lr=0.001)
        self.losses = MeanMetric().set_dtype(torch.float64)
        self.register_buffer("ema", torch.zeros((), dtype=torch.float64))

    def of(self, out: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(out, y, reduction="sum")

    def masked(self, out: Tensor, y: Tensor) -> Tensor:
        mask = y > 0.3
        return (out - y)[mask].square().sum() / mask.sum().clamp(min=1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        out, y = self.net(batch[0]), batch[1]
        loss = self.of(out, y)
        self.losses.update(loss.detach())
        self.log("losses", self.losses, on_step=False, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("masked", self.masked(out, y), on_step=True, on_epoch=True)
        self.log("root", F.mse_loss(out, y).sqrt(), on_epoch=True)
        self.ema = 0.9 * self.ema + 0.1 * self.masked(out, y).detach()
        self.log("ema", self.ema)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        out, y = self.net(batch[0]), batch[1]
        self.log("val_masked", self.masked(out, y))
        self.log("val_sum", self.of(out, y))
        self.log("val_root", F.mse_loss(out, y).sqrt())


class OfMeans(Chosen):
    def of(self, out: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(out, y)


class OfMasks(Chosen):
    def of(self, out: Tensor, y: Tensor) -> Tensor:
        return self.masked(out, y)

    def microbatch_weight(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        assert self.trainer.training, "asked of batches that are trained on"
        return (batch[1] > 0.3).sum()


class OfMixed(OfMasks):
    """Targets are those of the batch by its mean, so that a micro-batch's loss is divided by the batch's number."""

    def masked(self, out: Tensor, y: Tensor) -> Tensor:
        mask = y > 0.3
        return (out - (y - y.mean(0)) / y.std(0))[mask].square().sum() / mask.sum().clamp(min=1)


CHOSEN: list[tuple[Any, dict[str, Any]]] = [
    (Chosen, {"loss_weighting": "sum"}),
    (OfMeans, {"loss_weighting": "samples"}),
    (OfMasks, {}),
    (OfMixed, {}),
]


@pytest.mark.parametrize(("make", "options"), CHOSEN, ids=["sum", "samples", "hook", "hook of mixed"])
def test_what_is_no_loss_is_followed_where_the_user_weighs_the_loss(
    ranks: Any, make: Any, options: dict[str, Any]
) -> None:
    expected = run(None, make)
    for found in ranks(2)(run, {"stages": 2, "num_microbatches": 2, **options}, make, group=False):
        assert_same(found, expected)


class Root(Chosen):
    def of(self, out: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(out, y).sqrt()


def test_the_loss_is_logged_as_the_user_weighs_it_and_nothing_is_said_of_it() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = run({"stages": 1, "num_microbatches": 2, "loss_weighting": "samples"}, Root, max_steps=1)[1]
    assert not [one for one in said if "loss" in str(one.message) or "training_step" in str(one.message)]
    roots = []
    for half in torch.arange(8).chunk(2):
        module = Root()
        x, y = (tensor[half] for tensor in next(iter(loader())))
        roots.append(float(module.of(module.net(x), y).detach()))
    assert found["loss_step"] == pytest.approx(sum(roots) / 2, rel=1e-12)
    assert found["root"] != pytest.approx(sum(roots) / 2, rel=1e-6)


class OfLost(OfMixed):
    def of(self, out: Tensor, y: Tensor) -> Tensor:
        return self.masked(out, y).sqrt() ** 1.5


@pytest.mark.filterwarnings("ignore:training_step works out 'ema'")
def test_weights_of_losses_that_are_made_of_the_batch_are_warned_of() -> None:
    with pytest.warns(UserWarning, match="mixes samples of the batch.*which may divide them twice"):
        run({"stages": 1, "num_microbatches": 2}, OfLost, max_steps=1)


class Negative(Hooked):
    def microbatch_weight(self, batch: tuple[Tensor, Tensor]) -> Any:
        return -1.0


def test_a_weight_that_is_none_is_refused(ranks: Any) -> None:
    outcome = ranks(2).outcomes(run, {"stages": 2, "num_microbatches": 4}, Negative, group=False)[0]
    assert ConfigurationError.__name__ in str(outcome) and "microbatch_weight" in str(outcome)


class Measured(Regression):
    """Updates a metric whose code calls loss functions."""

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.error.update(self.net(batch[0]), batch[1])
        self.log("val_error", self.error)


def test_what_a_metric_calls_is_none_of_the_steps_functions(recwarn: pytest.WarningsRecorder) -> None:
    many = {"stages": 1, "stages_per_rank": 2, "schedule": "LoopedBFS", "num_microbatches": 2}
    assert_same(fit(many, Measured), fit(None, Measured))
    assert [str(one.message) for one in recwarn if "calls other functions" in str(one.message)] == []


class BySteps(Regression):
    """Divides its loss by what counts in each third step."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        mask, error = (batch[1] > 0.3).double(), (self.net(batch[0]) - batch[1]).pow(2)
        if self.global_step % 3 != 2:
            return error.mean()
        return (error * mask).sum() / mask.sum()


class LogsBySteps(Regression):
    """Logs such a mean in each third step."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        mask, error = (batch[1] > 0.3).double(), (self.net(batch[0]) - batch[1]).pow(2)
        if self.global_step % 3 == 2:
            self.log("masked", (error * mask).sum() / mask.sum())
        return error.mean()


@pytest.mark.parametrize(("make", "case"), [(BySteps, 0), (BySteps, 2), (LogsBySteps, 0)])
def test_what_the_number_of_a_step_decides_of_a_loss_is_followed(
    ranks: Any, recwarn: pytest.WarningsRecorder, make: Any, case: int
) -> None:
    expected = run(None, make)
    for found in ranks(SCHEDULES[case]["stages"])(run, SCHEDULES[case], make, group=False):
        assert_same(found, expected)
    assert_same(run({"stages": 1, "num_microbatches": 4}, make), expected)
    assert [str(one.message) for one in recwarn if "calls other functions" in str(one.message)] == []
