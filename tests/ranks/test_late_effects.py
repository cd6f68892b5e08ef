"""What a step leaves behind in some of its batches only, and weights that it writes in place."""

import warnings
from collections.abc import Callable
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, assert_same, loader, trainer, weights
from tests.whole import chosen

Ranks = Callable[[int], Pool]


class Late(Regression):
    """The second batch, and the second loader, leave behind what the first ones do not."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []
        self.number, self.counts = 0, dict[str, int]()
        self.register_buffer("batches", torch.zeros(()))
        self.means: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        if batch_idx == 1:
            self.losses.append(loss.detach())
            self.number += 1
            self.counts["late"] = self.counts.get("late", 0) + 1
            self.batches += 1
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        mean = self.net(batch[0]).mean()
        if dataloader_idx == 1:
            self.means.append(mean)


TABLE = [False, True, False, False, True, False]
CONDITIONS: dict[str, Callable[["Conditional"], Any]] = {
    "global_step": lambda module: module.global_step % 4 == 1,
    "fraction": lambda module: module.trainer.global_step / 6 > 0.4,
    "among": lambda module: module.global_step in {1, 4},
    "rounded": lambda module: int(module.global_step * 0.5) == 1,
    "epoch": lambda module: module.trainer.current_epoch > 0,
    "last": lambda module: module.trainer.is_last_batch,
    "loop": lambda module: module.trainer.fit_loop.epoch_loop.total_batch_idx == 3,
    "rate": lambda module: module.optimizers().param_groups[0]["lr"] < 0.085,
    "own": lambda module: module.own % 2 == 1,
    "mean": lambda module: module.running > 1.5,
    "keys": lambda module: module.held.get("batches", 0) == 1,
    "object": lambda module: module.beside.batches == 2,
    "set": lambda module: module.first is not None,
    "callback": lambda module: module.trainer.callbacks[0].batches == 2,
    "number": lambda module: module.history and module.global_step == 2,
    "table": lambda module: TABLE[module.global_step],
    "own table": lambda module: TABLE[module.own],
    "callback's table": lambda module: TABLE[module.trainer.callbacks[0].batches - 1],
}


class Counting(Callback):
    """Counts batches."""

    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_start(self, *args: Any) -> None:
        self.batches += 1


class Conditional(Regression):
    """Leaves something behind where a condition holds that the first batch does not meet."""

    def __init__(self, condition: str) -> None:
        super().__init__()
        self.condition = condition
        self.losses: list[Tensor] = []
        self.number, self.counts = 0, dict[str, int]()
        self.register_buffer("batches", torch.zeros(()))
        self.own, self.running, self.first = 0, 1.0, None
        self.held, self.beside = dict[str, int](), SimpleNamespace(batches=0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        if self.condition == "number":
            self.history = [loss.item()]
        if CONDITIONS[self.condition](self):
            self.losses.append(loss.detach())
            self.number += 1
            self.counts["late"] = self.counts.get("late", 0) + 1
            self.batches += 1
        self._count(loss)
        return loss

    def _count(self, loss: Tensor) -> None:
        match self.condition:
            case "own" | "own table":
                self.own += 1
            case "mean":
                self.running *= 1.2
            case "keys":
                self.held["batches"] = self.held.get("batches", 0) + 1
            case "object":
                self.beside.batches += 1
            case "set":
                self.first = loss.detach() if self.first is None else self.first

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)]


class ByValue(Regression):
    """Counts batches by what the loss is, and reads it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.small, self.last = kind, 0, 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.last = loss.item()
        if self.kind == "all" and loss < 10:
            self.small += 1
        if self.kind == "some" and batch[0].sum() + 0 * loss.detach() > 0:
            self.small += 1
        if self.kind == "unseen" and loss < 10 and not loss > 100:  # no two answers lead there
            self.small += 1
        return loss


class Decayed(Regression):
    """Each step writes weights in place."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for parameter in self.net.parameters():
            parameter.data.mul_(0.95)
        return F.mse_loss(self.net(batch[0]), batch[1])


def left(pipeline: dict[str, Any] | None) -> tuple[Any, ...]:
    module = Late()
    trainer(pipeline, max_epochs=2).fit(module, loader(24), [loader(8), loader(10, seed=4)])
    losses, means = ([float(value) for value in values] for values in (module.losses, module.means))
    return losses, means, float(module.batches), module.number, module.counts


@pytest.mark.parametrize(
    "pipeline", [{"stages": 2, "num_microbatches": 4}, {"stages": 3, "num_microbatches": 1}]
)
def test_effects_of_later_batches_are_those_of_one_device(ranks: Ranks, pipeline: dict[str, Any]) -> None:
    expected = left(None)
    assert expected[2:] == (2.0, 2, {"late": 2})
    for losses, means, *rest in ranks(pipeline["stages"])(left, pipeline):
        assert rest == list(expected[2:])
        assert losses == pytest.approx(expected[0])
        assert means == pytest.approx(expected[1])


def left_by_conditions(pipeline: dict[str, Any] | None, part: int) -> dict[str, tuple[Any, ...]]:
    found = {}
    for condition in chosen(list(CONDITIONS), 0, 4, 8, 11, 15, 16, 17)[part::3]:
        module = Conditional(condition)
        options: dict[str, Any] = {"callbacks": [Counting()], "limit_val_batches": 0}
        trainer(pipeline, max_epochs=2, **options).fit(module, loader(24))
        losses = [float(loss) for loss in module.losses]
        found[condition] = module.number, module.counts, float(module.batches), losses
    return found


@pytest.mark.parametrize("part", range(3))  # of the conditions, each of which takes seconds
def test_what_depends_on_numbers_that_change_is_left_once_on_every_rank(ranks: Ranks, part: int) -> None:
    expected = left_by_conditions(None, part)
    assert {condition for condition, (number, *_) in expected.items() if not 0 < number < 6} == set()
    for found in ranks(2)(left_by_conditions, {"stages": 2, "num_microbatches": 4}, part):
        for condition, (*counts, losses) in expected.items():
            assert list(found[condition][:-1]) == counts, condition
            assert found[condition][-1] == pytest.approx(losses), condition


def warned_of(kind: str) -> tuple[int, list[str]]:
    module = ByValue(kind)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipeline = {"stages": 2, "num_microbatches": 2}
        trainer(pipeline, max_epochs=1, limit_val_batches=0).fit(module, loader(16))
    return module.small, [str(one.message) for one in caught if "has changed 'small'" in str(one.message)]


def test_what_a_value_of_the_model_lets_a_step_leave_behind_is_on_every_rank_or_warned_of(
    ranks: Ranks,
) -> None:
    assert ranks(2)(warned_of, "none") == [(0, []), (0, [])]
    assert ranks(2)(warned_of, "all") == [(2, []), (2, [])]
    assert ranks(2)(warned_of, "some") == [(1, []), (1, [])]  # the batch decides
    (warning,) = [one for _, found in ranks(2)(warned_of, "unseen") for one in found]  # of one rank
    assert "on the last stage alone" in warning


def decay(pipeline: dict[str, Any] | None) -> dict[str, Tensor]:
    module = Decayed()
    trainer(pipeline, max_epochs=1).fit(module, loader(24))
    return weights(module)


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_weights_written_in_place_are_written_once_a_batch(ranks: Ranks, num_microbatches: int) -> None:
    expected = decay(None)
    for found in ranks(2)(decay, {"stages": 2, "num_microbatches": num_microbatches}):
        assert_same((found, {}), (expected, {}))


WRITES = ("average", "moment", "copied", "plain", "listed", "epoch")


class WritesLate(Regression):
    """In some batches alone a tensor that outlives the step is written in place, and nothing else changes."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.register_buffer("average", torch.zeros((), dtype=torch.float64))
        self.register_buffer("moment", torch.zeros(3, dtype=torch.float64))
        self.plain, self.listed = torch.zeros(3), [torch.zeros(())]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.net(batch[0])
        loss = F.mse_loss(out, batch[1])
        if batch_idx == 1:
            self.write(out, loss)
        return loss

    def write(self, out: Tensor, loss: Tensor) -> None:
        match self.where:
            case "average":
                self.average.mul_(0.9).add_(0.1 * loss.detach())
            case "moment":
                self.moment.lerp_(out.detach().mean(0), 0.5)
            case "copied":
                self.average.copy_(loss.detach())
            case "plain":
                self.plain[1] += 1
            case "listed":
                self.listed[0] += 2
            case "weights":
                for parameter in self.net.parameters():
                    parameter.data.mul_(0.95)
            case "epoch":
                self.average += self.trainer.current_epoch + 1


def written_late(pipeline: dict[str, Any] | None) -> dict[str, Any]:
    found = {}
    for where in WRITES:
        module = WritesLate(where)
        trainer(pipeline, max_epochs=2, limit_val_batches=0).fit(module, loader(24))
        left = {"average": module.average, "moment": module.moment, "plain": module.plain}
        numbers = {name: value.tolist() for name, value in left.items()}
        numbers["listed"] = float(module.listed[0])
        found[where] = weights(module), numbers
    return found


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_what_later_batches_write_in_place_is_written_once(ranks: Ranks, num_microbatches: int) -> None:
    expected = written_late(None)
    for found in ranks(2)(written_late, {"stages": 2, "num_microbatches": num_microbatches}):
        for where, (wanted, numbers) in expected.items():
            assert_same((found[where][0], {}), (wanted, {}))
            for name, value in numbers.items():
                assert found[where][1][name] == pytest.approx(value, abs=1e-12), (where, name)


class Follows(Regression):
    """A network follows another in some batches, of which the first is none."""

    def __init__(self) -> None:
        super().__init__()
        self.target = deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.mse_loss(self.net(batch[0]), batch[1] + 0.1 * self.target(batch[0]))
        if self.follows(batch_idx):
            self.follow()
        return loss

    def follows(self, batch_idx: int) -> bool:
        return batch_idx % 2 == 1

    def follow(self) -> None:
        with torch.no_grad():
            for mine, theirs in zip(self.target.parameters(), self.net.parameters(), strict=True):
                mine.lerp_(theirs, 0.2)


class FollowsByCount(Follows):
    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def follows(self, batch_idx: int) -> bool:
        self.seen += 1
        return self.seen % 3 == 0


class FollowsBySteps(Follows):
    def follows(self, batch_idx: int) -> bool:
        return self.global_step >= 1


class FollowsByTime(Follows):
    """Nobody sees how it decides."""

    def __init__(self) -> None:
        super().__init__()
        self.times = iter([False, False, True])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.now = next(self.times)

    def follows(self, batch_idx: int) -> bool:
        return self.now


def followed(pipeline: dict[str, Any] | None, kind: type[Follows] = Follows) -> dict[str, Tensor]:
    module = kind()
    trainer(pipeline, max_epochs=1, limit_val_batches=0).fit(module, loader(24))
    return weights(module)


@pytest.mark.parametrize("stages_per_rank", [1, 3])
def test_a_network_that_follows_another_in_some_batches_is_that_of_one_device(stages_per_rank: int) -> None:
    schedule = "1F1B" if stages_per_rank == 1 else "Interleaved1F1B"
    several = {"stages_per_rank": stages_per_rank, "schedule": schedule, "num_microbatches": 4}
    assert_same((followed({"stages": 1, **several}), {}), (followed(None), {}))


FOLLOWERS = (Follows, FollowsByCount, FollowsBySteps)


def followed_over_ranks(pipeline: dict[str, Any] | None) -> list[dict[str, Tensor]]:
    return [followed(pipeline, kind) for kind in FOLLOWERS]


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_stages_hold_what_weights_are_made_of_in_batches_to_come(ranks: Ranks, num_microbatches: int) -> None:
    expected = followed_over_ranks(None)
    for found in ranks(2)(followed_over_ranks, {"stages": 2, "num_microbatches": num_microbatches}):
        for one, other in zip(found, expected, strict=True):
            assert_same((one, {}), (other, {}))


def refused_late() -> str:
    module = FollowsByTime()
    try:
        trainer({"stages": 2}, max_epochs=1, limit_val_batches=0).fit(module, loader(24))
    except Exception as error:
        return str(error)
    return ""


def test_weights_that_a_later_batch_first_makes_of_those_of_another_stage_are_refused(ranks: Ranks) -> None:
    for found in ranks(2)(refused_late):
        assert "changes 'target." in found
        assert "is used on a stage that does not hold it" in found
        assert "on_train_batch_end" in found


class LearnsTwice(Regression):
    """What the second batch leaves behind is not touched by the batch that shows the next thing."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.register_buffer("average", torch.zeros((), dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        if self.global_step % 2 == 1:
            self.losses.append(loss.item())
        if self.current_epoch and not batch_idx:
            self.average.mul_(0.9).add_(0.1 * loss.detach())
        return loss


def learned_twice(pipeline: dict[str, Any] | None) -> tuple[list[float], float]:
    module = LearnsTwice()
    trainer(pipeline, max_epochs=2, limit_val_batches=0).fit(module, loader(26))
    return module.losses, float(module.average)


def test_rules_that_were_found_outlive_the_next_search(ranks: Ranks) -> None:
    losses, average = learned_twice(None)
    for found in ranks(2)(learned_twice, {"stages": 2, "num_microbatches": 3}):
        assert found[0] == pytest.approx(losses)
        assert found[1] == pytest.approx(average)


class CountsByNumbers(Regression):
    """A plain tensor is written between the numbers that a step reads of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = torch.zeros(3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for place, bound in enumerate((-100.0, 0.0, 0.5)):
            self.counts[place] += (batch[1] > bound).sum().item()
        return F.mse_loss(self.net(batch[0]), batch[1])


def counted(pipeline: dict[str, Any] | None) -> list[float]:
    module = CountsByNumbers()
    trainer(pipeline, max_epochs=2, limit_val_batches=0).fit(module, loader(26))
    return module.counts.tolist()


def test_what_is_written_between_numbers_that_are_read_is_written_once(ranks: Ranks) -> None:
    expected = counted(None)
    assert min(expected) > 0
    for microbatches in (1, 2):
        for found in ranks(2)(counted, {"stages": 2, "num_microbatches": microbatches}):
            assert found == expected


class MovesACenter(Regression):
    """A buffer is given its next values as `.data`, of what units have computed; the loss reads it before."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(4, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.net(batch[0])
        loss = F.mse_loss(out - self.center[: out.shape[1]], batch[1])
        with torch.no_grad():
            self.center.data = 0.9 * self.center + 0.1 * out.mean()
        return loss


def moved(pipeline: dict[str, Any] | None) -> tuple[list[float], dict[str, Tensor]]:
    module = MovesACenter()
    trainer(pipeline, max_epochs=2, limit_val_batches=0).fit(module, loader(24))
    return module.center.tolist(), weights(module)


def test_a_buffer_that_gets_its_data_from_units_is_that_of_one_device(ranks: Ranks) -> None:
    center, expected = moved(None)
    for found in ranks(2)(moved, {"stages": 2, "num_microbatches": 1}):
        assert found[0] == pytest.approx(center)
        assert_same((found[1], {}), (expected, {}))


class Queued(Regression):
    """Compares with a queue of earlier outputs, and appends its own after that."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.ones(3, 24, dtype=torch.float64))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.net(batch[0])
        loss = F.mse_loss(out, batch[1]) + (out @ self.queue.clone()).square().mean()
        place = int(self.place)
        self.queue[:, place : place + len(out)] = out.detach().T
        self.place[0] = (place + len(out)) % 24
        return loss


def queued(pipeline: dict[str, Any] | None) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    module = Queued()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer(pipeline, limit_val_batches=0).fit(module, loader(24))
    return weights(module), dict(module.named_buffers()), [str(one.message) for one in told]


def test_a_queue_is_read_and_written_as_by_one_device(ranks: Ranks) -> None:
    expected, states, _ = queued(None)
    for found, buffers, told in ranks(2)(queued, {"stages": 2, "num_microbatches": 4}):
        assert_same((found, {}), (expected, {}))
        assert_same((buffers, {}), (states, {}))
        assert not any("from the value before" in one for one in told)


class Spikes(Regression):
    """Counts batches by a number of the loss, in a branch that stands open after the first batch only."""

    def __init__(self, which: str) -> None:
        super().__init__()
        self.which, self.average, self.spikes = which, None, 0
        self.history: list[float] = []
        self.best = 0.7 if which == "falls" else None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        target = batch[1] * (30.0 if batch_idx in (2, 4) else 0.01 if batch_idx == 1 else 1.0)
        loss = F.mse_loss(self.net(batch[0]), target)
        if BRANCHES[self.which](self, loss):
            self.spikes += 1
            if self.which == "skipped":
                return None
        elif self.which != "falls":
            value = loss.item()
            self.average = value if self.average is None else 0.9 * self.average + 0.1 * value
            self.history.append(value)
        return loss


BRANCHES: dict[str, Callable[[Spikes, Tensor], bool]] = {
    "item": lambda module, loss: module.average is not None and loss.item() > 3 * module.average,
    "skipped": lambda module, loss: module.average is not None and loss.item() > 3 * module.average,
    "tensor": lambda module, loss: module.average is not None and bool(loss > 3 * module.average),
    "history": lambda module, loss: len(module.history) > 1 and loss.item() > 2 * max(module.history),
    "falls": lambda module, loss: loss.item() < module.best,
}


def spiked(pipeline: dict[str, Any] | None, which: str) -> Any:
    module = Spikes(which)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "training_step returned no loss|`training_step` returned `None`")
        trainer(pipeline, limit_val_batches=0, max_epochs=1).fit(module, loader(48))
    return weights(module), module.spikes, module.average


SPIKED = {
    "one": {"stages": 1, "num_microbatches": 2},
    "two": {"stages": 2, "num_microbatches": 2},
}


@pytest.mark.parametrize("which", BRANCHES)
@pytest.mark.parametrize("way", SPIKED)
def test_a_count_in_a_branch_that_opens_late_is_one_devices(ranks: Ranks, way: str, which: str) -> None:
    expected, spikes, average = spiked(None, which)
    assert spikes
    pipeline = SPIKED[way]
    runs = [spiked(pipeline, which)] if way == "one" else ranks(2)(spiked, pipeline, which)
    for found, counted, mean in runs:
        assert_same((found, {}), (expected, {}))
        assert counted == spikes
        assert mean == (None if average is None else pytest.approx(average))


class Sticks(Regression):
    """What one micro-batch's loss decides, and the batch's does not, until a batch in which it does."""

    def __init__(self, which: str) -> None:
        super().__init__()
        self.which, self.flag = which, False
        self.seen: list[tuple[bool, ...]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.mse_loss(0.05 * self.net(batch[0]), batch[1])
        if loss < 0.5 if self.which.startswith("tensor") else loss.item() < 0.5:
            DECIDED[self.which.removeprefix("tensor ")](self)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        layer = self.net[0].weight
        self.seen.append((self.flag, self.net[1].training, layer.requires_grad, self.trainer.should_stop))


DECIDED: dict[str, Callable[[Sticks], Any]] = {
    "flag": lambda module: setattr(module, "flag", True),
    "stop": lambda module: setattr(module.trainer, "should_stop", True),
    "mode": lambda module: module.net[1].eval(),
    "freeze": lambda module: module.net[0].requires_grad_(False),
}


def stuck(pipeline: dict[str, Any] | None, which: str) -> Any:
    """The halves of batches 1 to 3 would decide differently; the third is no batch that is looked at."""
    x, y = loader(48).dataset.tensors  # type: ignore[attr-defined]  # a TensorDataset
    scale = torch.full((6, 8, 1), 3.0, dtype=torch.float64)
    scale[1:4, :4] = scale[4] = 0.01
    module = Sticks(which)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        data = DataLoader(TensorDataset(x, y * scale.reshape(48, 1)), batch_size=8)
        trainer(pipeline, limit_val_batches=0, max_epochs=1).fit(module, data)
    texts = [str(one.message) for one in told]
    return weights(module), module.seen, any("gradients of this batch are those" in one for one in texts)


@pytest.mark.parametrize("which", [*DECIDED, "tensor flag", "tensor stop"])
@pytest.mark.parametrize("way", SPIKED)
def test_what_the_loss_decides_for_good_is_decided_for_the_batch(ranks: Ranks, way: str, which: str) -> None:
    expected, seen, _ = stuck(None, which)
    pipeline = SPIKED[way]
    runs = [stuck(pipeline, which)] if way == "one" else ranks(2)(stuck, pipeline, which)
    assert len(set(seen)) == 2
    for found, stood, _ in runs:
        assert stood == seen
        if which != "freeze":
            assert_same((found, {}), (expected, {}))
    assert any(told for *_, told in runs) is (which == "freeze")
