"""Pictures of plans and simulations in the style of the papers: numbered boxes, idle time grey."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

from lightning_pipeline.schedules.drawing.picture import Box, Picture, Words, words_fit
from lightning_pipeline.schedules.drawing.text import simulated
from lightning_pipeline.schedules.plans import Plan, Simulation, Timed, Wait

NAMES = {"F": "forward", "B": "backward", "I": "input half", "W": "weight half"}
_COLOURS = {"F": "#7fb0e0", "B": "#f3a977", "I": "#f5cc62", "W": "#92cc88"}
_WAITS = {"schedule": "#e6e6e6", "imbalance": "#dcc7dd", "message": "#b9bfc9"}
_WAIT_NAMES = {"schedule": "idle by schedule", "imbalance": "by imbalance", "message": "for messages"}
AROUND = {"data": "#c9b08f", "reduction": "#8f8fd0", "optimizer": "#d98c9a"}
"""What a rank does around the schedule, with its colour."""
_IDLE, _EDGE, _INK = "#e6e6e6", "#555555", "#333333"
_ROW, _BOX, _LEFT, _RIGHT, _GAP = 24.0, 21.0, 58.0, 10.0, 14.0
_LEAST, _MOST = 660.0, 3000.0  # of the time axis, in pixels; the first fits the column of a page
_SIZES = (11.0, 10.0, 9.0, 8.0, 7.0)  # of labels; what none of them lets fit stays empty
_SHADES = 2  # stages of a rank that colours tell apart; with more, labels name the stage
_TICKS = 70.0  # pixels between two at least
_LETTER = 6.5  # pixels of one below the axis, at most


class Span(NamedTuple):
    """Something a rank does around the schedule.

    Args:
        rank: Of the pipeline.
        start: In the units of the panel; may be before 0.
        end: Likewise; may be after the makespan.
        kind: `data`, `reduction` or `optimizer`.
    """

    rank: int
    start: float
    end: float
    kind: str


class Panel(NamedTuple):
    """One timeline of a picture.

    Args:
        simulation: What to draw.
        caption: Above it. Default: none.
        unit: Of its times, on the axis below it.
        waits: Why ranks are idle, where that is known. Default: all idle time looks alike.
        around: What ranks do around the schedule.
    """

    simulation: Simulation
    caption: str = ""
    unit: str = ""
    waits: Sequence[Wait] = ()
    around: Sequence[Span] = ()

    @property
    def start(self) -> float:
        """The first moment drawn."""
        return min([0.0, *(span.start for span in self.around)])

    @property
    def end(self) -> float:
        """The last moment drawn."""
        return max([self.simulation.makespan, *(span.end for span in self.around)])


def draw_svg(plan_or_simulation: Plan | Simulation, *, name: str = "") -> str:
    """Draw an SVG image: a row per rank, a box per action with its micro-batch, the action as a tooltip.

    Later stages of a rank are paler. A forward and a backward that run as one share a box. A plan is drawn
    with equal costs, as `draw` does.

    Args:
        plan_or_simulation: What to draw.
        name: Of the schedule, for the title.

    Returns:
        The text of an SVG file.
    """
    simulation = simulated(plan_or_simulation)
    return arrange([Panel(simulation)], title=title_of(simulation, name)).svg()


def title_of(simulation: Simulation, name: str = "") -> str:
    """What a picture shows, in a line.

    Args:
        simulation: What is drawn.
        name: Of the schedule.
    """
    plan = simulation.plan
    stages = f", {plan.num_stages} stages" if plan.num_stages != plan.num_ranks else ""
    sizes = f"{plan.num_ranks} ranks{stages}, {plan.num_microbatches} micro-batches"
    return f"{name + ': ' if name else ''}{sizes}, bubble {simulation.bubble:.1%}"


def arrange(panels: Sequence[Panel], *, title: str = "") -> Picture:
    """Put timelines below each other, all to the same scale, with a title and a legend.

    Args:
        panels: At least one.
        title: Above all. Default: that of the first.
    """
    scale, start = _scale(panels), min(panel.start for panel in panels)
    left = _LEFT - start * scale
    width = left + max(panel.end for panel in panels) * scale + _RIGHT
    title = title or title_of(panels[0].simulation)
    shapes: list[Box | Words] = [Words(_LEFT, 14.0, title, 14.0, bold=True)]
    y = 30.0
    for panel in panels:
        y = _draw(panel, scale, left, y, shapes) + _GAP
    y, end = _legend(panels, y, shapes)
    return Picture(max(width, 480.0, end, _LEFT + 8.0 * len(title)), y + 6, title, shapes)


def _scale(panels: Sequence[Panel]) -> float:
    """Pixels per unit of time: forwards and backwards wide enough for their numbers, if that is possible."""
    length = max(max(panel.end for panel in panels) - min(panel.start for panel in panels), 1e-12)
    plan = panels[0].simulation.plan
    digits = max(len(_label(Timed(action, 0, 0, 0), plan)) for actions in plan for action in actions)
    durations: dict[tuple[int, str], list[float]] = defaultdict(list)
    for number, panel in enumerate(panels):
        for timed in panel.simulation.actions:
            if timed.action.kind in "FB" and timed.end > timed.start:
                durations[number, timed.action.kind].append(timed.end - timed.start)
    shortest = min((median(times) for times in durations.values()), default=length)
    needed = 1.15 * (digits * 0.56 * _SIZES[1] + 2) / shortest
    return min(max(_LEAST / length, needed), _MOST / length)


def _draw(panel: Panel, scale: float, left: float, y: float, shapes: list[Box | Words]) -> float:
    """Add a timeline from a height downwards; where it ends."""
    simulation = panel.simulation
    plan, width = simulation.plan, simulation.makespan * scale
    if panel.caption:
        shapes.append(Words(_LEFT, y + 8, panel.caption, 13.0))
        y += 22
    for rank in range(plan.num_ranks):
        top = y + _ROW * rank
        shapes.append(Words(_LEFT - 6, top + _BOX / 2, f"rank {rank}", anchor="end"))
        shapes.append(Box(left, top, width, _BOX, _IDLE))
    for wait in panel.waits:
        hint = f"{_WAIT_NAMES[wait.cause]}: {wait.start:.4g} to {wait.end:.4g} {panel.unit}".rstrip()
        place = left + wait.start * scale, y + _ROW * wait.rank, (wait.end - wait.start) * scale
        shapes.append(Box(*place, _BOX, _WAITS[wait.cause], hint=hint))
    for span in panel.around:
        hint = f"{span.kind}: {span.start:.4g} to {span.end:.4g} {panel.unit}".rstrip()
        place = left + span.start * scale, y + _ROW * span.rank + 3, (span.end - span.start) * scale
        shapes.append(Box(*place, _BOX - 6, AROUND[span.kind], _EDGE, hint))
    for rank in range(plan.num_ranks):
        shapes += _row(panel, rank, scale, left, y + _ROW * rank)
    y += _ROW * plan.num_ranks
    shapes += _axis(panel, scale, left, y)
    return y + 20


def _row(panel: Panel, rank: int, scale: float, left: float, top: float) -> Iterator[Box | Words]:
    """The actions of a rank; a pair that runs as one is one box of two colours."""
    plan = panel.simulation.plan
    mine = [timed for timed in panel.simulation.actions if timed.rank == rank]
    position = {stage: place for place, stage in enumerate(plan.stages_of(rank))}
    pairs = plan.pairs_of(rank) if len(mine) == len(plan[rank]) else frozenset()
    joined = False
    for place, timed in enumerate(mine):
        if joined:
            joined = False
            continue
        joined = place in pairs and place + 1 < len(mine)
        end = mine[place + 1].end if joined else timed.end
        x, width = left + timed.start * scale, (end - timed.start) * scale
        if not joined:
            yield from _action(timed, plan, (x, top, width, _BOX), position, panel.unit)
            continue
        for half, part in enumerate((timed, mine[place + 1])):
            cell = x, top + half * _BOX / 2, width, _BOX / 2
            yield from _action(part, plan, cell, position, panel.unit, (timed.start, end))


def _action(
    timed: Timed,
    plan: Plan,
    cell: tuple[float, float, float, float],
    position: dict[int, int],
    unit: str,
    times: tuple[float, float] | None = None,
) -> Iterator[Box | Words]:
    x, top, width, height = cell
    start, end = times or (timed.start, timed.end)
    together = " as one with its neighbour" if times else ""
    hint = f"{timed.action}: {start:.4g} to {end:.4g}{' ' + unit if unit else ''}{together}"
    fill = _paler(_COLOURS[timed.action.kind], min(0.55, 0.3 * position[timed.action.stage]))
    yield Box(x, top, width, height, fill, _EDGE, hint)
    label = _label(timed, plan)
    fitting = (size for size in _SIZES if size <= height - 1 and words_fit(label, size, width))
    size = next(fitting, None)
    if size is None and label != str(timed.action.microbatch):
        label = str(timed.action.microbatch)
        size = next((size for size in _SIZES if size <= height - 1 and words_fit(label, size, width)), None)
    if size is not None:
        yield Words(x + width / 2, top + height / 2, label, size, "middle")


def _label(timed: Timed, plan: Plan) -> str:
    """The micro-batch; with its stage, `5:12`, where a rank has more of them than shades."""
    microbatch = str(timed.action.microbatch)
    crowded = plan.num_stages > _SHADES * plan.num_ranks
    return f"{timed.action.stage}:{microbatch}" if crowded else microbatch


def _paler(colour: str, share: float) -> str:
    parts = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)


def _axis(panel: Panel, scale: float, left: float, y: float) -> Iterator[Box | Words]:
    """A line with round numbers below it, from the first start to the last end, which is a number too."""
    end = panel.simulation.makespan
    yield Box(left, y, end * scale, 1, _INK)
    step = _round_step(_TICKS / scale)
    ticks = [number * step for number in range(math.floor(end / step + 1e-9) + 1)]
    room = _LETTER * len(f"{end:.4g} {panel.unit}") + 0.5 * _LETTER * len(f"{ticks[-1]:.6g}") + 4.0
    ticks = [tick for tick in ticks if tick == 0 or (end - tick) * scale > max(0.6 * _TICKS, room)]
    for tick in [*ticks, end]:
        x = left + tick * scale
        yield Box(x - 0.5, y, 1, 4, _INK)
        text = f"{tick:.4g}" if tick == end else f"{tick:.6g}"
        named = f"{text} {panel.unit}".rstrip() if tick in (0, end) else text
        yield Words(x, y + 11, named, 10.0, "end" if tick == end and end else "middle", bold=tick == end)


def _round_step(least: float) -> float:
    """The next 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def _legend(panels: Sequence[Panel], y: float, shapes: list[Box | Words]) -> tuple[float, float]:
    """Add what colours mean; where that ends, downwards and to the right."""
    kinds = {timed.action.kind for panel in panels for timed in panel.simulation.actions}
    causes = {wait.cause for panel in panels for wait in panel.waits}
    around = {span.kind for panel in panels for span in panel.around}
    entries = [(_COLOURS[kind], name) for kind, name in NAMES.items() if kind in kinds]
    entries += [(_WAITS[cause], name) for cause, name in _WAIT_NAMES.items() if cause in causes]
    entries += [] if causes else [(_IDLE, "idle")]
    entries += [(colour, kind) for kind, colour in AROUND.items() if kind in around]
    x = _LEFT
    for fill, name in entries:
        shapes.append(Box(x, y, 16, 12, fill, _EDGE))
        shapes.append(Words(x + 21, y + 6, name))
        x += 21 + 6.2 * len(name) + 16
    for note in _notes(panels[0].simulation.plan):
        shapes.append(Words(x, y + 6, note))
        x += 6.2 * len(note) + 16
    return y + 12, x


def _notes(plan: Plan) -> Iterator[str]:
    per_rank = plan.num_stages / max(plan.num_ranks, 1)
    if per_rank > _SHADES:
        yield "5:12 is micro-batch 12 on stage 5"
    elif per_rank > 1:
        yield "paler: a rank's later stages"
    if any(plan.pairs_of(rank) for rank in range(plan.num_ranks)):
        yield "two colours in a box: both run as one"
