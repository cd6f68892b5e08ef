"""The table of stages that `describe()` prints."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StageRow:
    """One stage.

    Attributes:
        stage: Its index.
        units: Names of its units, in order.
        num_parameters: Parameters of its units, each counted once.
        cost_share: Its part of the model's estimated time, 0 to 1.
        message_bytes: Size of what it is sent for the traced micro-batch.
        message_tensors: How many tensors that is.
        reason: Why the cut before it is where it is.
    """

    stage: int
    units: tuple[str, ...]
    num_parameters: int
    cost_share: float
    message_bytes: int
    message_tensors: int
    reason: str


@dataclass(frozen=True, slots=True)
class StageTable:
    """All stages. `str()` of it is the table."""

    rows: tuple[StageRow, ...]
    how: str

    def __str__(self) -> str:
        head = ("stage", "units", "parameters", "cost", "message in", "cut because")
        body = [
            (
                str(row.stage),
                _units(row.units),
                f"{row.num_parameters:,}",
                f"{row.cost_share:.1%}",
                f"{size_text(row.message_bytes)} in {row.message_tensors}" if row.stage else "-",
                row.reason,
            )
            for row in self.rows
        ]
        widths = [max(len(line[i]) for line in (head, *body)) for i in range(len(head))]
        right = (True, False, True, True, True, False)

        def render(line: tuple[str, ...]) -> str:
            cells = [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, right, strict=True)]
            return "  ".join(cells).rstrip()

        return "\n".join([render(head), "  ".join("-" * width for width in widths), *map(render, body)])


def _units(names: tuple[str, ...]) -> str:
    if len(names) <= 2:
        return ", ".join(names)
    return f"{names[0]} .. {names[-1]} ({len(names)})"


def size_text(num_bytes: float) -> str:
    """A size in the unit that suits it."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
