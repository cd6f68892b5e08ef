"""Pictures of plans and simulations: as text for a terminal or a test, and as SVG for a page."""

from collections.abc import Iterator
from html import escape

from lightning_pipeline.schedules.costs import Costs
from lightning_pipeline.schedules.plan import Plan
from lightning_pipeline.schedules.simulate import Simulation, Timed, simulate

_COLOURS = {"F": "#8fb8de", "B": "#f2b48f", "I": "#f7d08a", "W": "#a3cf9b"}
_ROW, _LEFT, _WIDTH = 24, 56, 1100


def draw(plan_or_simulation: Plan | Simulation) -> str:
    """Draw a line per rank, time to the right, `F3` for a forward of micro-batch 3, dots for idle time.

    With several stages per rank the stage stands first, `4F3`. A plan is drawn with every stage's
    forward, input and weight half taking one column each, and messages that take no time. A simulation
    is drawn to scale as far as columns allow.

    Args:
        plan_or_simulation: What to draw.

    Example:
        >>> from lightning_pipeline.schedules import OneFOneB
        >>> print(draw(OneFOneB().plan(num_ranks=2, num_microbatches=2)))
        rank 0 | F0 F1 .. .. B0 -- .. B1 --
        rank 1 | .. F0 B0 -- F1 B1 --
    """
    simulation = _simulation(plan_or_simulation)
    plan = simulation.plan
    by_stage = plan.num_stages > plan.num_ranks
    labels = [_label(t, by_stage) for t in simulation.actions]
    width = max(map(len, labels), default=2)
    column = _column(simulation)
    rows = [_cells(simulation, rank, column, by_stage) for rank in range(plan.num_ranks)]
    name = len(str(plan.num_ranks - 1))
    return "\n".join(
        f"rank {rank:>{name}} | " + " ".join(_padded(cell, width) for cell in row).rstrip()
        for rank, row in enumerate(rows)
    )


def _simulation(drawn: Plan | Simulation) -> Simulation:
    if isinstance(drawn, Simulation):
        return drawn
    share = max((len(drawn.stages_of(rank)) for rank in range(drawn.num_ranks)), default=1)
    return simulate(drawn, Costs(share, share, share))


def _label(timed: Timed, by_stage: bool) -> str:
    return str(timed.action) if by_stage else f"{timed.action.kind}{timed.action.microbatch}"


def _column(simulation: Simulation) -> float:
    """The time that one column stands for: the shortest action, but at most 400 columns in all."""
    durations = [t.end - t.start for t in simulation.actions if t.end > t.start]
    return max(min(durations, default=1.0), simulation.makespan / 400, 1e-12)


def _cells(simulation: Simulation, rank: int, column: float, by_stage: bool) -> list[str]:
    cells: list[str] = []
    for timed in _actions_of(simulation, rank):
        start = max(len(cells), round(timed.start / column))
        cells += [".."] * (start - len(cells))
        cells.append(_label(timed, by_stage))
        cells += ["--"] * (round(timed.end / column) - len(cells))
    return cells


def _actions_of(simulation: Simulation, rank: int) -> Iterator[Timed]:
    return (timed for timed in simulation.actions if timed.rank == rank)


def _padded(cell: str, width: int) -> str:
    filler = {"..": ".", "--": "-"}.get(cell)
    return filler * width if filler else cell.ljust(width)


def draw_svg(plan_or_simulation: Plan | Simulation) -> str:
    """Draw an SVG image: a row per rank, a box per action with its micro-batch, the stage as a tooltip.

    Later stages of a rank are darker. A plan is drawn with equal costs, as `draw` does.

    Args:
        plan_or_simulation: What to draw.

    Returns:
        The text of an SVG file.
    """
    simulation = _simulation(plan_or_simulation)
    plan = simulation.plan
    scale = (_WIDTH - _LEFT) / max(simulation.makespan, 1e-12)
    box = f'viewBox="0 0 {_WIDTH + 8} {_ROW * plan.num_ranks + 8}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="sans-serif" font-size="10">']
    parts.append(f"<title>{escape(repr(plan).strip('<>'))}</title>")
    for rank in range(plan.num_ranks):
        y = 4 + _ROW * rank
        parts.append(f'<text x="4" y="{y + 15}">rank {rank}</text>')
        parts.append(
            f'<rect x="{_LEFT}" y="{y}" width="{_WIDTH - _LEFT}" height="{_ROW - 3}" fill="#eeeeee"/>'
        )
    locals_of = {s: i for rank in range(plan.num_ranks) for i, s in enumerate(plan.stages_of(rank))}
    parts += [_box(timed, scale, locals_of[timed.action.stage]) for timed in simulation.actions]
    return "\n".join([*parts, "</svg>\n"])


def _box(timed: Timed, scale: float, local: int) -> str:
    x, width = _LEFT + timed.start * scale, (timed.end - timed.start) * scale
    y = 4 + _ROW * timed.rank
    label = str(timed.action.microbatch)
    shown = f'<text x="{x + width / 2:.2f}" y="{y + 14}" text-anchor="middle">{label}</text>'
    return (
        f"<g><title>{timed.action}: {timed.start:g} to {timed.end:g}</title>"
        f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_ROW - 3}" '
        f'fill="{_COLOURS[timed.action.kind]}" fill-opacity="{max(0.45, 1 - 0.3 * local):.2f}" '
        f'stroke="#555555" stroke-width="0.5"/>{shown if width > 6 * len(label) else ""}</g>'
    )
