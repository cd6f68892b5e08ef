"""What Lightning does on one device, or with DDP: the hooks of a run that has nothing to split."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.overrides.distributed import prepare_for_backward
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pipeline import _lightning
from lightning_pipeline.checkpoint import checkpoint_options, read_whole, save_whole
from lightning_pipeline.checkpoint.contents import bare, flat_state, names_by_identity
from lightning_pipeline.checkpoint.folder import MODEL, OURS, local_path
from lightning_pipeline.errors import ConfigurationError
from lightning_pipeline.hooks import FiniteSteps, first_not_finite
from lightning_pipeline.model.cut import StageTable
from lightning_pipeline.ranks import RankMap
from lightning_pipeline.registry import named_parameters_of
from lightning_pipeline.run.members import join
from lightning_pipeline.run.one_device import OneDevice
from lightning_pipeline.schedules import Plan
from lightning_pipeline.settings import Settings
from lightning_pipeline.weights import holds_weights_only, open_weights, prefix_for


class PlainStrategy(ParallelStrategy):
    """The hooks of Lightning's own strategies for one device and for DDP. `PipelineStrategy` inherits this.

    Its own hooks come first, and pass on to these where there is one stage on one rank.

    Attributes:
        compiles: Compiles a function as the module of the run was asked to be; None where it was not.
    """

    num_nodes: int
    _settings: Settings
    _rank_map: RankMap | None = None
    _one_device: OneDevice | None = None
    _table: StageTable | None = None  # of the run that has ended
    _plan: Plan | None = None  # likewise, of its last training step
    _stood: Mapping[str, Any] | None = None
    _said_world_size = 1
    _is_set_up = _synced = False
    _steps: FiniteSteps | None = None
    compiles: _lightning.Compile | None = None
    _given: LightningModule | None = None
    _uncover: Callable[[], None] | None = None

    @property
    def _lightning_module(self) -> LightningModule | None:
        return self._given

    @_lightning_module.setter
    def _lightning_module(self, module: LightningModule | None) -> None:
        """Set by the Trainer as the first thing of a run, before it asks which strategies can compile.

        A step that every stage replays, up to its own units and with placeholders around, is no one graph;
        its units are. On one device the steps stay compiled.
        """
        self._given = module
        compiles = None if module is None else _lightning.compile_of(module)
        if module is None or compiles is None:
            return
        if self.is_one_device:
            self._uncover = _lightning.hide_compile_of(module)
        else:
            self.compiles = compiles
            _lightning.take_compile_from(module)

    def end_compiled(self) -> None:
        """The run is over."""
        self.compiles, uncover, self._uncover = None, self._uncover, None
        if uncover is not None:
            uncover()

    # Which rank holds what

    @property
    def _ranks(self) -> RankMap:
        if self._rank_map is None:
            raise ConfigurationError(
                "which rank holds which stage is known once the Trainer has the strategy"
            )
        return self._rank_map

    @property
    def is_one_device(self) -> bool:
        """Whether there is nothing to split: one stage on one rank of each replica, with whole batches.

        Everything is then as on one device, or with several replicas as with DDP.
        """
        one_stage = self._rank_map is not None and self._rank_map.num_stages == 1
        return one_stage and self._settings.num_microbatches in ("auto", 1)

    def stage_index(self, global_rank: int | None = None, position: int = 0) -> int:
        """The stage that a rank holds. Never read it off a `DeviceMesh`, which sorts its ranks.

        Args:
            global_rank: Of the rank. Default: this one.
            position: Which of its stages, where ranks hold several.
        """
        return self._ranks.stages_of(self.global_rank if global_rank is None else global_rank)[position]

    @property
    def stages_here(self) -> tuple[int, ...]:
        """The stages that this rank holds."""
        return self._ranks.stages_of(self.global_rank)

    @property
    def has_last_stage(self) -> bool:
        """Whether this rank holds the stage with the loss."""
        return self._ranks.num_stages - 1 in self.stages_here

    @property
    def replica_index(self) -> int:
        """This rank's position among the data-parallel replicas."""
        return self._ranks.replica_of(self.global_rank)

    @property
    def num_replicas(self) -> int:
        """Data-parallel replicas of the pipeline."""
        return self._ranks.num_replicas

    @property
    def _replicated(self) -> bool:
        return self._rank_map is not None and self._rank_map.num_replicas > 1

    @property
    def _trainer(self) -> Trainer:
        assert self.lightning_module is not None, "a run has a module"
        return self.lightning_module.trainer

    # Processes

    @property
    def num_processes(self) -> int:
        """Ranks on this node."""
        return len(self.parallel_devices or ())

    @property
    def _is_one_process(self) -> bool:
        return self.is_one_device and not self._replicated

    @property
    @override
    def global_rank(self) -> int:
        return 0 if self._is_one_process else super().global_rank

    @property
    @override
    def local_rank(self) -> int:
        return 0 if self._is_one_process else super().local_rank

    @property
    @override
    def node_rank(self) -> int:
        return 0 if self._is_one_process else super().node_rank

    @property
    @override
    def world_size(self) -> int:
        return self._said_world_size if self._is_one_process else super().world_size

    @world_size.setter
    def world_size(self, size: int) -> None:
        self._said_world_size = size  # an attribute like any other on one device

    def set_world_ranks(self) -> None:
        """Tell the environment this rank's number; Lightning calls it."""
        if self.num_nodes * self.num_processes == 1:
            _lightning.set_rank_zero(0)
            return
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        _lightning.set_rank_zero(self.global_rank)

    # Setting up

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        assert self.cluster_environment is not None
        if self._replicated:
            reset_seed()
            self.set_world_ranks()
            backend = self._settings.process_group_backend or _lightning.backend_of(self.root_device)
            join(self.cluster_environment, backend, self._settings).close()
        if self._settings.async_save and self._checkpoint_io is None:
            self._checkpoint_io = AsyncCheckpointIO()
        self._is_set_up = False
        self._one_device = OneDevice(
            self.root_device, self._ranks.numbering, self._trainer, self._settings.schedule
        )

    @override
    def setup(self, trainer: Trainer) -> None:
        self._is_set_up = True
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting and self._layer_sync and self._replicated:
            assert self.model is not None
            self.model = self._layer_sync.apply(self.model)
            self._synced = True
        super().setup(trainer)
        if fitting and self._one_device is not None:
            self._one_device.at_end(self.watch_steps(trainer))

    @override
    def _setup_model(self, model: nn.Module) -> nn.Module:
        if not self._replicated:
            return model
        if self._trainer.state.fn != TrainerFn.FITTING:
            _lightning.sync_module_states(model)
            return model
        self._forward_redirection = _lightning.ddp_redirection()
        index = self.root_device.index
        devices = None if self.root_device.type == "cpu" else [index]
        return nn.parallel.DistributedDataParallel(model, device_ids=devices)

    @override
    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    # Steps

    @override
    def on_train_start(self) -> None:
        if self._one_device is not None:
            self._one_device.position.epoch_starts()

    @override
    def process_dataloader(self, dataloader: object) -> object:
        if self._one_device is not None and self._trainer.training:
            self._one_device.position.prepared()
        return dataloader

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self._one_device is not None:
            self._one_device.begin_batch(batch)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._one_device is None:
            return super().training_step(*args, **kwargs)
        with self._one_device.forward():
            return super().training_step(*args, **kwargs)

    @override
    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        def step(closure: Callable[[], Any]) -> Any:
            return super(PlainStrategy, self).optimizer_step(optimizer, closure, model, **kwargs)

        steps = self._steps
        if steps is None or getattr(self.precision_plugin, "scaler", None) is not None:
            return step(closure)
        return steps.step(step, closure, lambda: self.not_finite(optimizer))

    def not_finite(self, optimizer: Optimizer) -> list[str]:
        """Gradients that are inf or nan before a step, in words: replicas, which averaged, find the same."""
        with_gradient = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        first = first_not_finite(parameter.grad for parameter in with_gradient)
        if first is None:
            return []
        name = self._by_identity().get(id(with_gradient[first]), "a parameter without a name")
        return [f"that of {name} on global rank {self.global_rank}"]

    def watch_steps(self, trainer: Trainer) -> Callable[[], None]:
        """From now on decide what happens where gradients are not finite; gives the undoing."""
        policy = self._settings.on_nonfinite
        self._steps = None if policy == "ignore" else FiniteSteps(policy)
        steps = self._steps
        if steps is None:
            return lambda: None
        undo = _lightning.hold_schedulers(trainer, lambda: steps.is_left_out)

        def end() -> None:
            undo()
            steps.tell()

        return end

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps of this run, or the last, that `on_nonfinite="skip"` has left out."""
        return 0 if self._steps is None else self._steps.left_out

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        model, module = self.model, self.lightning_module
        assert module is not None, "a run has a module"
        if isinstance(model, nn.parallel.DistributedDataParallel) and not module.automatic_optimization:
            prepare_for_backward(model, closure_loss)
        if self._one_device is not None:
            self._one_device.begin_backward()

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        if self._one_device is not None:
            self._one_device.end_backward()

    # Collectives

    @property
    def _unanswered(self) -> bool:
        """Whether this rank is on its own: alone in the world, or the only one whose run was interrupted."""
        trainer = getattr(self.lightning_module, "_trainer", None)
        return not self._replicated or not dist.is_initialized() or _lightning.is_interrupted(trainer)

    @override
    def barrier(self, name: str | None = None) -> None:
        if not self._unanswered:
            nccl = dist.get_backend() == "nccl"
            dist.barrier(device_ids=[self.root_device.index] if nccl else None)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        box = [obj]
        if not self._unanswered:
            dist.broadcast_object_list(box, src)
        return box[0]

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if not isinstance(tensor, Tensor) or not self._replicated:
            return tensor
        return _lightning.reduce_over(tensor, group, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        return super().all_gather(tensor, group, sync_grads) if self._replicated else tensor

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return decision if self._unanswered else super().reduce_boolean_decision(decision, all)

    # Checkpoints

    def _by_identity(self) -> dict[int, str]:
        assert self.lightning_module is not None, "a run has a module"
        return names_by_identity(named_parameters_of(self.lightning_module))

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self._settings.save_distributed_checkpoint:
            return flat_state(bare(optimizer), self._by_identity())
        return super().optimizer_state(optimizer)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        stood = self._where() if "optimizer_states" in checkpoint else None
        if self._settings.save_distributed_checkpoint:
            return self._save_folder(checkpoint, filepath, stood)
        everyone = self._of_replicas(stood)
        if everyone[0] is not None:
            checkpoint = {**checkpoint, OURS: {"replicas": everyone}}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def _where(self) -> Mapping[str, Any] | None:
        run = self._one_device
        if run is None:
            return self._stood
        return {**run.position.state(), "seed": torch.initial_seed() % 2**63, "moved": 0}

    def _of_replicas(self, value: Any) -> list[Any]:
        if self._unanswered:
            return [value]
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, value)
        return found

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        path = Path(checkpoint_path) if "://" not in str(checkpoint_path) else None
        if path is not None and path.is_dir():
            if holds_weights_only(path):
                return self._weights_of(path)
            found = read_whole(path, trust=self._settings.trust_checkpoint)
        elif path is not None and holds_weights_only(path):
            return self._weights_of(path)
        else:
            found = super().load_checkpoint(checkpoint_path, weights_only)
        own = found.pop(OURS, {}) if isinstance(found, dict) else {}
        # What is loaded after the set-up is loaded by a tuner, which goes on with the numbers that it drew.
        if self._one_device is not None and not self._is_set_up and self._trainer.training:
            replicas = own.get("replicas") or [None]
            self._one_device.resume(replicas[self.replica_index % len(replicas)])
        return found

    def _weights_of(self, path: Path) -> dict[str, Any]:
        """A checkpoint with nothing but weights, which stay in the files until they are copied."""
        module = self.lightning_module
        assert module is not None, "a run has a module"
        weights = open_weights(path, trust=self._settings.trust_checkpoint)
        names = module.state_dict(keep_vars=True)
        stored = weights.renamed(prefix_for([*weights.tensors, *weights.ties], names)).under(MODEL)
        states = {name: entry.read() for name, entry in stored.items()}
        tied = {id(tensor): name for name, tensor in names.items() if name in states}
        states |= {name: states[tied[id(tensor)]] for name, tensor in names.items() if id(tensor) in tied}
        return {**_lightning.checkpoint_without_state(), "state_dict": states}

    def _save_folder(self, dumped: Mapping[str, Any], path: Any, stood: Mapping[str, Any] | None) -> None:
        numbers = {id(bare(optimizer)): index for index, optimizer in enumerate(self.optimizers)}
        scheduled = [numbers.get(id(bare(c.scheduler.optimizer)), 0) for c in self.lr_scheduler_configs]
        names, options = self._by_identity(), checkpoint_options(self._settings, 1)
        save_whole(
            local_path(path), dumped, options, self._ranks.numbering, self.optimizers, names, scheduled,
            list(names.values()), stood,
        )  # fmt: skip

    # The end

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self._replicated:
            _lightning.explain_ddp(exception)

    @override
    def teardown(self) -> None:
        self.end_compiled()
        run = self._one_device
        if run is not None:
            self._stood, self._table, self._plan = self._where(), run.table, run.last_plan
        self._one_device = None
        if isinstance(self.model, nn.parallel.DistributedDataParallel):
            self.model = self.lightning_module
        if self._synced and self._layer_sync is not None and self.model is not None:
            self.model = self._layer_sync.revert(self.model)
        self._synced = False
        if run is not None:
            run.close()
        super().teardown()
