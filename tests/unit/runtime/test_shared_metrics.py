"""Metrics that are made while a run is under way: shared, or told of, and never waited for."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric, MetricTracker

from lightning_pipeline.hooks.metrics import SharedMetrics
from lightning_pipeline.model.state import ElsewhereError


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.error = MeanMetric()
        self.tracked = MetricTracker(MeanMetric(), maximize=False)


class Board:
    """What the last stage's rank left, by name."""

    def read(self, key: str, what: str) -> torch.Tensor:
        return torch.tensor(float(len(key)))


def elsewhere(module: nn.Module) -> SharedMetrics:
    outlet: Any = SimpleNamespace(is_source=False, group=object())
    board: Any = Board()
    return SharedMetrics(module, outlet, board, None)


def test_a_copy_made_in_a_run_does_not_gather_on_a_rank_that_has_not_its_states() -> None:
    module = Module()
    shared = elsewhere(module)
    copied = module.error.clone()
    copied.update(1.0)
    with pytest.raises(ElsewhereError, match="a copy of a metric was made while the run was under way"):
        copied.compute()
    shared.restore()
    again = module.error.clone()
    again.update(1.0)
    assert float(again.compute()) == 1


def test_the_copies_of_a_tracker_are_shared_by_name_until_the_run_ends() -> None:
    module = Module()
    own, increment = MetricTracker(MeanMetric(), maximize=False), MetricTracker.increment
    shared = elsewhere(module)
    for _ in range(2):
        module.tracked.increment()
        own.increment()  # none of the module's
    own.update(3.0)
    assert module.tracked.compute_all().tolist() == [len("metric/tracked.1/0/0")] * 2
    assert float(own.compute()) == 3
    shared.restore()
    assert MetricTracker.increment is increment
