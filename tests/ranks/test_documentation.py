"""Every Python block of README and docs that is marked as runnable runs."""

import contextlib
import io
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lightning_pipeline import PipelineStrategy
from tests.pages import ROOT, blocks, pages
from tests.pool import Pool

Ranks = Callable[[int], Pool]
SCRIPTS = {
    block.text: block.ranks
    for page in pages()
    for block in blocks(page, "python")
    if block.ranks and not block.given
}
PARTS = [page for page in pages() if any(block.given for block in blocks(page, "python"))]
TOGETHER = [page for page in pages() if any(block.ranks == 0 for block in blocks(page, "python"))]


def run_script(script: str) -> str:
    """Run a file in this rank as `python FILE` does, and return what it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(script, run_name="__main__")
    return printed.getvalue()


@pytest.mark.parametrize("text", SCRIPTS)
def test_a_script_trains_and_prints_what_its_page_says(ranks: Ranks, tmp_path: Path, text: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(text.replace("max_epochs=2", f"max_epochs=2, default_root_dir={str(tmp_path)!r}"))
    first, *_ = ranks(SCRIPTS[text])(run_script, str(script), group=False)
    (loss,) = [line for line in first.splitlines() if line.startswith("loss ")]
    told = [
        page for page in pages() if text in (ROOT / page).read_text() and loss in (ROOT / page).read_text()
    ]
    assert told, f"it printed {loss!r}"


class Small(LightningModule):
    """What the reader of a page has."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch).relu()
        return batch.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def given() -> dict[str, Any]:
    """The names that pages take for granted: a module, its data, a Trainer."""
    torch.manual_seed(0)
    module, batch = Small(), torch.randn(16, 8)
    data = torch.utils.data.DataLoader(batch, batch_size=8)  # type: ignore[arg-type]
    trainer = Trainer(accelerator="cpu", devices=1, strategy=PipelineStrategy(stages=1), logger=False)
    return {
        "__name__": "page", "Trainer": Trainer, "PipelineStrategy": PipelineStrategy, "torch": torch,
        "module": module, "model": module, "self": module, "batch": batch, "datamodule": data,
        "trainer": trainer, "total_batch_size": 64,
    }  # fmt: skip


def run_part(text: str, folder: str) -> tuple[int, int]:
    """Run a block in this rank with what it takes for granted: steps and epochs of its Trainer."""
    with contextlib.chdir(folder):
        names = given()
        names.pop("trainer")
        exec(compile(text, "page", "exec"), names)
    return names["trainer"].global_step, names["trainer"].current_epoch


@pytest.mark.parametrize("page", PARTS)
def test_the_parts_of_a_page_run_with_the_readers_module(ranks: Ranks, tmp_path: Path, page: str) -> None:
    epochs = 0
    for block in blocks(page, "python"):
        if block.given and block.ranks:
            text = block.text.replace(
                "devices=2,", "devices=2, max_epochs=1,", "max_epochs" not in block.text
            )
            ends = ranks(block.ranks)(run_part, text, str(tmp_path), group=False)
            epochs += 1
            assert ends == [(2 * epochs, epochs)] * block.ranks


@pytest.mark.parametrize("page", TOGETHER)
def test_the_blocks_of_a_page_run_one_after_the_other(page: str) -> None:
    names = given()
    for block in blocks(page, "python"):
        if block.ranks == 0:
            exec(compile("\n" * (block.line - 1) + block.text, page, "exec"), names)


def test_the_first_block_of_the_readme_runs() -> None:
    assert blocks("README.md", "python")[0].ranks == 2
