"""What a rank holds: its own parameters, their optimizer state, and a bounded number of micro-batches."""

import gc
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from lightning_pipeline import PipelineStrategy
from lightning_pipeline.model.replay.stage import StageProgram
from lightning_pipeline.model.tensors import is_placeholder
from lightning_pipeline.wire.stage import Values
from tests.pool import Pool
from tests.ranks.lightning_cases import FEATURES, TARGETS, Regression, loader, trainer, weights

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
    """Notes how many gradients of the step before are held while a backward runs."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[int] = []
        for layer in (self.net[0], self.net[-1]):  # one on each stage
            layer.register_full_backward_hook(self.look)

    def look(self, *_: Any) -> None:
        stages = self.trainer.strategy._pipeline.stages
        if hasattr(stages, "gradients"):  # not while the whole module is traced
            self.held.append(len(stages.gradients.aside.held()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
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


class OutsideUnits(Regression):
    """A weight between units, whose graph holds what it is multiplied by."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.full((FEATURES,), 0.3, dtype=torch.float64))

    def given(self, x: Tensor) -> Tensor:
        return x * self.gate

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self.net(self.given(batch[0])) * self.gate[:TARGETS], batch[1])


class Centers(OutsideUnits):
    def given(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) * self.gate


class SampleBySample(OutsideUnits):
    def loss(self, batch: Any) -> Tensor:
        y = self.net(self.given(batch[0])) * self.gate[:TARGETS]
        return sum((a - b).square().mean() for a, b in zip(y, batch[1], strict=True)) / len(y)


class WritesInPlace(OutsideUnits):
    def given(self, x: Tensor) -> Tensor:
        found = torch.zeros_like(x) * self.gate
        found[:, 1:] = super().given(x)[:, 1:]
        return found


class CountsGraphs(Callback):
    """Counts the tensors whose graph holds a parameter, after each batch."""

    def __init__(self) -> None:
        self.counted: list[int] = []

    def count(self, module: pl.LightningModule) -> None:
        own = {id(p) for p in module.parameters()}
        made = [one for one in gc.get_objects() if isinstance(one, Tensor) and one.grad_fn is not None]
        self.counted.append(sum(any(id(leaf) in own for leaf in leaves_of(one)) for one in made))

    def on_train_batch_end(self, run: Any, module: pl.LightningModule, *args: Any) -> None:
        self.count(module)

    def on_validation_batch_end(self, run: Any, module: pl.LightningModule, *args: Any) -> None:
        self.count(module)


def leaves_of(tensor: Tensor) -> list[Tensor]:
    """The tensors that the graph of one ends in."""
    found, seen, nodes = [], set(), [tensor.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        nodes.extend(before for before, _ in node.next_functions)
    return found


def graphs_alive(make: type[Regression]) -> list[int]:
    counts = CountsGraphs()
    run = trainer({"stages": 2, "num_microbatches": 2}, max_epochs=1, callbacks=[counts])
    gc.disable()
    try:
        run.fit(make(), loader(), loader(seed=4))
    finally:
        gc.enable()
    return counts.counted


@pytest.mark.parametrize("make", [OutsideUnits, Centers, SampleBySample, WritesInPlace])
def test_no_graph_outlives_its_batch(ranks: Ranks, make: type[Regression]) -> None:
    """A graph in a circle would hold activations until Python collects it, and a weight that is to move."""
    for counted in ranks(2)(graphs_alive, make):
        assert len(counted) > 3
        assert not any(counted)
