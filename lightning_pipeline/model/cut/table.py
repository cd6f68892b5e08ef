"""The table of stages that `describe()` prints."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StageRow:
    """One stage.

    Attributes:
        stage: Its index.
        units: Names of its units, in order.
        num_parameters: Parameters that it holds, each counted once; one that stages share is on each of them.
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
                units_text(row.units),
                f"{row.num_parameters:,}",
                f"{row.cost_share:.1%}",
                f"{size_text(row.message_bytes)} in {row.message_tensors}" if row.stage else "-",
                row.reason,
            )
            for row in self.rows
        ]
        return text_table(head, body, left=("units", "cut because"))


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[str] = ()) -> str:
    """Columns of text under their names.

    Args:
        head: Names of the columns.
        rows: Cells, as many as there are names.
        left: Columns that begin at the left; the others, such as numbers, end at the right.

    Example:
        >>> print(text_table(["name", "count"], [["a", "9"], ["b", "10"]], left=["name"]))
        name  count
        ----  -----
        a         9
        b        10
    """
    widths = [max(len(line[column]) for line in (head, *rows)) for column in range(len(head))]

    def render(line: Sequence[str]) -> str:
        cells = zip(line, widths, head, strict=True)
        return "  ".join(c.ljust(w) if name in left else c.rjust(w) for c, w, name in cells).rstrip()

    return "\n".join([render(head), "  ".join("-" * width for width in widths), *map(render, rows)])


def units_text(names: tuple[str, ...]) -> str:
    """The units of a stage in a few words."""
    if len(names) <= 2:
        return ", ".join(names)
    return f"{names[0]} .. {names[-1]} ({len(names)})"


def common_prefix(names: Sequence[str]) -> str:
    """The modules, with the dot behind, that all of these names lie in; what is left is no bare number.

    Example:
        >>> common_prefix(["net.model.layers.0", "net.head"])
        'net.'
    """
    if len(names) < 2:
        return ""
    parts = [name.split(".")[:-1] for name in names]
    shared = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        shared.append(level[0])
    if any(name.split(".")[len(shared)].isdigit() for name in names):
        shared = shared[:-1]
    return "".join(f"{name}." for name in shared)


def size_text(num_bytes: float) -> str:
    """A size with its unit."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
