"""What activation checkpointing computes twice is what torch's own counter sees in a real backward."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)
from torch.utils.flop_counter import FlopCounterMode

from lightning_pipeline.forecast.machine import Assumptions
from lightning_pipeline.forecast.predict import predict
from lightning_pipeline.forecast.workload.memory import memory_of
from lightning_pipeline.forecast.workload.workload import Workload
from lightning_pipeline.schedules import OneFOneB
from tests.unit.split.pipe import Module

transformers = pytest.importorskip("transformers")

WIDTH, ROWS, LAYERS = 32, 8, 4


SELECTIVE = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])


class Block(nn.Module):
    """Two matrices with something between; `how`: which checkpoint is around them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.how = how

    def inner(self, hidden: Tensor) -> Tensor:
        wide = torch.tanh(self.first(hidden))
        if self.how == "nested":
            wide = checkpoint(torch.tanh, wide, use_reentrant=False)
        return hidden + self.second(wide)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.how == "none":
            return self.inner(hidden)
        selective = {"context_fn": SELECTIVE} if self.how == "selective" else {}
        return checkpoint(self.inner, hidden, use_reentrant=False, **selective)


class Blocks(Module):
    """A chain of blocks; `around`: one checkpoint around each block as a whole, between units."""

    def __init__(self, how: str, around: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block("none" if around else how) for _ in range(LAYERS))
        selective = {"context_fn": SELECTIVE} if how == "selective" else {}
        self.region = partial(checkpoint, use_reentrant=False, **selective) if around else None

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self.embed(batch)
        for layer in self.layers:
            hidden = self.region(layer, hidden) if self.region else layer(hidden)
        return hidden.square().mean()


class Llama(Module):
    """A small model of transformers, whose layers checkpoint themselves."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        sizes = dict(
            hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=LAYERS, vocab_size=64,
            num_attention_heads=2, num_key_value_heads=2,
        )  # fmt: skip
        config = transformers.LlamaConfig(**sizes, use_cache=False, attn_implementation="eager")
        self.model = transformers.LlamaForCausalLM(config)
        self.train()
        if checkpointed:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(input_ids=batch, labels=batch).loss


def counted(module: Any, batch: Tensor) -> float:
    with FlopCounterMode(display=False) as counter:
        module.training_step(batch, 0).backward()
    return counter.get_total_flops()


def planned(module: Any, batch: Tensor) -> float:
    calls = Workload(module, (batch, 0)).partition(1).trace.calls
    return sum(work.flops for call in calls for work in call.recomputed)


@pytest.mark.parametrize("how", ["once", "nested"])
def test_a_checkpoint_in_a_unit_computes_again_up_to_the_last_saved_tensor(how: str) -> None:
    batch = torch.randn(ROWS, WIDTH)
    surplus = counted(Blocks(how), batch) - counted(Blocks("none"), batch)
    # not the second matrix of a block: its input is the last that is saved
    assert planned(Blocks(how), batch) == surplus == LAYERS * 2 * ROWS * WIDTH * 4 * WIDTH
    assert planned(Blocks("none"), batch) == 0


def test_a_checkpoint_around_a_unit_counts_too() -> None:
    batch = torch.randn(ROWS, WIDTH)
    surplus = counted(Blocks("none", around=True), batch) - counted(Blocks("none"), batch)
    assert planned(Blocks("none", around=True), batch) == surplus > 0


@pytest.mark.parametrize("around", [False, True])
def test_a_selective_checkpoint_keeps_what_its_policy_says(around: bool) -> None:
    """Products are kept: nothing is multiplied twice, and their results are held beside the region's input."""
    batch = torch.randn(ROWS, WIDTH)
    module = Blocks("selective", around)
    assert counted(module, batch) == counted(Blocks("none"), batch)
    assert planned(module, batch) == 0
    calls = Workload(module, (batch, 0)).partition(1).trace.calls
    moved = [sum(work.num_bytes for work in call.recomputed) for call in calls]
    assert moved[0] == 0 < moved[1]  # tanh is run again
    held = Workload(module, (batch, 0), how=["layers.2"]).stages(2)[0].activation_bytes
    narrow = ROWS * WIDTH * 4
    # of each block: what it is given, the wide product before tanh, and the narrow one
    assert held == 2 * (narrow + 4 * narrow + narrow)


def test_without_the_early_stop_all_is_computed_again() -> None:
    batch = torch.randn(ROWS, WIDTH)
    with set_checkpoint_early_stop(False):
        surplus = counted(Blocks("once"), batch) - counted(Blocks("none"), batch)
        assert planned(Blocks("once"), batch) == surplus == LAYERS * 4 * ROWS * WIDTH * 4 * WIDTH


def test_gradient_checkpointing_of_transformers_is_seen() -> None:
    batch = torch.randint(0, 64, (2, 16))
    torch.manual_seed(0)
    surplus = counted(Llama(True), batch) - counted(Llama(False), batch)
    assert planned(Llama(True), batch) == surplus > 0
    assert planned(Llama(False), batch) == 0
    hidden = 2 * 16 * WIDTH * 4
    work = Workload(Llama(True), (batch, 0), how=["model.model.layers.2"])
    assert work.stages(2)[0].activation_bytes == 2 * hidden  # what two layers are given, and nothing inside


def test_the_second_forward_is_in_the_time_and_one_region_in_the_memory() -> None:
    batch = torch.randn(ROWS, WIDTH)
    plain, again = (Workload(Blocks(how), (batch, 0)) for how in ("none", "once"))
    step = {
        work: next(one for one in predict(work, 2, 4, Assumptions(flops=1e9)) if one.name == "1F1B").step
        for work in (plain, again)
    }
    assert step[again] > 1.1 * step[plain]
    plan = OneFOneB().plan(2, 4)
    held = [memory_of(plan, work.held(2, range(2)), work.stages(2), Assumptions()) for work in (plain, again)]
    assert [rank.recomputed for rank in held[0]] == [0, 0]
    # of a block: what the second matrix is given, which is what tanh saves too; the block's input stays
    assert [rank.recomputed for rank in held[1]] == [ROWS * 4 * WIDTH * 4] * 2
