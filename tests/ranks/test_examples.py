"""The examples do what their first lines say; those that pages run are run by `test_documentation`."""

import contextlib
import io
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.pool import Pool

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
Ranks = Callable[[int], Pool]


def run_here(script: str, *arguments: str) -> str:
    """Run a script of examples/ in this rank, and return what it printed."""
    sys.path.insert(0, str(EXAMPLES))
    sys.argv = [script, *arguments]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    sys.path.remove(str(EXAMPLES))
    return printed.getvalue()


def last_metrics(output: str) -> str:
    return [line for line in output.splitlines() if line.startswith("{")][-1]


def test_an_own_module_gives_on_two_stages_what_it_gives_on_one_device(ranks: Ranks) -> None:
    two = ranks(2)(run_here, "add_to_existing.py", group=False)[0]
    (one,) = ranks(1)(run_here, "add_to_existing.py", "one", group=False)
    assert last_metrics(two) == last_metrics(one)


@pytest.mark.parametrize("stages", [0, 2])
def test_the_demo_trains_saves_and_writes(ranks: Ranks, tmp_path: Path, stages: int) -> None:
    size = ["--steps", "8", "--layers", "2", "--width", "32", "--batch_size", "8", "--out", str(tmp_path)]
    first, *_ = ranks(max(stages, 1))(run_here, "train_gpt.py", "--stages", str(stages), *size, group=False)
    assert "step 0: validation loss 5." in first
    assert "step 8: validation loss" in first
    assert "What the trained weights write:\ndef " in first
    assert (tmp_path / "checkpoint").exists()
    assert {path.name for path in tmp_path.glob("timeline*")} == (
        {"timeline-7.svg", "timeline-7.json"} if stages == 2 else set()
    )
