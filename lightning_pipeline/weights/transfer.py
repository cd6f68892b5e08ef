"""Tensors by name from the ranks that have them to the ranks that want them, one after the other."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipeline.ranks import Company


@dataclass(frozen=True, slots=True)
class Offer:
    """A tensor that a rank has.

    Attributes:
        shape: Its sizes.
        dtype: Its data type.
        plain: Whether its bytes are all of it; else it travels pickled.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    plain: bool

    @classmethod
    def of(cls, tensor: Tensor) -> "Offer":
        """Describe a tensor."""
        plain = type(tensor.detach()) is Tensor and tensor.layout == torch.strided and not tensor.is_quantized
        return cls(tuple(tensor.shape), tensor.dtype, plain)


def once(own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor under its first name: tied ones travel once."""
    first: dict[int, str] = {}
    for name, tensor in own.items():
        first.setdefault(id(tensor), name)
    return {name: own[name] for name in first.values()}


def transfer(
    company: Company,
    what: str,
    own: Mapping[str, Tensor],
    wants: Callable[[Collection[str]], Collection[str]],
    put: Callable[[str, Tensor], None],
) -> set[str]:
    """Give each rank the tensors that it wants, in the order of names; all ranks call.

    A rank has one tensor more in memory than it keeps: the one that is on its way.

    Args:
        company: The ranks.
        what: For messages: `gathering weights`.
        own: What this rank gives, by name; where several ranks give a name, the first one's counts.
        wants: Told all names that are given, says which this rank is to get.
        put: Takes a tensor that has come, on the CPU. Not called for what this rank itself gives.

    Returns:
        All names that are given.
    """
    offers = company.gather(what, {name: Offer.of(tensor) for name, tensor in own.items()})
    sources: dict[str, tuple[int, Offer]] = {}
    for rank, offered in offers.items():
        for name, offer in offered.items():
            sources.setdefault(name, (rank, offer))
    wanted = company.gather(what, set(wants(sources)))
    rank = company.rank
    for name, (source, offer) in sources.items():
        receivers = [one for one in company.ranks if name in wanted[one] and one != source]
        if receivers:
            given = own[name] if rank == source else None
            tensor = _move(company, f"{what}: {name}", source, receivers, given, offer)
            if rank in receivers:
                put(name, tensor)
    return set(sources)


def _move(
    company: Company, what: str, source: int, receivers: list[int], tensor: Tensor | None, offer: Offer
) -> Any:
    if not offer.plain:
        return company.share(what, lambda: None if tensor is None else tensor.detach().cpu(), source)
    if tensor is not None:
        moved = tensor.detach().cpu().contiguous()
    elif company.rank in receivers:
        moved = torch.empty(offer.shape, dtype=offer.dtype)
    else:
        moved = torch.empty(0)
    if not offer.shape or 0 not in offer.shape:
        if len(receivers) == len(company.ranks) - 1:
            company.broadcast(what, _bytes(moved), source)
        elif company.rank == source or company.rank in receivers:
            _hand(company, what, source, receivers, _bytes(moved))
    return moved


def _hand(company: Company, what: str, source: int, receivers: list[int], data: Tensor) -> None:
    """From rank to rank; those that want nothing go on."""
    with company.exchange(what) as group:
        if company.rank != source:
            dist.recv(data, src=source, group=group)
            return
        for receiver in receivers:
            dist.send(data, dst=receiver, group=group)


def _bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor."""
    return tensor.reshape(-1).view(torch.uint8)
