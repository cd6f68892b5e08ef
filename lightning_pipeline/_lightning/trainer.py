"""Every private name of Lightning that this package uses, one function or line each: why, and since when.

An upgrade of Lightning means reading this file. Checked against lightning 2.6.
"""

import inspect
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import torch
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

# Joins the process group as Lightning's own strategies do, torchrun and SLURM included. Since 1.9.
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.fabric.utilities.distributed import (
    _all_gather_ddp_if_available,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)

# Moves an optimizer's state to the device of the stage. Since 1.9.
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, ThroughputMonitor

# Loads a checkpoint for `load_from_checkpoint`. Since 2.0.
from lightning.pytorch.core import saving

# Calls configure_optimizers and reads what it returns, as a strategy does. Since 2.0.
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers

# What a wrong signature of a step is told. Since 2.0.
from lightning.pytorch.loops.utilities import _verify_dataloader_idx_requirement

# What `DDPStrategy` does around the wrapper. Since 2.2.
from lightning.pytorch.overrides.distributed import _sync_module_states

# A plugin for checkpoints around another one. Since 2.0.
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.ddp import _DDPForwardRedirection

# Asks for loaders as the loops do. Since 2.0.
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.data_connector import (
    _check_dataloader_iterable,
    _request_dataloader,
)
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerStatus

# What a collection of loaders is. Since 2.2.
from lightning.pytorch.utilities._pytree import _tree_flatten
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_only

# Which arguments a step takes. Since 2.0.
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.distributed import Store

from lightning_pipeline.patching import all_undone, patch

STEPS = {
    TrainerFn.FITTING: "training_step",
    TrainerFn.VALIDATING: "validation_step",
    TrainerFn.TESTING: "test_step",
    TrainerFn.PREDICTING: "predict_step",
}

__all__ = [
    "around_epoch_start",
    "as_combined",
    "backend_of",
    "batch_limit",
    "before_fetch",
    "begin_resumed_epoch",
    "brings_checkpoint_io",
    "callbacks_with",
    "claim_cpu",
    "claim_device",
    "combined_loader_of",
    "configured_to_log_graph",
    "count_as_existing",
    "count_replicas_as_devices",
    "ddp_redirection",
    "evaluation_loop",
    "explain_ddp",
    "explain_signature",
    "gather_over",
    "init_optimizers",
    "is_interrupted",
    "is_overridden",
    "is_sequential",
    "join_group",
    "link_through",
    "load_loader_states",
    "loader_source",
    "loader_states",
    "loader_states_to_load",
    "loaders_in",
    "loop_of",
    "moves_batches_itself",
    "on_requeue",
    "on_sigterm",
    "optimizers_to_device",
    "prepared_batch",
    "read_folders_by",
    "reading_folders",
    "reads_checkpoints_itself",
    "reduce_over",
    "request_loaders",
    "set_device_mesh",
    "set_rank_zero",
    "set_received_sigterm",
    "silence_leaf_specs",
    "silence_moved_checkpoints",
    "silence_sync_dist_advice",
    "sync_module_states",
    "syncs_batch_norm",
    "takes",
    "uploads_checkpoints",
    "will_sanity_check",
]


def callbacks_with(hook: str, trainer: Trainer) -> list[Callback]:
    """The user's callbacks with a hook of their own. `trainer.callbacks` is set by a connector. Since 1.0."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return [
        callback
        for callback in callbacks
        if getattr(type(callback), hook) is not getattr(Callback, hook)
        and not type(callback).__module__.startswith(f"{__package__}.")
    ]


def is_interrupted(trainer: Trainer | None) -> bool:
    """Whether an exception is ending the run. `LightningModule.trainer` raises without one. Since 1.5."""
    return trainer is not None and trainer.state.status == TrainerStatus.INTERRUPTED


def join_group(environment: ClusterEnvironment, backend: str, timeout: timedelta, store: Store) -> None:
    """Join the default process group, by a store, unless this process is in it already. Since 1.9."""
    _init_dist_connection(environment, backend, timeout=timeout, store=store)


def backend_of(device: torch.device) -> str:
    """The backend that Lightning would choose for a device. Since 2.0."""
    return _get_default_process_group_backend_for_device(device)


def reduce_over(value: torch.Tensor, group: Any, reduce_op: Any) -> torch.Tensor:
    """Reduce with Lightning's reading of `reduce_op` ("mean", "avg", `ReduceOp`). Since 1.9."""
    return _sync_ddp_if_available(value, group, reduce_op=reduce_op)


def gather_over(value: torch.Tensor, group: Any) -> torch.Tensor:
    """Gather without gradients, as `LightningModule.all_gather` does. Since 1.9."""
    return _all_gather_ddp_if_available(value, group=group)


def set_rank_zero(global_rank: int) -> None:
    """What `rank_zero_only` and `rank_zero_info` go by; Lightning's strategies set it likewise. Since 1.6."""
    for guard in (rank_zero_only, fabric_rank_zero_only):
        vars(guard)["rank"] = global_rank


def on_sigterm(trainer: Trainer, told: Callable[[], None]) -> Callable[[], None]:
    """Call `told` when SIGTERM arrives, in place of Lightning's broadcasts; returns what undoes it.

    Lightning broadcasts in the handler, and again before every batch, where it ignores every exception.
    Since 2.6. To be deleted when a strategy may bring its own handling.
    """
    connector: Any = trainer._signal_connector
    loop: Any = trainer.fit_loop.epoch_loop
    names = ((connector, "_sigterm_notifier_fn"), (loop, "_broadcast_sigterm_tensor"))
    for owner, name in names:
        assert callable(getattr(owner, name, None)), (
            f"Lightning has no {type(owner).__name__}.{name} any more"
        )

    def notified(signum: int, frame: Any) -> None:
        launcher: Any = trainer.strategy.launcher
        if launcher is not None and not connector.received_sigterm:
            launcher.kill(signum)
        told()

    return all_undone(
        [
            patch(connector, "_sigterm_notifier_fn", notified),
            patch(loop, "_broadcast_sigterm_tensor", lambda: None),
        ]
    )


def on_requeue(trainer: Trainer, told: Callable[[], None]) -> tuple[Callable[[], None], Callable[[], None]]:
    """Call `told` when SLURM's signal to save and to requeue arrives, in place of Lightning's doing so.

    Lightning saves in the handler, where each rank is somewhere else in a step. Since 1.6. To be deleted when
    a strategy may bring its own handling.

    Returns:
        What saves and requeues; and what undoes this.
    """
    connector: Any = trainer._signal_connector
    requeue = type(connector)._slurm_sigusr_handler_fn
    undo = patch(connector, "_slurm_sigusr_handler_fn", lambda signum, frame: told())
    return lambda: requeue(connector, _requeue_signal(trainer), None), undo


def _requeue_signal(trainer: Trainer) -> Any:
    return getattr(trainer.strategy.cluster_environment, "requeue_signal", None)  # type: ignore[attr-defined]


def set_received_sigterm(trainer: Trainer) -> None:
    """The loops end at the next batch's end when this is set. Since 1.6."""
    trainer._signal_connector.received_sigterm = True


def evaluation_loop(trainer: Trainer) -> Any:
    """The loop whose batches are being evaluated; validation inside `fit` has its own. Since 2.0."""
    if trainer.state.fn == TrainerFn.FITTING:
        return trainer.fit_loop.epoch_loop.val_loop
    if trainer.state.fn == TrainerFn.VALIDATING:
        return trainer.validate_loop
    return trainer.test_loop if trainer.state.fn == TrainerFn.TESTING else trainer.predict_loop


_FolderReader = Callable[[str], dict[str, Any]]
_folder_reader: list[_FolderReader] = []


def read_folders_by(read: _FolderReader) -> None:
    """Where `load_from_checkpoint` is given a folder, take this reader's answer. Since 2.0.

    Lightning opens the path as a file. To be deleted when a module may bring its own loading.
    """
    if not _folder_reader:
        original = saving.pl_load

        def load(path_or_url: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(path_or_url, str | os.PathLike) and os.path.isdir(path_or_url):
                return _folder_reader[-1](os.fspath(path_or_url))
            return original(path_or_url, *args, **kwargs)

        saving.pl_load = load
    _folder_reader[:1] = [read]


@contextmanager
def reading_folders(read: _FolderReader) -> Iterator[None]:
    """Inside, take this reader's answer in its place."""
    _folder_reader.append(read)
    try:
        yield
    finally:
        _folder_reader.remove(read)


def sync_module_states(module: torch.nn.Module) -> None:
    """Give all ranks rank 0's values, as `DDPStrategy` does where it does not train. Since 2.0."""
    _sync_module_states(module)


def ddp_redirection() -> Any:
    """Sends a step through the DDP wrapper's `forward`, as `DDPStrategy` does. Since 2.2."""
    return _DDPForwardRedirection()


def explain_ddp(exception: BaseException) -> None:
    """Add to an error of DDP what Lightning has to say about it. Since 2.0."""
    DDPStrategy.on_exception(cast(DDPStrategy, None), exception)


def silence_sync_dist_advice() -> None:
    """With one replica there is nothing to sync, but Lightning sees a group and advises it. Since 1.6."""
    warnings.filterwarnings(
        "ignore", r"It is recommended to use `self\.log\(.*sync_dist=True", PossibleUserWarning
    )


def silence_leaf_specs() -> None:
    """Lightning asks torch 2.13 for a class that it warns of, on every rank and in every run. Since 2.0."""
    warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated")


def silence_moved_checkpoints() -> None:
    """`ModelCheckpoint` says on every rank that a resumed run saves elsewhere. Since 2.0."""
    warnings.filterwarnings("ignore", "The dirpath has changed from")


def optimizers_to_device(optimizers: list[torch.optim.Optimizer], device: torch.device) -> None:
    """Move the optimizers' state. Since 1.9."""
    _optimizers_to_device(optimizers, device)


def init_optimizers(module: LightningModule) -> tuple[list[torch.optim.Optimizer], list[Any]]:
    """Call `configure_optimizers`, and check what it returns. Since 2.0."""
    optimizers, schedulers = _init_optimizers_and_lr_schedulers(module)
    return optimizers, list(schedulers)


def takes(function: Any, parameter: str, *, explicit: bool = False, min_args: int | None = None) -> bool:
    """Whether a hook or step takes a parameter, decided as Lightning's loops decide it. Since 2.0."""
    return bool(is_param_in_hook_signature(function, parameter, explicit=explicit, min_args=min_args))


def set_device_mesh(module: LightningModule, mesh: Any) -> None:
    """What `LightningModule.device_mesh` returns has no setter. Since 2.3."""
    module._device_mesh = mesh


def combined_loader_of(loop: Any) -> CombinedLoader | None:
    """The processed loaders of a loop: `loop.setup_data()` is public, what it makes is not. Since 2.0."""
    loader = loop._combined_loader
    assert loader is None or isinstance(loader, CombinedLoader)
    return loader


def as_combined(loaders: Any, *, sequential: bool) -> CombinedLoader:
    """Loaders as the user gave them, in the collection that a loop makes of them. Since 2.0."""
    if isinstance(loaders, CombinedLoader):
        return loaders
    return CombinedLoader(
        [] if loaders is None else loaders, "sequential" if sequential else "max_size_cycle"
    )


def is_sequential(combined: CombinedLoader) -> bool:
    """Whether batches come from one loader after the other. The mode has no public name. Since 2.0."""
    return bool(combined._mode == "sequential")


def loader_source(loop: Any) -> Any:
    """Where a loop gets its loaders: given to the Trainer, or from a hook. Since 2.0."""
    return loop._data_source


def loaders_in(loaders: Any) -> tuple[list[Any], Any]:
    """The loaders of a collection, and its structure for torch's `tree_unflatten`. Since 2.2.

    A list of numbers or texts is a loader of these, and no collection.
    """
    return _tree_flatten(loaders)


def request_loaders(source: Any) -> Any:
    """Ask a source for its loaders as the loops do, which notes how each was made. Since 2.0."""
    return _request_dataloader(source)


def explain_loaders(source: Any, loaders: Any, function: TrainerFn) -> None:
    """Raise what one device raises for what is no loader. Since 2.0.

    Args:
        source: Of the loaders.
        loaders: As it gave them.
        function: That asks for them.
    """
    for loader in as_combined(loaders, sequential=True).flattened:
        if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
            _check_dataloader_iterable(loader, source, function)


def will_sanity_check(trainer: Trainer) -> bool:
    """Whether `fit` begins with a few batches of validation; not when it resumes. Since 2.0."""
    steps = trainer.num_sanity_val_steps
    return bool(trainer.enable_validation and steps > 0 and not trainer.ckpt_path)


def batch_limit(trainer: Trainer, function: TrainerFn) -> int | float:
    """`limit_train_batches` and its like; set by a connector. Since 1.0."""
    names = {TrainerFn.FITTING: "train", TrainerFn.VALIDATING: "val", TrainerFn.TESTING: "test"}
    limit: int | float = getattr(trainer, f"limit_{names.get(function, 'predict')}_batches")
    return limit


def explain_signature(trainer: Trainer, step: str, args: tuple[Any, ...], num_loaders: int) -> None:
    """Raise what one device raises for a step that does not take its arguments. Since 2.0.

    Args:
        trainer: In its setup.
        step: Name of the step.
        args: That the loop will give it.
        num_loaders: Read one after the other, in an evaluation.
    """
    module = trainer.lightning_module
    if step == "training_step":
        init_optimizers_refusal(module)
    else:
        assert trainer.state.stage is not None, "a Trainer that runs has a stage"
        stage = RunningStage.VALIDATING if step == "validation_step" else trainer.state.stage
        _verify_dataloader_idx_requirement((step,), num_loaders > 1, stage, module)
    function = getattr(module, step)
    try:
        inspect.signature(function).bind(*args)
    except TypeError:
        function(*args)  # raises before its first line


def init_optimizers_refusal(module: LightningModule) -> None:
    """Lightning refuses a training step for several optimizers where it makes them, after the trace."""
    if is_param_in_hook_signature(module.training_step, "optimizer_idx", explicit=True):
        init_optimizers(module)


def loop_of(trainer: Trainer, function: TrainerFn) -> Any:
    """The loop that asks for the loaders of a function; validation inside `fit` has its own. Since 2.0."""
    if function == TrainerFn.FITTING:
        return trainer.fit_loop
    return evaluation_loop(trainer)


def begin_resumed_epoch(trainer: Trainer) -> None:
    """Begin the epoch after one that was resumed with no batch left, which Lightning takes for that one.

    It would not be counted, and `on_train_epoch_start` not called. Since 2.6. To be deleted when Lightning
    begins that epoch itself.
    """
    progress: Any = trainer.fit_loop.epoch_progress
    if progress.current.ready == progress.current.processed:
        progress.increment_ready()
        call._call_callback_hooks(trainer, "on_train_epoch_start")
        call._call_lightning_module_hook(trainer, "on_train_epoch_start")
        progress.increment_started()


def around_epoch_start(
    trainer: Trainer, before: Callable[[Any, int, bool], None], after: Callable[[int], None]
) -> Callable[[], None]:
    """Call in before and after the loop over an epoch's batches gets its iterator; returns what undoes it.

    `before` gets the fetcher, the number of batches already seen of the data to come, and whether the loop
    makes a new iterator; `after` that number. Lightning resumes in the middle of an epoch with the loader's
    first batch. Since 2.0.
    """
    loop = trainer.fit_loop.epoch_loop
    original = loop.on_run_start

    def on_run_start(fetcher: Any) -> None:
        seen = 0 if _trains_after_the_end(loop) else loop.batch_progress.current.ready
        resuming = bool(getattr(trainer.fit_loop, "is_resuming", False)) or bool(loop.restarting)
        before(fetcher, seen, trainer.current_epoch > 0 and not resuming)
        original(fetcher)
        after(seen)

    return patch(loop, "on_run_start", on_run_start)


def _trains_after_the_end(loop: Any) -> bool:
    """Whether a resumed epoch whose last batch was seen trains on all batches of the next. Since 2.6.

    So it does where the loader has no length, and nothing has been validated since that batch.
    """
    over = loop._is_training_done and loop._is_validation_done
    return bool(loop.restarted_on_train_batch_end and loop.batch_progress.is_last_batch and not over)


def before_fetch(trainer: Trainer, call: Callable[[], None]) -> Callable[[], None]:
    """Call something each time the training loop turns to its loader; gives the undoing. Since 2.0.

    What a loop spends on loading can be told by no public hook: those around it are its batches' own.
    """
    loop = trainer.fit_loop.epoch_loop
    original = loop._on_before_fetch

    def on_before_fetch() -> None:
        call()
        original()

    return patch(loop, "_on_before_fetch", on_before_fetch)


def loader_states(loop: Any) -> list[Any]:
    """States of the loaders that have `state_dict`. Since 2.0."""
    combined = loop._combined_loader
    return list(combined._state_dicts()) if combined is not None else []


def loader_states_to_load(loop: Any) -> list[Any]:
    """What a checkpoint's loop state brought for the loaders. Since 2.0."""
    return list(loop._combined_loader_states_to_load or [])


def load_loader_states(loop: Any, states: list[Any]) -> None:
    """Give the loaders their states. Since 2.0."""
    loop._combined_loader._load_state_dicts(states)
    loop._combined_loader_states_to_load = []


def link_through(callback: ModelCheckpoint, link: Callable[[str, str], None]) -> Callable[[], None]:
    """Let `ModelCheckpoint(save_last="link")` link through us; it removes the old link first. Since 2.2."""
    return patch(callback, "_link_checkpoint", lambda trainer, filepath, linkpath: link(filepath, linkpath))


def count_as_existing(callback: ModelCheckpoint, coming: Callable[[str], bool]) -> Callable[[], None]:
    """Let the version counter of `ModelCheckpoint` see what has no name on disk yet. Since 2.3.

    Args:
        callback: Of the run that begins.
        coming: Whether a path will be a checkpoint; must say the same on every rank.

    Returns:
        Undoes it.
    """
    exists = type(callback).file_exists  # not what a run before has put on the instance

    def file_exists(filepath: Any, trainer: Trainer) -> bool:
        return exists(callback, filepath, trainer) or coming(filepath)

    return patch(callback, "file_exists", file_exists)


def prepared_batch(trainer: Trainer, batch: Any) -> Any:
    """A batch as the loops prepare it before the strategy moves it to the device. Since 1.6."""
    batch = trainer.precision_plugin.convert_input(batch)
    return trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)


def moves_batches_itself(module: LightningModule) -> bool:
    """Whether the user's code runs while a batch moves, such as random augmentation. Since 2.0."""
    hooks = ("transfer_batch_to_device", "on_after_batch_transfer")
    datamodule = getattr(module.trainer, "datamodule", None)
    found = [is_overridden(hook, module) for hook in hooks]
    return any(found) or (datamodule is not None and any(is_overridden(hook, datamodule) for hook in hooks))


def syncs_batch_norm(strategy: Any) -> bool:
    """`Trainer(sync_batchnorm=True)` reaches a strategy as a plugin that it must apply itself. Since 1.9."""
    return getattr(strategy, "_layer_sync", None) is not None


def brings_checkpoint_io(strategy: Any) -> bool:
    """A plugin of the user for one-file checkpoints; the public getter would make one. Since 1.6."""
    return type(getattr(strategy, "_checkpoint_io", None)) not in (type(None), TorchCheckpointIO)


def reads_checkpoints_itself(io: Any) -> bool:
    """Whether a plugin for checkpoints has its own way to read them, and not only to write. Since 1.6."""
    while isinstance(io, _WrappingCheckpointIO):
        io = io.checkpoint_io
    return io is not None and type(io).load_checkpoint is not TorchCheckpointIO.load_checkpoint


def configured_to_log_graph(logger: Any) -> bool:
    """`TensorBoardLogger(log_graph=True)` runs the model on rank 0 alone. Since 1.0."""
    return bool(vars(logger).get("_log_graph"))  # a DummyLogger answers every name


def uploads_checkpoints(logger: Any) -> bool:
    """`WandbLogger(log_model=...)` and its like: they upload files, not folders. Since 1.5."""
    return getattr(logger, "_log_model", False) in (True, "all")


def count_replicas_as_devices(trainer: Trainer, stages: int) -> None:
    """Let `ThroughputMonitor` count a batch once, not once for each stage of its pipeline. Since 2.1.

    What it calls a device is a replica then, also in the share of its peak that is used.
    """
    for callback in getattr(trainer, "callbacks", ()):
        for throughput in callback._throughputs.values() if isinstance(callback, ThroughputMonitor) else ():
            uncounted = throughput.world_size == trainer.world_size
            throughput.world_size = trainer.world_size // stages
            if throughput.available_flops and uncounted:
                throughput.available_flops *= stages


def claim_cpu(module: LightningModule) -> None:
    """Let a module that was built on the meta device say that it is on the CPU. Since 2.0."""
    for part in module.modules():
        device = vars(part).get("_device")
        if isinstance(device, torch.device) and device.type == "meta":
            vars(part)["_device"] = torch.device("cpu")


def claim_device(module: LightningModule, device: torch.device) -> None:
    """Let a module and what is in it say that they are on a device, as `Module.to` does. Since 2.0.

    `Module.to` itself would trip over what stands for the tensors of other stages.
    """
    _update_properties(module, device=device)
