"""Trace a module that has no weights: what stands in for parameters and buffers on the meta device."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from lightning_pipeline.errors import SplitError
from lightning_pipeline.model.tensors.placeholder import PlaceholderMode, user_line
from lightning_pipeline.model.tensors.structure import TensorSpec
from lightning_pipeline.model.tensors.tags import Tag


class StandIns:
    """Placeholders on the CPU in the place of a module's meta tensors, tied ones tied.

    Whoever puts them in keeps the module's state and restores it; see `ModuleState`.

    Args:
        mode: The placeholders' mode.
    """

    def __init__(self, mode: PlaceholderMode) -> None:
        self._mode = mode
        self._made: dict[int, Tensor] = {}

    def put_into(self, root: nn.Module) -> bool:
        """Replace parameters, buffers and plain attributes on the meta device; whether there were any."""
        for module in root.modules():
            for held in (module._parameters, module._buffers, vars(module)):
                self._replace(held)
        return bool(self._made)

    def _replace(self, held: dict[str, Any]) -> None:
        for name, tensor in held.items():
            if isinstance(tensor, Tensor) and tensor.is_meta:
                held[name] = self._stand_in(tensor)

    def _stand_in(self, tensor: Tensor) -> Tensor:
        made = self._made.get(id(tensor))
        if made is None:
            spec = TensorSpec.of(tensor.detach())._replace(device="cpu")
            made = self._mode.make(spec)
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, requires_grad=tensor.requires_grad)
            self._made[id(tensor)] = made
        return made


def weights_needed(tags: Iterable[Tag], root: nn.Module) -> SplitError:
    """The error for code that looks at the values of a parameter or buffer that has none."""
    names = sorted({tag.name for tag in tags if tag.kind == "state"})
    return SplitError(
        f"the code looks at values of {', '.join(map(repr, names))}, which has none: the module is on the "
        f"meta device. Build it with its weights, or keep such a value outside of tensors "
        f"[at {user_line(root)}]"
    )
