"""Weights are read in parts from every usual kind of file, by each rank its own."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lightning_pipeline.errors import CheckpointError
from lightning_pipeline.model.tensors import is_placeholder
from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, loader, mlp, trainer, weights

Ranks = Callable[[int], Pool]
TWO = {"stages": 2, "num_microbatches": 2, "gather_weights": "all"}


class Loads(Regression):
    """Loads when the fit begins, or is told to have loaded by then."""

    path: str | None = None
    options: dict[str, Any] = {}  # noqa: RUF012
    loaded: dict[str, Tensor] = {}  # noqa: RUF012

    def on_train_start(self) -> None:
        if self.path is not None:
            self.trainer.strategy.load_weights(self.path, **self.options)  # type: ignore[attr-defined]
        self.loaded = {name: value for name, value in weights(self).items() if not is_placeholder(value)}
        self.step = self.trainer.global_step


def written(folder: Path, kind: str) -> tuple[Path, dict[str, Tensor]]:
    """A file of some kind, and what stands in it."""
    torch.manual_seed(4)
    source = Regression()
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.normal_()
    expected, state = weights(source), source.state_dict()
    path = folder / kind
    if kind == "file":
        torch.save({"state_dict": state, "epoch": 0}, path := folder / "one.pt")
    elif kind == "state_dict":
        torch.save(state, path := folder / "state.pt")
    elif kind == "inner":
        torch.save(source.net.state_dict(), path := folder / "net.pt")
    elif kind == "safetensors":
        save_file(state, path := folder / "one.safetensors")
    else:
        path.mkdir()
        names = list(state)
        places = {name: f"part-{names.index(name) % 3}.safetensors" for name in names}
        for file in set(places.values()):
            save_file({name: state[name] for name in names if places[name] == file}, path / file)
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return path, expected


def fit_loading(path: str, how: str) -> tuple[dict[str, Tensor], int]:
    module, run = Loads(), trainer(TWO, max_epochs=1)
    if how == "ckpt_path":
        run.fit(module, loader(), loader(seed=4), ckpt_path=path)
    else:
        module.path = path
        run.fit(module, loader(), loader(seed=4))
    return module.loaded, module.step


@pytest.mark.parametrize(("kind", "how"), [
    *((kind, "load_weights") for kind in ("file", "safetensors", "index", "state_dict", "inner")),
    *((kind, "ckpt_path") for kind in ("safetensors", "index", "state_dict", "inner")),
])  # fmt: skip
def test_each_rank_reads_its_own(ranks: Ranks, tmp_path: Path, kind: str, how: str) -> None:
    path, expected = written(tmp_path, kind)
    found: dict[str, Tensor] = {}
    for loaded, step in ranks(2)(fit_loading, str(path), how):
        assert 0 < len(loaded) < len(expected)
        assert step == 0
        found.update(loaded)
    assert {name: torch.equal(found[name], value) for name, value in expected.items()} == dict.fromkeys(
        expected, True
    )


def save_folder(path: str) -> dict[str, Tensor]:
    module, run = Regression(), trainer(TWO, max_epochs=1)
    run.fit(module, loader(), loader(seed=4))
    run.save_checkpoint(path)
    return weights(module)


def test_a_checkpoint_folder_gives_its_weights(ranks: Ranks, tmp_path: Path) -> None:
    expected = ranks(2)(save_folder, str(tmp_path / "a.ckpt"))[0]
    found: dict[str, Tensor] = {}
    for loaded, _ in ranks(2)(fit_loading, str(tmp_path / "a.ckpt"), "load_weights"):
        found.update(loaded)
    assert {name: torch.equal(found[name], value) for name, value in expected.items()} == dict.fromkeys(
        expected, True
    )


def one_device(path: str) -> dict[str, Tensor]:
    module, run = Loads(), trainer({"stages": 1}, max_epochs=1)
    run.fit(module, loader(), loader(seed=4), ckpt_path=path)
    return module.loaded


@pytest.mark.parametrize("kind", ["safetensors", "index", "inner"])
def test_one_device_reads_them_too(tmp_path: Path, kind: str) -> None:
    path, expected = written(tmp_path, kind)
    found = one_device(str(path))
    assert {name: torch.equal(found[name], value) for name, value in expected.items()} == dict.fromkeys(
        expected, True
    )


def refusal(path: str, options: dict[str, Any]) -> tuple[str, bool]:
    module, run = Loads(), trainer(TWO, max_epochs=1)
    module.path, module.options = path, options
    before = weights(module)
    with pytest.raises(CheckpointError) as caught:
        run.fit(module, loader(), loader(seed=4))
    held = {name: value for name, value in weights(module).items() if value.numel()}
    return str(caught.value), all(torch.equal(before[name], value) for name, value in held.items())


def broken(folder: Path, how: str) -> Path:
    path, _ = written(folder, "index")
    part = path / "part-1.safetensors"
    if how == "missing shard":
        part.unlink()
    elif how == "short shard":
        part.write_bytes(part.read_bytes()[:-8])
    elif how == "unreadable index":
        (path / "model.safetensors.index.json").write_bytes(b"\x00{")
    elif how == "nothing":
        for file in path.iterdir():
            file.unlink()
    elif how == "lacking shard":
        save_file({"other": torch.ones(1)}, part)
    else:
        state = Regression().state_dict()
        state["net.0.weight"] = torch.ones(2, 2)
        state.pop("net.4.bias")
        state["net.9.weight"] = torch.ones(1)
        save_file(state, path / "all.safetensors")
        (path / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": dict.fromkeys(state, "all.safetensors")})
        )
    return path


@pytest.mark.parametrize(("how", "text"), [
    ("missing shard", r"lists part-1.safetensors, which is not there"),
    ("short shard", r"part-1.safetensors cannot be read, as when it was cut short"),
    ("unreadable index", r"model.safetensors.index.json is no index of shards"),
    ("nothing", r"holds no weights: neither a checkpoint's manifest.json, nor model.safetensors"),
    ("lacking shard", r"part-1.safetensors lacks net.*, which model.safetensors.index.json lists"),
    ("misfits", r"missing: net.4.bias; unexpected: net.9.weight; wrong shape: net.0.weight \(\(2, 2\) stored, \(8, 6\) here\)"),
])  # fmt: skip
def test_what_does_not_fit_or_is_broken_is_named(ranks: Ranks, tmp_path: Path, how: str, text: str) -> None:
    path = broken(tmp_path, how)
    for told, unchanged in ranks(2)(refusal, str(path), {}):
        assert re.search(text, told), told
        assert unchanged


def fit_partly(path: str) -> dict[str, Tensor]:
    module, run = Loads(), trainer(TWO, max_epochs=1)
    module.path, module.options = path, {"strict": False, "prefix": "net."}
    run.fit(module, loader(), loader(seed=4))
    return module.loaded


class Late(Loads):
    """Loads where it is built."""

    def __init__(self) -> None:
        pl.LightningModule.__init__(self)
        self.lr, self.net = 0.1, None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = mlp().double()
            self.trainer.strategy.load_weights(self.source)  # type: ignore[attr-defined]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)


def fit_late(path: str) -> dict[str, Tensor]:
    module, run = Late(), trainer(TWO, max_epochs=1)
    module.source = path
    run.fit(module, loader(), loader(seed=4))
    return module.loaded


@pytest.mark.parametrize("kind", ["safetensors", "index", "state_dict"])
def test_a_module_loads_where_it_is_built(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    path, expected = written(tmp_path, kind)
    found: dict[str, Tensor] = {}
    for loaded in ranks(2)(fit_late, str(path)):
        assert 0 < len(loaded) < len(expected)
        found.update(loaded)
    assert {name: torch.equal(found[name], value) for name, value in expected.items()} == dict.fromkeys(
        expected, True
    )


def test_what_fits_is_read_where_it_need_not_all_fit(ranks: Ranks, tmp_path: Path) -> None:
    save_file({"0.bias": torch.arange(8.0), "extra": torch.ones(1)}, tmp_path / "part.safetensors")
    found = ranks(2)(fit_partly, str(tmp_path / "part.safetensors"))
    assert {**found[0], **found[1]}["net.0.bias"].tolist() == list(range(8))
