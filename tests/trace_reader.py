"""Reads a trace as a viewer does: strictly by the Trace Event Format, arrows bound to the slices at their ends."""

import json
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

_NEEDED = {
    "M": {"name", "pid", "args"},
    "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
    "C": {"name", "cat", "pid", "tid", "ts", "args"},
    "s": {"name", "cat", "id", "pid", "tid", "ts"},
    "f": {"name", "cat", "id", "pid", "tid", "ts", "bp"},
}


class Slice(NamedTuple):
    """A box of a trace; times in nanoseconds."""

    name: str
    ts: int
    dur: int
    track: str
    process: str


class Seen(NamedTuple):
    """What is in a trace: slices but those that wait, and arrows by their slices' names."""

    slices: list[Slice]
    arrows: Counter[tuple[str, str]]


def check_strictly(entry: dict[str, Any]) -> None:
    """What the Trace Event Format says of the phases that we write."""
    needed = _NEEDED[entry["ph"]]
    assert needed <= entry.keys() <= needed | {"ph", "tid"} | ({"cname"} if entry["ph"] == "X" else set())
    assert all(isinstance(entry[key], int) for key in ("pid", "tid", "id") if key in entry)
    assert all(isinstance(entry[key], float) and entry[key] >= 0 for key in ("ts", "dur") if key in entry)


def look(path: Path) -> Seen:
    """Read a trace file."""
    entries = json.loads(path.read_text())["traceEvents"]
    for entry in entries:
        check_strictly(entry)
    names = {(e["name"], e["pid"], e.get("tid")): e["args"].get("name") for e in entries if e["ph"] == "M"}
    slices = [
        Slice(
            e["name"], round(e["ts"] * 1e3), round(e["dur"] * 1e3),
            names["thread_name", e["pid"], e["tid"]], names["process_name", e["pid"], None],
        )
        for e in entries if e["ph"] == "X" and e["name"] != "waiting"
    ]  # fmt: skip
    begins = {(e["tid"], e["ts"]): e["name"] for e in entries if e["ph"] == "X"}
    ends: dict[int, dict[str, str]] = {}
    for e in entries:
        if e["ph"] in "sf":
            ends.setdefault(e["id"], {})[e["ph"]] = begins[e["tid"], e["ts"]]
    return Seen(slices, Counter((end["s"], end["f"]) for end in ends.values()))
