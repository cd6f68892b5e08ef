"""The examples are ordinary Lightning code."""

import ast
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def gpt() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpt", EXAMPLES / "gpt.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_gpt_does_not_import_this_package() -> None:
    nodes = ast.walk(ast.parse((EXAMPLES / "gpt.py").read_text()))
    names = [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    assert "lightning.pytorch" in names
    assert not [name for name in names if name and name.startswith("lightning_pipeline")]


def test_the_gpt_learns_on_one_device(gpt: ModuleType, tmp_path: Path) -> None:
    seed_everything(0, verbose=False)
    model = gpt.GPT(layers=2, width=32)
    trainer = Trainer(
        accelerator="cpu", devices=1, max_steps=30, logger=False, enable_checkpointing=False, barebones=False,
        enable_progress_bar=False, enable_model_summary=False, limit_val_batches=2, default_root_dir=tmp_path,
    )  # fmt: skip
    data = gpt.StandardLibrary()
    before = trainer.validate(model, data, verbose=False)[0]["val_loss"]
    trainer.fit(model, data)
    after = trainer.validate(model, data, verbose=False)[0]["val_loss"]
    assert before == pytest.approx(5.55, abs=0.15)
    assert after < before - 1


def test_the_text_is_the_same_each_time(gpt: ModuleType) -> None:
    first, second = gpt.StandardLibrary(), gpt.StandardLibrary()
    first.setup()
    second.setup()
    assert torch.equal(first.train_windows[7], second.train_windows[7])
    assert len(first.train_windows) > 10 * len(first.val_windows) > 0


def test_the_same_seed_writes_the_same_text(gpt: ModuleType) -> None:
    model = gpt.GPT(layers=1, width=16)
    assert model.generate("def ", 80) == model.generate("def ", 80)
    assert model.generate("def ", 8).startswith("def ")
