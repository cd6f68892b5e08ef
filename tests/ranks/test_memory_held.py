"""What a rank holds: its own parameters, their optimizer state, and a bounded number of micro-batches."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_pipeline import PipelineStrategy
from lightning_pipeline.model.replay.stage import StageProgram
from lightning_pipeline.model.tensors import is_placeholder
from lightning_pipeline.wire.stage import Values
from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, loader, trainer, weights

Ranks = Callable[[int], Pool]


class Counts(Regression):
    """Adam, so that there is optimizer state; notes what this rank holds before the run is undone."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)

    def on_train_end(self) -> None:
        assert [name for name, _ in self.named_parameters()] == list(weights(Regression()))
        own = {name: p for name, p in self.named_parameters() if not is_placeholder(p)}
        self.names = list(own)
        tensors = [*own.values(), *(b for b in self.buffers() if not is_placeholder(b))]
        self.held = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
        state = self.trainer.optimizers[0].state
        self.state = sum(
            v.numel() * v.element_size()
            for held in state.values()
            for v in held.values()
            if v.dim() and not is_placeholder(v)
        )


def fit(stages: int, schedule: str) -> tuple[int, list[str], int, dict[int, int]]:
    peaks: dict[int, int] = {}
    forward = StageProgram.forward

    def counting(self: StageProgram, microbatch: int, incoming: Values | None) -> Values | None:
        values = forward(self, microbatch, incoming)
        peaks[self.index] = max(peaks.get(self.index, 0), self.num_saved)
        return values

    StageProgram.forward = counting  # type: ignore[method-assign]
    try:
        module = Counts()
        strategy = PipelineStrategy(stages=stages, schedule=schedule, num_microbatches=8)
        trainer = pl.Trainer(
            accelerator="cpu", devices=stages, strategy=strategy, max_epochs=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, loader(16))
    finally:
        StageProgram.forward = forward  # type: ignore[method-assign]
    return module.held, module.names, module.state, peaks


@pytest.mark.parametrize("stages", [2, 4])
def test_with_1f1b_a_stage_holds_as_many_microbatches_as_stages_follow(ranks: Ranks, stages: int) -> None:
    whole = Regression()
    total = sum(p.untyped_storage().nbytes() for p in whole.parameters())
    found = ranks(stages)(fit, stages, "1F1B")
    peaks: dict[int, int] = {}
    for *_, counted in found:
        peaks.update(counted)
    assert peaks == {stage: stages - stage for stage in range(stages)}
    assert sum(held for held, *_ in found) == total
    assert sum(state for _, _, state, _ in found) == 2 * total
    names = [name for _, listed, *_ in found for name in listed]
    assert sorted(names) == sorted(name for name, _ in whole.named_parameters())


def test_gpipe_holds_all_microbatches(ranks: Ranks) -> None:
    for *_, peaks in ranks(2)(fit, 2, "GPipe"):
        assert set(peaks.values()) == {8}


class WatchesGradients(Regression):
    """Notes how many gradients of the step before are held while a step runs."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        stages = self.trainer.strategy._pipeline.stages
        if hasattr(stages, "gradients"):  # not while the whole module is traced
            self.held.append(len(stages.gradients.aside.held()))
        return self.loss(batch)


class LooksAtGradients(WatchesGradients):
    def on_before_zero_grad(self, optimizer: Any) -> None: ...


def gradients_of_the_step_before(looks: bool, accumulate: int) -> tuple[list[int], dict[str, Tensor]]:
    module = LooksAtGradients() if looks else WatchesGradients()
    run = trainer({"stages": 2, "num_microbatches": 1}, accumulate_grad_batches=accumulate, max_epochs=1)
    run.fit(module, loader())
    return module.held, weights(module)


@pytest.mark.parametrize(
    ("looks", "accumulate", "held"),
    [(False, 1, [0, 0, 0]), (True, 1, [0, 4, 4]), (False, 2, [0, 4, 0])],
    ids=["freed", "seen by a hook", "accumulated"],
)
def test_gradients_of_the_step_before_are_freed_unless_someone_looks(
    ranks: Ranks, looks: bool, accumulate: int, held: list[int]
) -> None:
    module, run = Regression(), trainer(None, accumulate_grad_batches=accumulate, max_epochs=1)
    run.fit(module, loader())
    for found, trained in ranks(2)(gradients_of_the_step_before, looks, accumulate):
        assert found[-3:] == held
        torch.testing.assert_close(trained, weights(module), rtol=1e-10, atol=0)
