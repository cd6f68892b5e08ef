"""The strategy: the only place that knows Lightning's strategy hooks."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pipeline import _lightning
from lightning_pipeline.checkpoint import make_folders_known
from lightning_pipeline.errors import ConfigurationError
from lightning_pipeline.forecast import Assumptions, Forecast
from lightning_pipeline.hooks import of_stages
from lightning_pipeline.ranks import fit_to_devices
from lightning_pipeline.run import (
    Answers,
    CheckpointHooks,
    ForecastInput,
    OptimizersOnDemand,
    Pipeline,
    Splitting,
    begin,
    check_run,
    compare_modules,
    compare_optimizers,
    compare_runs,
    join,
    loggers_set_aside,
    pipelined,
    stay_away,
)
from lightning_pipeline.schedules import Schedule
from lightning_pipeline.settings import KnownArguments, read_settings
from lightning_pipeline.weights import Staging


class PipelineStrategy(KnownArguments, OptimizersOnDemand, Answers, CheckpointHooks):
    """Trains an unmodified LightningModule over the stages of a pipeline.

    Args:
        stages: Ranks that the model is spread over, or "auto": all devices. The model is cut into
            `stages * stages_per_rank` stages; `devices * num_nodes` must be `stages * data_parallel_size`.
        num_microbatches: Parts that each batch of a replica is cut into. "auto" picks a number from the
            schedule and the first batch, and says which.
        schedule: The order of work: a name such as "1F1B" or "GPipe", an instance, or a class path.
        stages_per_rank: Stages that each rank holds, for schedules that serve several. A schedule's own wins.
        partition: Where to cut: "auto" (equal cost), "uniform" (equal numbers of units), "parameters" (equal
            parameters), or a list with the name of the first unit of each later stage.
        units: Name patterns (`fnmatch`) of modules to keep whole. Default: found by walking the module.
        data_parallel_size: Replicas of the pipeline. "auto": as many as the devices allow.
        data: "replicate": every rank loads, and the first batches of each epoch are compared. "broadcast":
            one rank per replica loads and sends. "auto": as "replicate", but where the ranks' first batches
            differ, as data made without a seed do, as "broadcast", with a warning.
        transport: How tensors cross a cut. "nccl": from device to device, by communicators of their own.
            "ipc": by copies between the memories of two processes of one machine. "host": through host
            memory, over gloo. "auto": between CUDA devices the faster of "nccl" (where collectives use it)
            and "ipc" (where it works), measured once for each two neighbours; else "host".
        process_group_backend: For collectives, and between devices. Default: Lightning's choice.
        init_timeout: Longest wait for a rank to come to the start of a run, and while groups are made.
            Seconds or timedelta.
        step_timeout: Longest wait for a rank that is stopped or cut off, or for ranks that wait for each
            other. Seconds or timedelta.
        hook_timeout: Longest wait for a rank that is alive inside your own code, such as an upload in a hook.
            After `step_timeout` there is a warning. Seconds or timedelta.
        integrity: Checksums of checkpoint files, compared before anything is loaded: "sha256", "crc32"
            (faster), or "off".
        trust_checkpoint: Whether checkpoints may hold objects of any class; reading those can run code.
        async_save: Whether checkpoints are written while training goes on, from a copy in host memory.
        checkpoint_timeout: Longest wait for a rank while a checkpoint is written or read. Seconds or
            timedelta.
        resume: "auto": `fit` goes on from the newest whole checkpoint in the `ModelCheckpoint` folders, as a
            job that `torchrun` or SLURM starts again should. A `ckpt_path` wins.
        save_distributed_checkpoint: Whether a checkpoint is a folder that each stage writes its part of, or
            Lightning's one file. Default: one file with one stage or a `CheckpointIO` plugin, else a folder.
        start_method: How Lightning starts the processes where nobody else does: "popen" runs the script once
            per rank; "fork" works in notebooks; "spawn" and "forkserver" need picklable modules.
        loss_weighting: What the loss of a micro-batch counts for. "auto": what makes their sum the loss of
            the whole batch, whatever it is divided by (samples, tokens that are not masked, weights of
            classes, a number of the batch). "samples": the mean over samples of the micro-batches' losses.
            "sum": their sum. A `microbatch_weight(batch)` of the LightningModule, which returns a number for
            a micro-batch as the step gets it, wins: the mean by these weights; what weighs 0 adds nothing.
        gather_weights: Who has the whole module after a run. "all": every rank, in its host memory.
            "rank_zero": global rank 0. "none": nobody; a rank keeps its own stages, and what is not there is
            on the meta device. "auto": as "all", and as "none" where the module was built in
            `configure_model` or `trainer.init_module()`, which give each rank its own stages only.
        on_nonfinite: Where a gradient of any stage is inf or nan. "ignore": the optimizer steps, as on one
            device. "skip": weights, optimizer state and schedulers stay as they are on all ranks, and
            `skipped_steps` counts it. "raise": the run ends with rank, stage and parameter. With a gradient
            scaler (`precision="16-mixed"`) the scaler decides.
        loss_over_batch: Whether what follows the last unit runs once for the whole batch, as a loss that
            compares its samples needs (InfoNCE, CLIP), instead of once for each micro-batch. The last stage
            keeps what its units return for all micro-batches. Needs a schedule that finishes all forwards
            first: "GPipe" or "LoopedBFS".
        whole_steps: Whether every rank runs `training_step` on whole batches and calls layers of other stages
            by message, one after the other, as with manual optimization: for steps that cannot be cut, such
            as one that takes a gradient through layers. The numbers are those of one device.

    Raises:
        ConfigurationError: Settings that cannot work; all of them are named.
    """

    strategy_name = "pipeline"

    def __init__(
        self,
        stages: int | Literal["auto"],
        *,
        num_microbatches: int | Literal["auto"] = "auto",
        schedule: str | Schedule = "1F1B",
        stages_per_rank: int = 1,
        partition: str | list[str] = "auto",
        units: list[str] | None = None,
        data_parallel_size: int | Literal["auto"] = "auto",
        data: Literal["auto", "replicate", "broadcast"] = "auto",
        transport: Literal["auto", "nccl", "ipc", "host"] = "auto",
        process_group_backend: str | None = None,
        init_timeout: float | timedelta = 300,
        step_timeout: float | timedelta = 300,
        hook_timeout: float | timedelta = 1800,
        resume: Literal["auto"] | None = None,
        integrity: Literal["sha256", "crc32", "off"] = "sha256",
        trust_checkpoint: bool = False,
        async_save: bool = False,
        checkpoint_timeout: float | timedelta = 1800,
        save_distributed_checkpoint: bool | None = None,
        start_method: Literal["popen", "fork", "spawn", "forkserver"] = "popen",
        loss_weighting: Literal["auto", "samples", "sum"] = "auto",
        gather_weights: Literal["auto", "all", "rank_zero", "none"] = "auto",
        on_nonfinite: Literal["ignore", "skip", "raise"] = "ignore",
        loss_over_batch: bool = False,
        whole_steps: bool = False,
    ) -> None:
        self._settings = read_settings(
            stages=stages,
            num_microbatches=num_microbatches,
            schedule=schedule,
            stages_per_rank=stages_per_rank,
            partition=partition,
            units=units,
            data_parallel_size=data_parallel_size,
            data=data,
            transport=transport,
            process_group_backend=process_group_backend,
            init_timeout=init_timeout,
            step_timeout=step_timeout,
            integrity=integrity,
            trust_checkpoint=trust_checkpoint,
            async_save=async_save,
            checkpoint_timeout=checkpoint_timeout,
            hook_timeout=hook_timeout,
            resume=resume,
            save_distributed_checkpoint=save_distributed_checkpoint,
            start_method=start_method,
            loss_weighting=loss_weighting,
            gather_weights=gather_weights,
            on_nonfinite=on_nonfinite,
            loss_over_batch=loss_over_batch,
            whole_steps=whole_steps,
        )
        self._accumulating = self._in_step = self._comes = False
        self._told: dict[tuple[int, str | None], Any] = {}
        self._staging = Staging()
        self.num_nodes = 1
        self._closed: Pipeline | None = None
        self.leaves_in_teardown = False
        if _lightning.is_pytorch_lightning_apart():
            rank_zero_warn(
                "pytorch_lightning is imported, whose Trainer takes PipelineStrategy for an invalid name: "
                "use `from lightning.pytorch import Trainer`, or call "
                "lightning_pipeline.alias_pytorch_lightning() before anything imports the other"
            )
        super().__init__()

    def __repr__(self) -> str:
        return f"PipelineStrategy(stages={self._settings.stages!r}, schedule={self._settings.schedule!r})"

    @override
    def __getstate__(self) -> dict[str, Any]:
        # What a run made, and what only works with it, is not pickled; Lightning wraps optimizers anew.
        gone = dict.fromkeys(("_pipeline", "_closed", "_one_device", "_device_mesh"))
        return {**vars(self), **gone, "_unlink": [], "_told": {}, "_wrapped_optimizers": []}

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        if cls.strategy_name not in strategy_registry:
            strategy_registry.register(
                cls.strategy_name, cls, description="Pipeline parallelism over all devices", stages="auto"
            )

    # Before a run

    def plan(
        self,
        module: LightningModule,
        batch: Any,
        *,
        assumptions: Assumptions | None = None,
        precision: str = "32-true",
        measure: bool = False,
    ) -> Forecast:
        """Predict cut, memory, step and bubble, with this schedule and the others; nothing is started.

        Args:
            module: Whole, with its weights or on the meta device; it is left as it is.
            batch: Of one replica, as a dataloader gives it.
            assumptions: About speed, links and memory. Default: 100 TFLOP/s and 25 GB/s, or what is
                measured; no limit of memory.
            precision: As of the Trainer.
            measure: Run each stage on this machine for its times, which needs weights, and without
                `assumptions` two processes for the link's.

        Returns:
            The report; `str()` of it is the table.

        Raises:
            ConfigurationError: `stages="auto"`, or something the module lacks.
            SplitError: The step cannot be cut.
        """
        prospect = ForecastInput(module, batch, precision=precision, measure=measure)
        settings = self._settings
        return prospect.forecast(settings, assumptions, own=settings.schedule)

    # Where this rank is

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None, "the Trainer sets the devices"
        return self.parallel_devices[self.local_rank]

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning gives loaders a distributed sampler: with several replicas.

        With one, every stage keeps the user's own sampler, so that batches come in the order of one device;
        the random states that samplers draw from are kept equal.
        """
        return self._rank_map is None or self.num_replicas > 1

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.num_replicas, "rank": self.replica_index}

    # Processes

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        device = self.parallel_devices[0].type if self.parallel_devices else "cpu"
        ranks = self._rank_map = fit_to_devices(self._settings, self.num_processes, self.num_nodes, device)
        if self._settings.stages == "auto" and ranks.numbering.world_size == 1:
            rank_zero_warn(
                "the pipeline has one stage, for there is one device: give Trainer(devices=N); on CPU "
                "devices='auto' is 1"
            )
        self._serve_precision()
        self.check_checkpoint_io()
        alone = self.is_one_device and ranks.numbering.world_size == 1
        if alone:
            return
        started = self.cluster_environment.creates_processes_externally
        if ranks.numbering.world_size == 1 and self._settings.start_method == "popen":
            started = True  # by hand; Lightning's launcher would start none, but choose the number of threads
        method = None if started else self._settings.start_method
        self._launcher = _lightning.make_launcher(self, method, self.num_processes, self.num_nodes)

    @override
    def connect(self, model: LightningModule) -> None:
        super().connect(model)
        if not self.is_one_device:
            check_run(model)

    @pipelined
    @override
    def setup_environment(self) -> None:
        ParallelStrategy.setup_environment(self)
        self._comes = True
        _lightning.silence_leaf_specs()
        assert self.cluster_environment is not None
        placement, numbering = self._ranks.placement, self._ranks.numbering
        self.set_world_ranks()
        if self.global_rank:  # rank 0 says it
            _lightning.silence_moved_checkpoints()
        backend = self._settings.process_group_backend or _lightning.backend_of(self.root_device)
        assert self.lightning_module is not None, "a run has a module"
        trainer = self.lightning_module.trainer
        with closing(join(self.cluster_environment, backend, self._settings)) as roll:
            roll.within("comparing the settings", lambda: compare_runs(trainer, self._settings))
            if dist.get_world_size() != numbering.world_size:
                raise ConfigurationError(
                    f"this process is in a group of {dist.get_world_size()} ranks, but the strategy needs "
                    f"{numbering.world_size}: start as many processes"
                )
            self._pipeline = Pipeline(
                self._settings, placement, backend, self.root_device, trainer, roll.within
            )
        by_rank, device = list(zip(*numbering.pipelines(), strict=True)), self.root_device.type
        make = partial(DeviceMesh, device, by_rank, mesh_dim_names=("pp", "dp"))
        self._device_mesh = self._pipeline.groups.within("making the device mesh", make)
        assert self.lightning_module is not None
        _lightning.set_device_mesh(self.lightning_module, self._device_mesh)
        begin(self._pipeline, trainer, self._settings)

    # Setting up

    @pipelined
    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        built = self._staging.adopt(self.lightning_module)
        if built is not None:
            built.given = self.values_from_elsewhere(self.lightning_module)
        self.model = self.precision_plugin.convert_module(self.lightning_module)
        compare_modules(self.lightning_module, self._running.world)
        trainer.log_dir  # noqa: B018  # all ranks are told, so that a step may ask
        with loggers_set_aside(trainer):  # also one that is run once more to learn of it
            trainer.log_dir  # noqa: B018
        self.note_hyper_parameters(self.lightning_module)
        self.restore_data(trainer)
        trains = trainer.state.fn == TrainerFn.FITTING
        with self.optimizers_on_demand(self.lightning_module) if trains else nullcontext(), self._telling():
            Splitting(self._running, self.precision_plugin).split(built)
        self.note_names(trainer)
        self.print_stages()
        self.model_to_device()
        self.restore_early(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            _lightning.optimizers_to_device(self.optimizers, self.root_device)
            self._running.at_end(self.watch_steps(trainer))

    @pipelined
    @override
    def model_to_device(self) -> None:
        self._running.stages.to_device(self.root_device)

    @pipelined
    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        self._reset_optimizers_and_schedulers()
        running = self._running
        assert trainer.lightning_module is not None
        with running.stages.in_hook():
            optimizers, schedulers = _lightning.init_optimizers(trainer.lightning_module)
        running.stages.adopt(optimizers)
        self.optimizers, self.lr_scheduler_configs = optimizers, schedulers
        compare_optimizers(self.optimizers, self.lr_scheduler_configs, running.world)

    @property
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = precision_plugin
        if self._rank_map is not None or self._settings.stages not in (1, "auto"):
            self._serve_precision()

    def _serve_precision(self) -> None:
        """Once it is known whether there is anything to split: clip by the norm of all stages."""
        if self._precision_plugin is not None and not self.is_one_device:
            self._precision_plugin = of_stages(self._precision_plugin, self.clip_grad_norm_, self._backward)

    @pipelined
    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        with (
            self._building(empty_init),
            self.precision_plugin.tensor_init_context(),
        ):
            yield

    def _building(self, empty_init: bool | None) -> AbstractContextManager[Any]:
        """Modules are built without weights; with `empty_init` they are to be loaded."""
        if empty_init:
            return torch.device("meta")
        module = self.lightning_module if self._pipeline is not None else None
        return self._staging.building(module, _lightning.configure_again)

    # Data

    @pipelined
    @override
    def process_dataloader(self, dataloader: object) -> object:
        prepared = self._running.feed.prepare(dataloader)
        if self.lightning_module is not None and self.lightning_module.trainer.training:
            self._running.position.prepared()
        return prepared

    @pipelined
    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        with self._running.feed.alike(self.lightning_module):
            return super().batch_to_device(batch, device, dataloader_idx)

    # Steps

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_one_device:
            return super().training_step(*args, **kwargs)
        batch = self._running.training_batch([*args, *kwargs.values()], stepping=not self._accumulating)
        if self.trains_whole:
            return batch.train()
        with self._telling():
            outputs = batch.train()
        if outputs is None:
            self._running.split.put_gradients_back(stepping=not self._accumulating)
            return _lightning.NO_LOSS
        return outputs

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_one_device:
            return super().validation_step(*args, **kwargs)
        batch = self._running.evaluated_batch("validation_step", [*args, *kwargs.values()])
        with self._telling():
            return batch.evaluate()

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_one_device:
            return super().test_step(*args, **kwargs)
        batch = self._running.evaluated_batch("test_step", [*args, *kwargs.values()])
        with self._telling():
            return batch.evaluate()

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_one_device:
            return super().predict_step(*args, **kwargs)
        batch = self._running.evaluated_batch("predict_step", [*args, *kwargs.values()])
        with self._telling():
            return batch.evaluate()

    @pipelined
    @contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def _backward(self, loss: Tensor, run: Callable[[Tensor], None]) -> None:
        """Called by the precision plugin in the place of a backward, which the step has run."""
        if self.trains_whole:
            with self._running.split.in_hook():
                run(loss)
            self._running.split.after_backward()
        else:
            self._running.split.put_gradients_back(loss, run, stepping=not self._accumulating)

    @pipelined
    @override
    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        with self._running.split.stepping(optimizer, closure) as once:
            return super().optimizer_step(optimizer, once, model, **kwargs)

    @pipelined
    @override
    def not_finite(self, optimizer: Optimizer) -> list[str]:
        return self._running.split.gradients.not_finite(optimizer)

    # Collectives

    @pipelined
    @override
    def barrier(self, name: str | None = None) -> None:
        if self._alone:
            return
        if self._pipeline is not None:
            self._pipeline.stages.meet()
            self._pipeline.world.barrier(f"the barrier {name!r}" if name else "a barrier")
        else:
            nccl = dist.get_backend() == "nccl"
            dist.barrier(device_ids=[self.root_device.index] if nccl else None)

    @pipelined
    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Tell all ranks; in a step, which they do not enter together, what they were told before of it.

        Lightning's `Trainer.log_dir` is such an object: it was asked for before the run.
        """
        known = obj is None or isinstance(obj, str)
        if self._in_step and src == self.global_rank:
            return obj
        if self._in_step and known and (src, obj) in self._told:
            return self._told[src, obj]
        box = [obj]
        if not self._alone:
            if self._pipeline is not None:
                self._pipeline.stages.meet()
                box = [self._pipeline.world.share("a broadcast", lambda: obj, src)]
            else:
                dist.broadcast_object_list(box, src)
        if known:
            self._told[src, obj] = box[0]
        return box[0]

    @contextmanager
    def _telling(self) -> Iterator[None]:
        before, self._in_step = self._in_step, True
        try:
            yield
        finally:
            self._in_step = before

    @pipelined
    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the data-parallel replicas, unless another group is given."""
        return self._pipeline.reduce(tensor, group, reduce_op) if self._pipeline else tensor

    @pipelined
    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather from the data-parallel replicas: the ranks that hold the same stage."""
        return self._running.all_gather(tensor, group, sync_grads)

    @pipelined
    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Decide over all ranks of the world."""
        if self._alone:
            return decision
        any_of = self._running.members.any_of
        return not any_of(not decision)[0] if all else any_of(decision)[0]

    # The end

    @pipelined
    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        running = self._pipeline or self._closed
        if running is not None:
            running.fail(exception)
        elif not self._comes and isinstance(exception, Exception):
            stay_away(self.cluster_environment, self._settings, exception)

    def leave(self) -> None:
        """All of the user's hooks have run on this rank: wait for the others, whose last may yet fail."""
        closed, self._closed, self.leaves_in_teardown = self._closed, None, False
        if closed is not None:
            closed.leave()
        self._comes = False  # to the start of a next run

    @pipelined
    @override
    def teardown(self) -> None:
        try:
            self.finish_saving()
        finally:
            self.note_position()
            self.leave_callbacks()
            self.end_compiled()
            self.keep_answers()
            pipeline, self._pipeline = self._pipeline, None
            if pipeline is not None:
                pipeline.close()
                self._closed = pipeline
            _lightning.optimizers_to_device(self.optimizers, torch.device("cpu"))
            if self.cluster_environment is not None:
                self.cluster_environment.teardown()
            self.precision_plugin.teardown()
            if self.accelerator is not None:
                self.accelerator.teardown()
            if _lightning.brings_checkpoint_io(self):
                self.checkpoint_io.teardown()
            if self.leaves_in_teardown:
                self.leave()


PipelineStrategy.register_strategies(StrategyRegistry)
make_folders_known()
