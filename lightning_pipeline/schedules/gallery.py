"""Writes the gallery of schedules: `python -m lightning_pipeline.schedules.gallery docs`."""

import argparse
from pathlib import Path
from typing import NamedTuple

from lightning_pipeline.schedules.drawing import draw_svg
from lightning_pipeline.schedules.plans import Costs, Simulation, simulate
from lightning_pipeline.schedules.registry import get_schedule

_RANKS, _MICROBATCHES = 4, 8
_COSTS = Costs(1, 1, 1)


class Exhibit(NamedTuple):
    """What the gallery says of a schedule beside what it computes."""

    name: str
    formula: str
    memory: str
    when: str


EXHIBITS = (
    Exhibit(
        "GPipe",
        "(p-1)T + 2(p-1)c",
        "m",
        "A first run, or few micro-batches: nothing is simpler to read in a trace. Memory grows with m.",
    ),
    Exhibit(
        "1F1B",
        "(p-1)T + [2(p-1)m/p + 2(p-2)]c, where p divides m",
        "p on rank 0, p - r on rank r",
        "The default: one stage per rank, a fused backward, memory that does not grow with m.",
    ),
    Exhibit(
        "Interleaved1F1B",
        "(p-1)T/v + 2(pv-1)c",
        "p + (p-1)/v",
        "The bubble is too large and hops are cheap. Works with any backward.",
    ),
    Exhibit(
        "LoopedBFS",
        "(p-1)T/v, where hops are free",
        "m",
        "Sharded parameters: a stage's micro-batches come in one piece, so it is gathered once each way.",
    ),
    Exhibit(
        "ZBH1",
        "(p-1)(F+B-W) + 4(p-1)c, m >= 2p",
        "p",
        "A split backward pays, one stage per rank, 1F1B's memory.",
    ),
    Exhibit(
        "ZBH2",
        "span: (p-1)(F+B-2W) + 2(p-1)c",
        "2p - 1",
        "Memory is plenty, and the next step may start before the last rank has finished this one.",
    ),
    Exhibit(
        "InterleavedZeroBubble",
        "(p-1)(F+B-W)/v, where B >= W and hops are free",
        "p",
        "A split backward pays and several stages per rank are at hand: the least makespan at 1F1B's memory.",
    ),
    Exhibit(
        "ZBV",
        "span 0, makespan (p-1)F/2, where F = B = W and hops are free",
        "p",
        "As before with two stages per rank, all ranks equally full, and the loss on the first rank.",
    ),
    Exhibit(
        "VHalf",
        "computed",
        "floor((p+2)/2)",
        "Memory is short. Keeps its rate where W + 2B >= 2F and W + 2F >= 2B; else the bubble grows with m.",
    ),
    Exhibit(
        "VMin",
        "computed",
        "floor((p+4)/3)",
        "Memory is very short, and F, B and W cost about the same; else the bubble grows with m.",
    ),
    Exhibit(
        "DualPipeV",
        "order as published; a pair runs as one",
        "p + 1/2",
        "Forward and backward of different micro-batches can overlap, as with expert parallelism.",
    ),
    Exhibit(
        "Auto",
        "the smallest that a search finds",
        "what you allow; by default p",
        "Costs have been measured, stages are unequal, or memory is limited to something in between.",
    ),
)

_HEAD = """# Schedules

This page and its pictures are written by `python -m lightning_pipeline.schedules.gallery docs`.

`p` ranks, `m` micro-batches, `v` stages per rank. `F`, `B`, `W`: time of the forward, the input-gradient
half and the weight-gradient half of the backward for one rank's whole share of the model and one
micro-batch; a fused backward costs `B + W`; `T = F + B + W`; `c`: one hop between ranks. Memory is in
shares: the activations of one rank's whole share for one micro-batch.

*Makespan* is first start to last end over all ranks: what a step costs when something at its end waits
for every rank, such as a gradient norm or the optimizer step of an ordinary run. Choose by this. *Span* is
the largest (last end - first start) of any one rank; the zero-bubble papers quote it. *Bubble* is idle
time over all rank-time. The figures below are simulated with p = {p}, m = {m}, F = B = W = 1, free hops,
and two stages per rank where a schedule takes several. In the pictures, blue is forward, orange a fused
backward, yellow the input half, green the weight half; a rank's later stages are paler.

Which one wins depends on the costs: simulate with yours, or let `Auto` do it. Here `Auto` was given the
costs, and chose its stages per rank by them. A run whose `Auto` is given none keeps one stage per rank,
and orders its actions anew once it has measured.

<!-- runs -->
```python
from lightning_pipeline.schedules import Costs, draw, get_schedule, simulate

run = simulate(get_schedule("ZBH1").plan(num_ranks=4, num_microbatches=8), Costs(1.0, 1.1, 0.7, send=0.05))
print(draw(run), run.bubble, run.peak_memory)
```

| schedule | bubble (makespan) | bubble (span) | peak memory, shares |
|---|---|---|---|
"""


def page() -> tuple[str, dict[str, str]]:
    """The gallery's text, and its pictures by file name."""
    runs = {exhibit.name: _run(exhibit.name) for exhibit in EXHIBITS}
    text = _HEAD.format(p=_RANKS, m=_MICROBATCHES)
    for name, run in runs.items():
        text += f"| {name} | {run.bubble:.4f} | {run.bubble_span:.4f} | {max(run.peak_memory):g} |\n"
    for exhibit in EXHIBITS:
        text += _section(exhibit)
    return text, {f"{name}.svg": draw_svg(run, name=name) for name, run in runs.items()}


def _run(name: str) -> Simulation:
    options: dict[str, object] = {"costs": _COSTS} if name == "Auto" else {}
    return simulate(get_schedule(name, **options).plan(_RANKS, _MICROBATCHES), _COSTS)


def _section(exhibit: Exhibit) -> str:
    plan_of = f'get_schedule("{exhibit.name}")'
    about = (type(get_schedule(exhibit.name)).__doc__ or "").split("\n", 1)[0]
    return (
        f"\n## {exhibit.name}\n\n{about}\n\n"
        f"![{exhibit.name}](schedules/{exhibit.name}.svg)\n\n"
        f"* Made with `{plan_of}`.\n"
        f"* Bubble time: {exhibit.formula}.\n"
        f"* Peak memory in shares: {exhibit.memory}.\n"
        f"* When: {exhibit.when}\n"
    )


def write(folder: Path) -> None:
    """Write `schedules.md` and the pictures in `schedules/` into a folder."""
    text, pictures = page()
    (folder / "schedules").mkdir(parents=True, exist_ok=True)
    (folder / "schedules.md").write_text(text)
    for name, picture in pictures.items():
        (folder / "schedules" / name).write_text(picture)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("docs"))
    write(parser.parse_args().folder)
