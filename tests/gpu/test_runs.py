"""Runs over stages on a GPU equal those of one device; everything else is in benchmarks/gpu.py."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_stages_by_host_and_by_copies_equal_one_device(precision: str) -> None:
    command = [sys.executable, str(SCRIPT), "--models", '["layers"]', "--precisions", f'["{precision}"]']
    done = subprocess.run([*command, "--figures", "false"], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks, ipc" in done.stdout


def test_a_step_and_a_message_keep_their_bounds() -> None:
    command = [sys.executable, str(SCRIPT), "--models", "[]"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
