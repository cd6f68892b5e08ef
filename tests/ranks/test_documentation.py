"""Every Python block of README and docs that is marked as runnable runs."""

import contextlib
import io
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.pages import ROOT, blocks, pages
from tests.pool import Pool

Ranks = Callable[[int], Pool]
SCRIPTS = {block.text: block.ranks for page in pages() for block in blocks(page, "python") if block.ranks}
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


@pytest.mark.parametrize("page", TOGETHER)
def test_the_blocks_of_a_page_run_one_after_the_other(page: str) -> None:
    names: dict[str, object] = {"__name__": "page"}
    for block in blocks(page, "python"):
        if block.ranks == 0:
            exec(compile("\n" * (block.line - 1) + block.text, page, "exec"), names)


def test_the_first_block_of_the_readme_runs() -> None:
    assert blocks("README.md", "python")[0].ranks == 2
