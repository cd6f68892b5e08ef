"""Optimizers that run the step more than once for a batch: all stages run it as often, with one device's numbers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_pipeline.errors import PipelineError
from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, assert_same, loader, trainer, weights

Ranks = Callable[[int], Pool]


class Sharpness(torch.optim.Optimizer):
    """Sharpness-aware minimization, as it is usually written: a base optimizer shares the groups."""

    def __init__(self, parameters: Any, rho: float = 0.05, **options: Any) -> None:
        super().__init__(parameters, {"rho": rho, **options})
        self.base = torch.optim.SGD(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        closure = torch.enable_grad()(closure)
        loss = closure()
        each = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.norm(torch.stack([p.grad.norm(p=2) for p in each]), p=2)
        for group in self.param_groups:
            scale = group["rho"] / (norm + 1e-12)
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["old"] = p.data.clone()
                    p.add_(p.grad * scale.to(p))
        closure()
        for p in each:
            p.data = self.state[p]["old"]
        self.base.step()
        return loss


class Repeats(torch.optim.SGD):
    """Runs the step until the loss falls below a bound, at most three times."""

    def step(self, closure: Any = None) -> Any:
        for _ in range(3):
            loss = super().step(closure)
            if float(loss) < 0.4:
                break
        return loss


class Differs(torch.optim.Optimizer):
    """Calls as often as it is told, another number of times on each rank."""

    def __init__(self, parameters: Any, calls: int) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.calls = calls

    def step(self, closure: Any = None) -> Any:
        return [closure() for _ in range(self.calls)][-1]


class Trains(Regression):
    """With a log and a counter in the step."""

    kind = "sharpness"

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls += 1
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.history += [float(outputs["loss"]), float(self.calls)]

    def configure_optimizers(self) -> Any:
        if self.kind == "sharpness":
            return Sharpness(self.parameters(), lr=0.05, momentum=0.9)
        if self.kind == "repeats":
            return Repeats(self.parameters(), lr=0.05)
        if self.kind == "differs":
            return Differs(self.parameters(), calls=1 + self.global_rank)
        search = "strong_wolfe" if self.kind == "wolfe" else None
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4, line_search_fn=search)


def fit(kind: str, pipeline: dict[str, Any] | None) -> tuple[Any, Any]:
    module = Trains()
    module.kind = kind
    run = trainer({**pipeline, "step_timeout": 20} if pipeline else None, max_epochs=2)
    run.fit(module, loader())
    logged = {name: float(value) for name, value in run.callback_metrics.items()}
    return (weights(module), {}), [*module.history, logged.get("loss_epoch"), float(run.global_step)]


ALONE: list[dict[str, Any]] = [
    {"stages": 1, "num_microbatches": 2},
    {"stages": 1, "stages_per_rank": 2, "schedule": "Interleaved1F1B", "num_microbatches": 4},
]


@pytest.mark.parametrize("pipeline", ALONE, ids=["one stage", "two stages"])
@pytest.mark.parametrize("kind", ["sharpness", "repeats", "quasi", "wolfe"])
def test_one_rank_runs_the_step_as_often_as_its_optimizer_asks(
    ranks: Ranks, kind: str, pipeline: dict[str, Any]
) -> None:
    expected, history = fit(kind, None)
    for found, seen in ranks(1)(fit, kind, pipeline):
        assert_same(found, expected)
        assert seen == pytest.approx(history, rel=1e-9)


@pytest.mark.parametrize(
    ("kind", "schedule"), [("sharpness", "1F1B"), ("sharpness", "ZBH1"), ("repeats", "1F1B")]
)
def test_stages_on_two_ranks_run_it_together(ranks: Ranks, kind: str, schedule: str) -> None:
    expected, history = fit(kind, None)
    for found, seen in ranks(2)(fit, kind, {"stages": 2, "num_microbatches": 2, "schedule": schedule}):
        assert_same(found, expected)
        assert seen == pytest.approx(history, rel=1e-9)


def refused(kind: str) -> str:
    with pytest.raises(PipelineError) as told:
        fit(kind, {"stages": 2, "num_microbatches": 2})
    return str(told.value)


def test_ranks_that_call_it_another_number_of_times_are_told(ranks: Ranks) -> None:
    for told in ranks(2)(refused, "differs"):
        assert "the end of an optimizer's step" in told
        assert "call 2 of an optimizer's closure" in told
