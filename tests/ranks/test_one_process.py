"""A step that asks `torch.distributed` how many processes there are sees those of one device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, assert_same, fit, loader, trainer, weights

Ranks = Callable[[int], Pool]


class Contrasts(Regression):
    """As contrastive losses gather the samples of all replicas."""

    def loss(self, batch: Any) -> Tensor:
        out = F.normalize(self.net(batch[0]), dim=-1)
        others = out
        if dist.is_available() and dist.is_initialized():
            gathered = [torch.zeros_like(out) for _ in range(dist.get_world_size())]
            dist.all_gather(gathered, out)
            others = torch.cat(gathered)
        return F.cross_entropy(out @ others.T / 0.5, torch.arange(len(out)))


class Counts(Regression):
    """As detectors divide by the boxes of all replicas."""

    def loss(self, batch: Any) -> Tensor:
        count = (batch[1] > 0).sum().double()
        if dist.is_initialized():
            dist.all_reduce(count)
            count = count / dist.get_world_size()
        return ((self.net(batch[0]) - batch[1]) ** 2 * (batch[1] > 0)).sum() / count.clamp(min=1)


def in_a_hook() -> tuple[bool, int]:
    seen = []

    class Asks(Regression):
        def on_train_start(self) -> None:
            seen.append((dist.is_initialized(), dist.get_world_size()))

    fit({"stages": 2}, Asks)
    return seen[0]


def test_a_step_that_gathers_of_replicas_is_that_of_one_device(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: False)  # another test may have left a group here
    for cls, microbatches in ((Contrasts, 1), (Counts, 4)):
        expected = fit(None, cls)
        for found in ranks(2)(fit, {"stages": 2, "num_microbatches": microbatches}, cls):
            assert_same(found, expected)


def test_a_hook_sees_the_ranks_that_there_are(ranks: Ranks) -> None:
    assert ranks(2)(in_a_hook) == [(True, 2), (True, 2)]


class OfAGroup(Regression):
    """Goes by whether there is a group in loaders, optimizers and hooks, as projects for several devices do."""

    def train_dataloader(self) -> Any:
        data = loader().dataset
        several = dist.is_available() and dist.is_initialized()
        generator = torch.Generator().manual_seed(0)
        sampler = DistributedSampler(data) if several else RandomSampler(data, generator=generator)
        return DataLoader(data, batch_size=8, sampler=sampler)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01 if dist.is_initialized() else 0.1)

    def on_train_epoch_end(self) -> None:
        self.log("several", float(dist.is_initialized()))


def of_a_group(pipeline: dict[str, Any] | None) -> Any:
    module, run = OfAGroup(), trainer(pipeline)
    run.fit(module)
    return weights(module), {name: float(value) for name, value in run.callback_metrics.items()}


def test_a_run_of_one_process_finds_no_group(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as alone:
        alone.setattr(dist, "is_initialized", lambda: False)  # another test may have left a group here
        expected = of_a_group(None)
    pipeline = {"stages": 1, "num_microbatches": 2}
    assert_same(ranks(1)(of_a_group, pipeline, group=False)[0], expected)
