"""Draws the pictures of the documentation: `python docs/draw_images.py`; with `--measured` also the demo."""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from lightning_pipeline.schedules import draw_svg, get_schedule

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
# The demo on two stages. The picture is that of its last step.
STEPS = 40
RUN = ["examples/train_gpt.py", "--stages", "2", "--num_microbatches", "4", "--steps", str(STEPS)]


def draw_measured() -> None:
    """Train the demo for a little while and keep the picture that `PipelineTimeline` draws of it."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *RUN, "--out", folder]
        subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
        shutil.copy(Path(folder) / f"timeline-{STEPS - 1}.svg", IMAGES / "timeline.svg")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measured", action="store_true", help="train the demo for a minute, too")
    IMAGES.mkdir(exist_ok=True)
    (IMAGES / "1f1b.svg").write_text(draw_svg(get_schedule("1F1B").plan(4, 8), name="1F1B"))
    if parser.parse_args().measured:
        draw_measured()
