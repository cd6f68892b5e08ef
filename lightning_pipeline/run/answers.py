"""What the user, and the callbacks, may ask of the strategy."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_pipeline.errors import ConfigurationError
from lightning_pipeline.measure import MemoryMeter, PipelineRun
from lightning_pipeline.model.cut import Partition, StageTable
from lightning_pipeline.ranks import Offset
from lightning_pipeline.recording import MessageLog, Timeline
from lightning_pipeline.registry import parameters_of
from lightning_pipeline.run.forecasting import ForecastInput
from lightning_pipeline.run.held import Whole
from lightning_pipeline.run.one_device import OneDevice
from lightning_pipeline.run.run import Running
from lightning_pipeline.run.setup import held_states
from lightning_pipeline.schedules import Plan, Schedule
from lightning_pipeline.weights import gathered


class Answers(Running):
    """What is known while the module is split, and after it. The strategy inherits these answers."""

    _table: StageTable | None = None  # of the run that has ended
    _plan: Plan | None = None  # likewise, of its last training step
    _printed = ""

    _device_mesh: DeviceMesh | None = None

    @property
    def device_mesh(self) -> DeviceMesh:
        """The ranks by pipeline rank (axis `pp`) and replica (axis `dp`). Ask `stage_index` for stages."""
        if self._device_mesh is None:
            raise ConfigurationError(
                "the device mesh exists once the processes have joined: ask for it in `setup`"
            )
        return self._device_mesh

    def describe(self, module: LightningModule | None = None, batch: Any = None) -> StageTable:
        """The stages: units, parameters, share of cost, messages, and why the cuts are where they are.

        Args:
            module: Of a run that is not begun; `configure_model` is run on a copy, without weights. Default:
                that of the run, or of the one that ended last.
            batch: For `module`: of one replica, as a dataloader gives it.

        Raises:
            ConfigurationError: There is no run with data, or it is not split yet, and no module was given.
        """
        if module is not None:
            return ForecastInput(module, batch).table(self._settings)
        if self._has_ended and self._table is not None:
            return self._table
        return self._split.table

    def print_stages(self) -> None:
        """Say what the stages are, where that is new."""
        table = str(self._running.stages.table or "")
        if table not in ("", self._printed):
            rank_zero_info(f"{table}\n{self._running.stages.says}")
            self._printed = table

    def keep_answers(self) -> None:
        """The run ends: keep what may be asked after it."""
        if self._pipeline is not None and not isinstance(stages := self._pipeline.stages, Whole):
            self._table, self._plan = stages.table, stages.last_plan

    @property
    def run(self) -> PipelineRun:
        """What is known of the run under way, once its module is split.

        Raises:
            ConfigurationError: There is no run, or it has no stages yet.
        """
        return self._one_device if self._one_device is not None else self._running.split.run

    @property
    def timeline(self) -> Timeline:
        """What happened in the last step on this rank."""
        return self.run.timeline

    @property
    def pipeline_rank(self) -> int:
        """This rank's position in its pipeline."""
        return 0 if self._one_device is not None else self._running.groups.rank

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent to other stages in this run of the Trainer."""
        return self.run.bytes_sent

    @property
    def memory(self) -> MemoryMeter:
        """Measures the memory of this rank."""
        return self.run.memory

    @property
    def clock_offsets(self) -> list[Offset]:
        """How far the ranks' clocks are from pipeline rank 0's; empty before `align_clocks`."""
        return self.run.clock_offsets

    def align_clocks(self, exchanges: int = 8) -> list[Offset]:
        """Measure `clock_offsets`, by pipeline rank; all ranks must call.

        Args:
            exchanges: Messages back and forth with each rank; the quickest counts.
        """
        return self.run.align_clocks(exchanges)

    def record_messages(self, on: bool) -> None:
        """Write down every message of this rank, from the next step on; or stop it.

        Args:
            on: Whether messages are recorded.
        """
        self.run.record_messages(on)

    @property
    def messages(self) -> MessageLog | None:
        """Those of the last step on this rank; `None` while they are not recorded."""
        return self.run.messages

    def own_parameters(self) -> Iterator[Tensor]:
        """This rank's parameters, tied ones once."""
        return self.run.own_parameters()

    @property
    def partition(self) -> Partition:
        """Where the module is cut, with the trace that the cut was chosen from."""
        return self.run.partition

    @property
    def last_plan(self) -> Plan | None:
        """The plan of the last training step, also after the run; `None` before the first."""
        return self._plan if self._has_ended else self._stages.last_plan

    @property
    def batch_size(self) -> int | None:
        """Samples in the last training batch of this replica; `None` where the batch does not tell."""
        return self._stages.batch_size

    @property
    def trains_whole(self) -> bool:
        """Whether every rank runs `training_step` whole: with manual optimization, or by `whole_steps`."""
        module = self.lightning_module
        return module is not None and self._settings.trains_whole(automatic=module.automatic_optimization)

    def gather_from_pipeline(self, value: Any) -> list[Any]:
        """A picklable value of every rank of this replica, by pipeline rank; all of them must call."""
        run = self._run
        return run.gather_from_pipeline(value) if isinstance(run, OneDevice) else run.members.gather(value)

    def whole_model(
        self, on: Literal["rank_zero", "all"] = "rank_zero"
    ) -> AbstractContextManager[LightningModule | None]:
        """Gather the module for code that needs all of its weights at once; all ranks must enter together.

        In a hook the module itself may be called by all ranks or by one, without this. Inside the block one
        rank has every weight in its memory; what is done to copies of other stages' weights is refused. After
        a run it is the module that the run has left, which is whole unless `gather_weights` says otherwise.

        Args:
            on: Who gets it: global rank 0, or all ranks.

        Returns:
            A context, which gives the whole module, and `None` on ranks that only wait.

        Raises:
            ConfigurationError: `on` is something else, there is no module yet, or the run that ended has left
                it whole elsewhere.
            SplitError: At the end: a weight that another stage holds was changed.
        """
        if on not in ("rank_zero", "all"):
            raise ConfigurationError(f"whole_model(on={on!r}) is not known: use 'rank_zero' or 'all'")
        if self._one_device is not None:
            return nullcontext(self.lightning_module)
        return nullcontext(self._left_by_run(on)) if self._has_ended else self._whole(on)

    def _left_by_run(self, on: str) -> LightningModule | None:
        module = self.lightning_module
        if module is None:
            raise ConfigurationError("there is no module yet: enter whole_model() in a hook, or after a run")
        if on == "rank_zero" and module.global_rank != 0:
            return None
        if any(tensor.is_meta for tensor in (*parameters_of(module), *module.buffers())):
            raise ConfigurationError(
                f"the run has ended with gather_weights={self._settings.gather_weights!r}, which leaves no "
                "whole module here: enter whole_model() in a hook such as on_train_end, or set "
                "gather_weights='all'"
            )
        return module

    @contextmanager
    def _whole(self, on: str) -> Iterator[LightningModule | None]:
        running, module = self._running, self.lightning_module
        assert module is not None, "a run has a module"
        stages, members = running.stages, running.members
        with stages.aside():
            if isinstance(stages, Whole):
                yield module
                return
            held = held_states(module, transient=True)
            with gathered(module, stages.split, held, members.replica, members.world, on) as whole:
                yield whole

    @property
    def schedule(self) -> Schedule:
        """The rule that training plans are made by."""
        return self._settings.schedule

    def gather_numbers(self, values: Sequence[float]) -> list[list[list[float]]]:
        """As many float64 of every rank, by replica and pipeline rank; all ranks must call.

        Args:
            values: Of this rank; as many as on the others.
        """
        return self.run.gather_numbers(values)

    def clip_grad_norm_(
        self, parameters: Any, max_norm: float, *, error_if_nonfinite: bool = False
    ) -> Tensor:
        """As `torch.nn.utils.clip_grad_norm_`, by the 2-norm of the gradients of all stages.

        Args:
            parameters: This rank's part of the parameters to clip.
            max_norm: The largest norm allowed.
            error_if_nonfinite: Raise, on every rank, when the norm is inf or nan.

        Returns:
            The norm before clipping, the same on every rank.
        """
        return self._split.clip(parameters, max_norm, error_if_nonfinite=error_if_nonfinite)
