"""From a whole LightningModule to this rank's stages, and back to the whole one."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_pipeline import _lightning
from lightning_pipeline.checkpoint.contents import Owns, extra_states, load_extra_states
from lightning_pipeline.errors import PartitionError, SplitError, StageFailedError
from lightning_pipeline.hooks import LogRecorder, fill_copies, owners_beside
from lightning_pipeline.model.construction import Construction, is_whole, sizes_of
from lightning_pipeline.model.cut import Partition, StageTable, partition, stages_of_states
from lightning_pipeline.model.replay import SplitModel
from lightning_pipeline.model.state import SharedParameter
from lightning_pipeline.model.tensors import ModuleState, ObjectState, is_placeholder
from lightning_pipeline.model.trace import Owner, Trace, find_units, needs_values, trace_step
from lightning_pipeline.ranks import Company, Groups, Outlet
from lightning_pipeline.schedules import Plan
from lightning_pipeline.settings import Settings
from lightning_pipeline.weights import fetch_absent, gather_weights, receives_all


@dataclass(frozen=True)
class Cut:
    """Where the module is cut, the same on every rank.

    Attributes:
        partition: What the split is made from.
        table: The stages, as rank 0 sees them.
        later: Traces of other steps that the run will call, made while the module was whole.
    """

    partition: Partition
    table: StageTable
    later: tuple[Trace, ...] = ()


def choose_cut(
    module: LightningModule,
    step: str,
    args: tuple[Any, ...],
    num_stages: int,
    settings: Settings,
    forward_context: Callable[[], AbstractContextManager[Any]],
    device: torch.device,
    from_rank_zero: Outlet,
    agreed: Callable[[Callable[[], Any]], Any],
    built: Construction | None = None,
    trainer: Trainer | None = None,
) -> Cut:
    """Trace a step and choose the stages. Rank 0 chooses: its batch may have other sizes than the others'.

    Args:
        module: Whole, on CPU.
        step: Name of the step to trace.
        args: Its arguments, of one micro-batch.
        num_stages: Stages of all ranks.
        settings: For `partition` and `units`.
        forward_context: The precision plugin's.
        device: Of this rank, where its batch is.
        from_rank_zero: To all ranks.
        agreed: Does local work on all ranks or raises on all of them.
        built: The weights that the module has not yet. Where the step cannot be traced without, all are made.
        trainer: Whose data module, callbacks and so on the step may change.

    Raises:
        SplitError: The step cannot be cut.
        PartitionError: The asked-for stages are not possible.
    """

    def choose() -> Partition:
        units = find_units(module, at_least=num_stages, keep_whole=settings.units)
        trace = trace_step(
            module,
            step,
            args,
            units=units,
            forward_context=forward_context,
            device=device,
            others=_beside(trainer),
        )
        return partition(trace, num_stages, how=settings.partition)

    try:
        chosen: Partition = agreed(choose)
    except PartitionError:
        raise
    except (SplitError, StageFailedError) as error:
        if not built:
            raise
        built.make()
        rank_zero_warn(
            f"the step cannot be traced without weights, so every process built the whole module, "
            f"{sizes_of(module.parameters()) / 2**20:,.1f} MiB: {error}"
        )
        chosen = agreed(choose)
    table: StageTable = from_rank_zero.share(chosen.table)
    names = [row.units[0] for row in table.rows[1:]]
    if names != [row.units[0] for row in chosen.table().rows[1:]]:
        chosen = agreed(lambda: partition(chosen.trace, num_stages, how=names))
    return Cut(chosen, table)


def _beside(trainer: Trainer | None) -> list[Owner]:
    return [] if trainer is None else owners_beside(trainer)


def trace_later(
    module: LightningModule, cut: Cut, step: str, args: tuple[Any, ...],
    forward_context: Callable[[], AbstractContextManager[Any]], device: torch.device,
    trainer: Trainer | None = None,
) -> Cut:  # fmt: skip
    """The cut with the trace of another step, so that what no stage could run is refused before the run.

    A step that stumbles over what hooks before it are to set is left to be traced when it comes.

    Args:
        module: Whole, on CPU, in the mode in which the step is called.
        cut: Of its first step.
        step: Name of the other one.
        args: Its arguments, of one micro-batch.
        forward_context: The precision plugin's.
        device: Of this rank, where its batch is.
        trainer: Whose data module, callbacks and so on the step may change.

    Raises:
        SplitError: The step cannot be cut.
    """
    try:
        with torch.no_grad():
            trace = trace_step(
                module, step, args, units=cut.partition.trace.units, forward_context=forward_context,
                seen=cut.partition.trace.calls, device=device, others=_beside(trainer),
            )  # fmt: skip
    except SplitError as error:
        if needs_values(error):
            raise
        return cut
    return replace(cut, later=(*cut.later, trace))


def materialize(
    module: LightningModule, cut: Cut, stages: tuple[int, ...], world: Company, replica: Company,
    built: Construction | None,
) -> None:  # fmt: skip
    """Give what this rank is to hold its values, where the module has none; all ranks call.

    Args:
        module: Not split.
        cut: The same on every rank.
        stages: Of this rank.
        world: All ranks.
        replica: Those that hold the module together.
        built: The weights that can be made.
    """
    if world.any_of("looking for weights", not is_whole(module))[0]:
        chosen = cut.partition
        needed = stages_of_states(module, chosen.trace, chosen.stage_of, chosen.num_stages)
        own = {name for name, users in needed.items() if set(users) & set(stages)}
        if built is not None:
            built.make(own)
        fetch_absent(module, own, replica)


def make_whole(
    module: LightningModule, callbacks: Sequence[Callback], split: SplitModel, owns: Owns, replica: Company,
    how: str, *, staged: bool,
) -> None:  # fmt: skip
    """The end of a run: the module is one again, on the CPU; all ranks of a replica call.

    Args:
        module: Of the run.
        callbacks: Of the run; copies of the module in them become whole too.
        split: This rank's stages of it.
        owns: Whether this rank has the true state of a module that is neither parameter nor buffer.
        replica: The ranks that hold the module together.
        how: Who gets what the others hold; elsewhere that is left on the meta device. See
            `PipelineStrategy(gather_weights=...)`.
        staged: Whether ranks built their own stages only.
    """
    move(module, torch.device("cpu"))
    told = replica.gather("gathering extra states", extra_states(module, owns))
    extra: dict[str, Any] = {}
    for one in told.values():
        extra = {**one, **extra}
    load_extra_states(module, extra)
    everything = receives_all(how, replica.rank, staged=staged)

    def gather(own: Any) -> list[Any]:
        return list(replica.gather("filling copies that callbacks hold", own).values())

    fill_copies(callbacks, module, gather, keep=everything)
    own, held = split.owned_states(transient=True), held_states(module, transient=True)
    split.restore(gather_weights(replica, own, held, everything=everything), on_meta=True)


@contextmanager
def as_the_loop_will(trainer: Trainer, step: str) -> Iterator[None]:
    """Inside, the module is in the mode in which the loop calls the step; at the end all is as before.

    Args:
        trainer: In its setup.
        step: To be traced.
    """
    attributes = dict(vars(trainer))
    modes = [(part, part.training) for part in trainer.lightning_module.modules()]
    if step != "training_step":
        trainer.lightning_module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode
        vars(trainer).clear()
        vars(trainer).update(attributes)


def split_module(
    module: LightningModule,
    cut: Cut,
    stages: tuple[int, ...],
    recorder: LogRecorder,
    forward_context: Callable[[], AbstractContextManager[Any]],
    device: torch.device,
    seed: int,
    trainer: Trainer,
) -> SplitModel:
    """Keep this rank's stages of a module.

    Args:
        module: Whole.
        cut: The same on every rank.
        stages: This rank's.
        recorder: Where `self.log` goes during a step.
        forward_context: The precision plugin's.
        device: Of this rank.
        seed: Of the random numbers in steps; the same on every rank.
        trainer: Whose data module, callbacks and so on a step may change.
    """
    sinks = {"log": recorder.log, "log_dict": recorder.log_dict}
    return SplitModel(
        module, cut.partition, stages=list(stages), sinks=sinks, forward_context=forward_context, seed=seed,
        later=cut.later, device=device,
        others=lambda: owners_beside(trainer),
    )  # fmt: skip


def held_states(module: LightningModule, *, transient: bool = False) -> dict[str, Tensor]:
    """Parameters and persistent buffers that this rank holds, under all their names in the whole module.

    Args:
        module: Split or whole.
        transient: Whether non-persistent buffers are among them.
    """
    held: dict[str, Tensor] = {}
    for prefix, part in module.named_modules(remove_duplicate=False):
        left_out = set() if transient else part._non_persistent_buffers_set
        kept = {k: v for k, v in part._buffers.items() if k not in left_out}
        for name, tensor in (*part._parameters.items(), *kept.items()):
            if tensor is not None and not is_placeholder(tensor):
                held[f"{prefix}.{name}" if prefix else name] = tensor
    return held


def move(module: LightningModule, device: torch.device) -> None:
    """Move what this rank holds. `Module.to` would trip over what stands for other stages' tensors."""
    for part in module.modules():
        for tensor in (*part._parameters.values(), *part._buffers.values()):
            if tensor is not None and not is_placeholder(tensor) and tensor.device != device:
                _move_tensor(tensor, device)
        if isinstance(part, Metric):
            part.to(device)
    _lightning.claim_device(module, device)


def _move_tensor(tensor: Tensor, device: torch.device) -> None:
    """Move a parameter or buffer, which stays the object that it is, and its gradient."""
    gradient = None if tensor.grad is None else tensor.grad.to(device)
    moved, tensor.grad = tensor.detach().to(device), None
    if torch._has_compatible_shallow_copy_type(tensor, moved):
        tensor.data = moved
    else:  # between the CPU and a device of an extension of torch
        is_parameter = isinstance(tensor, nn.Parameter)
        torch.utils.swap_tensors(tensor, nn.Parameter(moved, tensor.requires_grad) if is_parameter else moved)
    tensor.grad = gradient


def _give_memory(tensor: Tensor, moved: Tensor) -> None:
    if torch._has_compatible_shallow_copy_type(tensor, moved):
        tensor.data = moved
        return
    grad, tensor.grad = tensor.grad, None  # devices of torch's extensions, where `data` cannot be set
    made = nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved
    torch.utils.swap_tensors(tensor, made)
    tensor.grad = grad


@contextmanager
def hooks_undone(trainer: Trainer) -> Iterator[None]:
    """Inside, what the user's transfer hooks note in the module or data module is forgotten at the end.

    Args:
        trainer: Whose first batch is looked at before the run.
    """
    data: Any = getattr(trainer, "datamodule", None)
    attributes = {} if data is None else dict(vars(data))
    state = ModuleState(trainer.lightning_module)
    containers = ObjectState({name: value for name, value in attributes.items() if name != "trainer"})
    try:
        yield
    finally:
        state.restore()
        containers.restore()
        if data is not None:
            vars(data).clear()
            vars(data).update(attributes)


def seed_of_run(from_rank_zero: Outlet) -> int:
    """The seed that all ranks draw from in steps: rank 0's."""
    return int(from_rank_zero.share(torch.initial_seed)) % 2**63


def start_equal(
    tensors: Iterable[Tensor], shared: Iterable[SharedParameter], groups: Groups, placement: Plan
) -> None:
    """Give replicas, and stages that share a parameter, the same values, seeded or not.

    Args:
        tensors: All that this rank holds, in the order of the other replicas.
        shared: Parameters of several stages.
        groups: Of the ranks.
        placement: Which rank holds which stage.
    """
    if groups.data_parallel is not None and groups.data_parallel.size() > 1:
        source = groups.numbering.global_rank(groups.rank, 0)
        for tensor in tensors:
            dist.broadcast(tensor.detach(), src=source, group=groups.data_parallel)
    for one in shared:
        group = groups.shared(one.stages, placement)
        if one.parameter is not None and group is not None:
            source = groups.numbering.global_rank(placement.rank_of(one.stages[0]), groups.replica)
            dist.broadcast(one.parameter.detach(), src=source, group=group)


def beside_module(trainer: Trainer) -> list[Any]:
    """What a step can reach and change beside the module: data module, optimizers' groups, schedulers."""
    data = getattr(trainer, "datamodule", None)
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    groups = [optimizer.param_groups for optimizer in trainer.optimizers]
    return [*([] if data is None else [data]), *groups, *schedulers]


@contextmanager
def loggers_set_aside(trainer: Trainer) -> Iterator[None]:
    """Inside, what a step gives to `self.logger` is dropped."""
    loggers = trainer.loggers
    trainer.loggers = [DummyLogger() for _ in loggers]
    try:
        yield
    finally:
        trainer.loggers = loggers
