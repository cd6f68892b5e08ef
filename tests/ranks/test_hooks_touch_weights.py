"""Hooks that touch single weights: equal to one device, or, where large, refused with module, stage and line."""

import copy
import io
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_pipeline.errors import PlaceholderError
from lightning_pipeline.model.state import meeting
from tests.pool import Pool, RankFailure
from tests.ranks.lightning_cases import Regression, assert_same, fit

Ranks = Callable[[int], Pool]


class ClipsBesideAPenalty(Regression):
    """The last stage holds all weights, for the step reads them; others hold their own."""

    def loss(self, batch: Any) -> Any:
        return super().loss(batch) + 0.01 * sum(one.pow(2).sum() for one in self.net.parameters())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), max_norm=0.1)


class ClipsByValue(ClipsBesideAPenalty):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        nn.utils.clip_grad_value_(self.net.parameters(), 0.01)


class ValidatesAverages(Regression):
    """A moving average of all weights, which validation steps put in their place."""

    def __init__(self) -> None:
        super().__init__()
        self.averages = [one.detach().clone() for one in self.net.parameters()]

    def on_before_zero_grad(self, optimizer: Any) -> None:
        with torch.no_grad():
            for average, one in zip(self.averages, self.net.parameters(), strict=True):
                average.sub_(0.1 * (average - one))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        held = [one.detach().clone() for one in self.net.parameters()]
        with torch.no_grad():
            for average, one in zip(self.averages, self.net.parameters(), strict=True):
                one.copy_(average)
        super().validation_step(batch, batch_idx)
        with torch.no_grad():
            for before, one in zip(held, self.net.parameters(), strict=True):
                one.copy_(before)


class AveragesByLayer(Regression):
    """A teacher whose layers follow the student's, which are on other stages."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def loss(self, batch: Any) -> Any:
        with torch.no_grad():
            target = self.teacher(batch[0])
        return super().loss(batch) + nn.functional.mse_loss(self.net(batch[0]), target)

    def on_train_batch_end(self, *args: Any) -> None:
        for student, teacher in zip(self.net, self.teacher, strict=True):
            if isinstance(student, nn.Linear):
                with torch.no_grad():
                    teacher.weight.lerp_(student.weight, 0.1)


class AssignsData(AveragesByLayer):
    """As BYOL's published update writes it, also where the value is complete already, or of other stages alone."""

    def on_train_batch_end(self, *args: Any) -> None:
        for student, teacher in zip(self.net, self.teacher, strict=True):
            if isinstance(student, nn.Linear):
                teacher.weight.data = 0.9 * teacher.weight.data + 0.1 * student.weight.data
                teacher.bias.data = student.bias.data.clone()
        self.teacher[0].bias.data = torch.full_like(self.teacher[0].bias.data, 0.25)
        self.net[2].bias.data = self.net[2].bias.data * self.net[4].weight.data.norm().item()


class ReadsLists(Regression):
    def on_train_batch_end(self, *args: Any) -> None:
        first, last = (self.net[place].weight.detach().flatten() for place in (0, -1))
        self.log("weights", sum(map(abs, first.tolist())) + sum(map(abs, last.clone().tolist())))


class AssignsGradients(Regression):
    def on_before_optimizer_step(self, *args: Any) -> None:
        self.net[2].weight.grad = self.net[4].weight.grad.clone()
        self.net[4].weight.grad = 0.5 * self.net[2].weight.grad + self.net[4].weight.grad
        self.net[0].bias.grad = torch.ones(self.net[0].bias.shape, dtype=torch.float64)


class SavesEverything(Regression):
    """On every rank, as a script does that keeps all gradients."""

    def on_before_optimizer_step(self, *args: Any) -> None:
        file = io.BytesIO()
        gradients = {name: p.grad.clone() for name, p in self.named_parameters() if p.grad is not None}
        torch.save((gradients, self.state_dict(), list(self.parameters())), file)
        file.seek(0)
        saved, states, weights = torch.load(file, weights_only=False)
        assert list(saved) == list(states) == [name for name, _ in self.named_parameters()]
        self.log("saved", sum(value.abs().sum() for value in (*saved.values(), *states.values(), *weights)))


class CopiesALayer(Regression):
    def on_train_epoch_end(self) -> None:
        with torch.no_grad():
            self.net[4].weight.copy_(self.net[2].weight)


class FillsABuffer(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6, dtype=torch.float64))

    def on_train_batch_end(self, *args: Any) -> None:
        self.mean.copy_(self.net[0].weight.detach().mean(0))


class ReadsANumber(Regression):
    def on_train_batch_end(self, *args: Any) -> None:
        if self.net[0].weight.norm() > 1e9:
            raise AssertionError


class ChangesTogether(Regression):
    def on_train_epoch_end(self) -> None:
        torch._foreach_mul_([self.net[0].weight.data, self.net[6].weight.data], 0.5)


class ChangesEach(Regression):
    """Right on the stage that has the weight, without effect elsewhere."""

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            for layer in (self.net[0], self.net[6]):
                layer.weight.clamp_(-0.1, 0.1)
                layer.weight.div_(layer.weight.norm())


class StartsAnew(Regression):
    """Draws for weights of every stage, in the order of one device."""

    def on_fit_start(self) -> None:
        torch.manual_seed(4)
        for layer in self.net:
            if isinstance(layer, nn.Linear):
                nn.init.xavier_uniform_(layer.weight)
                nn.init.normal_(layer.bias)


class TakesPartsOfAVector(Regression):
    """As an optimizer without gradients does, for which all weights are one vector."""

    def on_train_epoch_end(self) -> None:
        weights = list(self.parameters())
        vector = torch.linspace(-0.2, 0.2, sum(one.numel() for one in weights), dtype=weights[0].dtype)
        nn.utils.vector_to_parameters(vector, weights)


class TakesOnePartTwice(Regression):
    def on_train_epoch_end(self) -> None:
        vector = torch.full((1000,), 0.1, dtype=torch.float64)
        for weight in self.parameters():
            weight.data = vector[: weight.numel()].view_as(weight)


class UsesTheVectorLater(TakesPartsOfAVector):
    """On one device the vector follows the weights that are trained in between."""

    vector = None

    def on_train_epoch_end(self) -> None:
        if self.vector is not None:
            self.norm = self.vector.norm().item()
        weights = list(self.parameters())
        self.vector = torch.linspace(-0.2, 0.2, sum(one.numel() for one in weights), dtype=weights[0].dtype)
        nn.utils.vector_to_parameters(self.vector, weights)


class ChangesTheVector(TakesPartsOfAVector):
    def on_train_epoch_end(self) -> None:
        weights = list(self.parameters())
        vector = torch.zeros(sum(one.numel() for one in weights), dtype=weights[0].dtype)
        nn.utils.vector_to_parameters(vector, weights)
        vector.fill_(0.1)


class FlattensAll(Regression):
    def on_train_batch_end(self, *args: Any) -> None:
        nn.utils.parameters_to_vector(self.parameters()).norm().item()


def fit_with_small_meetings(cls: type[Regression]) -> tuple[Any, list[str]]:
    before, meeting.UNTOLD = meeting.UNTOLD, 3
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = fit({"stages": 2, "num_microbatches": 4}, cls)
        return result, [str(warning.message) for warning in caught]
    finally:
        meeting.UNTOLD = before


def test_a_large_weight_used_with_one_of_another_stage_gives_that_of_one_device_and_is_said_once(
    ranks: Ranks,
) -> None:
    expected = fit(None, AveragesByLayer)
    for found, said in ranks(2)(fit_with_small_meetings, AveragesByLayer):
        assert_same(found, expected)
        (text,) = [text for text in said if "are told between the ranks" in text]
        assert "net." in text
        assert "test_hooks_touch_weights.py" in text


def test_a_whole_model_made_one_value_in_a_hook_is_refused(ranks: Ranks) -> None:
    outcomes = ranks(2).outcomes(fit_with_small_meetings, FlattensAll)
    errors = [outcome.error for outcome in outcomes if isinstance(outcome.error, PlaceholderError)]
    assert not any(outcome.ok or outcome.hung for outcome in outcomes)
    assert errors
    for error in errors:
        assert "net." in str(error)
        assert "(stage " in str(error)
        assert "is large" in str(error)
        assert "test_hooks_touch_weights.py" in str(error)


@pytest.mark.parametrize(
    "cls",
    [
        ClipsBesideAPenalty,
        ClipsByValue,
        ValidatesAverages,
        AveragesByLayer,
        AssignsData,
        AssignsGradients,
        SavesEverything,
        CopiesALayer,
        FillsABuffer,
        ReadsANumber,
        ReadsLists,
        ChangesTogether,
        ChangesEach,
        StartsAnew,
        TakesPartsOfAVector,
    ],
)
def test_a_hook_that_reads_and_changes_weights_gives_that_of_one_device(
    ranks: Ranks, tmp_path: Path, cls: type[Regression]
) -> None:
    expected = fit(None, cls, writes=str(tmp_path / "one"))
    written = partial(fit, writes=str(tmp_path / "two"))
    for found in ranks(2)(written, {"stages": 2, "num_microbatches": 4}, cls):
        assert_same(found, expected)


@pytest.mark.parametrize(
    ("cls", "words"),
    [
        (TakesOnePartTwice, "two weights are given the same part of a vector"),
        (UsesTheVectorLater, "a vector whose parts weights were given is used again"),
        (ChangesTheVector, "a vector whose parts weights were given is used again"),
    ],
)
def test_weights_that_share_memory_with_a_vector_are_refused(
    ranks: Ranks, cls: type[Regression], words: str
) -> None:
    with pytest.raises(RankFailure, match=words):
        ranks(2)(fit, {"stages": 2, "num_microbatches": 4}, cls)
