"""Fills what a rank is to hold and has no values of, as after a run that left weights where they were."""

from collections.abc import Collection, Iterator

from torch import Tensor, nn

from lightning_pipeline.errors import SplitError
from lightning_pipeline.ranks import Company
from lightning_pipeline.weights.transfer import once, transfer

_SHOWN = 5


def named_states(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers under all their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def is_whole(module: nn.Module) -> bool:
    """Whether a module has all its weights: none stands on the meta device."""
    return not any(tensor.is_meta for _, tensor in named_states(module))


def fetch_absent(module: nn.Module, needed: Collection[str], company: Company) -> None:
    """Get tensors on the meta device that this rank needs from the ranks that have them; all ranks call.

    Args:
        module: Alike on all ranks, but for what is on the meta device.
        needed: Names of what this rank is to hold.
        company: The ranks.

    Raises:
        SplitError: No rank has it.
    """
    states = dict(named_states(module))
    first = once(states)
    real = {name: tensor for name, tensor in first.items() if not tensor.is_meta}
    holders = {id(states[name]) for name in needed}
    missing = {name for name, tensor in first.items() if tensor.is_meta and id(tensor) in holders}
    came: dict[int, Tensor] = {}

    def put(name: str, tensor: Tensor) -> None:
        came[id(states[name])] = tensor

    given = transfer(company, "fetching weights from other ranks", real, lambda names: missing, put)
    lost = sorted(missing - given)
    if lost:
        more = f" and {len(lost) - _SHOWN} more" if len(lost) > _SHOWN else ""
        raise SplitError(
            f"{', '.join(lost[:_SHOWN])}{more} have no values on any rank: they are on the meta device. "
            "Build the module with its weights, or in configure_model"
        )
    replace(module, came)


def replace(module: nn.Module, by: dict[int, Tensor]) -> None:
    """Put values in the places of tensors on the meta device; tied ones stay tied.

    Args:
        module: To fill.
        by: The values, by `id` of what they are for.
    """
    made: dict[int, Tensor] = {}
    for part in module.modules():
        for held in (part._parameters, part._buffers):
            for name, tensor in held.items():
                if tensor is not None and id(tensor) in by:
                    value = by[id(tensor)]
                    if isinstance(tensor, nn.Parameter) and id(tensor) not in made:
                        value = nn.Parameter(value, requires_grad=tensor.requires_grad)
                    held[name] = made.setdefault(id(tensor), value)  # type: ignore[assignment]
