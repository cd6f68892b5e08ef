"""What the forward of a unit changes of its own is after a batch what one device has, on every rank."""

import warnings
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.pool import Pool
from tests.ranks.lightning_cases import FEATURES, TARGETS, Regression, loader, trainer

Ranks = Callable[[int], Pool]
KEPT = ("calls", "seen", "means", "recent", "by_mode", "average", "total", "is_warm", "largest", "kept")


class Counts(nn.Module):
    """A layer that keeps what passes through it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.calls = self.seen = 0
        self.means: list[Tensor] = []
        self.recent: deque[Tensor] = deque(maxlen=2)
        self.by_mode: dict[str, int] = {}
        self.average = torch.zeros(inputs, dtype=torch.float64)
        self.total = torch.zeros((), dtype=torch.float64)
        self.is_warm, self.largest = False, -1.0
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        before = self.average.mean()
        self.calls += 1
        self.seen += len(x)
        self.means.append(x.detach().mean())
        self.recent.append(x.detach().mean(0))
        mode = "train" if self.training else "eval"
        self.by_mode[mode] = self.by_mode.get(mode, 0) + 1
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        self.total = self.total + x.detach().sum()
        self.is_warm = True
        self.largest = max(self.largest, 1.0 * self.seen)
        self.kept = x.detach()
        scale = 1.0 + 0.1 * min(self.calls, 5) + 0.01 * before
        return scale * self.linear(x).tanh()

    def plain(self) -> dict[str, Any]:
        return {name: _plain(getattr(self, name)) for name in KEPT}


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, list | deque):
        return [_plain(item) for item in value]
    return dict(value) if isinstance(value, dict) else value


class Kept(Regression):
    """Three such layers, whose counts hooks read after each batch, and all of it at an epoch's end."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (FEATURES, 5, 5, TARGETS)
        self.net = nn.Sequential(*map(Counts, sizes, sizes[1:])).double()
        self.after_batches: list[Any] = []
        self.at_ends: list[Any] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        layers: Any = self.net
        self.after_batches.append([(one.calls, one.seen, one.is_warm, one.total.item()) for one in layers])

    def on_train_epoch_end(self) -> None:
        layers: Any = self.net
        self.at_ends.append([one.plain() for one in layers])
        for one in layers:
            one.means.clear()

    on_validation_epoch_end = on_train_epoch_end


def left_by(pipeline: dict[str, Any] | None) -> dict[str, Any]:
    module, run = Kept(), trainer(pipeline, num_sanity_val_steps=0)
    run.fit(module, loader(24), loader(16, seed=4))
    layers: Any = module.net
    weights = {name: value.tolist() for name, value in module.named_parameters()}
    return {
        "left": [one.plain() for one in layers], "batches": module.after_batches, "ends": module.at_ends,
        "weights": weights, "logs": {name: float(value) for name, value in run.callback_metrics.items()},
    }  # fmt: skip


def assert_close(found: Any, expected: Any, where: str = "") -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            assert_close(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_close(one, other, f"{where}.{number}")
    else:
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-9), where


@pytest.mark.parametrize(
    ("stages", "num_microbatches", "schedule"),
    [(2, 4, "1F1B"), (3, 1, "1F1B"), (2, 2, "ZBH1"), (3, 2, "GPipe")],
)
def test_what_units_keep_is_that_of_one_device_on_every_rank(
    ranks: Ranks, stages: int, num_microbatches: int, schedule: str
) -> None:
    expected = left_by(None)
    assert expected["left"][0]["calls"] == 2 * (3 + 2)
    pipeline = {"stages": stages, "num_microbatches": num_microbatches, "schedule": schedule}
    for found in ranks(stages)(left_by, pipeline):
        assert_close(found, expected)


class Reads(nn.Module):
    """A layer that reads numbers of what passes, so that nothing is known of it without values."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.first, self.highest, self.positive = 0.0, 0.0, 0
        self.counts: Counter[str] = Counter()
        self.spread = 0.0

    def forward(self, x: Tensor) -> Tensor:
        found = self.linear(x).tanh()
        self.first = found[0, 0].item()
        self.highest = found.abs().max().item()
        self.positive += int((found > 0).sum())
        self.counts["calls"] += 1
        self.counts["positive"] += int((found > 0).sum())
        return found

    def plain(self) -> Any:
        return self.first, self.highest, self.positive, dict(self.counts)


class Spreads(Reads):
    """Keeps what no rule puts together."""

    def forward(self, x: Tensor) -> Tensor:
        self.spread = self.linear(x).std().item()
        return super().forward(x)


class KeptRead(Regression):
    def __init__(self, kind: type[Reads]) -> None:
        super().__init__()
        sizes = (FEATURES, 5, TARGETS)
        self.net = nn.Sequential(*map(kind, sizes, sizes[1:])).double()
        self.after_batches: list[Any] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        layers: Any = self.net
        self.after_batches.append([one.plain() for one in layers])


def read_by(pipeline: dict[str, Any] | None, kind: type[Reads] = Reads) -> tuple[Any, list[str]]:
    module, run = KeptRead(kind), trainer(pipeline, limit_val_batches=0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run.fit(module, loader(24))
    return module.after_batches, [str(one.message) for one in said if "no rule is known" in str(one.message)]


@pytest.mark.parametrize("stages", [1, 2])
def test_what_units_read_of_values_and_keep_is_that_of_one_device(ranks: Ranks, stages: int) -> None:
    expected, _ = read_by(None)
    for found, said in ranks(stages)(read_by, {"stages": stages, "num_microbatches": 2}, group=False):
        assert_close(found, expected)
        assert not said


@pytest.mark.parametrize("stages", [1, 2])
def test_what_no_rule_puts_together_is_told_on_one_rank_too(ranks: Ranks, stages: int) -> None:
    pipeline = {"stages": stages, "num_microbatches": 2}
    said = [text for _, lines in ranks(stages)(read_by, pipeline, Spreads, group=False) for text in lines]
    assert [text for text in said if "forward of Spreads" in text and "net.0.spread" in text], said


class Drops(nn.Module):
    """A layer that drops values, and keeps figures of what is left: one device is not followed in its draws."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.total = self.peak = 0.0
        self.dropped = torch.zeros((), dtype=torch.float64)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        mask = (torch.rand(x.shape, dtype=x.dtype) < 0.9).to(x.dtype)
        x = nn.functional.dropout(x, 0.25, self.training) * mask
        self.total += x.sum().item()
        self.peak = max(self.peak, x.max().item())
        self.dropped = self.dropped + (1 - mask).sum()
        self.calls += 1
        FOUND.append((self, float(x.detach().sum()), float(x.detach().max()), float((1 - mask).sum())))
        return self.linear(x)


FOUND: list[tuple[Any, float, float, float]] = []


class Dropping(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(Drops(FEATURES, 5), Drops(5, TARGETS)).double()
        self.began = 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        FOUND.clear()
        layers: Any = self.net
        self.before = [(one.total, one.peak, one.dropped.item(), one.calls) for one in layers]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        layers: Any = self.net
        for one, (total, peak, dropped, calls) in zip(layers, self.before, strict=True):
            own = [found for module, *found in FOUND if module is one][-4:]  # before them it is tried out
            if own:
                self.began += 1
                assert one.total == pytest.approx(total + sum(found[0] for found in own))
                assert one.peak == max(peak, *(found[1] for found in own))
                assert one.dropped.item() == pytest.approx(dropped + sum(found[2] for found in own))
                assert one.calls == calls + 1


def figures_of_dropping() -> tuple[int, list[Any]]:
    module, run = Dropping(), trainer({"stages": 2, "num_microbatches": 4}, max_epochs=1)
    run.fit(module, loader(24))
    layers: Any = module.net
    return module.began, [(one.total, one.peak, one.dropped.item(), one.calls) for one in layers]


def test_figures_of_random_units_are_those_of_all_their_micro_batches(ranks: Ranks) -> None:
    (first, of_first), (second, of_second) = ranks(2)(figures_of_dropping)
    assert first == second == 3
    assert of_first == of_second
