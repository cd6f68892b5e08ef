"""Time and memory of `lightning-pipeline plan` for a GPT of 7 billion parameters on 8 stages, on one CPU.

    python benchmarks/plan_large.py

The report is printed, then seconds and the largest resident set of the command's process.
"""

import resource
import subprocess
import sys
import time
from pathlib import Path

from jsonargparse import auto_cli


def main(layers: int = 35, width: int = 4096, stages: int = 8, memory: float = 80.0) -> None:
    """Run the command and measure it.

    Args:
        layers: Blocks of the GPT.
        width: Size of its hidden state.
        stages: Ranks.
        memory: GiB of a device.
    """
    command = [
        sys.executable, "-m", "lightning_pipeline", "plan", "--model", "gpt.GPT", f"--model.layers={layers}",
        f"--model.width={width}", "--model.heads=32", "--model.block_size=2048", "--batch=32,2049:int64",
        f"--stages={stages}", "--num_microbatches=32", f"--memory={memory}", "--precision=bf16-true",
    ]  # fmt: skip
    begin = time.monotonic()
    subprocess.run(command, check=True, cwd=Path(__file__).resolve().parents[1] / "examples")
    seconds = time.monotonic() - begin
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    print(f"\n{seconds:.1f} s, {peak:.2f} GiB resident")


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
