"""A forecast of a run: what stands between a LightningModule with its batch, and the planning."""

import copy
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from typing_extensions import override

from lightning_pipeline._lightning import claim_cpu, is_overridden, takes
from lightning_pipeline.errors import ConfigurationError
from lightning_pipeline.forecast import (
    Assumptions,
    Forecast,
    MeasuredWorkload,
    ScaledWorkload,
    Search,
    Workload,
    forecast,
    measure_link,
    search,
)
from lightning_pipeline.model.construction import without_weights
from lightning_pipeline.model.cut import StageTable
from lightning_pipeline.registry import parameters_of
from lightning_pipeline.run.batch import Parts, Plans, split_arguments, trains_batch_norm
from lightning_pipeline.schedules import Schedule
from lightning_pipeline.settings import Settings

PRECISIONS: dict[str, Callable[[], Precision]] = {
    "32-true": Precision,
    "64-true": DoublePrecision,
    "bf16-true": lambda: HalfPrecision("bf16-true"),
    "16-true": lambda: HalfPrecision("16-true"),
    "bf16-mixed": lambda: MixedPrecision("bf16-mixed", device="cpu"),
    "16-mixed": lambda: MixedPrecision("16-mixed", device="cpu"),
}
_ALIASES = {"32": "32-true", "64": "64-true", "16": "16-mixed", "bf16": "bf16-mixed", "None": "32-true"}


def precision_named(name: object) -> Precision:
    """The plugin that a Trainer would have on CPU.

    Raises:
        ConfigurationError: There is none of this name.
    """
    key = _ALIASES.get(str(name), str(name))
    if key not in PRECISIONS:
        raise ConfigurationError(f"precision={name!r} is unknown here: use one of {', '.join(PRECISIONS)}")
    return PRECISIONS[key]()


class Unstarted(Trainer):
    """Answers what hooks ask of a Trainer before a run, such as how many steps there will be."""

    STEPS = 1000

    @classmethod
    def made(cls) -> "Unstarted":
        """One that logs and prints nothing."""
        told = logging.getLogger("lightning.pytorch")
        level = told.level
        told.setLevel(logging.WARNING)
        try:
            return cls(
                accelerator="cpu", devices=1, max_steps=cls.STEPS, logger=False, enable_checkpointing=False,
                enable_progress_bar=False, enable_model_summary=False,
            )  # fmt: skip
        finally:
            told.setLevel(level)

    @property
    @override
    def estimated_stepping_batches(self) -> int:
        return self.STEPS


class ForecastInput:
    """A module and a batch that a run is planned for; nothing of either is changed.

    Args:
        module: Whole, with its weights or on the meta device. A module with `configure_model` is copied and
            configured on the meta device.
        batch: As a dataloader gives it, on CPU.
        precision: As of the Trainer.
        measure: Whether stages are run for their times; needs weights.
        progress: Told what is done, how much of it, and of how much.
    """

    def __init__(
        self,
        module: LightningModule,
        batch: Any,
        *,
        precision: object = "32-true",
        measure: bool = False,
        progress: Callable[[str, int, int], None] = lambda what, done, of: None,
    ) -> None:
        if not is_overridden("training_step", module):
            raise ConfigurationError(f"{type(module).__name__} has no training_step to be planned for")
        plugin = precision_named(precision)
        converts = isinstance(plugin, HalfPrecision | DoublePrecision)
        self.module = _configured(module, copied=converts)
        plugin.convert_module(self.module)
        self._context: Callable[[], AbstractContextManager[Any]] = plugin.forward_context
        self._measure, self._progress = measure, progress
        if measure and any(parameter.is_meta for parameter in parameters_of(self.module)):
            raise ConfigurationError("stages without weights cannot be measured: build the module with them")
        batch = _prepared(self.module, plugin.convert_input(batch))
        step = self.module.training_step
        self._args = (batch, 0) if takes(step, "batch_idx", min_args=2) else (batch,)

    @cached_property
    def assumptions(self) -> Assumptions:
        """The usual ones; where stages are measured, the link between ranks of this machine is too.

        Raises:
            PipelineError: It cannot be measured here.
        """
        if not self._measure:
            return Assumptions()
        self._progress("timing messages", 0, 1)
        link = measure_link(next(parameters_of(self.module)).device.type)
        return Assumptions(
            latency=link.latency, link_bytes=link.bytes_per_s, handling=link.handling, link_measured=True
        )

    def parts(self, num_microbatches: int) -> Parts:
        """The batch, split."""
        return split_arguments(self.module, "training_step", self._args, num_microbatches)

    def choose_number(self, schedule: Schedule, stages: int) -> int:
        """What `num_microbatches="auto"` is in a run."""
        at_least = 1 + trains_batch_norm(self.module)
        return Plans(schedule, stages).choose_number(self.parts(1).batch_size, at_least=at_least)

    def workload(self, parts: Parts, settings: Settings) -> Workload:
        """For the first micro-batch, none of the others is larger."""
        made: dict[str, Any] = dict(
            how=settings.partition, units=settings.units, forward_context=self._context,
            configure=self._optimizers,
        )  # fmt: skip
        if self._measure:
            return MeasuredWorkload(self.module, parts.args[0], progress=self._progress, **made)
        return Workload(self.module, parts.args[0], **made)

    def search(self, settings: Settings, devices: int, assumptions: Assumptions) -> Search:
        """Look for the best use of devices; the batch is that of all replicas together.

        Args:
            settings: Where to cut, and what to keep whole.
            devices: All of them.
            assumptions: About the machine.

        Raises:
            ConfigurationError: The batch does not tell its samples, or is too small.
        """
        samples = self.parts(1).batch_size
        if samples is None:
            raise ConfigurationError("--devices needs a batch that tells its samples: a tensor, or several")
        known: dict[int, Workload] = {}
        sizes = [size for size in range(1, samples + 1) if samples % size == 0][:2]

        def workload_of(size: int) -> Workload:
            if size not in known:
                if size in sizes:
                    known[size] = self.workload(self.parts(samples // size), settings)
                else:
                    first, second = (workload_of(traced) for traced in sizes)
                    known[size] = ScaledWorkload(first, second, (sizes[0], sizes[1]), size)
            return known[size]

        return search(workload_of, devices, samples, assumptions, progress=self._progress)

    def table(self, settings: Settings) -> StageTable:
        """The stages that a run would have.

        Args:
            settings: Of the strategy.

        Raises:
            ConfigurationError: `stages="auto"`.
            PartitionError: There are fewer units than stages.
            SplitError: The step cannot be cut.
        """
        stages, number = _ranks_of(settings), settings.num_microbatches
        if number == "auto":
            number = self.choose_number(settings.schedule, stages)
        num_stages = Plans(settings.schedule, stages).plan(number, forward_only=False).num_stages
        return self.workload(self.parts(number), settings).partition(num_stages).table()

    def _optimizers(self) -> Any:
        """What `configure_optimizers` returns, with a Trainer that will not be started."""
        before = self.module._trainer
        self.module.trainer = Unstarted.made()
        try:
            return self.module.configure_optimizers()
        finally:
            self.module._trainer = before

    def forecast(
        self, settings: Settings, assumptions: Assumptions | None = None, *, own: Schedule | None = None
    ) -> Forecast:
        """Work out every schedule.

        Args:
            settings: Of the strategy.
            assumptions: About the machine. Default: `self.assumptions`.
            own: The schedule to show; its micro-batches count for `num_microbatches="auto"`.
        """
        stages, number = _ranks_of(settings), settings.num_microbatches
        if number == "auto":
            number = self.choose_number(own or settings.schedule, stages)
        parts = self.parts(number)
        workload = self.workload(parts, settings)
        notes = []
        if len(parts.args) != number:
            made = f"a batch of {parts.batch_size} makes {len(parts.args)}"
            notes.append(f"{number} micro-batches were asked for; {made}.")
        return forecast(
            workload,
            stages,
            len(parts.args),
            assumptions or self.assumptions,
            batch_size=parts.batch_size,
            own=own,
            notes=notes,
            progress=self._progress,
        )


def _ranks_of(settings: Settings) -> int:
    """How many ranks a pipeline is to have."""
    if settings.stages == "auto":
        raise ConfigurationError(
            "stages='auto' takes all devices of a Trainer, and there is none to plan for: say how many, "
            "such as PipelineStrategy(stages=4)"
        )
    return settings.stages


def _prepared(module: LightningModule, batch: Any) -> Any:
    """The batch after the module's own hooks, as the loops call them."""
    batch = module.on_before_batch_transfer(batch, 0)
    batch = module.transfer_batch_to_device(batch, torch.device("cpu"), 0)
    return module.on_after_batch_transfer(batch, 0)


def _configured(module: LightningModule, *, copied: bool) -> LightningModule:
    """The module as a run would have it: hooks that make its layers are called on a copy, without weights.

    `setup` may want data and a Trainer; it is called only where the layers are not there without.
    """
    if is_overridden("configure_model", module):
        module = _after(module, "configure_model")
    elif copied:
        module = copy.deepcopy(module)
    if is_overridden("setup", module) and not list(parameters_of(module)):
        module = _after(module, "setup", "fit")
    claim_cpu(module)
    return module


def _after(module: LightningModule, hook: str, *arguments: str) -> LightningModule:
    """A copy of which a hook was called that makes layers, without weights."""

    def made() -> LightningModule:
        called = copy.deepcopy(module)
        getattr(called, hook)(*arguments)
        return called

    try:
        return without_weights(made)
    except Exception as error:
        raise ConfigurationError(
            f"{hook} of {type(module).__name__} fails without a Trainer: {type(error).__name__}: {error}"
        ) from error
