"""PipelineTimeline in whole runs: what it writes, where, and that it stands back where it should."""

import json
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_pipeline.callbacks import PipelineTimeline, timeline
from lightning_pipeline.schedules import get_schedule
from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, loader, trainer
from tests.trace_reader import look

Ranks = Callable[[int], Pool]
PIPELINE = {"stages": 2, "num_microbatches": 4}
SVG = "{http://www.w3.org/2000/svg}"


def fit(
    pipeline: dict[str, Any],
    options: dict[str, Any],
    recording: dict[str, Any] | None = None,
    others: Any = (),
) -> Any:
    """A fit of three batches an epoch; the files written here, and the seconds taken."""
    callback = PipelineTimeline(**recording or {})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = trainer(pipeline, callbacks=[callback, *others], **options)
        run.fit(Regression(), loader(), loader(8, seed=4))
    said = [str(warning.message) for warning in caught if "PipelineTimeline" in str(warning.message)]
    return [str(path) for path in callback.files], said, callback.seconds_recording, callback.seconds_writing


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("timeline-*"))


def slices(path: Path) -> Counter[str]:
    events = json.loads(path.read_text())["traceEvents"]
    return Counter(event["name"] for event in events if event["ph"] == "X" and event["cat"] == "compute")


def actions(schedule: str, ranks: int, microbatches: int) -> Counter[str]:
    plan = get_schedule(schedule).plan(ranks, microbatches)
    return Counter(str(action) for actions in plan for action in actions)


@pytest.fixture(scope="module", params=["1F1B", "ZBV"])
def recorded(request: pytest.FixtureRequest, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A schedule, the folder of a run with it, and what its ranks returned."""
    folder = tmp_path_factory.mktemp("recorded")
    found = ranks(2)(fit, {**PIPELINE, "schedule": request.param}, {"default_root_dir": folder})
    return request.param, folder, found


def test_a_trace_and_a_picture_show_every_action_of_every_rank(recorded: Any) -> None:
    schedule, tmp_path, (first, second) = recorded
    # Two epochs of three batches: the last of this short fit is recorded, and rank 0 alone writes.
    assert [Path(path).name for path in first[0]] == ["timeline-5.json", "timeline-5.svg"]
    assert second[0] == []
    assert names(tmp_path) == ["timeline-5.json", "timeline-5.svg"]
    expected = actions(schedule, 2, 4)
    assert slices(tmp_path / "timeline-5.json") == expected
    drawn = ElementTree.parse(tmp_path / "timeline-5.svg").getroot()
    hints = [title.text or "" for box in drawn.iter(f"{SVG}rect") for title in box.iter(f"{SVG}title")]
    drawn_actions = Counter(name for hint in hints if (name := hint.split(":")[0]) in expected)
    assert drawn_actions == expected + expected  # planned and measured
    assert "optimizer" in {hint.split(":")[0] for hint in hints}


def test_a_viewer_finds_every_action_of_a_run_once(recorded: Any) -> None:
    schedule, tmp_path, _ = recorded
    seen = look(tmp_path / "timeline-5.json")
    assert Counter(row.name for row in seen.slices if row.track == "compute") == actions(schedule, 2, 4)
    assert set(seen.arrows.values()) == {1}
    messages = [pair for pair in seen.arrows if "_" in pair[0]]
    assert sorted(pair[0] for pair in messages) == sorted(r.name for r in seen.slices if r.track == "send")
    assert sorted(pair[1] for pair in messages) == sorted(r.name for r in seen.slices if r.track == "receive")


@pytest.mark.quiet  # times of both ranks are compared
def test_messages_have_bytes_and_arrows(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2)(fit, PIPELINE, {"default_root_dir": tmp_path}, {"steps": [4]})
    events = json.loads((tmp_path / "timeline-4.json").read_text())["traceEvents"]
    bytes_of = {e["name"]: e["args"]["bytes"] for e in events if e["ph"] == "X" and "bytes" in e["args"]}
    times = {e["name"]: (e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X"}
    pairs = [(f"0SEND_F{m}", f"1RECV_F{m}") for m in range(4)] + [
        (f"1SEND_B{m}", f"0RECV_B{m}") for m in range(4)
    ]
    assert len(bytes_of) == 16
    for sent, received in pairs:
        assert bytes_of[sent] == bytes_of[received] == 64 + 2 * 8 * 8  # header, two rows of eight doubles
        assert times[sent][0] <= times[received][1]
    assert times["0F0"][1] <= times["0SEND_F0"][0] and times["1RECV_F0"][1] <= times["1F0"][0]
    assert times["1B3"][1] <= times["1SEND_B3"][0] and times["0RECV_B3"][1] <= times["0B3"][0]
    assert sum(e["ph"] == "s" for e in events) == sum(e["ph"] == "f" for e in events) == 8 + 8


def test_steps_are_chosen_and_those_that_never_came_are_told(ranks: Ranks, tmp_path: Path) -> None:
    chosen = {"steps": [0, 4, 99], "every_n_steps": 3, "dirpath": str(tmp_path / "own")}
    first, second = ranks(2)(fit, PIPELINE, {"default_root_dir": tmp_path}, chosen)
    assert names(tmp_path / "own") == names(tmp_path)
    assert {name.split(".")[0] for name in names(tmp_path)} == {f"timeline-{n}" for n in (0, 2, 4, 5)}
    assert slices(tmp_path / "own" / "timeline-4.json") == actions("1F1B", 2, 4)
    (said,) = first[1]
    assert "was to record steps [99], which this fit did not run: it ended after step 5" in said
    assert second[1] == []


class StopsEarly(Callback):
    """Ends the fit after two batches."""

    def on_train_batch_end(self, run: Trainer, *_: Any) -> None:
        run.should_stop = run.fit_loop.total_batch_idx >= 1


@pytest.mark.parametrize(
    ("chosen", "awaited"),
    [({}, "its batch 6"), ({"every_n_steps": 1000}, "the last of 1000 steps"), ({"steps": []}, "any step")],
)
def test_that_nothing_was_recorded_is_told(
    ranks: Ranks, tmp_path: Path, chosen: dict[str, Any], awaited: str
) -> None:
    first, second = ranks(2)(fit, PIPELINE, {"default_root_dir": tmp_path}, chosen, [StopsEarly()])
    assert names(tmp_path) == []
    (said,) = first[1]
    assert f"recorded nothing: this fit did not come to {awaited}; it ended after step 1. Choose" in said
    assert second[1] == []


def fit_twice(folder: str) -> list[str]:
    texts: list[str] = []
    timeline.rank_zero_info = rank_zero_only(texts.append)  # type: ignore[assignment]
    callback = PipelineTimeline(steps=[1], dirpath=folder)
    for _ in range(2):
        trainer(PIPELINE, callbacks=[callback], max_steps=2).fit(Regression(), loader())
    return [text.splitlines()[-1].partition(": ")[2] for text in texts]


def test_a_second_fit_writes_beside_the_first(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(2)(fit_twice, str(tmp_path))
    assert second == []
    files = [
        [tmp_path / f"timeline-1{version}.{kind}" for kind in ("json", "svg")] for version in ("", "-v1")
    ]
    assert first == [", ".join(map(str, pair)) for pair in files]
    assert all(path.is_file() for pair in files for path in pair)


def test_of_replicas_the_first_is_recorded(ranks: Ranks, tmp_path: Path) -> None:
    pipeline = {"stages": 2, "data_parallel_size": 2, "num_microbatches": 2}
    results = ranks(4)(fit, pipeline, {"default_root_dir": tmp_path}, {"steps": [1]})
    assert [len(files) for files, *_ in results] == [2, 0, 0, 0]
    assert slices(tmp_path / "timeline-1.json") == actions("1F1B", 2, 2)
    assert [seconds > 0 for _, _, seconds, _ in results] == [True, False, True, False]


def test_the_loggers_folder_is_used(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2)(fit_with_csv, str(tmp_path))
    assert names(tmp_path / "log" / "0") == ["timeline-5.json", "timeline-5.svg"]


def fit_with_csv(folder: str) -> None:
    fit(PIPELINE, {"logger": CSVLogger(folder, name="log", version="0")})


@pytest.mark.parametrize(
    ("options", "written"),
    [
        ({"barebones": True, "log_every_n_steps": None, "num_sanity_val_steps": None}, 2),
        ({"fast_dev_run": 2}, 0),
        ({"max_steps": 2}, 2),
        ({"limit_train_batches": 1, "max_epochs": 1}, 2),
        ({"accumulate_grad_batches": 2}, 2),
    ],
    ids=lambda value: next(iter(value), None) if isinstance(value, dict) else None,
)
def test_nothing_breaks(ranks: Ranks, tmp_path: Path, options: dict[str, Any], written: int) -> None:
    first, _ = ranks(2)(fit, PIPELINE, {"default_root_dir": tmp_path, **options})
    assert len(first[0]) == len(names(tmp_path)) == written
    assert first[2] > 0 and first[1] == []


def test_a_dirpath_is_written_to_even_by_fast_dev_run_and_png_on_demand(ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    ranks(2)(fit, PIPELINE, {"fast_dev_run": True}, {"dirpath": str(tmp_path), "png": True})
    assert names(tmp_path) == ["timeline-0.json", "timeline-0.png", "timeline-0.svg"]
    assert (tmp_path / "timeline-0.png").read_bytes()[1:4] == b"PNG"


def fit_with_tensorboard(folder: str, plot: bool) -> None:
    has_plot, timeline.has_plot = timeline.has_plot, lambda: plot
    try:
        fit(PIPELINE, {"logger": TensorBoardLogger(folder, name="board", version="0"), "max_epochs": 1})
    finally:
        timeline.has_plot = has_plot


@pytest.mark.parametrize("plot", [True, False])
def test_tensorboard_shows_the_picture(ranks: Ranks, tmp_path: Path, plot: bool) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    pytest.importorskip("matplotlib")
    ranks(2)(fit_with_tensorboard, str(tmp_path), plot)
    events = accumulator.EventAccumulator(str(tmp_path / "board" / "0"))
    events.Reload()
    if plot:
        (image,) = events.Images("pipeline/timeline")
        assert image.step == 2 and image.width > 800 and image.encoded_image_string[1:4] == b"PNG"
    else:
        (text,) = events.Tensors("pipeline/timeline/text_summary")
        written = text.tensor_proto.string_val[0].decode()
        assert text.step == 2 and "    rank 0 | F0" in written and "    measured in step 2: " in written


def fit_with_profiler(folder: str) -> None:
    profiler = PyTorchProfiler(dirpath=folder, filename="profile", schedule=None)
    run = trainer(PIPELINE, profiler=profiler, max_epochs=1, limit_train_batches=2)
    run.fit(Regression(), loader())


def test_a_profiler_s_trace_carries_the_actions_names(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2)(fit_with_profiler, str(tmp_path))
    found = []
    for path in tmp_path.glob("*.pt.trace.json"):
        events = json.loads(path.read_text())["traceEvents"]
        named = Counter(e["name"] for e in events if e.get("cat") == "user_annotation")
        found.append({name: count for name, count in named.items() if name in actions("1F1B", 2, 4)})
    stages = [{f"{s}{kind}{m}": 2 for kind in "FB" for m in range(4)} for s in (0, 1)]
    assert sorted(found, key=str) == sorted(stages, key=str)
