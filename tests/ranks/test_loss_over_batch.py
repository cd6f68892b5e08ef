"""Through the Trainer: a loss over the whole batch trains and logs as one device does."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_pipeline import PipelineStrategy
from lightning_pipeline.errors import ConfigurationError
from lightning_pipeline.schedules import available_schedules, get_schedule
from lightning_pipeline.settings.choices import FORWARDS_FIRST
from tests.ranks.lightning_cases import Regression, assert_same, fit


class Clip(Regression):
    """Two towers, a learned temperature; logs in training and validation, and keeps what hooks read."""

    def __init__(self) -> None:
        super().__init__()
        self.text = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        self.scale = nn.Parameter(torch.tensor(0.3).double())
        self.embedded: Tensor | None = None

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        one, other = F.normalize(self.net(batch[0])), F.normalize(self.text(batch[1]))
        logits, target = one @ other.T * self.scale.exp(), torch.arange(len(one))
        self.embedded = one.detach()
        return F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))
        self.error.update(self.net(batch[0]), batch[1])
        self.log("val_error", self.error)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self.embedded is not None
        self.log("embedded", self.embedded.abs().sum(), on_epoch=True)


PIPELINES = [
    {"stages": 2, "num_microbatches": 4, "schedule": "GPipe"},
    {"stages": 3, "num_microbatches": 7, "schedule": "GPipe"},
    {"stages": 2, "num_microbatches": 4, "schedule": "LoopedBFS", "stages_per_rank": 2},
]


def accumulated(pipeline: dict[str, Any] | None) -> Any:
    return fit(pipeline, Clip, accumulate_grad_batches=2)


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_weights_and_logs_are_those_of_whole_batches_on_one_device(ranks: Any, pipeline: Any) -> None:
    pipeline = {**pipeline, "loss_over_batch": True}
    expected = accumulated(None)
    for found in ranks(pipeline["stages"])(accumulated, pipeline, group=False):
        assert_same(found, expected)


def test_other_schedules_are_refused_at_the_start_with_those_that_serve() -> None:
    served = []
    for name in available_schedules():
        if name in ("ForwardOnly", "FromTable", "FromTorch"):
            continue
        try:
            PipelineStrategy(2, schedule=name, num_microbatches=4, loss_over_batch=True)
        except ConfigurationError as error:
            assert "use schedule='GPipe' or 'LoopedBFS'" in str(error), error
        else:
            served.append(name)
    assert served == list(FORWARDS_FIRST)
    with pytest.raises(ConfigurationError, match="loss_weighting='sum' could weigh"):
        PipelineStrategy(2, schedule="GPipe", loss_over_batch=True, loss_weighting="sum")


def test_a_plan_that_first_turns_back_at_another_number_is_refused_there(ranks: Any) -> None:
    pipeline = {"stages": 2, "num_microbatches": 7, "schedule": TurnsBack(), "loss_over_batch": True}
    outcome = ranks(2).outcomes(fit, pipeline, KeepsNothing, group=False)[0]
    assert "finishes all forwards before its first backward" in str(outcome)


class KeepsNothing(Clip):
    """Without rows of samples in an attribute, with which a batch of another size is one micro-batch."""

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        one, other = F.normalize(self.net(batch[0])), F.normalize(self.text(batch[1]))
        return F.cross_entropy(one @ other.T * self.scale.exp(), torch.arange(len(one)))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        pass


class TurnsBack(type(get_schedule("GPipe"))):  # type: ignore[misc]
    """GPipe for the number that is asked for, and not for the last batch, which is smaller."""

    def plan(self, num_ranks: int, num_microbatches: int) -> Any:
        name = "GPipe" if num_microbatches in (1, 7) else "1F1B"
        return get_schedule(name).plan(num_ranks, num_microbatches)
