"""Each family of schedules really trains: the gradients of all parameters are those of one process."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from examples.gpt import GPT
from lightning_pipeline import PipelineStrategy
from lightning_pipeline.schedules import get_schedule
from tests.pool import Pool
from tests.unit.split.models import Residual

Ranks = Callable[[int], Pool]
# One of each family; test_launch_order runs all of them on toy stages, where the order is all that counts.
CASES = [
    ("1F1B", 4, 4), ("Interleaved1F1B", 2, 8), ("ZBH1", 2, 9), ("ZBV", 4, 4), ("DualPipeV", 2, 9), ("Auto", 2, 8),
]  # fmt: skip
BATCH = 18


class KeepsGradients(pl.LightningModule):
    """Keeps what the optimizer is about to use."""

    def __init__(self) -> None:
        super().__init__()
        self.gradients: dict[str, Tensor] = {}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        held = {id(p): n for n, p in self.named_parameters_here()}
        for group in self.optimizers().param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and id(parameter) in held:
                    self.gradients[held[id(parameter)]] = parameter.grad.clone()

    def named_parameters_here(self) -> list[tuple[str, nn.Parameter]]:
        own = set(map(id, self.trainer.strategy.own_parameters()))
        return [(n, p) for n, p in self.named_parameters(remove_duplicate=False) if id(p) in own]


class SmallGPT(KeepsGradients):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gpt = GPT(layers=7, width=16, heads=2, block_size=8).double()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.gpt.loss(batch)


class SmallCNN(KeepsGradients):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), *[Residual(4) for _ in range(7)]).double()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]).mean((2, 3)), batch[1])


def batch_for(name: str) -> Any:
    torch.manual_seed(1)
    if name == "gpt":
        return torch.randint(0, 256, (BATCH, 9))
    return torch.randn(BATCH, 1, 6, 6, dtype=torch.float64), torch.randint(0, 4, (BATCH,))


def module_for(name: str) -> KeepsGradients:
    return SmallGPT() if name == "gpt" else SmallCNN()


def expected_gradients(name: str, microbatches: int) -> dict[str, Tensor]:
    from lightning_pipeline.data.microbatch import split_batch

    module = module_for(name).train()
    for part, size in split_batch(batch_for(name), microbatches):
        (module.training_step(part, 0) * (size / BATCH)).backward()
    return {n: p.grad for n, p in module.named_parameters() if p.grad is not None}


def gradients_of_rank(name: str, schedule: str, stages: int, microbatches: int) -> dict[str, Tensor]:
    module = module_for(name)
    strategy = PipelineStrategy(
        stages=stages, schedule=schedule, num_microbatches=microbatches, partition="uniform"
    )
    trainer = pl.Trainer(
        accelerator="cpu", devices=stages, strategy=strategy, max_steps=1, logger=False, barebones=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader([batch_for(name)], batch_size=None))
    return module.gradients


@pytest.mark.parametrize(("schedule", "stages", "microbatches"), CASES)
def test_a_schedule_trains_with_the_gradients_of_one_process(
    ranks: Ranks, schedule: str, stages: int, microbatches: int
) -> None:
    per_rank = get_schedule(schedule).stages_per_rank
    assert per_rank in (1, 2)
    for name in ("gpt", "cnn"):
        expected = expected_gradients(name, microbatches)
        found: dict[str, Tensor] = {}
        for gradients in ranks(stages)(gradients_of_rank, name, schedule, stages, microbatches):
            for own_name, gradient in gradients.items():
                key = own_name.replace("gpt.head.", "gpt.token_embedding.")  # tied: the first name counts
                if key in found:  # a shared parameter: every copy has the whole sum
                    torch.testing.assert_close(gradient, found[key], rtol=1e-10, atol=1e-12)
                found[key] = gradient
        assert set(found) == set(expected)
        for key, gradient in expected.items():
            torch.testing.assert_close(
                found[key], gradient, rtol=1e-10, atol=1e-12, msg=lambda m, k=key: f"{k}: {m}"
            )
