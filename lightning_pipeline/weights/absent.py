"""Fills what a rank is to hold and has no values of, as after a run that left weights where they were."""

from collections.abc import Collection

from torch import Tensor, nn

from lightning_pipeline.errors import SplitError
from lightning_pipeline.model.construction import named_states, replace
from lightning_pipeline.ranks import Company
from lightning_pipeline.weights.transfer import once, transfer

_SHOWN = 5


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
