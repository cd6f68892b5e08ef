"""Pictures of plans and simulations as text, for a terminal or a test."""

from collections.abc import Iterator

from lightning_pipeline.schedules.plans import Costs, Plan, Simulation, Timed, simulate


def draw(
    plan_or_simulation: Plan | Simulation, *, column: float | None = None, width: int | None = None
) -> str:
    """Draw a line per rank, time to the right, `F3` for a forward of micro-batch 3, dots for idle time.

    With several stages per rank the stage stands first, `4F3`. A plan is drawn with every stage's
    forward, input and weight half taking one column each, and messages that take no time. A simulation
    is drawn to scale as far as columns allow.

    Args:
        plan_or_simulation: What to draw.
        column: The time that a column stands for; an action takes one at least. Default: the shortest
            action's, or more where that would be over 400 columns.
        width: Characters in a line; what is longer goes on in lines below. Default: no limit.

    Example:
        >>> from lightning_pipeline.schedules import OneFOneB
        >>> print(draw(OneFOneB().plan(num_ranks=2, num_microbatches=2)))
        rank 0 | F0 F1 .. .. B0 -- .. B1 --
        rank 1 | .. F0 B0 -- F1 B1 --
    """
    simulation = simulated(plan_or_simulation)
    plan = simulation.plan
    by_stage = plan.num_stages > plan.num_ranks
    labels = [_label(t, by_stage) for t in simulation.actions]
    cell = max(map(len, labels), default=2)
    column = column or _column(simulation)
    rows = [_cells(simulation, rank, column, by_stage) for rank in range(plan.num_ranks)]
    digits = len(str(plan.num_ranks - 1))
    names = [f"rank {rank:>{digits}} | " for rank in range(plan.num_ranks)]
    longest = max(map(len, rows), default=0)
    fitting = longest if width is None else max(1, (width - len(names[0]) + 1) // (cell + 1))
    return "\n\n".join(
        _lines(names, [row[start : start + fitting] for row in rows], cell)
        for start in range(0, max(longest, 1), max(fitting, 1))
    )


def beginning(simulation: Simulation, width: int) -> tuple[str, bool]:
    """The first lines of a picture, with every rank at work in them, and whether more follows.

    Ranks that begin late, as where a message takes much longer than an action, are brought in by a column
    that stands for more time.

    Args:
        simulation: What to draw.
        width: Characters in a line.
    """
    num_ranks = simulation.plan.num_ranks
    starts = [min((t.start for t in _actions_of(simulation, rank)), default=0.0) for rank in range(num_ranks)]
    cell = max(len(_label(t, simulation.plan.num_stages > num_ranks)) for t in simulation.actions)
    seen = 0.75 * max(1, (width - len(f"rank {num_ranks - 1} | ") + 1) // (cell + 1))
    column = max(_column(simulation), max(starts) / seen)
    first, *rest = draw(simulation, column=column, width=width).split("\n\n")
    return first, bool(rest)


def _lines(names: list[str], rows: list[list[str]], cell: int) -> str:
    return "\n".join(
        (name + " ".join(_padded(word, cell) for word in row)).rstrip()
        for name, row in zip(names, rows, strict=True)
    )


def simulated(drawn: Plan | Simulation) -> Simulation:
    """A simulation as it is; a plan with equal stages and free messages."""
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
