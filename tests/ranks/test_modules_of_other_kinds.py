"""Modules and values that torch makes otherwise: scripted and traced ones, sparse tensors, counts that layers keep."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, loader, trainer

Ranks = Callable[[int], Pool]


def neighbours() -> Tensor:
    places = torch.tensor([[0, 1, 2, 5], [1, 3, 0, 7]])
    values = torch.tensor([1.0, 2.0, 0.5, 1.0], dtype=torch.float64)
    return torch.sparse_coo_tensor(places, values, (8, 8), check_invariants=True).coalesce()


class Scripted(Regression):
    """A layer of `torch.jit.script`."""

    def __init__(self) -> None:
        super().__init__()
        self.net[2] = torch.jit.script(nn.Linear(8, 8).double())


class OfGraph(nn.Module):
    """A sparse matrix as a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("neighbours", neighbours(), persistent=False)
        self.linear = nn.Linear(8, 8).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear((self.neighbours @ x.T).T) + x


class Sparse(Regression):
    """That, and one as an attribute between the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net[2], self.plain = OfGraph(), neighbours()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.net[0](batch[0])
        hidden = torch.sparse.mm(self.plain, hidden.T).T + hidden
        return nn.functional.mse_loss(self.net[1:](hidden), batch[1])


class Solver(nn.Module):
    """Counts its calls, as the function of a neural ODE does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(8, 8).double(), 0

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(self.linear(hidden))


class CountsCalls(Regression):
    """Logs that count, has it in the loss, and sets it back."""

    def __init__(self) -> None:
        super().__init__()
        self.solver = Solver()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.net[0](batch[0])
        for _ in range(3):
            hidden = hidden + 0.1 * self.solver(hidden)
        calls, self.solver.calls = self.solver.calls, 0
        self.log("calls", float(calls))
        return nn.functional.mse_loss(self.net[6](hidden), batch[1]) + 0.01 * calls


class Sure(Regression):
    """Divides by a whole number of those that the network is sure of."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        each = (self.net(batch[0]) - batch[1]).pow(2).mean(1)
        sure = each.detach() < 0.9
        return (each * sure).sum() / sure.sum().clamp(min=1)


KINDS = {kind.__name__: kind for kind in (Scripted, Sparse, CountsCalls, Sure)}


def fitted(pipeline: dict[str, Any] | None, kind: str) -> dict[str, Any]:
    module, run = KINDS[kind](), trainer(pipeline)
    run.fit(module, loader())
    logged = {name: float(value) for name, value in run.callback_metrics.items()}
    return {**logged, **{name: value.detach() for name, value in module.named_parameters()}}


@pytest.mark.parametrize("kind", KINDS)
def test_they_train_as_on_one_device(ranks: Ranks, kind: str) -> None:
    expected = fitted(None, kind)
    one_rank = {"stages": 1, "stages_per_rank": 2, "schedule": "Interleaved1F1B", "num_microbatches": 2}
    for found in (
        fitted(one_rank, kind),
        *ranks(2)(fitted, {"stages": 2, "num_microbatches": 2}, kind, group=False),
    ):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


class Views(Regression):
    """A batch with a list of two views: in a micro-batch of two samples it could be one of samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        views = sum(nn.functional.mse_loss(self.net(view["x"]), batch["y"]) for view in batch["views"])
        return nn.functional.mse_loss(self.net(batch["x"]), batch["y"]) + views


def with_views(samples: list[Any]) -> dict[str, Any]:
    x, y = (torch.stack(column) for column in zip(*samples, strict=True))
    return {"x": x, "y": y, "views": [{"x": x * factor} for factor in (1, 2)]}


def test_two_views_may_be_as_many_as_the_samples_of_a_micro_batch() -> None:
    one, ours = Views(), Views()
    data = DataLoader(loader().dataset, batch_size=8, collate_fn=with_views)
    trainer(None).fit(one, data)
    trainer({"stages": 1, "num_microbatches": 4}).fit(ours, data)
    torch.testing.assert_close(ours.state_dict(), one.state_dict(), rtol=1e-9, atol=1e-12)
