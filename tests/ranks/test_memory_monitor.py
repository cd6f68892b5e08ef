"""What the memory monitor reports of whole runs is what the stages hold, and what the plan foresees."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lightning_pipeline.callbacks import StageMemoryMonitor
from lightning_pipeline.model.tensors import is_placeholder
from lightning_pipeline.schedules import Costs, get_schedule, simulate
from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, loader, trainer, weights
from tests.ranks.sleeping import told

Ranks = Callable[[int], Pool]
GIB = 2**30
MICROBATCHES = 8


class Adam(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Notes(pl.Callback):
    """Keeps what was logged before the run is undone, and the optimizer's state as it stands."""

    def on_train_batch_end(self, run: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        self.states = sum(
            tensor.numel() * tensor.element_size()
            for held in run.optimizers[0].state.values()
            for tensor in held.values()
            if not is_placeholder(tensor)
        )

    def on_train_end(self, run: pl.Trainer, *_: Any) -> None:
        self.logged = {
            name.removeprefix("pipeline/"): float(value)
            for name, value in run.callback_metrics.items()
            if name.startswith("pipeline/")
        }


def fit(pipeline: dict[str, Any], **options: Any) -> tuple[dict[str, float], int, dict[str, Tensor]]:
    notes, module = Notes(), Adam()
    run = trainer(pipeline, callbacks=[StageMemoryMonitor(), notes], max_epochs=1, **options)
    run.fit(module, loader(16))
    return notes.logged, notes.states, weights(module)


@pytest.mark.parametrize(("schedule", "stages"), [("1F1B", 2), ("1F1B", 4), ("GPipe", 2), ("ZBH1", 2)])
def test_stages_hold_as_many_microbatches_as_the_plan_says(ranks: Ranks, schedule: str, stages: int) -> None:
    found = ranks(stages)(fit, {"stages": stages, "schedule": schedule, "num_microbatches": MICROBATCHES})
    logged = found[0][0]
    assert all(one == logged for one, *_ in found)
    plan = get_schedule(schedule).plan(stages, MICROBATCHES)
    expected = simulate(plan, Costs(1, 1, 1)).peak_memory
    held = [logged[f"stage_{stage}/activation_microbatches"] for stage in range(stages)]
    assert held == list(expected)
    if schedule != "ZBH1":
        assert held == [stages - stage if schedule == "1F1B" else MICROBATCHES for stage in range(stages)]


def test_parameters_gradients_and_optimizer_state_are_counted_to_the_byte(ranks: Ranks) -> None:
    found = ranks(2)(fit, {"stages": 2, "num_microbatches": 2})
    logged = found[0][0]
    for stage, (_, states, _) in enumerate(reversed(found)):  # the last stage is rank 0's
        assert round(logged[f"stage_{stage}/optimizer_state_gib"] * GIB) == states
        assert logged[f"stage_{stage}/gradients_gib"] == logged[f"stage_{stage}/parameters_gib"]
        assert logged[f"stage_{stage}/buffers_gib"] > 0
    total = round(sum(logged[f"stage_{stage}/parameters_gib"] for stage in range(2)) * GIB)
    assert total == sum(p.numel() * p.element_size() for p in Adam().parameters())


def test_counting_changes_no_bit(ranks: Ranks) -> None:
    pipeline = {"stages": 2, "schedule": "ZBH1", "num_microbatches": 4}
    for (_, _, counted), alone in zip(
        ranks(2)(fit, pipeline), ranks(2)(fit_uncounted, pipeline), strict=True
    ):
        assert all(torch.equal(counted[name], alone[name]) for name in alone)


def fit_uncounted(pipeline: dict[str, Any]) -> dict[str, Tensor]:
    module = Adam()
    trainer(pipeline, max_epochs=1).fit(module, loader(16))
    return weights(module)


def fit_gpt(schedule: str, options: dict[str, Any], masked: bool = False) -> dict[str, float]:
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    from gpt import GPT

    class Masked(GPT):
        """Its loss is divided by the tokens that count, of which micro-batches have more or fewer."""

        def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
            targets = tokens[:, 1:].flatten()
            losses = F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), targets, reduction="none")
            counts = (targets % 3 > 0).float()
            return (losses * counts).sum() / counts.sum()

    notes = Notes()
    run = trainer(
        {"stages": 2, "schedule": schedule, "num_microbatches": 4, **options},
        callbacks=[StageMemoryMonitor(), notes], max_epochs=1, max_steps=2,
    )  # fmt: skip
    data = torch.randint(0, 256, (32, 65))
    run.fit((Masked if masked else GPT)(layers=6), torch.utils.data.DataLoader(data, 16))
    return notes.logged


@pytest.mark.parametrize(
    ("schedule", "options"),
    [("GPipe", {}), ("1F1B", {}), ("ZBH1", {}), ("Interleaved1F1B", {"stages_per_rank": 2}), ("ZBV", {})],
)
def test_the_demo_holds_what_was_foreseen(ranks: Ranks, schedule: str, options: dict[str, Any]) -> None:
    check_foreseen(ranks(2)(fit_gpt, schedule, options)[0], 2 if schedule in ("GPipe", "1F1B", "ZBH1") else 6)


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "ZBH1"])
def test_a_loss_that_is_followed_leaves_no_micro_batch_behind(ranks: Ranks, schedule: str) -> None:
    check_foreseen(ranks(2)(fit_gpt, schedule, {}, True)[0], 2)


def check_foreseen(logged: dict[str, float], places: int) -> None:
    """What was held is what was planned, in so many places: stages, and ranks with several."""
    names = {name.removesuffix("/activations_gib") for name in logged if name.endswith("/activations_gib")}
    assert len(names) == places
    for name in names:
        planned = logged[f"{name}/activations_planned_gib"]
        assert logged[f"{name}/activations_gib"] == pytest.approx(planned, rel=0.002), name


class Layers(pl.LightningModule):
    """A small Llama of transformers, whose layers checkpoint themselves if they are told to."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 4}
        sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 64}
        self.model = LlamaForCausalLM(LlamaConfig(**heads, **sizes, use_cache=False))
        if checkpointed:
            self.model.gradient_checkpointing_enable()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_llama(checkpointed: bool) -> tuple[dict[str, float], list[float]]:
    from lightning_pipeline import PipelineStrategy

    pipeline = {"stages": 2, "num_microbatches": 4}
    data = torch.randint(0, 64, (16, 32))
    module, notes = Layers(checkpointed), Notes()
    plan = PipelineStrategy(**pipeline, schedule="1F1B").plan(module, data)  # type: ignore[arg-type]
    run = trainer(pipeline, callbacks=[StageMemoryMonitor(), notes], max_epochs=1)
    run.fit(module, torch.utils.data.DataLoader(data, 16))
    chosen = next(one for one in plan.predictions if one.name == "1F1B")
    return notes.logged, [rank.activations for rank in chosen.memory]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradient_checkpointing_of_transformers_is_planned_as_measured(
    ranks: Ranks, checkpointed: bool
) -> None:
    pytest.importorskip("transformers")
    logged, planned = ranks(2)(fit_llama, checkpointed)[0]
    measured = [GIB * logged[f"stage_{stage}/activations_gib"] for stage in range(2)]
    assert planned == pytest.approx(measured, rel=0.02)
    if checkpointed:  # two layers of a micro-batch of four, and two micro-batches at the worst moment
        assert measured[0] == 2 * 2 * (4 * 32 * 32 * 4)


class Selective(pl.LightningModule):
    """Blocks whose checkpoints keep the results of their products; `around`: not in the block, but around it."""

    def __init__(self, around: bool) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Wide(around) for _ in range(4))
        self.around = around

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = selectively(layer, batch) if self.around else layer(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Wide(torch.nn.Module):
    """Two products with something between."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(32, 128), torch.nn.Linear(128, 32)
        self.plain = plain

    def inner(self, hidden: Tensor) -> Tensor:
        return hidden + self.second(torch.tanh(self.first(hidden)))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.inner(hidden) if self.plain else selectively(self.inner, hidden)


selectively = partial(
    checkpoint,
    use_reentrant=False,
    context_fn=partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default]),
)


def fit_selective(around: bool) -> dict[str, float]:
    notes = Notes()
    run = trainer(
        {"stages": 2, "num_microbatches": 4, "schedule": "1F1B", "partition": ["layers.2"]},
        callbacks=[StageMemoryMonitor(), notes], max_epochs=1,
    )  # fmt: skip
    run.fit(Selective(around), torch.utils.data.DataLoader(torch.randn(32, 32), 16))
    return notes.logged


@pytest.mark.parametrize("around", [False, True])
def test_what_a_selective_checkpoint_keeps_is_held_and_foreseen(ranks: Ranks, around: bool) -> None:
    logged = ranks(2)(fit_selective, around)[0]
    for stage in range(2):
        held = logged[f"stage_{stage}/activations_gib"]
        assert held == logged[f"stage_{stage}/activations_planned_gib"]
    # two layers, two micro-batches of 4 rows: both products of each layer, and what the second layer is given;
    # what the first is given is the batch, which is there anyway
    narrow = 4 * 32 * 4
    assert round(GIB * logged["stage_0/activations_gib"]) == 2 * (2 * (4 * narrow + narrow) + narrow)


class Counted(pl.Callback):
    """How many steps were counted."""

    def __init__(self) -> None:
        self.counts: list[Any] = []

    def on_train_batch_end(self, run: pl.Trainer, *_: Any) -> None:
        count = run.strategy.memory.split.count  # type: ignore[attr-defined]
        if not any(count is known for known in self.counts):
            self.counts.append(count)


def fit_counting(every: int | None, epochs: int) -> int:
    counted = Counted()
    callbacks = [StageMemoryMonitor(every), counted]
    trainer({"stages": 2, "num_microbatches": 2}, callbacks=callbacks, max_epochs=epochs).fit(
        Regression(), loader()
    )
    return len(counted.counts)


@pytest.mark.parametrize(("every", "epochs", "steps"), [(None, 19, 2), (5, 5, 4)])
def test_only_chosen_steps_are_counted(ranks: Ranks, every: int | None, epochs: int, steps: int) -> None:
    assert ranks(2)(fit_counting, every, epochs) == [steps] * 2  # of 57 and 15; the first is always counted


def fit_briefly(options: dict[str, Any]) -> str:
    lines, monitor = told(), StageMemoryMonitor(every_n_steps=2)
    run = trainer({"stages": 2, "num_microbatches": 2}, callbacks=[monitor], **options)
    run.fit(Regression(), loader(), loader(seed=4))
    return "\n".join(lines)


@pytest.mark.parametrize(
    "options",
    [
        {"fast_dev_run": True},
        {"fast_dev_run": 3},
        {"barebones": True, "log_every_n_steps": None, "num_sanity_val_steps": None},
        {"logger": False, "max_epochs": 1},
    ],
    ids=["one step", "three steps", "barebones", "no logger"],
)
def test_a_short_or_silent_run_ends_with_the_table_on_rank_0(ranks: Ranks, options: dict[str, Any]) -> None:
    first, second = ranks(2)(fit_briefly, options)
    table = first.partition("Memory, activations at the worst moment\n")[2].splitlines()[:4]
    assert table[0].split()[:5] == ["stage", "parameters", "size", "gradients", "optimizer"]
    for stage, row in enumerate(table[2:]):
        cells = [cell.strip() for cell in row.split("  ") if cell.strip()]
        assert cells[0] == f"stage_{stage}"
        assert cells[2] == cells[3] != "0 B"  # gradients, which the validation has zeroed since
        assert cells[5] == cells[6] != "0 B"  # activations as planned
    assert "Memory" not in second
