"""A run that was saved and resumed is, bit by bit, the run that was not interrupted."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from tests.pool import Pool
from tests.ranks.checkpoint_cases import assert_equal, fit_and_save, fit_resumed, names_in
from tests.ranks.lightning_cases import Regression, loader, trainer, weights

Ranks = Callable[[int], Pool]


AN_EPOCH, MIDDLE = 10, 7


@pytest.mark.parametrize("pipeline", [
    {"stages": 1, "num_microbatches": 2},
    {"stages": 2, "num_microbatches": 2},
    {"stages": 2, "num_microbatches": 2, "data_parallel_size": 2},
    {"stages": 4, "num_microbatches": 2},
], ids=str)  # fmt: skip
def test_resume_at_an_epochs_end_and_in_its_middle_is_exact(
    ranks: Ranks, tmp_path: Path, pipeline: dict[str, Any]
) -> None:
    pool = ranks(ranks_of(pipeline))
    straight = pool(fit_and_save, pipeline, str(tmp_path), 20, AN_EPOCH, MIDDLE)
    for step in (AN_EPOCH, MIDDLE):
        resumed = pool(fit_resumed, pipeline, str(tmp_path / f"step={step}.ckpt"), 20)
        for found, expected in zip(resumed, straight, strict=True):
            assert len(found["steps"]) == 20 - step
            assert_equal(found, expected)
    assert names_in(tmp_path) == ["step=10.ckpt", "step=14.ckpt", "step=20.ckpt", "step=7.ckpt"]


def load_only(pipeline: dict[str, Any], path: str, save_to: str) -> dict[str, Any]:
    """Resume for no step; then one more, for its loss."""
    from tests.ranks.checkpoint_cases import fit_noisy

    kept = fit_noisy(pipeline, resume=path, save=save_to, max_steps=5)
    later = fit_noisy(pipeline, resume=path, max_steps=6)
    return {**kept, "next": later["steps"]}


TWO_EACH = {"stages": 2, "schedule": "Interleaved1F1B", "stages_per_rank": 2}


@pytest.mark.parametrize(("start", "hops"), [
    ({"stages": 4},
     [{"stages": 2, "schedule": "GPipe"}, {"stages": 1}, {"stages": 3, "partition": "uniform"}]),
    (TWO_EACH, [{"stages": 4}, TWO_EACH, {"stages": 2}]),
    ({"stages": 2, "data_parallel_size": 2},
     [{"stages": 2}, {"stages": 1, "data_parallel_size": 2}, {"stages": 2, "data_parallel_size": 2}]),
], ids=["stages", "stages per rank", "replicas"])  # fmt: skip
def test_hops_between_layouts_keep_every_bit(
    ranks: Ranks, tmp_path: Path, start: dict[str, Any], hops: list[dict[str, Any]]
) -> None:
    first = ranks(ranks_of(start))(fit_and_save, {**start, "num_microbatches": 2}, str(tmp_path), 5, 5)
    weights = first[0]["weights"]
    adam = {name: value for rank in first for name, value in rank["optimizer"].items()}
    path, losses = str(tmp_path / "step=5.ckpt"), []
    for number, hop in enumerate(hops):
        onward = str(tmp_path / f"hop{number}.ckpt")
        found = ranks(ranks_of(hop))(load_only, {**hop, "num_microbatches": 2}, path, onward)
        for rank in found:
            assert all(torch.equal(value, weights[name]) for name, value in rank["weights"].items())
            assert all(torch.equal(value, adam[name]) for name, value in rank["optimizer"].items())
        assert {name for rank in found for name in rank["optimizer"]} == set(adam)
        assert set(found[0]["weights"]) == set(weights)
        losses.append((hop.get("data_parallel_size", 1), found[0]["next"]))
        path = onward
    assert all(loss == next(b for n, b in losses if n == replicas) for replicas, loss in losses)


def ranks_of(pipeline: dict[str, Any]) -> int:
    return int(pipeline["stages"] * pipeline.get("data_parallel_size", 1))


class Counting:
    """A loader that knows where it stands, and counts what it is asked for."""

    def __init__(self) -> None:
        self.at = self.asked = 0

    def __iter__(self) -> Any:
        start, self.at = self.at, 0
        for index in range(start, 6):
            self.at, self.asked = index + 1, self.asked + 1
            generator = torch.Generator().manual_seed(index)
            yield tuple(torch.randn(4, n, generator=generator, dtype=torch.float64) for n in (6, 3))
        self.at = 0

    def __len__(self) -> int:
        return 6

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def fit_counting(folder: str, steps: int, path: str | None) -> tuple[list[float], int]:
    from tests.ranks.checkpoint_cases import Noisy, saving_every, trainer

    module, data = Noisy(), Counting()
    run = trainer({"stages": 2, "num_microbatches": 2}, max_epochs=-1, max_steps=steps, enable_checkpointing=True,
                  callbacks=[saving_every(folder, 4)])  # fmt: skip
    run.fit(module, data, ckpt_path=path)
    return module.batches, data.asked


def test_a_loader_with_state_is_asked_to_go_where_it_was(ranks: Ranks, tmp_path: Path) -> None:
    straight = ranks(2)(fit_counting, str(tmp_path), 9, None)
    resumed = ranks(2)(fit_counting, str(tmp_path / "again"), 9, str(tmp_path / "step=4.ckpt"))
    for (batches, _), (found, asked) in zip(straight, resumed, strict=True):
        assert found == batches[4:]
        assert asked <= 7  # five batches, one looked at for the split; none that had been seen


class ByEpoch(Regression):
    """Makes its loader by the epoch, and notes which it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[int, int]] = []

    def train_dataloader(self) -> Any:
        self.asked.append((self.trainer.current_epoch, self.trainer.global_step))
        return loader(8, seed=self.trainer.current_epoch)


class OwnIO(TorchCheckpointIO):
    """Reads and writes files itself."""


def resumed_by_epoch(
    pipeline: dict[str, Any] | None, folder: str, plugin: bool
) -> tuple[Any, dict[str, torch.Tensor]]:
    module, path = ByEpoch(), f"{folder}/saved.ckpt"
    options: dict[str, Any] = {
        "reload_dataloaders_every_n_epochs": 1,
        "plugins": [OwnIO()] if plugin else None,
    }
    first = trainer(pipeline, max_epochs=2, **options)
    first.fit(module)
    first.save_checkpoint(path)
    again = ByEpoch()
    trainer(pipeline, max_epochs=4, **options).fit(again, ckpt_path=path)
    return [module.asked, again.asked], weights(again)


@pytest.mark.parametrize("kind", ["folder", "one file", "plugin"])
def test_a_hook_that_makes_loaders_sees_the_epoch_that_the_run_goes_on_from(
    ranks: Ranks, tmp_path: Path, kind: str
) -> None:
    plugin = kind == "plugin"
    pipeline: dict[str, Any] = {"num_microbatches": 2, "save_distributed_checkpoint": kind == "folder"}
    asked, expected = resumed_by_epoch(None, str(tmp_path / "one"), plugin)
    found = [resumed_by_epoch({"stages": 1, **pipeline}, str(tmp_path / "ours"), plugin)]
    found += ranks(2)(resumed_by_epoch, {"stages": 2, **pipeline}, str(tmp_path / "two"), plugin, group=False)
    for own, own_weights in found:
        assert own == asked
        torch.testing.assert_close(own_weights, expected, rtol=1e-9, atol=1e-9)
