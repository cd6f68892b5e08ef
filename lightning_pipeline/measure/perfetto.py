"""A recorded step as a trace that Perfetto and Chrome open.

The format is the JSON of Chrome's trace events (Trace Event Format, Google, 2016), which
https://ui.perfetto.dev opens: `X` a slice, `M` a name, `C` a counter, `s` and `f` the two ends of an arrow.
`cname`, one of the reserved names of Catapult's color_scheme.html, colours a slice in chrome://tracing;
Perfetto ignores it (google/perfetto#208) and colours by the name without digits: kinds differ there, too.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lightning_pipeline.measure.steps import RankStep
from lightning_pipeline.schedules import Action

TRACKS = ("compute", "send", "receive")
_FIRST_THREAD = 10_000  # thread ids are not to be mistaken for process ids
_COMPUTE, _SEND, _RECEIVE = range(3)
_FOLLOWS = {"B": ("F",), "I": ("F",), "W": ("I",)}
_WAITING = "waiting"

# Of Chrome's reserved names: blue, orange, yellow, green as in the pictures; waiting is pale.
_COLOURS = {
    "F": "rail_response", "B": "rail_idle", "I": "startup", "W": "rail_load",
    _WAITING: "thread_state_sleeping",
}  # fmt: skip

Entry = dict[str, Any]


class _Slice(NamedTuple):
    """A box of the trace, in nanoseconds since the step began."""

    name: str
    rank: int
    track: int
    start: int
    end: int
    args: Mapping[str, object]


def trace(
    steps: Sequence[RankStep], number: int, activations: Mapping[int, int] | None = None
) -> dict[str, Any]:
    """What a JSON file of one step holds: a process per rank, with tracks `compute`, `send`, `receive`.

    Slices are named after their actions, `2F0`, messages `2SEND_F0` and `3RECV_F0`. Arrows lead from a
    forward to its backward, from an input half to its weight half, and along each message. A send lasts
    until the communicator has the bytes. A receive lasts until the tensors are there, and begins when the
    rank turns to it and the message is under way: what the rank waits before that is a slice `waiting`. Kinds
    have colours (`cname`), and a counter says how many micro-batches' activations a rank holds, in MiB where
    that is known.

    Args:
        steps: Of every rank, on one clock.
        number: Of the batch.
        activations: Bytes of a micro-batch's activations, by stage.
    """
    zero = min(step.began for step in steps)
    sent = {message.action: message.began for step in steps for message in step.messages}
    slices = [piece for step in steps for piece in _slices(step, zero, sent)]
    entries = [entry for step in steps for entry in _names(step)]
    entries += [_drawn(piece) for piece in slices]
    for arrow, (source, target) in enumerate(_arrows({piece.name: piece for piece in slices}), start=1):
        entries += _arrow(arrow, source, target)
    entries += [entry for step in steps for entry in _counted(step, zero, activations or {})]
    about = {"step": number, "clock": "nanoseconds of pipeline rank 0's monotonic clock", "zero": zero}
    return {"traceEvents": entries, "displayTimeUnit": "ms", "otherData": about}


def _slices(step: RankStep, zero: int, sent: Mapping[Action, int]) -> Iterator[_Slice]:
    for action, asked, started, ended in step.events:
        args = {"stage": action.stage, "microbatch": action.microbatch, "waited_us": (started - asked) / 1e3}
        yield _Slice(str(action), step.rank, _COMPUTE, started - zero, ended - zero, args)
    for action, peer, num_bytes, began, ended in step.messages:
        args = {"stage": action.stage, "microbatch": action.microbatch, "bytes": num_bytes, "peer": peer}
        if action.kind.startswith("SEND"):
            yield _Slice(str(action), step.rank, _SEND, began - zero, ended - zero, args)
            continue
        under_way = min(max(began, sent.get(_sender(action), began) + 1), ended)
        if under_way > began:
            yield _Slice(_WAITING, step.rank, _RECEIVE, began - zero, under_way - zero, {"for": str(action)})
        yield _Slice(str(action), step.rank, _RECEIVE, under_way - zero, ended - zero, args)


def _counted(step: RankStep, zero: int, activations: Mapping[int, int]) -> Iterator[Entry]:
    """A counter of what the rank holds: more with each forward, less with each backward or weight half."""
    split = {event.action.stage for event in step.events if event.action.kind == "W"}
    held = num_bytes = 0
    for action, _, started, ended in step.events:
        ends = action.kind == "W" or (action.kind in "BI" and action.stage not in split) or action.kind == "B"
        change = 1 if action.kind == "F" else -1 if ends else 0
        if not change:
            continue
        held += change
        num_bytes += change * activations.get(action.stage, 0)
        values: dict[str, float] = {"micro-batches": held}
        if activations:
            values = {"MiB": num_bytes / 2**20}
        moment = (started if change > 0 else ended) - zero
        place = {"pid": step.rank + 1, "tid": _thread(step.rank, _COMPUTE), "ts": moment / 1e3}
        yield {"ph": "C", "name": "activations held", "cat": "memory", **place, "args": values}


def _sender(received: Action) -> Action:
    stage, kind, microbatch = received
    return (
        Action(stage - 1, "SEND_F", microbatch)
        if kind == "RECV_F"
        else Action(stage + 1, "SEND_B", microbatch)
    )


def _arrows(slices: Mapping[str, _Slice]) -> Iterator[tuple[_Slice, _Slice]]:
    for name, target in slices.items():
        for source in _sources(name):
            if source in slices:
                yield slices[source], target


def _sources(name: str) -> list[str]:
    if name == _WAITING:
        return []
    action = Action.parse(name)
    if action.kind in ("RECV_F", "RECV_B"):
        return [str(_sender(action))]
    return [str(action._replace(kind=earlier)) for earlier in _FOLLOWS.get(action.kind, ())]


def _names(step: RankStep) -> Iterator[Entry]:
    held = ", ".join(map(str, step.stages))
    name = f"rank {step.rank}: stage{'' if len(step.stages) == 1 else 's'} {held}"
    yield _meta("process_name", step.rank, name=name)
    yield _meta("process_sort_index", step.rank, sort_index=step.rank)
    for track, title in enumerate(TRACKS):
        yield {**_meta("thread_name", step.rank, name=title), "tid": _thread(step.rank, track)}
        yield {**_meta("thread_sort_index", step.rank, sort_index=track), "tid": _thread(step.rank, track)}


def _meta(what: str, rank: int, **args: object) -> Entry:
    return {"ph": "M", "name": what, "pid": rank + 1, "args": args}


def _thread(rank: int, track: int) -> int:
    return _FIRST_THREAD + len(TRACKS) * rank + track


def _drawn(piece: _Slice) -> Entry:
    place = {"pid": piece.rank + 1, "tid": _thread(piece.rank, piece.track)}
    times = {"ts": piece.start / 1e3, "dur": max(piece.end - piece.start, 1) / 1e3}  # microseconds
    colour = {"cname": _COLOURS[kind]} if (kind := _kind(piece)) in _COLOURS else {}
    what = {"name": piece.name, "cat": TRACKS[piece.track]}
    return {"ph": "X", **what, **place, **times, **colour, "args": piece.args}


def _kind(piece: _Slice) -> str:
    return _WAITING if piece.name == _WAITING else Action.parse(piece.name).kind


def _arrow(number: int, source: _Slice, target: _Slice) -> Iterator[Entry]:
    name = "message" if source.track else f"{source.name} to {target.name}"
    for phase, piece in (("s", source), ("f", target)):
        end = {"bp": "e"} if phase == "f" else {}  # "bind to the enclosing slice", which here begins there
        place = {"pid": piece.rank + 1, "tid": _thread(piece.rank, piece.track), "ts": piece.start / 1e3}
        yield {"ph": phase, "id": number, "name": name, "cat": "arrow", **place, **end}
