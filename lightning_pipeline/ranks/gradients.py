"""Gradients of several ranks: averaged over replicas, summed over stages, clipped, led through a gather."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

_PIECE_BYTES = 32 * 2**20


class _Rows(torch.autograd.Function):
    """What all ranks of a group have, stacked."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        value = value.contiguous()
        rows = [torch.empty_like(value) for _ in range(group.size())]
        dist.all_gather(rows, value, group=group)
        return torch.stack(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _through(_OwnRow, grads[0], ctx.group), None


class _OwnRow(torch.autograd.Function):
    """This rank's row of the sum over all ranks of a group."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = rows.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total[group.rank()]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _through(_Rows, grads[0], ctx.group), None


def gather_rows(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather tensors of one shape from all ranks of a group, with gradients, also of these.

    torch's own (`torch.distributed.nn.functional.all_gather`, 2.13) counts ranks over all processes in its
    backward with gloo, and fails in a group of some of them.

    Args:
        value: This rank's.
        group: The ranks; all of them go backward, too.

    Returns:
        The tensors, stacked in the order of ranks: (ranks, *value.shape).
    """
    return _through(_Rows, value, group)


def _through(function: type[torch.autograd.Function], value: Tensor, group: dist.ProcessGroup) -> Tensor:
    return cast(Tensor, function.apply(value, group))


def average_gradients(
    parameters: Iterable[Parameter],
    group: dist.ProcessGroup | None,
    flags: dist.ProcessGroup | None = None,
    *,
    numbers: Sequence[int] = (),
) -> list[int]:
    """Average gradients over the data-parallel replicas.

    A gradient that no replica has stays None; one that some have counts as zero on the others, so all
    replicas take the same step. Each is divided before they are added up, as DDP does: the average of finite
    numbers is finite, though their sum may not be.

    Args:
        parameters: This rank's, in the same order on all replicas. Those that need no gradient are skipped.
        group: The replicas. None or a single one: nothing to do.
        flags: The same ranks, for tensors of the host, where the group carries those of a device: reading
            which gradients there are off the device would wait for it.
        numbers: To be added up over the replicas along with it; as many on each.

    Returns:
        Those sums.
    """
    if group is None or group.size() == 1:
        return list(numbers)
    own = [p for p in parameters if p.requires_grad]
    return _reduce(own, group, flags, divide_by=group.size(), numbers=numbers)


def sum_gradients(
    parameters: Iterable[Parameter], group: dist.ProcessGroup | None, flags: dist.ProcessGroup | None = None
) -> None:
    """Sum gradients of parameters that several stages share, before clipping and stepping.

    Args:
        parameters: This rank's copies, in the same order on all ranks of the group.
        group: The ranks that hold a copy. None: one rank holds all.
        flags: The same ranks, as of `average_gradients`.
    """
    if group is not None and group.size() > 1:
        _reduce([p for p in parameters if p.requires_grad], group, flags, divide_by=1)


def sum_shared(
    copies: Iterable[tuple[tuple[int, ...], Parameter | None]],
    group_of: Callable[[tuple[int, ...]], dist.ProcessGroup | None],
    flags_of: Callable[[dist.ProcessGroup | None], dist.ProcessGroup | None] = lambda group: group,
) -> None:
    """Sum the gradients of all parameters that several stages share.

    Args:
        copies: The stages of each, in the same order everywhere, and this rank's copy, if any.
        group_of: The ranks that hold these stages; None where one rank holds them all.
        flags_of: The same ranks as a group, as of `average_gradients`.
    """
    every = list(copies)
    for stages in sorted({stages for stages, _ in every}):
        group = group_of(stages)
        sum_gradients([own for of, own in every if of == stages and own is not None], group, flags_of(group))


def _reduce(
    parameters: Sequence[Parameter],
    group: dist.ProcessGroup,
    flags: dist.ProcessGroup | None,
    *,
    divide_by: int,
    numbers: Sequence[int] = (),
) -> list[int]:
    if not parameters and not numbers:
        return []
    present = torch.tensor([*(p.grad is not None for p in parameters), *numbers], dtype=torch.int64)
    works = [_start(present, flags or group)]
    pieces = [(piece, _flat(piece, divide_by)) for piece in _pieces(parameters)]
    works += [_start(flat, group) for _, flat in pieces]
    for work, _ in works:
        work.wait()
    told = works[0][1].tolist()
    somewhere = dict(zip(parameters, told, strict=False))
    for piece, flat in pieces:
        _hand_back(piece, flat, somewhere)
    return [int(number) for number in told[len(parameters) :]]


def _start(tensor: Tensor, group: dist.ProcessGroup) -> tuple[dist.Work, Tensor]:
    """Start to sum a tensor; it is held with its handle until that is done."""
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None, "an asynchronous collective returns a handle"
    return work, tensor


def _pieces(parameters: Sequence[Parameter]) -> Iterator[list[Parameter]]:
    """Runs of parameters of one type and device that are reduced as one tensor."""
    piece: list[Parameter] = []
    size = 0
    for parameter in parameters:
        kind = (parameter.dtype, parameter.device)
        if piece and (kind != (piece[0].dtype, piece[0].device) or size >= _PIECE_BYTES):
            yield piece
            piece, size = [], 0
        piece.append(parameter)
        size += parameter.numel() * parameter.element_size()
    if piece:
        yield piece


def _flat(piece: Sequence[Parameter], divide_by: int) -> Tensor:
    with torch.no_grad():
        flat = torch.cat([(p.new_zeros(p.shape) if p.grad is None else p.grad).reshape(-1) for p in piece])
        return flat.div_(divide_by) if divide_by > 1 else flat


def _hand_back(piece: Sequence[Parameter], flat: Tensor, somewhere: dict[Parameter, int]) -> None:
    start = 0
    with torch.no_grad():
        for parameter in piece:
            end = start + parameter.numel()
            if somewhere[parameter]:
                reduced = flat[start:end].view(parameter.shape)
                if parameter.grad is None:
                    parameter.grad = reduced.clone()
                else:
                    parameter.grad.copy_(reduced)
            start = end


def global_norm(
    gradients: Sequence[Tensor], groups: Sequence[dist.ProcessGroup], device: torch.device
) -> Tensor:
    """The 2-norm of gradients that are spread over ranks.

    Args:
        gradients: This rank's share, each counted by one rank only.
        groups: Process groups to sum over, one after the other. May be empty.
        device: Where the sum travels.

    Returns:
        float64 scalar, the same on every rank of the groups; inf or nan when any rank's share is.
    """
    squares = [torch.linalg.vector_norm(gradient.detach(), dtype=_wide(gradient)) for gradient in gradients]
    total = torch.zeros((), dtype=torch.float64, device=device)
    if squares:
        total = torch.stack([norm.to(device, torch.float64) for norm in squares]).square().sum()
    for group in groups:
        dist.all_reduce(total, group=group)
    return total.sqrt()


def _wide(gradient: Tensor) -> torch.dtype | None:
    return torch.float32 if gradient.dtype in (torch.float16, torch.bfloat16) else None


def clip_to_norm(
    gradients: Iterable[Tensor], norm: Tensor, max_norm: float, *, error_if_nonfinite: bool = False
) -> None:
    """Scale gradients in place so that the norm they belong to is at most `max_norm`, as torch does.

    Args:
        gradients: This rank's gradients.
        norm: Their norm over all ranks.
        max_norm: The largest norm allowed.
        error_if_nonfinite: Raise when the norm is inf or nan; every rank decides from the same number.

    Raises:
        RuntimeError: As `torch.nn.utils.clip_grad_norm_` does.
    """
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"the total norm of the gradients of all stages is {norm.item()}, so it cannot be clipped"
        )
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.detach().mul_(scale.to(gradient.device, gradient.dtype))


def clip_by_norm(
    parameters: Iterable[Tensor], max_norm: float, *, elsewhere: Collection[int],
    groups: Sequence[dist.ProcessGroup], device: torch.device, error_if_nonfinite: bool,
) -> Tensor:  # fmt: skip
    """Clip gradients by their norm over all ranks.

    Args:
        parameters: This rank's.
        max_norm: The largest norm allowed.
        elsewhere: Identities of parameters here that another rank counts, such as tied ones.
        groups: The ranks.
        device: Where the sum travels.
        error_if_nonfinite: Raise when the norm is inf or nan.

    Returns:
        The norm before, the same on every rank.
    """
    own = [(p, p.grad) for p in parameters if p.grad is not None]
    norm = global_norm([grad for p, grad in own if id(p) not in elsewhere], groups, device)
    clip_to_norm([grad for _, grad in own], norm, max_norm, error_if_nonfinite=error_if_nonfinite)
    return norm
