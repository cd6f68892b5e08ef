"""The examples run as a user runs them: as scripts, over two processes that Lightning starts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run_example(folder: Path, *command: str) -> str:
    """Run a script of examples/ in `folder` to its end and return what it wrote to stdout."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / command[0]), *command[1:]],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def last_metrics(output: str) -> str:
    return [line for line in output.splitlines() if line.startswith("{")][-1]


def test_an_own_module_gives_on_two_stages_what_it_gives_on_one_device(tmp_path: Path) -> None:
    two, one = run_example(tmp_path, "add_to_existing.py"), run_example(tmp_path, "add_to_existing.py", "one")
    assert last_metrics(two) == last_metrics(one)


@pytest.mark.parametrize("stages", ["0", "2"])
def test_the_demo_trains_saves_and_writes(tmp_path: Path, stages: str) -> None:
    size = ["--steps", "8", "--layers", "2", "--width", "32", "--batch_size", "8"]
    output = run_example(tmp_path, "train_gpt.py", "--stages", stages, *size)
    assert "step 0: validation loss 5." in output
    assert "step 8: validation loss" in output
    assert "What the trained weights write:\ndef " in output
    assert (tmp_path / "demo_out" / "checkpoint").exists()
    assert (tmp_path / "demo_out" / "timeline.svg").exists() == (stages == "2")


def test_lightning_cli_reads_the_yaml(tmp_path: Path) -> None:
    size = ["--trainer.max_steps=4", "--trainer.val_check_interval=2", "--model.layers=2", "--model.width=32"]
    output = run_example(tmp_path, "gpt_cli.py", "fit", "--config", str(EXAMPLES / "gpt.yaml"), *size)
    assert "`Trainer.fit` stopped: `max_steps=4` reached" in output
