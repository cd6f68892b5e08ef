"""Draws the pictures of the documentation: `python docs/draw_images.py`."""

from pathlib import Path

from lightning_pipeline.schedules import draw_svg, get_schedule

IMAGES = Path(__file__).resolve().parent / "images"

if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    (IMAGES / "1f1b.svg").write_text(draw_svg(get_schedule("1F1B").plan(num_ranks=4, num_microbatches=8)))
