"""Looking at the whole batch runs a step once more: it leaves nothing behind, or is not done."""

import itertools
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_pipeline.model.rehearsal.dry_runs import Rehearsal
from lightning_pipeline.model.replay import WholeBatch
from lightning_pipeline.model.trace import choices
from tests.unit.split.pipe import Module, Outcome, _run_batch, alone, assert_whole, piped, split_arguments

COUNTED = {"steps": 0}
STEPS = 0


pytestmark = pytest.mark.usefixtures("float64")


def batch(left_out: bool = True) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    target = torch.randint(0, 4, (6, 5), generator=generator)
    if left_out:
        target[0] = target[1, 2:] = -100
    return {"x": torch.randn(6, 5, 4, generator=generator), "target": target}


class Padded(Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))

    def before(self) -> None:
        """What a step does beside."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self.net(batch["x"]).transpose(1, 2), batch["target"])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.before()
        return self.loss(batch)


class TakesFromAnIterator(Padded):
    def __init__(self) -> None:
        super().__init__()
        self.unlabelled = itertools.count()
        self.taken: list[int] = []

    def before(self) -> None:
        self.taken.append(next(self.unlabelled))


class CountsInGlobals(Padded):
    def before(self) -> None:
        global STEPS
        COUNTED["steps"] += 1
        STEPS += 1


def test_a_step_that_takes_from_an_iterator_is_not_run_once_more_and_says_so() -> None:
    with pytest.warns(UserWarning, match=r"takes from unlabelled, so .*microbatch_weight") as said:
        mine = piped(TakesFromAnIterator(), batch(), 2, 3, steps=3, follow=True)
    assert len([one for one in said if "takes from" in str(one.message)]) == 1
    theirs = piped(TakesFromAnIterator(), batch(), 2, 3, steps=3, follow=False)
    for name, gradient in theirs.gradients.items():
        torch.testing.assert_close(mine.gradients[name], gradient)
    taken = mine.splits[-1].root.taken[-2:]
    assert taken[1] == taken[0] + 1, "no number is skipped"


def test_an_iterator_that_no_step_takes_from_is_no_obstacle() -> None:
    module = Padded()
    module.unlabelled = itertools.count()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_whole(module, batch(), 2, 3)


def test_globals_are_those_of_the_micro_batches_alone() -> None:
    COUNTED["steps"] = 0
    before = STEPS
    traced = piped(CountsInGlobals(), batch(), 2, 3, follow=False)
    without, steps = COUNTED["steps"], STEPS - before
    COUNTED["steps"] = 0
    before = STEPS
    followed = piped(CountsInGlobals(), batch(), 2, 3, follow=True)
    assert (COUNTED["steps"], STEPS - before) == (without, steps)
    assert traced.losses == followed.losses


class Switched(Padded):
    """From its second batch on another loss, with a divisor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.masked = False
        self.cell = [False].__iter__  # nobody sees what it holds

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        y, target = self.net(batch["x"]), batch["target"].clamp(min=0)
        if not (self.masked or next(self.cell())):
            return y.pow(2).mean()
        mask = (batch["target"] > 0).double()
        each = F.cross_entropy(y.transpose(1, 2), target, reduction="none")
        return (each * mask).sum() / mask.sum()


def losses_once_masked(unseen: bool) -> tuple[list[Any], list[list[str]]]:
    """Of the two batches after one that was not: what is logged, and what is said."""
    splits: list[Any] = piped(Switched(), batch(), 2, 3, follow=True).splits
    for split in splits:
        split.root.masked, split.root.cell = not unseen, [unseen].__iter__
    microbatches, weights = split_arguments(batch(), 3)
    found, said = [], []
    for count in (1, 2):
        outcome, whole = Outcome(), WholeBatch(((batch(), 0), {}), weights, 1.0)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            _run_batch(splits, microbatches, weights, "training_step", count, outcome, False, whole)
        found.append(outcome.loss)
        said.append([str(one.message) for one in told])
    return found, said


@pytest.mark.parametrize("unseen", [True, False])
def test_a_loss_that_changes_during_a_run_is_looked_at_again(unseen: bool) -> None:
    """At once where an attribute decides; where nobody sees what does, it is said, and from the next batch on."""
    found, said = losses_once_masked(unseen)
    switched = Switched()
    switched.masked = True
    expected = switched.training_step(batch(), 0).item()
    assert found[1] == pytest.approx(expected)
    assert not said[1]
    if unseen:
        assert any("calls other functions between its units than in the batches" in one for one in said[0])
    else:
        assert found[0] == pytest.approx(expected)
        assert not said[0]


class LossInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.layer(x).transpose(1, 2), target)


class InUnit(Padded):
    def __init__(self) -> None:
        super().__init__()
        self.head = LossInside()

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return self.head(self.net(batch["x"]), batch["target"])


@pytest.mark.parametrize("left_out", [False, True])
def test_a_loss_inside_a_unit_that_leaves_out_targets_is_said(left_out: bool) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        mine = piped(InUnit(), batch(left_out), 2, 3, units=["head"], steps=2, follow=True)
    texts = [str(one.message) for one in said if "mean over classes" in str(one.message)]
    assert len(texts) == left_out
    assert all("unit 'head'" in text and "microbatch_weight" in text for text in texts)
    theirs = piped(InUnit(), batch(left_out), 2, 3, units=["head"], steps=2)
    for name, gradient in theirs.gradients.items():
        torch.testing.assert_close(mine.gradients[name], gradient, equal_nan=True)


class Sized(Padded):
    """Logs by the size of the batch, beside a root."""

    beta = 1.0

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        out = self.net(batch["x"])
        loss = F.mse_loss(out, batch["x"])
        self.log("root", loss.sqrt())
        self.log("hits", (out.argmax(-1) == 1).sum() / len(batch["x"]))
        self.log("scaled", loss.sqrt() * out.sum() / (len(batch["x"]) * self.beta))
        return loss * self.beta


def test_numbers_that_are_sizes_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    rehearse = Rehearsal.rehearse
    monkeypatch.setattr(Rehearsal, "rehearse", lambda *args: (looked.append(1), rehearse(*args))[1])

    def each(module: Any, step: int) -> dict[str, Tensor]:
        module.beta = 1.0 / (step + 1)
        return {"x": batch()["x"] * (step + 1)}

    mine = piped(Sized(), {"x": batch()["x"]}, 2, 3, steps=4, follow=True, each=each)
    assert len(looked) == 1
    theirs = alone(Sized(), {"x": batch()["x"]}, 1, steps=4, each=each)
    for name, gradient in theirs.gradients.items():
        torch.testing.assert_close(mine.gradients[name], gradient)
    for _, name, value in theirs.logged[-3:]:
        torch.testing.assert_close(mine.logs[name], value)


class Recurrent(nn.LSTM):
    """Reads its lengths, so that only a rank that holds it can say what comes out for other sizes."""

    def forward(self, x: Tensor, hx: tuple[Tensor, Tensor], lengths: Tensor) -> Any:  # type: ignore[override]
        if int(lengths.min()) < 1:
            raise ValueError("an empty sequence")
        return super().forward(x, hx)


class Forecast(Module):
    """As many steps as a micro-batch has samples, so that sizes do not tell them apart."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.encoder, self.decoder = (Recurrent(4, 4, batch_first=True) for _ in range(2))
        self.head = nn.Linear(4, 1)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        start = torch.zeros(1, len(batch["past"]), 4)
        _, state = self.encoder(batch["past"], (start, start), batch["lengths"])
        out, _ = self.decoder(batch["future"], state, batch["lengths"])
        return F.mse_loss(self.head(out), batch["target"])


def forecasts(length: float) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    past, future = (torch.randn(8, 4, 4, generator=generator) for _ in range(2))
    return {"past": past, "future": future, "lengths": torch.full((8,), length), "target": past[..., :1]}


def test_a_whole_batch_of_which_nobody_knows_the_shapes_is_warned_of_and_not_refused() -> None:
    with pytest.warns(UserWarning, match=r"cannot be traced for the batch as a whole \(unit 'encoder'"):
        assert_whole(Forecast(), forecasts(4.0), 2, 2)


@pytest.mark.filterwarnings("error:.*cannot be traced for the batch as a whole")
def test_a_unit_that_reads_integers_of_the_batch_is_known_for_the_batch_as_a_whole() -> None:
    assert_whole(Forecast(), forecasts(4), 2, 2)


class Doubles(Padded):
    """Ends a loop by a number of the model, which no made-up one that is far below does."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        out = self.net(batch["x"])
        size = out.detach().norm()
        while size.item() < 0.5:
            size = size * 2
        return F.mse_loss(out, batch["x"]) * out.size(-1)


def test_a_loop_that_no_made_up_number_ends_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "_ENDLESS", 200)
    mine = piped(Doubles(), batch(), 2, 3, follow=True)
    theirs = alone(Doubles(), batch(), 1)
    for name, gradient in theirs.gradients.items():
        torch.testing.assert_close(mine.gradients[name], gradient)


class StudentT(Padded):
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        df, loc, scale, _ = self.net(batch["x"]).unbind(-1)
        distribution = torch.distributions.StudentT(2 + F.softplus(df), loc, F.softplus(scale))
        weights = (batch["target"] != -100).to(df.dtype)
        return -(distribution.log_prob(batch["x"][..., 0]) * weights).sum() / weights.sum()


def test_checks_of_a_distribution_hold_for_the_whole_batch_too() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_whole(StudentT(), batch(), 2, 3)
