"""What a step gives to loggers by itself is written once a batch, as on one device."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from torch.nn.functional import dropout, mse_loss

from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, loader, trainer
from tests.ranks.test_loggers_in_hooks import Writer, Writes

Ranks = Callable[[int], Pool]


class Keeps(Writes):
    """Keeps what it is given in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.writer = Tensorboard()

    @property
    @rank_zero_experiment
    def experiment(self) -> "Tensorboard":
        return self.writer

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.writer.add("metrics", step, *(float(value) for value in metrics.values()))


class Tensorboard(Writer):
    def add(self, name: str, *values: Any) -> None:
        self.seen.setdefault(name, []).append(tuple(round(float(value), 9) for value in values))

    def add_array(self, name: str, values: Any) -> None:
        self.add(name, *values)

    def add_scalar(self, name: str, value: Any, step: int) -> None:
        self.add(name, value, step)

    def add_image(self, name: str, image: Tensor, step: int) -> None:
        self.add(name, *image.shape, *image.flatten().tolist(), step)


class LogsItself(Regression):
    """Before the first layer, and after the last one."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tensorboard = self.logger.experiment
        tensorboard.add_scalar("inputs", batch[0].abs().max(), self.global_step)
        loss = self.loss(batch)
        self.logger.log_metrics({"own": loss.detach(), "root": loss.detach().sqrt()}, self.global_step)
        if batch_idx % 2 == 0:
            tensorboard.add_histogram("batches", batch[1], batch_idx)
        tensorboard["series"].append(loss.detach())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        out = self.net(batch[0])
        self.log("val_loss", mse_loss(out, batch[1]))
        self.logger.experiment.add_image("first", out[:3], batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        self.logger.experiment.add_scalar("hook", self.global_step, 0)


class KeepsIt(LogsItself):
    """What it writes to is an attribute."""

    def on_fit_start(self) -> None:
        self.tensorboard = self.logger.experiment

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.tensorboard.add_scalar("root", loss.detach().sqrt(), self.global_step)
        return loss


class Draws(LogsItself):
    """Its batch cannot be looked at as one."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = mse_loss(dropout(self.net(batch[0]), 0.1), batch[1])
        self.logger.experiment.add_array("classes", np.arange(3))
        self.logger.log_metrics({"own": loss.detach(), "rate": 0.1}, self.global_step)
        self.logger.experiment.add("targets", *batch[1].numpy().sum(0))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)


def fitted(pipeline: dict[str, Any] | None, kind: type[LogsItself] = LogsItself) -> dict[str, list[Any]]:
    logger = Keeps()
    run = trainer(pipeline, logger=logger, max_epochs=2)
    run.fit(kind(), loader(20), loader(20, seed=4))
    return logger.writer.seen


@pytest.mark.parametrize(
    "pipeline",
    [
        {"stages": 1, "num_microbatches": 4},
        {"stages": 1, "stages_per_rank": 2, "schedule": "Interleaved1F1B", "num_microbatches": 2},
        {"stages": 1, "stages_per_rank": 2, "schedule": "Interleaved1F1B", "num_microbatches": 1},
        {"stages": 1, "stages_per_rank": 2, "schedule": "LoopedBFS", "num_microbatches": 4, "loss_over_batch": True},
    ],
    ids=["one stage", "two stages", "one micro-batch", "over the batch"],
)  # fmt: skip
def test_a_step_writes_once_a_batch(pipeline: dict[str, Any]) -> None:
    assert fitted(pipeline) == approx(fitted(None))


def approx(seen: dict[str, list[Any]]) -> dict[str, Any]:
    return {name: [pytest.approx(one) for one in values] for name, values in seen.items()}


def test_what_it_writes_to_may_be_an_attribute() -> None:
    pipeline = {"stages": 1, "num_microbatches": 4}
    assert fitted(pipeline, KeepsIt) == approx(fitted(None, KeepsIt))


def test_a_step_that_cannot_be_looked_at_as_one_writes_means_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="training_step gives a logger by itself"):
        found = fitted({"stages": 1, "num_microbatches": 4}, Draws)
    expected = fitted(None, Draws)
    assert [(one[0], one[2]) for one in found["metrics"]] == [(one[0], one[2]) for one in expected["metrics"]]
    assert found["classes"] == expected["classes"]


def test_the_last_stage_writes_for_all_ranks(ranks: Ranks) -> None:
    expected = fitted(None)
    found, others = ranks(2)(fitted, {"stages": 2, "num_microbatches": 2})
    assert found == approx(expected)
    assert not others


class MovesATeacher(LogsItself):
    """It writes weights, too, so that what it leaves is tried out."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.net(batch[0])
        away = (self.teacher(batch[0]) - out).detach().abs()
        self.logger.log_metrics({"median": away.median().item()}, self.global_step)
        self.teacher.load_state_dict(self.net.state_dict())
        return mse_loss(out, batch[1])


def test_a_step_that_writes_weights_writes_once_a_batch() -> None:
    pipeline = {"stages": 1, "num_microbatches": 4}
    assert fitted(pipeline, MovesATeacher) == approx(fitted(None, MovesATeacher))
