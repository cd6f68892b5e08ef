"""What is known of a run before it is started, and how it prints."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from lightning_pipeline.forecast.machine import Assumptions
from lightning_pipeline.forecast.predict import Prediction, predict
from lightning_pipeline.forecast.verdict import verdict
from lightning_pipeline.forecast.workload import (
    Rates,
    StageProfile,
    Workload,
    basis_text,
    operations_text,
    rates,
    seconds_text,
    strategy_text,
)
from lightning_pipeline.model.cut import StageTable, common_prefix, size_text, text_table, units_text
from lightning_pipeline.registry import parameters_of
from lightning_pipeline.schedules import Schedule, available_schedules
from lightning_pipeline.schedules.drawing import Panel, Picture, arrange, beginning, title_of
from lightning_pipeline.schedules.plans import waits

_PICTURE_WIDTH = 120


@dataclass(frozen=True)
class Forecast:
    """A workload on a number of devices. `str()` of it is the report.

    Attributes:
        name: Of the module.
        num_parameters: Of the whole module, tied ones once.
        batch_size: Samples; `None` where the batch does not tell.
        predictions: Of every schedule that serves these sizes, what fits first and the fastest of it first.
        chosen: The one that was asked for, else the best.
        stages: Those of `chosen`.
        partition: Their cut, as a table.
        verdict: Whether it pays, in a sentence.
        basis: What the times are taken from.
        rates: What a second amounts to with `chosen`.
        notes: What was taken otherwise than asked for.
    """

    name: str
    num_parameters: int
    batch_size: int | None
    predictions: tuple[Prediction, ...]
    chosen: Prediction
    stages: tuple[StageProfile, ...]
    partition: StageTable
    verdict: str
    basis: str
    rates: Rates
    notes: tuple[str, ...] = ()

    @property
    def strategy(self) -> str:
        """What to write into a script for `chosen`; a rule of the user's own as it prints itself."""
        plan, name = self.chosen.plan, self.chosen.name
        if name not in available_schedules():
            return (
                f"PipelineStrategy(stages={plan.num_ranks}, num_microbatches={plan.num_microbatches}, "
                f"schedule={self.chosen.schedule!r})"
            )
        return strategy_text(plan.num_ranks, plan.num_microbatches, name, self.chosen.stages_per_rank)

    @property
    def svg(self) -> str:
        """The picture of `chosen`, as the text of an SVG file."""
        return self.picture.svg()

    @property
    def picture(self) -> Picture:
        """The picture of `chosen`."""
        run = self.chosen.simulation
        title = f"{self.name}, {title_of(run, self.chosen.name)}"
        unit, factor = _axis_unit(run.makespan)
        drawn = replace(
            run,
            makespan=factor * run.makespan,
            actions=tuple(t._replace(start=factor * t.start, end=factor * t.end) for t in run.actions),
        )
        causes = [wait._replace(start=factor * wait.start, end=factor * wait.end) for wait in waits(run)]
        return arrange([Panel(drawn, unit=unit, waits=causes)], title=title)

    def __str__(self) -> str:
        return self.text()

    def to_dict(self, tokens: float | None = None) -> dict[str, Any]:
        """Plain data, for JSON: sizes in bytes, times in seconds.

        Args:
            tokens: To train on, for `days`.
        """
        return {
            "name": self.name,
            "parameters": self.num_parameters,
            "batch_size": self.batch_size,
            "devices": self.chosen.devices,
            "microbatches": self.chosen.plan.num_microbatches,
            "chosen": self.chosen.name,
            "strategy": self.strategy,
            "schedules": [
                {
                    "schedule": one.name, "stages_per_rank": one.stages_per_rank, "step_s": one.step,
                    "bubble": one.bubble, "peak_bytes": one.peak, "fits": one.fits,
                }
                for one in self.predictions
            ],
            "stages": [
                {
                    "stage": stage.stage, "rank": self.chosen.plan.rank_of(stage.stage),
                    "units": list(stage.units), "parameters": stage.num_parameters, "flops": stage.flops,
                    "cost_share": cut.cost_share, "message_bytes": stage.message_bytes,
                    "activation_bytes": stage.activation_bytes,
                }
                for stage, cut in zip(self.stages, self.partition.rows, strict=True)
            ],
            "memory": [asdict(held) | {"total": held.total} for held in self.chosen.memory],
            "rates": asdict(self.rates),
            "days": None if tokens is None else self.rates.days(tokens),
            "verdict": self.verdict,
            "basis": self.basis,
            "notes": list(self.notes),
        }  # fmt: skip

    def text(self, tokens: float | None = None) -> str:
        """The report.

        Args:
            tokens: To train on, for the days it takes.
        """
        parts = [
            *self.notes,
            f"{self.name}, {self.num_parameters:,} parameters, on {self.chosen.plan.num_ranks} ranks; "
            f"{self.chosen.plan.num_microbatches} micro-batches"
            + (f" of a batch of {self.batch_size}" if self.batch_size is not None else ""),
            self._stage_table(),
            self._memory_table(),
            "Schedules, best first\n" + self._schedule_table(),
            self.verdict,
            f"{self.chosen.name}: {self.rates.text(tokens)}\nstrategy={self.strategy}",
            f"{self.chosen.name}, as predicted\n{_picture(self.chosen)}",
            self.basis,
        ]
        return "\n\n".join(parts)

    def _stage_table(self) -> str:
        plan = self.chosen.plan
        prefix = common_prefix([name for stage in self.stages for name in stage.units])

        def short(units: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(name.removeprefix(prefix) for name in units)

        rows = [
            [
                str(stage.stage), str(plan.rank_of(stage.stage)), units_text(short(stage.units)),
                f"{stage.num_parameters:,}", operations_text(stage.flops), f"{cut.cost_share:.1%}",
                size_text(stage.message_bytes) if stage.stage else "-", size_text(stage.activation_bytes),
            ]
            for stage, cut in zip(self.stages, self.partition.rows, strict=True)
        ]  # fmt: skip
        head = ["stage", "rank", "units", "parameters", "operations", "cost", "message in", "activations"]
        names = f"names without {prefix!r}; " if prefix else ""
        what = "operations of a forward and activations of one micro-batch"
        return f"Stages, {self.partition.how}; {names}{what}\n" + text_table(head, rows, left=["units"])

    def _memory_table(self) -> str:
        again = any(held.recomputed for held in self.chosen.memory)
        rows = [
            [str(rank), *(size_text(size) for size in (
                held.parameters, held.gradients, held.optimizer, held.activations,
                *((held.recomputed,) if again else ()), held.buffers + held.messages, held.total,
            ))]
            for rank, held in enumerate(self.chosen.memory)
        ]  # fmt: skip
        head = ["rank", "parameters", "gradients", "optimizer", "activations"]
        head += [*(["recomputed"] if again else []), "buffers", "all"]
        fits = "" if self.chosen.fits else ", which does not fit"
        return f"Memory with {self.chosen.name}{fits}\n" + text_table(head, rows)

    def _schedule_table(self) -> str:
        rows = [
            [
                one.name, str(one.stages_per_rank), seconds_text(one.step), f"{one.bubble:.1%}",
                size_text(one.peak), "yes" if one.fits else "no",
            ]
            for one in self.predictions
        ]  # fmt: skip
        head = ["schedule", "stages per rank", "step", "bubble", "fullest rank", "fits"]
        return text_table(head, rows, left=["schedule"])


def _axis_unit(seconds: float) -> tuple[str, float]:
    """In what a time is drawn, and how many of it are a second."""
    units = (("s", 1.0), ("ms", 1e3), ("us", 1e6))
    return next((unit for unit in units if seconds * unit[1] >= 1.0), units[-1])


def _picture(prediction: Prediction) -> str:
    drawn, goes_on = beginning(prediction.simulation, _PICTURE_WIDTH)
    return drawn + (
        "\n(the beginning; --svg FILE writes all of it, .svg has it in Python)" if goes_on else ""
    )


def forecast(
    workload: Workload,
    num_ranks: int,
    num_microbatches: int,
    assumptions: Assumptions,
    *,
    batch_size: int | None = None,
    own: Schedule | None = None,
    notes: Sequence[str] = (),
    progress: Callable[[str, int, int], None] = lambda what, done, of: None,
) -> Forecast:
    """Work out every schedule.

    Args:
        workload: For one of the micro-batches.
        num_ranks: Devices of the pipeline.
        num_microbatches: Per batch.
        assumptions: About the machine.
        batch_size: Samples of a batch, where it is known.
        own: The schedule that is asked for. Default: the best is shown.
        notes: What is taken otherwise than asked for.
        progress: Told what is done, how much of it, and of how much.

    Raises:
        SplitError: The step cannot be cut.
        PartitionError: There are fewer units than ranks.
        ScheduleError: The schedule that is asked for does not serve these sizes.
    """
    predictions = predict(workload, num_ranks, num_microbatches, assumptions, own=own, progress=progress)
    chosen = next((one for one in predictions if one.schedule is own), predictions[0])
    num_stages = chosen.plan.num_stages
    stages = workload.stages(num_stages)
    return Forecast(
        name=workload.name,
        num_parameters=sum(parameter.numel() for parameter in parameters_of(workload.root)),
        batch_size=batch_size,
        predictions=tuple(predictions),
        chosen=chosen,
        stages=stages,
        partition=workload.table(num_stages, assumptions),
        verdict=verdict(predictions, chosen, workload, assumptions),
        basis=basis_text(assumptions, workload.measured_on, workload.optimizer_states is not None),
        rates=rates(
            stages,
            chosen.step,
            chosen.devices,
            num_microbatches,
            assumptions,
            samples=batch_size,
            tokens=workload.tokens,
        ),
        notes=tuple(notes),
    )
