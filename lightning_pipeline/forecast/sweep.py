"""A table over numbers of ranks and of micro-batches, and schedules."""

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_pipeline.errors import ConfigurationError, PartitionError
from lightning_pipeline.forecast.machine import Assumptions
from lightning_pipeline.forecast.predict import predict
from lightning_pipeline.forecast.workload import Workload, basis_text, number_text, seconds_text, write_csv
from lightning_pipeline.model.cut import size_text, text_table

_SHOWN = 20


@dataclass(frozen=True)
class SweepRow:
    """One combination.

    Attributes:
        ranks: Devices of the pipeline.
        num_microbatches: Per batch.
        schedule: Its name.
        stages_per_rank: Stages on each rank.
        step_s: Seconds of a step.
        bubble: Idle share of all rank-time.
        samples_per_s: Of all ranks together; `None` where the batch does not tell its samples.
        peak_bytes: Of the fullest rank.
        fits: Whether that is within a device's memory.
    """

    ranks: int
    num_microbatches: int
    schedule: str
    stages_per_rank: int
    step_s: float
    bubble: float
    samples_per_s: float | None
    peak_bytes: int
    fits: bool


@dataclass(frozen=True)
class Sweep:
    """All combinations: what fits before what does not, then by the step. `str()` is the table.

    Attributes:
        rows: The combinations.
        basis: What the times are taken from.
    """

    rows: tuple[SweepRow, ...]
    basis: str

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write every row, with a head."""
        write_csv(path, SweepRow, self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {"rows": [asdict(row) for row in self.rows], "basis": self.basis}

    def __str__(self) -> str:
        return self.text()

    def text(self, written: str = "") -> str:
        """The table, its first rows alone, and what it is based on.

        Args:
            written: The file that has all rows, if there is one.
        """
        head = [
            "ranks", "micro-batches", "schedule", "stages per rank", "step", "bubble", "samples/s",
            "fullest rank", "fits",
        ]  # fmt: skip
        table = text_table(head, [_cells(row) for row in self.rows[:_SHOWN]], left=["schedule"])
        left = len(self.rows) - _SHOWN
        if left > 0:
            table += (
                f"\n... and {left} more, in {written}"
                if written
                else (f"\n... and {left} more: write them all with --csv FILE")
            )
        return f"{table}\n\n{self.basis}"


def _cells(row: SweepRow) -> list[str]:
    return [
        str(row.ranks), str(row.num_microbatches), row.schedule, str(row.stages_per_rank),
        seconds_text(row.step_s), f"{row.bubble:.1%}",
        "-" if row.samples_per_s is None else number_text(row.samples_per_s, 4),
        size_text(row.peak_bytes), "yes" if row.fits else "no",
    ]  # fmt: skip


def sweep(
    workload_of: Callable[[int], tuple[Workload, int, int | None]],
    ranks: Sequence[int],
    microbatches: Sequence[int],
    assumptions: Assumptions,
    *,
    schedules: Sequence[str] | None = None,
    progress: Callable[[str, int, int], None] = lambda what, done, of: None,
) -> Sweep:
    """Work out every combination that the module and the schedules serve.

    Args:
        workload_of: From a number of micro-batches to a workload, how many there really are, and the samples
            of the batch.
        ranks: Numbers of devices.
        microbatches: Numbers of micro-batches.
        assumptions: About the machine.
        schedules: Names. Default: all.
        progress: Told what is done, how much of it, and of how much.

    Raises:
        PartitionError: The model has fewer units than the smallest number of ranks.
        ConfigurationError: No combination is left.
    """
    rows, refusal, measured_on = [], None, ""
    for place, asked in enumerate(microbatches):
        workload, number, batch_size = workload_of(asked)
        for nth, count in enumerate(ranks):
            progress("sizes", place * len(ranks) + nth, len(microbatches) * len(ranks))
            try:
                found = predict(workload, count, number, assumptions)
            except PartitionError as error:  # more ranks than units
                refusal = error
                continue
            measured_on = workload.measured_on
            rows += [
                SweepRow(
                    count, number, one.name, one.stages_per_rank, one.step, one.bubble,
                    None if batch_size is None else batch_size / one.step, int(one.peak), one.fits,
                )
                for one in found
                if schedules is None or one.name.lower() in [name.lower() for name in schedules]
            ]  # fmt: skip
    if not rows:
        raise refusal or ConfigurationError(f"no schedule of {schedules} serves these sizes")
    ordered = sorted(dict.fromkeys(rows), key=lambda row: (not row.fits, row.step_s))
    return Sweep(tuple(ordered), basis_text(assumptions, measured_on))
