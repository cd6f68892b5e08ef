"""How to use a number of devices: stages, replicas, micro-batches and schedule together."""

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from lightning_pipeline.errors import ConfigurationError
from lightning_pipeline.forecast.machine import Assumptions
from lightning_pipeline.forecast.predict import predict
from lightning_pipeline.forecast.verdict import Rivals
from lightning_pipeline.forecast.workload import (
    Workload,
    basis_text,
    number_text,
    rates,
    seconds_text,
    strategy_text,
    write_csv,
)
from lightning_pipeline.model.cut import size_text, text_table
from lightning_pipeline.schedules import OneFOneB

_LOOKED_INTO = 3
"""Ways to use all devices that every schedule is tried for: the best with 1F1B. Of fewer devices, one."""
_LARGEST = 16  # samples of a micro-batch


@dataclass(frozen=True)
class SearchRow:
    """One way to use devices.

    Attributes:
        devices: All of them.
        stages: Ranks of a pipeline; 1: no pipeline, replicas alone.
        replicas: Of the pipeline.
        samples: Of a micro-batch.
        microbatches: Of a replica's part of the batch.
        schedule: Its name; `DDP` without a pipeline, and `FSDP`, which is not this package.
        stages_per_rank: Stages on each rank.
        step_s: Seconds of a step.
        bubble: Idle share of all rank-time in the schedule.
        samples_per_s: Of all devices.
        tokens_per_s_per_device: `None` where the batch has no tokens.
        mfu: 0 to 1; `None` without a known device.
        peak_bytes: Of the fullest device.
        fits: Whether that is within its memory.
    """

    devices: int
    stages: int
    replicas: int
    samples: int
    microbatches: int
    schedule: str
    stages_per_rank: int
    step_s: float
    bubble: float
    samples_per_s: float
    tokens_per_s_per_device: float | None
    mfu: float | None
    peak_bytes: int
    fits: bool

    @property
    def settings(self) -> str:
        """What to write into a script: for the Trainer, and what its loader has to give."""
        if self.stages > 1:
            strategy = strategy_text(self.stages, self.microbatches, self.schedule, self.stages_per_rank)
            loader = self.microbatches * self.samples
        else:
            strategy = "" if self.devices == 1 else f'"{self.schedule.lower()}"'
            loader = self.samples
        parts = [f"strategy={strategy}"] if strategy else []
        if self.stages == 1 and self.microbatches > 1:
            parts.append(f"accumulate_grad_batches={self.microbatches}")
        of = " of each replica" if self.replicas > 1 else ""
        return f"{', '.join(parts) or 'the Trainer as it is'}; the loader{of} gives {loader} samples at once"


@dataclass(frozen=True)
class Search:
    """What was found. `str()` is the report.

    Attributes:
        batch_size: Samples of a step, of all replicas together.
        best: The best way for each number of devices: the fastest that fits, else the smallest.
        pareto: On all devices, ways of which no other is both faster and smaller; the smallest first.
        rivals: FSDP for each number of devices.
        rows: All that were worked out.
        tokens_per_sample: `None` where a sample has none.
        basis: What the times are taken from.
    """

    batch_size: int
    best: tuple[SearchRow, ...]
    pareto: tuple[SearchRow, ...]
    rivals: tuple[SearchRow, ...]
    rows: tuple[SearchRow, ...]
    tokens_per_sample: float | None
    basis: str

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write every row, with a head."""
        write_csv(path, SearchRow, self.rows)

    def to_dict(self, tokens: float | None = None) -> dict[str, Any]:
        """Plain data, for JSON.

        Args:
            tokens: To train on, for `days` of each best row.
        """
        return {
            "batch_size": self.batch_size,
            "best": [
                asdict(row) | {"settings": row.settings, "days": self.days(row, tokens)} for row in self.best
            ],
            "pareto": [asdict(row) for row in self.pareto],
            "fsdp": [asdict(row) for row in self.rivals],
            "basis": self.basis,
        }

    def days(self, row: SearchRow, tokens: float | None) -> float | None:
        """Days to train on so many tokens; `None` where that is not known."""
        if tokens is None or self.tokens_per_sample is None:
            return None
        return tokens / (row.samples_per_s * self.tokens_per_sample) / 86400

    def __str__(self) -> str:
        return self.text()

    def text(self, tokens: float | None = None) -> str:
        """The report.

        Args:
            tokens: To train on, for the days it takes.
        """
        most = self.best[-1].devices
        parts = [
            f"Batches of {self.batch_size} samples, the best way for each number of devices",
            f"{self._table(self.best, tokens)}\n\nThe last row: {self.best[-1].settings}",
            f"On {most} devices: less memory against less time",
            self._table(self.pareto, tokens),
        ]
        if self.rivals:
            parts += ["Beside it FSDP, which shares states out over all devices"]
            parts += [self._table(self.rivals, tokens)]
        pairs = zip(parts[::2], parts[1::2], strict=True)
        return "\n\n".join(["\n".join(pair) for pair in pairs] + [self.basis])

    def _table(self, rows: Sequence[SearchRow], tokens: float | None) -> str:
        head = ["devices", "stages", "replicas", "micro-batches", "schedule", "step", "bubble", "samples/s"]
        head += ["tokens/s a device", "MFU", "fullest", "fits", "days"]
        cells = [self._cells(row, tokens) for row in rows]
        shown = [place for place in range(len(head)) if any(line[place] != "-" for line in cells)]
        return text_table(
            [head[place] for place in shown], [[line[place] for place in shown] for line in cells],
            left=["schedule"],
        )  # fmt: skip

    def _cells(self, row: SearchRow, tokens: float | None) -> list[str]:
        per_rank = f" x{row.stages_per_rank}" if row.stages_per_rank > 1 else ""
        each, days = row.tokens_per_s_per_device, self.days(row, tokens)
        return [
            str(row.devices), str(row.stages), str(row.replicas), f"{row.microbatches} of {row.samples}",
            row.schedule + per_rank, seconds_text(row.step_s), f"{row.bubble:.1%}",
            number_text(row.samples_per_s), "-" if each is None else number_text(each),
            "-" if row.mfu is None else f"{row.mfu:.1%}", size_text(row.peak_bytes),
            "yes" if row.fits else "no", "-" if days is None else number_text(days),
        ]  # fmt: skip


class _Sizes(NamedTuple):
    """How devices are shared out."""

    stages: int
    replicas: int
    samples: int
    microbatches: int

    @property
    def devices(self) -> int:
        return self.stages * self.replicas


def search(
    workload_of: Callable[[int], Workload],
    devices: int,
    batch_size: int,
    assumptions: Assumptions,
    *,
    progress: Callable[[str, int, int], None] = lambda what, done, of: None,
) -> Search:
    """Look for the best use of a number of devices, and of each smaller one that divides it.

    Every way to share them out over stages, replicas and micro-batches is simulated with 1F1B; all schedules
    are tried for the best of these.

    Args:
        workload_of: From samples of a micro-batch to its workload.
        devices: All of them.
        batch_size: Samples of a step, of all replicas together.
        assumptions: About the machine.
        progress: Told what is done, how much of it, and of how much.

    Raises:
        ConfigurationError: There is no way, for the batch is too small.
    """
    finder = _Finder(workload_of, batch_size, assumptions)
    ways = finder.ways(devices)
    if not any(way.devices == devices for way in ways):
        raise ConfigurationError(
            f"{devices} devices cannot share a batch of {batch_size} samples over this model's units: give "
            "a larger batch, which is that of all replicas together"
        )
    rows: dict[_Sizes, list[SearchRow]] = {}
    for done, way in enumerate(ways):
        progress("sizes", done, len(ways))
        rows[way] = finder.rows(way, only=True)
    chosen = _worth_a_look(rows, devices)
    for done, way in enumerate(chosen):
        progress("schedules", done, len(chosen))
        rows[way] = finder.rows(way, only=False)
    progress("schedules", len(chosen), len(chosen))
    found = [row for many in rows.values() for row in many]
    numbers = sorted({row.devices for row in found})
    everywhere = [row for row in found if row.devices == devices]
    samples = min(way.samples for way in ways)
    first = finder.workload(samples)
    return Search(
        batch_size,
        tuple(min((row for row in found if row.devices == number), key=_order) for number in numbers),
        tuple(_pareto(everywhere)),
        tuple(row for number in numbers if (row := finder.fsdp(number, ways)) is not None),
        tuple(sorted(found, key=lambda row: (row.devices, *_order(row)))),
        first.tokens / samples if first.tokens else None,
        basis_text(assumptions, first.measured_on, first.optimizer_states is not None),
    )


class _Finder:
    """Works ways out."""

    def __init__(
        self, workload_of: Callable[[int], Workload], batch_size: int, assumptions: Assumptions
    ) -> None:
        self._workloads: dict[int, Workload] = {}
        self._make, self._batch_size, self._assumptions = workload_of, batch_size, assumptions

    def workload(self, samples: int) -> Workload:
        """For micro-batches of so many samples."""
        if samples not in self._workloads:
            self._workloads[samples] = self._make(samples)
        return self._workloads[samples]

    def ways(self, devices: int) -> list[_Sizes]:
        """All ways to share out any divisor of the devices, in powers of two where there are many."""
        smallest = min(_divisors(self._batch_size))
        units = self.workload(smallest).num_units
        found = []
        for number in _thinned(_divisors(devices)):
            for stages in _divisors(number):
                replicas = number // stages
                if stages > units or self._batch_size % replicas:
                    continue
                mine = self._batch_size // replicas
                for samples in _thinned(_divisors(mine)):
                    microbatches = mine // samples
                    if samples <= _LARGEST and (stages == 1 or microbatches >= stages or samples == 1):
                        found.append(_Sizes(stages, replicas, samples, microbatches))
        return found

    def rows(self, way: _Sizes, *, only: bool) -> list[SearchRow]:
        """What a way gives, with 1F1B alone or with all schedules."""
        if way.stages == 1:
            return [self._replicas(way)]
        workload, own = self.workload(way.samples), OneFOneB()
        found = predict(
            workload, way.stages, way.microbatches, self._assumptions,
            own=own, only=only, replicas=way.replicas, quick=True,
        )  # fmt: skip
        return [
            self._row(way, one.name, one.stages_per_rank, one.step, one.bubble, one.peak) for one in found
        ]

    def _replicas(self, way: _Sizes) -> SearchRow:
        """Without a pipeline."""
        rivals = self._rivals(way)
        name = "DDP" if way.replicas > 1 else "one device"
        step = rivals.ddp if way.replicas > 1 else rivals.one_device
        assert step is not None, "each replica has a micro-batch"
        return self._row(way, name, 1, step, 0.0, rivals.alone.total)

    def fsdp(self, devices: int, ways: Sequence[_Sizes]) -> SearchRow | None:
        """The best of FSDP on so many devices; `None` on one."""
        found = []
        for way in ways:
            rival = self._rivals(way).fsdp if way.stages == 1 and way.devices == devices > 1 else None
            if rival is not None:
                found.append(self._row(way, "FSDP", 1, rival.step, 0.0, rival.memory))
        return min(found, key=_order, default=None)

    def _rivals(self, way: _Sizes) -> Rivals:
        sizes = way.devices, way.microbatches * way.replicas
        return Rivals(self.workload(way.samples), sizes, self._assumptions)

    def _row(
        self, way: _Sizes, name: str, stages_per_rank: int, step: float, bubble: float, peak: float
    ) -> SearchRow:
        workload = self.workload(way.samples)
        found = rates(
            workload.stages(1), step, way.devices, way.microbatches * way.replicas, self._assumptions,
            samples=self._batch_size, tokens=workload.tokens,
        )  # fmt: skip
        limit = self._assumptions.memory
        return SearchRow(
            way.devices, way.stages, way.replicas, way.samples, way.microbatches, name, stages_per_rank,
            step, bubble, self._batch_size / step, found.tokens_per_s_per_device, found.mfu, int(peak),
            limit is None or peak <= limit,
        )  # fmt: skip


def _worth_a_look(rows: dict[_Sizes, list[SearchRow]], devices: int) -> list[_Sizes]:
    """Pipelines to try all schedules for."""
    pipelines = {way: many[0] for way, many in rows.items() if way.stages > 1}
    found: list[_Sizes] = []
    for number in sorted({way.devices for way in pipelines}):
        mine = [way for way in pipelines if way.devices == number]
        best = sorted(mine, key=lambda way: _order(pipelines[way]))
        found += best[: _LOOKED_INTO if number == devices else 1]
    return found


def _order(row: SearchRow) -> tuple[bool, float, float]:
    """What fits first, the fastest of it first; of what does not, the smallest first."""
    return not row.fits, row.step_s if row.fits else row.peak_bytes, row.peak_bytes


def _pareto(rows: Sequence[SearchRow]) -> list[SearchRow]:
    found: list[SearchRow] = []
    for row in sorted(rows, key=lambda row: (row.peak_bytes, row.step_s)):
        if not found or row.step_s < found[-1].step_s * 0.995:
            found.append(row)
    return found


def _divisors(number: int) -> list[int]:
    return [part for part in range(1, number + 1) if number % part == 0]


def _thinned(numbers: Sequence[int]) -> list[int]:
    """Powers of two and the largest, where there are more than eight."""
    if len(numbers) <= 8:
        return list(numbers)
    return [number for number in numbers if number & (number - 1) == 0 or number == numbers[-1]]
