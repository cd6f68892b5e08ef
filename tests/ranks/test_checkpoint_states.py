"""What a checkpoint keeps beside parameters: buffers, extra state, state of callbacks and optimizers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from lightning_pipeline.checkpoint.consolidate import to_file
from lightning_pipeline.checkpoint.contents.rank_differences import at, different, joined, tensor_digests
from lightning_pipeline.checkpoint.folder.reader import Reader
from lightning_pipeline.errors import CheckpointWriteError
from tests.pool import Pool
from tests.ranks.checkpoint_cases import state_of
from tests.ranks.lightning_cases import Regression, loader, trainer

Ranks = Callable[[int], Pool]
TWO = {"stages": 2, "num_microbatches": 1}


class Small(Regression):
    def __init__(self) -> None:
        super().__init__()
        del self.error

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...


def fit_after_a_search(folder: str) -> tuple[set[float], set[str]]:
    module = Small()
    search = LearningRateFinder(num_training_steps=5, early_stop_threshold=None)
    run = trainer(TWO, max_epochs=-1, max_steps=1, callbacks=[search], default_root_dir=folder)
    run.fit(module, loader(40))
    steps = {float(value) for name, value in state_of(run, module).items() if name.endswith(".step")}
    return steps, {key for group in run.optimizers[0].param_groups for key in group}


def test_a_search_for_a_learning_rate_leaves_no_state(ranks: Ranks, tmp_path: Path) -> None:
    options = {key for group in Small().configure_optimizers().param_groups for key in group}
    # The schedule of the search has set `initial_lr`, which another schedule would begin from.
    assert ranks(2)(fit_after_a_search, str(tmp_path)) == [({1.0}, options), ({1.0}, options)]


def order_after_a_search(pipeline: dict[str, Any] | None, folder: str) -> list[float]:
    """First numbers of the batches, which are shuffled by torch's own generator."""
    seed_everything(4, verbose=False)
    module, order = Small(), list[float]()

    class Records(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            order.append(float(batch[0][0, 0]))

    search = LearningRateFinder(num_training_steps=5, early_stop_threshold=None)
    run = trainer(pipeline, max_epochs=2, callbacks=[search, Records()], default_root_dir=folder)
    run.fit(module, DataLoader(loader(40).dataset, batch_size=8, shuffle=True))
    return order


def test_after_a_search_the_random_numbers_are_those_of_one_device(ranks: Ranks, tmp_path: Path) -> None:
    expected = order_after_a_search(None, str(tmp_path / "one"))
    assert ranks(2)(order_after_a_search, TWO, str(tmp_path / "two")) == [expected, expected]


class Counting(nn.Linear):
    """Counts batches of the stage that holds it."""

    seen = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


class Editing(Small):
    """Keeps extra state, and edits the weights on their way into a checkpoint and back."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            Counting(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), Counting(64, 3)
        ).double()
        self.net[2].requires_grad_(False)
        self.loaded: list[str] = []

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for part in (self.net[0], self.net[5]):
            part.seen += "weight" in part._parameters

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        states = checkpoint["state_dict"]
        checkpoint["state_dict"] = {k: v for k, v in states.items() if not k.startswith("net.2")}
        if "net.4.weight" in states:
            checkpoint["state_dict"]["net.4.weight"] = states["net.4.weight"] * 2
        checkpoint["state_dict"] |= {"version": torch.tensor(3), "note": "kept once"}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        states = checkpoint["state_dict"]
        self.loaded = sorted(states)
        assert int(states.pop("version")) == 3 and states.pop("note") == "kept once"
        states["net.4.weight"].div_(2)
        states["net.2.weight"], states["net.2.bias"] = torch.eye(64), torch.zeros(64)


def fit_editing(
    pipeline: dict[str, Any] | None, epochs: int, path: str | None, folder: str
) -> dict[str, Any]:
    module = Editing()
    saver = ModelCheckpoint(folder, filename=f"after{epochs}")
    run = trainer(pipeline, max_epochs=epochs, enable_checkpointing=True, callbacks=[saver])
    run.fit(module, loader(16), ckpt_path=path)
    return {"loaded": module.loaded, "seen": [module.net[0].seen, module.net[5].seen],
            "weights": {name: value.clone() for name, value in module.state_dict().items()
                        if isinstance(value, torch.Tensor)}}  # fmt: skip


def fit_editing_twice(folder: str) -> list[dict[str, Any]]:
    first = fit_editing(TWO, 2, f"{folder}/after1.ckpt", folder)
    return [first, fit_editing(TWO, 3, f"{folder}/after2.ckpt", folder)]


def test_extra_state_and_edits_of_a_state_dict_are_kept(ranks: Ranks, tmp_path: Path) -> None:
    fit_editing(None, 1, None, str(tmp_path))
    alone = [fit_editing(None, n, str(tmp_path / f"after{n - 1}.ckpt"), str(tmp_path / "one")) for n in (2,)]
    for found in ranks(2)(fit_editing_twice, str(tmp_path)):
        for epochs, entry in zip((2, 3), found, strict=True):
            assert entry["seen"] == [2 * epochs, 2 * epochs]
            assert entry["loaded"] == alone[0]["loaded"]
            assert torch.equal(entry["weights"]["net.2.weight"], torch.eye(64).double())
        for name, value in alone[0]["weights"].items():
            torch.testing.assert_close(found[0]["weights"][name], value)
    to_file(tmp_path / "after2.ckpt", tmp_path / "back.ckpt", trust=False)
    back, one = (torch.load(tmp_path / name, weights_only=False) for name in ("back.ckpt", "one/after2.ckpt"))
    assert set(back["state_dict"]) == set(one["state_dict"])
    assert back["state_dict"]["net.5._extra_state"] == {"seen": 4}
    resumed = fit_editing(None, 3, str(tmp_path / "back.ckpt"), str(tmp_path / "one"))
    for name, value in found[1]["weights"].items():
        torch.testing.assert_close(resumed["weights"][name], value)
    assert resumed["seen"] == found[1]["seen"]


class SetsFirst(Small):
    """The last stage's rank sets a weight of the first stage, which sets it too or leaves it."""

    def __init__(self, others: bool) -> None:
        super().__init__()
        self.others = others

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        rank = self.trainer.global_rank
        if rank == 0 or self.others:
            checkpoint["state_dict"]["net.0.weight"] = torch.full((8, 6), 1.0 + rank, dtype=torch.float64)


def save_set(folder: str, others: bool) -> str:
    saver = ModelCheckpoint(folder, filename="a")
    run = trainer(TWO, max_epochs=1, enable_checkpointing=True, callbacks=[saver])
    try:
        run.fit(SetsFirst(others), loader(8))
    except CheckpointWriteError as error:
        return str(error)
    return ""


def test_a_weight_that_one_rank_sets_is_stored_and_one_that_two_set_differently_is_refused(
    ranks: Ranks, tmp_path: Path
) -> None:
    for told in ranks(2)(save_set, str(tmp_path), True):
        assert "different values: net.0.weight (pipeline ranks 0 and 1)" in told
    assert list(tmp_path.iterdir()) == []
    assert ranks(2)(save_set, str(tmp_path), False) == ["", ""]
    to_file(tmp_path / "a.ckpt", tmp_path / "one.ckpt", trust=False)
    stored = torch.load(tmp_path / "one.ckpt", weights_only=False)["state_dict"]["net.0.weight"]
    assert torch.equal(stored, torch.ones(8, 6).double())


class Average(Callback):
    """An average of each parameter that it finds, as most users write it, and a tensor under no name."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.own = dict(pl_module.named_parameters())
        found = getattr(self, "loaded", {})
        self.average = {**found, **{n: p.detach() * 0 for n, p in self.own.items() if n not in found}}
        self.total = torch.zeros(1)

    def on_train_batch_end(self, *args: Any) -> None:
        for name, parameter in self.own.items():
            self.average[name] = 0.9 * self.average[name] + 0.1 * parameter.detach()
            self.total = self.total + float(parameter.detach().sum())

    def state_dict(self) -> dict[str, Any]:
        return {"average": dict(self.average), "total": self.total, "count": len(self.own)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = state_dict["average"]


def fit_averaging(pipeline: dict[str, Any] | None, folder: str) -> list[dict[str, Any]]:
    found = []
    for steps in (2, 4, 6):
        path = f"{folder}/{steps - 2}" if pipeline is not None and steps > 2 else None
        average = Average()
        run = trainer(pipeline, max_epochs=-1, max_steps=steps, callbacks=[average])
        run.fit(Small(), loader(16), ckpt_path=path)
        run.save_checkpoint(f"{folder}/{steps}")
        found.append({name: average.average[name].clone() for name in average.own})
    return found


def test_state_of_a_callback_by_parameter_name_is_kept_from_all_stages(ranks: Ranks, tmp_path: Path) -> None:
    expected = fit_averaging(None, str(tmp_path / "one"))
    by_rank = ranks(2)(fit_averaging, TWO, str(tmp_path))
    for one, *parts in zip(expected, *by_rank, strict=True):
        found = {name: value for part in parts for name, value in part.items()}
        assert found.keys() == one.keys()
        for name, value in one.items():
            torch.testing.assert_close(found[name], value)


def test_tensors_under_no_name_are_told_of() -> None:
    first, second = ({"callbacks": {"A": {"x": value}}} for value in (torch.ones(1), torch.zeros(1)))
    places = different([tensor_digests(first), tensor_digests(second)])
    parts = {1: at(first, places), 0: at(second, places)}
    with pytest.warns(UserWarning, match="the state of A differs between stages in x"):
        whole = joined(first, parts, {"x.weight": 0})
    assert torch.equal(whole["callbacks"]["A"]["x"], torch.ones(1))
    assert different([tensor_digests({"a": 1}), tensor_digests({"a": 2})]) == []


class Buffered(Small):
    """Buffers on each stage and outside of units, and a weight on the first and the last stage."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.BatchNorm1d(6),
            nn.Linear(6, 6, bias=False), nn.Linear(6, 3),
        ).double()  # fmt: skip
        self.net[4].weight = self.net[0].weight
        self.register_buffer("outside", torch.full((2,), 5.0))
        self.register_buffer("teacher", torch.zeros(2))
        self.strict_loading = False

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        return {
            name: value for name, value in super().state_dict(*args, **options).items() if name != "teacher"
        }


def fit_buffered(pipeline: dict[str, Any] | None, steps: int, path: str | None, save: str) -> dict[str, Any]:
    module, run = Buffered(), trainer(pipeline, max_epochs=-1, max_steps=steps)
    run.fit(module, loader(24), ckpt_path=path)
    run.strategy.barrier()
    held = {name: value.clone() for name, value in module.state_dict().items()}
    run.save_checkpoint(save)
    return held


def fit_buffered_twice(folder: str) -> list[dict[str, Any]]:
    cut = {**TWO, "partition": ["net.2"]}
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    run = trainer(cut, max_epochs=-1, max_steps=2, enable_checkpointing=True, callbacks=[saver])
    run.fit(Buffered(), loader(24))
    return [fit_buffered(cut, n, f"{folder}/step=2.ckpt", f"{folder}/{n}.ckpt") for n in (2, 3)]


def test_buffers_of_all_stages_and_ties_between_them_are_kept(ranks: Ranks, tmp_path: Path) -> None:
    expected = [fit_buffered(None, n, None, str(tmp_path / "one.ckpt")) for n in (2, 3)]
    for found in ranks(2)(fit_buffered_twice, str(tmp_path)):
        for steps, entry in zip(expected, found, strict=True):
            assert entry.keys() == steps.keys()
            for name, value in steps.items():
                torch.testing.assert_close(entry[name], value)
    manifest = json.loads((tmp_path / "step=2.ckpt" / "manifest.json").read_text())
    stored = {name.removeprefix("model.") for name in manifest["tensors"] if name.startswith("model.")}
    assert stored == set(Buffered().state_dict())
    reader = Reader(tmp_path / "step=2.ckpt", trust=False)
    assert reader.place_of("model.net.0.weight") == reader.place_of("model.net.4.weight")
    assert "optimizer_0.state.net.4.weight.exp_avg" not in reader.entries
    to_file(tmp_path / "step=2.ckpt", tmp_path / "back.ckpt", trust=False)
    back = Buffered.load_from_checkpoint(tmp_path / "back.ckpt", strict=False)
    assert back.net[4].weight is back.net[0].weight
    for name, value in expected[0].items():
        torch.testing.assert_close(back.state_dict()[name], value)
