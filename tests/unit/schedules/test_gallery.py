import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from lightning_pipeline.schedules import available_schedules, gallery

ROOT = Path(__file__).parents[3]


def test_the_gallery_in_docs_is_the_one_that_the_command_writes(tmp_path) -> None:
    gallery.write(tmp_path)
    written = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*.*")}
    assert len(written) == len(gallery.EXHIBITS) + 1
    for path, text in written.items():
        assert (ROOT / "docs" / path).read_text() == text, (
            f"docs/{path} is old: run python -m {gallery.__name__}"
        )


def test_every_schedule_with_an_order_of_its_own_is_shown() -> None:
    shown = {exhibit.name for exhibit in gallery.EXHIBITS}
    assert shown == set(available_schedules()) - {"ForwardOnly", "FromTable", "FromTorch"}


def test_pictures_are_well_formed() -> None:
    for picture in gallery.page()[1].values():
        assert ElementTree.fromstring(picture).tag.endswith("svg")


def test_the_example_of_an_own_schedule_runs() -> None:
    script = ROOT / "examples" / "own_schedule.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, timeout=60)
    assert "HeldBack1F1B(limit=2): bubble 0.647, peak memory (2.0, 2.0, 2.0, 1.0)" in done.stdout
