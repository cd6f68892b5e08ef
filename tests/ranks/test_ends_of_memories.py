"""As many rows of a memory as the batch has samples, by Python's `len`: those of one device."""

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.pool import Pool
from tests.ranks.lightning_cases import FEATURES, Regression, assert_same, loader, trainer, weights

Ranks = Callable[[int], Pool]
KINDS = ["start", "middle", "list", "deque", "grown", "last", "end"]


class Memory(Regression):
    """Contrasts samples with rows of what it has kept."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        made = torch.randn(24, FEATURES, generator=torch.Generator().manual_seed(3))
        self.register_buffer("fixed", made.to(next(self.parameters()).dtype))
        self.kept: list[Tensor] = []
        self.window = deque[Tensor](self.fixed[:20], maxlen=20)
        self.grown: Tensor | None = None

    def rows(self, x: Tensor) -> Tensor:
        number = len(x)
        if self.kind in ("start", "middle", "end"):
            begin = {"start": 0, "middle": 5, "end": 24 - number}[self.kind]
            return self.fixed[begin : begin + number]
        if self.kind == "last":
            return self.fixed[-number:]
        if self.kind == "list":
            return self.kept[-1][:number] if self.kept else torch.zeros_like(x)
        if self.kind == "deque":
            return torch.stack(list(self.window)[-number:])
        return self.grown[-number:] if self.grown is not None else torch.zeros_like(x)

    def keep(self, x: Tensor) -> None:
        if self.kind == "list":
            self.kept.append(x)
        elif self.kind == "deque":
            self.window.extend(x)
        elif self.kind == "grown":
            self.grown = x if self.grown is None else torch.cat([self.grown, x])[-16:]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        loss = nn.functional.relu(1 + self.net(self.rows(x)) - self.net(x)).mean()
        self.keep(x)
        self.log("loss", loss)
        return loss


def fit_memory(pipeline: dict[str, Any] | None, kind: str) -> Any:
    module, run = Memory(kind), trainer(pipeline, max_epochs=2)
    run.fit(module, loader(32))
    return weights(module), {name: float(value) for name, value in run.callback_metrics.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_memory_are_those_of_one_device(kind: str) -> None:
    assert_same(fit_memory({"stages": 1, "num_microbatches": 4}, kind), fit_memory(None, kind))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "grown"])
def test_rows_of_a_memory_are_those_of_one_device_on_several_ranks(ranks: Ranks, kind: str) -> None:
    expected = fit_memory(None, kind)
    for found in ranks(2)(fit_memory, {"stages": 2, "num_microbatches": 2}, kind):
        assert_same(found, expected)


class Targets(Regression):
    """Soft targets by sample, in a dictionary: what micro-batches call goes by what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: dict[int, Tensor] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        out, targets = self.net(x), []
        for number, one in zip(y[:, 0].mul(1e6).long().tolist(), out.detach(), strict=True):
            self.memory[number] = 0.6 * self.memory[number] + 0.4 * one if number in self.memory else one
            targets.append(self.memory[number])
        return self.loss(batch) + nn.functional.mse_loss(out, torch.stack(targets))


def fit_targets(pipeline: dict[str, Any] | None) -> Any:
    module, run = Targets(), trainer(pipeline, max_epochs=2)
    run.fit(module, loader(26))
    return weights(module), {name: float(value) for name, value in run.callback_metrics.items()}


def test_targets_by_sample_are_those_of_one_device() -> None:
    assert_same(fit_targets({"stages": 1, "num_microbatches": 2}), fit_targets(None))
