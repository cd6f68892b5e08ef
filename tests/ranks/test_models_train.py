"""Four optimizer steps of real models over stages: weights and optimizer state are those of one process."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_pipeline import PipelineStrategy
from lightning_pipeline.data.microbatch import split_batch
from tests.pool import Pool
from tests.unit.split.models import module_and_batch

Ranks = Callable[[int], Pool]
STEPS = 4


class Wrapped(pl.LightningModule):
    """Any of the models of the split's tests as a LightningModule, in float64, with two parameter groups."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.inner, self.batch = module_and_batch(name)
        self.inner.double()
        self.batch = torch.utils._pytree.tree_map(
            lambda t: t.double() if t.is_floating_point() else t, self.batch
        )
        self.state: dict[str, Tensor] = {}
        self.losses: list[float] = []
        self.seen: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = self.inner.training_step(batch, batch_idx)
        self.log("loss", result["loss"] if isinstance(result, dict) else result)
        return result

    def configure_optimizers(self) -> Any:
        self.seen = [name for name, _ in self.named_parameters()]
        biases = [p for n, p in self.named_parameters() if n.endswith("bias")]
        others = [p for n, p in self.named_parameters() if not n.endswith("bias")]
        return torch.optim.AdamW([{"params": biases, "weight_decay": 0.0}, {"params": others}], lr=1e-2)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_train_end(self) -> None:
        optimizer = self.trainer.optimizers[0]
        own = set(map(id, self.trainer.strategy.own_parameters()))
        for name, parameter in self.named_parameters():
            for key, value in (optimizer.state.get(parameter, {}) if id(parameter) in own else {}).items():
                self.state[f"{name}/{key}"] = value.detach().clone()


def fit(name: str, stages: int, schedule: str, microbatches: int) -> dict[str, Any]:
    module = Wrapped(name)
    strategy = PipelineStrategy(stages=stages, schedule=schedule, num_microbatches=microbatches)
    trainer = pl.Trainer(
        accelerator="cpu", devices=stages, strategy=strategy, max_steps=STEPS, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader([module.batch] * STEPS, batch_size=None))
    weights = {key: value.detach().clone() for key, value in module.state_dict().items()}
    return {"weights": weights, "state": module.state, "losses": module.losses, "seen": module.seen}


def alone(name: str, microbatches: int) -> dict[str, Any]:
    """One process with the same micro-batches, accumulated."""
    module = Wrapped(name).train()
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    optimizer = module.configure_optimizers()
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        parts = split_batch(module.batch, microbatches)
        total = sum(size for _, size in parts)
        loss_sum = 0.0
        for part, size in parts:
            result = module.training_step(part, 0)
            loss = (result["loss"] if isinstance(result, dict) else result) * (size / total)
            loss.backward()
            loss_sum += float(loss)
        optimizer.step()
        losses.append(loss_sum)
    names = {id(p): n for n, p in module.named_parameters()}
    state = {f"{names[id(p)]}/{k}": v for p, held in optimizer.state.items() for k, v in held.items()}
    return {"weights": module.state_dict(), "state": state, "losses": losses, "seen": module.seen}


@pytest.mark.parametrize(
    ("name", "stages", "schedule", "microbatches"),
    [
        ("residual", 2, "1F1B", 4), ("residual", 3, "GPipe", 3), ("unet", 3, "1F1B", 7), ("unet", 4, "GPipe", 4),
        ("gpt2", 2, "GPipe", 7), ("gpt2", 4, "1F1B", 4), ("llama", 3, "1F1B", 4), ("bert", 2, "1F1B", 1),
        ("bert", 4, "1F1B", 7), ("t5", 2, "1F1B", 4), ("t5", 4, "GPipe", 7), ("perceptron", 4, "1F1B", 7),
    ],
)  # fmt: skip
def test_weights_and_optimizer_state_after_four_steps(
    ranks: Ranks, name: str, stages: int, schedule: str, microbatches: int
) -> None:
    expected = alone(name, microbatches)
    found = ranks(stages)(fit, name, stages, schedule, microbatches)
    state: dict[str, Tensor] = {}
    for rank in found:
        torch.testing.assert_close(
            rank["losses"], expected["losses"], rtol=1e-6, atol=0
        )  # some compute it in float32
        state.update(rank["state"])
    weights = found[0]["weights"]
    assert set(weights) == set(expected["weights"])
    for key, value in expected["weights"].items():
        torch.testing.assert_close(
            weights[key], value, rtol=1e-8, atol=1e-10, msg=lambda m, k=key: f"{k}: {m}"
        )
    for key, value in expected["state"].items():
        mine = state[_held_name(key, state)]
        torch.testing.assert_close(
            mine, value.to(mine.dtype), rtol=1e-8, atol=1e-10, msg=lambda m, k=key: f"{k}: {m}"
        )
    assert all(rank["seen"] == expected["seen"] for rank in found)


def _held_name(key: str, state: dict[str, Tensor]) -> str:
    """A tied weight is held under its first name on its first stage, another on a later one."""
    if key in state:
        return key
    name, kind = key.split("/")
    shape = [
        k
        for k in state
        if k.endswith(f"/{kind}") and ("wte" in k or "shared" in k or "embed" in k or "head" in k)
    ]
    assert shape, f"no rank holds {name}"
    return shape[0]
