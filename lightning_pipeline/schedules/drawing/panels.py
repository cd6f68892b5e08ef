"""Pictures of plans and simulations in the style of the papers: numbered boxes, idle time grey."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

from lightning_pipeline.schedules.drawing.picture import Box, Picture, Words, words_fit
from lightning_pipeline.schedules.drawing.text import simulated
from lightning_pipeline.schedules.plans import Plan, Simulation, Timed

NAMES = {"F": "forward", "B": "backward", "I": "input half", "W": "weight half"}
_COLOURS = {"F": "#7fb0e0", "B": "#f3a977", "I": "#f5cc62", "W": "#92cc88"}
_IDLE, _EDGE, _INK = "#e6e6e6", "#555555", "#333333"
_ROW, _BOX, _LEFT, _RIGHT, _GAP = 24.0, 21.0, 58.0, 10.0, 14.0
_LEAST, _MOST = 1040.0, 3000.0  # of the time axis, in pixels
_SIZES = (11.0, 10.0, 9.0, 8.0, 7.0)  # of labels; what none of them lets fit stays empty


class Panel(NamedTuple):
    """One timeline of a picture.

    Args:
        simulation: What to draw.
        caption: Above it. Default: none.
        unit: Of its times, for an axis below it. Default: no axis.
    """

    simulation: Simulation
    caption: str = ""
    unit: str = ""


def draw_svg(plan_or_simulation: Plan | Simulation) -> str:
    """Draw an SVG image: a row per rank, a box per action with its micro-batch, the action as a tooltip.

    Later stages of a rank are paler. A plan is drawn with equal costs, as `draw` does.

    Args:
        plan_or_simulation: What to draw.

    Returns:
        The text of an SVG file.
    """
    return arrange([Panel(simulated(plan_or_simulation))]).svg()


def arrange(panels: Sequence[Panel]) -> Picture:
    """Put timelines below each other, all to the same scale, with a legend.

    Args:
        panels: At least one.
    """
    scale = _scale(panels)
    width = _LEFT + max(panel.simulation.makespan for panel in panels) * scale + _RIGHT
    shapes: list[Box | Words] = []
    y = 6.0
    for panel in panels:
        y = _draw(panel, scale, y, shapes) + _GAP
    y = _legend([panel.simulation for panel in panels], y, shapes)
    title = repr(panels[0].simulation.plan).strip("<>")
    return Picture(max(width, 480.0), y + 6, title, shapes)


def _scale(panels: Sequence[Panel]) -> float:
    """Pixels per unit of time: forwards and backwards wide enough for their numbers, if that is possible."""
    makespan = max(max(panel.simulation.makespan for panel in panels), 1e-12)
    digits = len(str(panels[0].simulation.plan.num_microbatches - 1))
    durations: dict[tuple[int, str], list[float]] = defaultdict(list)
    for number, panel in enumerate(panels):
        for timed in panel.simulation.actions:
            if timed.action.kind in "FB" and timed.end > timed.start:
                durations[number, timed.action.kind].append(timed.end - timed.start)
    shortest = min((median(times) for times in durations.values()), default=makespan)
    needed = 1.15 * (digits * 0.56 * _SIZES[1] + 2) / shortest
    return min(max(_LEAST / makespan, needed), _MOST / makespan)


def _draw(panel: Panel, scale: float, y: float, shapes: list[Box | Words]) -> float:
    """Add a timeline from a height downwards; where it ends."""
    simulation = panel.simulation
    plan, width = simulation.plan, simulation.makespan * scale
    if panel.caption:
        shapes.append(Words(_LEFT, y + 8, panel.caption, 13.0, bold=True))
        y += 22
    for rank in range(plan.num_ranks):
        top = y + _ROW * rank
        shapes.append(Words(_LEFT - 6, top + _BOX / 2, f"rank {rank}", anchor="end"))
        shapes.append(Box(_LEFT, top, width, _BOX, _IDLE))
    position = {s: i for rank in range(plan.num_ranks) for i, s in enumerate(plan.stages_of(rank))}
    for timed in simulation.actions:
        shapes += _action(timed, scale, y, position[timed.action.stage], panel.unit)
    y += _ROW * plan.num_ranks
    if not panel.unit:
        return y
    shapes += _axis(simulation.makespan, scale, y, panel.unit)
    return y + 20


def _action(timed: Timed, scale: float, y: float, position: int, unit: str) -> Iterator[Box | Words]:
    x, width = _LEFT + timed.start * scale, (timed.end - timed.start) * scale
    top = y + _ROW * timed.rank
    hint = f"{timed.action}: {timed.start:.4g} to {timed.end:.4g}{' ' + unit if unit else ''}"
    fill = _paler(_COLOURS[timed.action.kind], min(0.55, 0.3 * position))
    yield Box(x, top, width, _BOX, fill, _EDGE, hint)
    label = str(timed.action.microbatch)
    size = next((size for size in _SIZES if words_fit(label, size, width)), None)
    if size is not None:
        yield Words(x + width / 2, top + _BOX / 2, label, size, "middle")


def _paler(colour: str, share: float) -> str:
    parts = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)


def _axis(makespan: float, scale: float, y: float, unit: str) -> Iterator[Box | Words]:
    yield Box(_LEFT, y, makespan * scale, 1, _INK)
    step = _round_step(70 / scale)
    count = math.floor(makespan / step + 1e-9)
    for number in range(count + 1):
        x = _LEFT + number * step * scale
        yield Box(x - 0.5, y, 1, 4, _INK)
        text = f"{number * step:.6g}"
        yield Words(x, y + 11, f"{text} {unit}" if number == 0 else text, 10.0, "middle")


def _round_step(least: float) -> float:
    """The next 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def _legend(simulations: Sequence[Simulation], y: float, shapes: list[Box | Words]) -> float:
    kinds = {timed.action.kind for simulation in simulations for timed in simulation.actions}
    x = _LEFT
    entries = [(_COLOURS[kind], name) for kind, name in NAMES.items() if kind in kinds] + [(_IDLE, "idle")]
    for fill, name in entries:
        shapes.append(Box(x, y, 16, 12, fill, _EDGE))
        shapes.append(Words(x + 21, y + 6, name))
        x += 21 + 6.2 * len(name) + 16
    plan = simulations[0].plan
    if plan.num_stages > plan.num_ranks:
        shapes.append(Words(x, y + 6, "paler: a rank's later stages"))
    return y + 12
