"""The trace of a recorded step: strictly Chrome's trace events, and what a viewer makes of it."""

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lightning_pipeline.measure.perfetto import trace
from lightning_pipeline.schedules import Plan, get_schedule
from tests.trace_reader import check_strictly, look
from tests.unit.callbacks.recorded import recorded

KINDS = ["GPipe", "1F1B", "Interleaved1F1B", "ZBH1", "ZBV"]


def plan_of(schedule: str) -> Plan:
    return get_schedule(schedule).plan(num_ranks=4, num_microbatches=8)


def actions_of(plan: Plan) -> list[str]:
    return sorted(str(action) for actions in plan for action in actions)


@pytest.mark.parametrize("schedule", KINDS)
def test_every_action_is_a_slice_of_its_rank_once(schedule: str) -> None:
    plan = plan_of(schedule)
    written = json.loads(json.dumps(trace(recorded(plan), 9)))
    assert written["displayTimeUnit"] == "ms" and written["otherData"]["step"] == 9
    for entry in written["traceEvents"]:
        check_strictly(entry)
    slices = [entry for entry in written["traceEvents"] if entry["ph"] == "X"]
    assert sorted(s["name"] for s in slices if s["cat"] == "compute") == actions_of(plan)
    for piece in slices:
        if piece["cat"] == "compute":
            assert plan.rank_of(piece["args"]["stage"]) == piece["pid"] - 1


@pytest.mark.parametrize("schedule", KINDS)
def test_slices_of_a_track_follow_each_other(schedule: str) -> None:
    entries = trace(recorded(plan_of(schedule)), 9)["traceEvents"]
    for thread in {entry["tid"] for entry in entries if "tid" in entry}:
        slices = sorted(
            (round(e["ts"] * 1e3), round((e["ts"] + e["dur"]) * 1e3))
            for e in entries if e["ph"] == "X" and e["tid"] == thread
        )  # fmt: skip
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(slices))


def arrows_of(entries: list[dict[str, Any]]) -> Counter[tuple[str, str]]:
    """Names of the slices that arrows lead from and to, found by where the arrows' ends are."""
    slices = {(e["tid"], e["ts"]): e["name"] for e in entries if e["ph"] == "X"}
    ends: dict[int, dict[str, str]] = {}
    for entry in entries:
        if entry["ph"] in "sf":
            ends.setdefault(entry["id"], {})[entry["ph"]] = slices[entry["tid"], entry["ts"]]
    return Counter((end["s"], end["f"]) for end in ends.values())


def test_arrows_lead_to_backwards_and_along_messages() -> None:
    entries = trace(recorded(get_schedule("1F1B").plan(2, 2)), 0)["traceEvents"]
    assert arrows_of(entries) == Counter(
        [(f"{s}F{m}", f"{s}B{m}") for s in range(2) for m in range(2)]
        + [(f"0SEND_F{m}", f"1RECV_F{m}") for m in range(2)]
        + [(f"1SEND_B{m}", f"0RECV_B{m}") for m in range(2)]
    )


def test_arrows_lead_from_input_to_weight_half() -> None:
    arrows = arrows_of(trace(recorded(get_schedule("ZBH1").plan(2, 2)), 0)["traceEvents"])
    assert arrows["0F1", "0I1"] == arrows["0I1", "0W1"] == 1
    assert set(arrows.values()) == {1}


def test_tracks_are_named_and_messages_have_their_bytes() -> None:
    entries = trace(recorded(get_schedule("Interleaved1F1B").plan(2, 2)), 0)["traceEvents"]
    names = [e["args"]["name"] for e in entries if e["name"] in ("process_name", "thread_name")]
    tracks = ["compute", "send", "receive"]
    assert names == ["rank 0: stages 0, 2", *tracks, "rank 1: stages 1, 3", *tracks]
    (received,) = [e for e in entries if e["name"] == "1RECV_F0"]
    assert received["args"] == {"stage": 1, "microbatch": 0, "bytes": 64, "peer": 0}


def test_a_rank_that_waits_for_a_message_shows_waiting() -> None:
    entries = trace(recorded(get_schedule("1F1B").plan(2, 1)), 0)["traceEvents"]
    (waiting,) = [e for e in entries if e["name"] == "waiting" and e["pid"] == 2]
    (forward,) = [e for e in entries if e["name"] == "0F0"]
    assert waiting["args"] == {"for": "1RECV_F0"}
    assert waiting["dur"] == pytest.approx(forward["dur"], abs=0.002)


@pytest.mark.parametrize("schedule", KINDS)
def test_a_viewer_finds_every_action_once(tmp_path: Path, schedule: str) -> None:
    plan, path = plan_of(schedule), tmp_path / "timeline-9.json"
    written = trace(recorded(plan), 9)
    path.write_text(json.dumps(written))
    seen = look(path)
    assert sorted(row.name for row in seen.slices if row.track == "compute") == actions_of(plan)
    assert seen.arrows == arrows_of(written["traceEvents"])
    times = {e["name"]: e for e in written["traceEvents"] if e["ph"] == "X"}
    for row in seen.slices:
        entry = times[row.name]
        assert (row.ts, row.dur) == (round(entry["ts"] * 1e3), round(entry["dur"] * 1e3)), row.name
        assert row.process.startswith(f"rank {entry['pid'] - 1}: stage")


def test_kinds_have_colours_and_a_counter_says_what_is_held() -> None:
    plan = plan_of("ZBH1")
    entries = trace(recorded(plan), 9, dict.fromkeys(range(4), 2**20))["traceEvents"]
    colours = {(e["name"][1], e["cname"]) for e in entries if e["ph"] == "X" and e["cat"] == "compute"}
    assert colours == {("F", "rail_response"), ("I", "startup"), ("W", "rail_load")}
    for rank in range(4):
        held = [e["args"]["MiB"] for e in entries if e["ph"] == "C" and e["pid"] == rank + 1]
        split = any(action.kind == "W" for action in plan[rank])
        assert held[-1] == 0 and max(held) == peak(plan, rank) and min(held) >= 0 and split


def peak(plan: Plan, rank: int) -> int:
    held = most = 0
    for action in plan[rank]:
        held += {"F": 1, "W": -1, "B": -1}.get(action.kind, 0)
        most = max(most, held)
    return most
