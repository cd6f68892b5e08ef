"""What of a module is here: read, moved, made equal on all ranks, and whole again at the end."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_pipeline import _lightning
from lightning_pipeline._torch import may_take_data_of
from lightning_pipeline.checkpoint.contents import Owns, extra_states, load_extra_states
from lightning_pipeline.hooks import owners_at_end, units_at_end
from lightning_pipeline.model.split import OutsideSteps
from lightning_pipeline.model.state import InUnits, SharedParameter, Told
from lightning_pipeline.model.tensors import is_placeholder
from lightning_pipeline.ranks import Company, Groups
from lightning_pipeline.run.setup.copies import fill_copies
from lightning_pipeline.schedules import Plan
from lightning_pipeline.weights import gather_weights, receives_all


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


def listed_states(module: LightningModule) -> list[str]:
    """Names of all parameters and persistent buffers, in the order of one device's `state_dict`."""
    names = []
    for prefix, part in module.named_modules(remove_duplicate=False):
        apart = part._non_persistent_buffers_set
        held = [name for name, _ in part._parameters.items()]  # those of scripted modules are no dictionaries
        held += [name for name, _ in part._buffers.items() if name not in apart]
        names += [f"{prefix}.{name}" if prefix else name for name in held]
    return names


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
    if may_take_data_of(tensor, moved):
        tensor.data = moved
    else:  # between the CPU and a device of an extension of torch
        is_parameter = isinstance(tensor, nn.Parameter)
        torch.utils.swap_tensors(tensor, nn.Parameter(moved, tensor.requires_grad) if is_parameter else moved)
    tensor.grad = gradient


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
            _broadcast(tensor, source, groups, groups.data_parallel)
    for one in shared:
        group = groups.shared(one.stages, placement)
        if one.parameter is not None and group is not None:
            source = groups.numbering.global_rank(placement.rank_of(one.stages[0]), groups.replica)
            _broadcast(one.parameter, source, groups, group)


def equal_buffers(module: nn.Module, groups: Groups) -> None:
    """Give replicas the buffers of the first one, as DDP does before the forward that follows a step.

    Args:
        module: Of which this rank holds some buffers: the same as its fellows of other replicas.
        groups: Of the ranks.
    """
    assert groups.data_parallel is not None, "there are several replicas"
    source, by_kind = groups.numbering.global_rank(groups.rank, 0), dict[Any, list[Tensor]]()
    for buffer in module.buffers():
        if not (is_placeholder(buffer) or buffer.is_meta) and buffer.numel():
            by_kind.setdefault((buffer.device, buffer.dtype), []).append(buffer)
    with torch.no_grad():
        for buffers in by_kind.values():
            told = torch.cat([buffer.reshape(-1) for buffer in buffers])
            _broadcast(told, source, groups, groups.data_parallel)
            parts = told.split([buffer.numel() for buffer in buffers])
            for buffer, part in zip(buffers, parts, strict=True) if groups.replica else ():
                buffer.copy_(part.view_as(buffer))


def _broadcast(tensor: Tensor, source: int, groups: Groups, group: dist.ProcessGroup) -> None:
    """By the group that carries tensors of its device: before a run weights are in host memory."""
    carries = groups.flags_of(group) if tensor.device.type == "cpu" else group
    dist.broadcast(tensor.detach(), src=source, group=carries)


def make_whole(
    trainer: Trainer, split: OutsideSteps, owns: Owns, replica: Company, how: str, *, staged: bool
) -> dict[str, Tensor]:
    """The end of a run: gather what makes the module one again, on the CPU; all ranks of a replica call.

    Args:
        trainer: Of the run. Copies of the module's weights in its callbacks and data module become whole
            too, and those in attributes, globals and classes of the module's project.
        split: This rank's stages of it.
        owns: Whether this rank has the true state of a module that is neither parameter nor buffer.
        replica: The ranks that hold the module together.
        how: Who gets what the others hold; elsewhere that is left on the meta device. See
            `PipelineStrategy(gather_weights=...)`.
        staged: Whether ranks built their own stages only.

    Returns:
        What other stages hold, by name, where it is wanted.
    """
    module: LightningModule = trainer.lightning_module
    move(module, torch.device("cpu"))
    told = replica.gather("gathering extra states", extra_states(module, owns))
    extra: dict[str, Any] = {}
    for one in told.values():
        extra = {**one, **extra}
    load_extra_states(module, extra)
    everything = receives_all(how, replica.rank, staged=staged)

    def gather(own: Any) -> list[Any]:
        return list(replica.gather("filling copies that callbacks hold", own).values())

    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    fill_copies(callbacks, owners_at_end(trainer), module, gather, keep=everything)
    own, held = split.owned_states(transient=True), held_states(module, transient=True)
    return gather_weights(replica, own, held, everything=everything)


def kept_by_units(units: InUnits, replica: Company, how: str, *, staged: bool) -> list[Told]:
    """At the end of a run: what units of all ranks keep, where this rank gets it; all of a replica call.

    Args:
        units: Of this rank.
        replica: The ranks that hold the module together.
        how: Who gets what the others hold.
        staged: Whether ranks built their own stages only.
    """
    return units_at_end(units, replica, partial(receives_all, how, staged=staged))
