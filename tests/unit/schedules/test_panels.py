"""Pictures of plans: well-formed, every action once, and numbers that fit their boxes."""

import io
import itertools
import re
import sys
from typing import Any
from xml.etree import ElementTree

import pytest

from lightning_pipeline.errors import ConfigurationError
from lightning_pipeline.schedules import Costs, Plan, draw_svg, get_schedule, simulate
from lightning_pipeline.schedules.drawing.panels import Panel, arrange, title_of
from lightning_pipeline.schedules.drawing.picture import Box, Picture, Words, words_fit
from lightning_pipeline.schedules.plans import waits

SVG = "{http://www.w3.org/2000/svg}"
SIZES = [(2, 4), (4, 8), (8, 32)]


def two_panels(ranks: int, microbatches: int, schedule: str = "1F1B") -> tuple[Plan, Picture]:
    plan = get_schedule(schedule).plan(ranks, microbatches)
    run = simulate(plan, Costs(2.0, 2.0, 2.0, send=0.1))
    return plan, arrange(
        [Panel(simulate(plan, Costs(2, 2, 2)), "planned", "ms"), Panel(run, "measured", "ms")]
    )


def hints_of(svg: str) -> list[str]:
    rectangles = ElementTree.fromstring(svg).iter(f"{SVG}rect")
    return [title.text or "" for box in rectangles for title in box.iter(f"{SVG}title")]


@pytest.mark.parametrize("schedule", ["GPipe", "ZBH1", "ZBV", "Interleaved1F1B"])
def test_an_svg_has_a_box_for_each_action(schedule: str) -> None:
    plan = get_schedule(schedule).plan(2, 4)
    drawn = [hint.split(":")[0] for hint in hints_of(draw_svg(plan))]
    assert sorted(drawn) == sorted(str(action) for actions in plan for action in actions)


@pytest.mark.parametrize("size", SIZES)
def test_every_number_fits_its_box(size: tuple[int, int]) -> None:
    plan, picture = two_panels(*size)
    boxes = [shape for shape in picture.shapes if isinstance(shape, Box) and shape.hint]
    numbers = [shape for shape in picture.shapes if isinstance(shape, Words) and shape.anchor == "middle"]
    assert len(boxes) == 2 * sum(map(len, plan))
    inside = [
        (box, words) for box, words in zip(picture.shapes, picture.shapes[1:], strict=False)
        if isinstance(box, Box) and box.hint and isinstance(words, Words)
    ]  # fmt: skip
    assert len(inside) == len(boxes) <= len(numbers)
    for box, words in inside:
        assert words_fit(words.text, words.size, box.width) and words.size >= 9
        assert words.text == re.split("[FBIW]", box.hint.split(":")[0])[1]


@pytest.mark.parametrize(("makespan", "unit"), [(135.6, "us"), (1.356e-4, "s"), (61.0, "ms")])
def test_numbers_of_the_axis_lie_side_by_side(makespan: float, unit: str) -> None:
    plan = get_schedule("GPipe").plan(2, 8)
    cost = makespan / simulate(plan, Costs(1, 1, 1)).makespan
    picture = arrange([Panel(simulate(plan, Costs(cost, cost, cost)), unit=unit)])
    height = next(s.y for s in picture.shapes if isinstance(s, Words) and s.text == f"0 {unit}")
    *numbers, last = [s for s in picture.shapes if isinstance(s, Words) and s.y == height]
    right = [words.x + 3.0 * len(words.text) for words in numbers]  # of 10 pixels, from its middle
    left = [*(words.x - 3.0 * len(words.text) for words in numbers), last.x - 6.0 * len(last.text)]
    assert last.text == f"{makespan:.4g} {unit}"
    assert all(one < next_one for one, next_one in zip(right, left[1:], strict=True))


def test_boxes_stay_in_the_picture_and_rows_apart() -> None:
    _, picture = two_panels(4, 8)
    boxes = [shape for shape in picture.shapes if isinstance(shape, Box) and shape.hint]
    assert all(box.x + box.width <= picture.width and box.y + box.height <= picture.height for box in boxes)
    rows = sorted({box.y for box in boxes})
    assert len(rows) == 8
    assert all(below - above > boxes[0].height for above, below in itertools.pairwise(rows))


def test_captions_axis_and_legend_are_there() -> None:
    _, picture = two_panels(2, 4)
    words = [shape.text for shape in picture.shapes if isinstance(shape, Words)]
    assert [text for text in words if text in ("planned", "measured")] == ["planned", "measured"]
    assert words.count("0 ms") == 2 and words.count("rank 1") == 2
    assert words[-3:] == ["forward", "backward", "idle"]
    halves = [shape.text for shape in two_panels(2, 4, "ZBV")[1].shapes if isinstance(shape, Words)]
    assert halves[-5:] == ["forward", "input half", "weight half", "idle", "paler: a rank's later stages"]


def test_an_action_too_short_for_its_number_stays_empty() -> None:
    run = simulate(Plan.parse("0F0 0B0\n1F0 1B0"), Costs([100, 0.01], [100, 0.01], [100, 0.01]))
    words = [s.text for s in arrange([Panel(run)]).shapes if isinstance(s, Words) and s.anchor == "middle"]
    assert words[:2] == ["0", "0"] and words.count("0") == 3  # the third begins the axis


def texts(picture: Picture) -> list[str]:
    return [shape.text for shape in picture.shapes if isinstance(shape, Words)]


def test_a_title_says_what_is_drawn_and_the_axis_ends_with_the_step() -> None:
    run = simulate(get_schedule("1F1B").plan(4, 8), Costs(1.0, 1.0, 1.3))
    picture = arrange([Panel(run, unit="ms")], title=title_of(run, "1F1B"))
    assert texts(picture)[0] == picture.title == f"1F1B: 4 ranks, 8 micro-batches, bubble {run.bubble:.1%}"
    assert f"{run.makespan:.4g} ms" in texts(picture)


def test_a_forward_and_a_backward_that_run_as_one_share_a_box() -> None:
    plan = get_schedule("DualPipeV").plan(2, 6)
    run = simulate(plan, Costs(2, 2, 2))
    boxes = [s for s in arrange([Panel(run)]).shapes if isinstance(s, Box) and "as one with" in s.hint]
    assert len(boxes) == 2 * sum(len(plan.pairs_of(rank)) for rank in range(2)) > 0
    for upper, lower in zip(boxes[::2], boxes[1::2], strict=True):
        assert (upper.x, upper.width) == (lower.x, lower.width)
        assert lower.y == upper.y + upper.height and upper.fill != lower.fill


def test_labels_name_the_stage_where_a_rank_has_more_than_two() -> None:
    four = simulate(get_schedule("Interleaved1F1B", stages_per_rank=4).plan(2, 4), Costs(4, 4, 4))
    assert {"0:3", "7:0"} <= set(texts(arrange([Panel(four)])))
    two = simulate(get_schedule("Interleaved1F1B", stages_per_rank=2).plan(2, 4), Costs(2, 2, 2))
    assert not any(":" in text and text[0].isdigit() for text in texts(arrange([Panel(two)])))


def test_every_pause_has_a_cause_and_they_add_up() -> None:
    plan = get_schedule("1F1B").plan(4, 8)
    even = simulate(plan, Costs(1, 1, 1))
    assert {wait.cause for wait in waits(even)} == {"schedule"}
    hops = simulate(plan, Costs(1, 1, 1, send=0.25))
    assert {wait.cause for wait in waits(hops)} == {"schedule", "message"}
    uneven = simulate(plan, Costs([1, 2, 1, 1], [1, 2, 1, 1], [1, 2, 1, 1]))
    assert {wait.cause for wait in waits(uneven)} == {"schedule", "imbalance"}
    for run in (even, hops, uneven):
        found = waits(run)
        assert sum(wait.end - wait.start for wait in found) == pytest.approx(4 * run.makespan - sum(run.busy))
        busy = [(t.rank, t.start, t.end) for t in run.actions]
        assert not any(
            rank == wait.rank and start < wait.end - 1e-9 and wait.start < end - 1e-9
            for wait in found for rank, start, end in busy
        )  # fmt: skip


def test_text_is_escaped() -> None:
    picture = Picture(10, 10, "a < b", [Words(1, 1, "x & y"), Box(0, 0, 1, 1, "#000000", hint='"<')])
    root = ElementTree.fromstring(picture.svg())
    assert [element.text for element in root.iter(f"{SVG}title")] == ["a < b", '"<']
    assert [element.text for element in root.iter(f"{SVG}text")] == ["x & y"]


def test_a_png_has_the_picture_s_size_and_colours() -> None:
    pytest.importorskip("matplotlib")
    from PIL import Image

    _, picture = two_panels(2, 4)
    image: Any = Image.open(io.BytesIO(picture.png(scale=1.0))).convert("RGB")
    assert image.size == (int(picture.width), int(picture.height))
    boxes = [shape for shape in picture.shapes if isinstance(shape, Box) and shape.hint]
    for box in boxes:
        colour = "#{:02x}{:02x}{:02x}".format(*image.getpixel((int(box.x + 3), int(box.y + 4))))
        assert colour == box.fill, box.hint


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'lightning-pipeline\[plot\]'"):
        two_panels(2, 2)[1].png()
