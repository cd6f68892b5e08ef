"""What stands in for weights while a step is traced: they are on another device than the step, or on none."""

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeline.errors import SplitError
from lightning_pipeline.model.tensors.operations import is_placeholder
from lightning_pipeline.model.tensors.placeholder import PlaceholderMode
from lightning_pipeline.model.tensors.shape_rules import TensorSpec
from lightning_pipeline.model.tensors.tags import Tag
from lightning_pipeline.model.tensors.user_code import user_line
from lightning_pipeline.registry import parameters_of

_SHARE_OF_FREE_MEMORY = 4  # a module that takes more than this part of what is free is traced without copies


class StandIns:
    """Parameters and buffers on the device of a run, while the module is still elsewhere; tied ones tied.

    Tensors on the meta device are replaced by placeholders. Where the run is on another device than the
    module, buffers are copied there, since steps read their values. Parameters are copied if the device has
    room for all of them, for a model may be larger than it; otherwise placeholders stand for them.

    Whoever puts them in keeps the module's state and restores it; see `ModuleState`.

    Args:
        mode: The placeholders' mode.
        device: Of the run.
    """

    def __init__(self, mode: PlaceholderMode, device: torch.device) -> None:
        self._mode, self._device = mode, device
        self._made: dict[int, Tensor] = {}
        self._originals: dict[int, Tensor] = {}  # of placeholders, by `id` of the placeholder
        self._copies_parameters = False

    def put_into(self, root: nn.Module) -> bool:
        """Replace what is not on the device; whether values of parameters or buffers are missing now."""
        away = [p for p in parameters_of(root) if not p.is_meta and self._is_away(p)]
        self._copies_parameters = not away or _has_room(self._device, sum(p.nbytes for p in away))
        for module in root.modules():
            for held in (module._parameters, module._buffers):
                self._replace(held, self._is_away)
            self._replace(vars(module), lambda _: False)
        return bool(self._originals)

    @contextmanager
    def with_values(self, module: nn.Module) -> Iterator[bool]:
        """Inside, a part of the module has its own values on the device.

        Args:
            module: The part.

        Yields:
            Whether it has; what was built on the meta device has none.
        """
        put: list[tuple[MutableMapping[str, Any], str, Tensor]] = []
        held: Any
        copies: dict[int, Tensor] = {}
        complete = True
        try:
            for part in module.modules():
                for held in (part._parameters, part._buffers, vars(part)):
                    for name, tensor in list(held.items()):
                        original = self._originals.get(id(tensor)) if isinstance(tensor, Tensor) else None
                        if original is None:
                            continue
                        complete &= not original.is_meta
                        put.append((held, name, tensor))
                        if not original.is_meta:
                            copy = copies.setdefault(id(tensor), _copy(original, self._device))
                            held[name] = copy.requires_grad_(tensor.requires_grad)
            yield complete
        finally:
            for held, name, tensor in put:
                held[name] = tensor

    def _is_away(self, tensor: Tensor) -> bool:
        return tensor.device.type != self._device.type and not is_placeholder(tensor)

    def _replace(self, held: MutableMapping[str, Any], is_away: Callable[[Tensor], bool]) -> None:
        for name, tensor in held.items():
            if isinstance(tensor, Tensor) and (tensor.is_meta or is_away(tensor)):
                held[name] = self._stand_in(tensor)

    def _stand_in(self, tensor: Tensor) -> Tensor:
        made = self._made.get(id(tensor))
        if made is None:
            copied = self._copies_parameters or not isinstance(tensor, nn.Parameter)
            has_value = copied and not tensor.is_meta
            made = _copy(tensor, self._device) if has_value else self._without_value(tensor)
            self._made[id(tensor)] = made
        return made

    def _without_value(self, tensor: Tensor) -> Tensor:
        spec = TensorSpec.of(tensor.detach())._replace(device=self._device.type)
        made = self._mode.make(spec)
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=tensor.requires_grad)
        self._originals[id(made)] = tensor
        return made


def _copy(tensor: Tensor, device: torch.device) -> Tensor:
    copy = tensor.detach().to(device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(copy, requires_grad=tensor.requires_grad)
    return copy


def _has_room(device: torch.device, num_bytes: int) -> bool:
    """Whether the device has plenty of memory for this; no where it does not tell."""
    ask = getattr(torch.get_device_module(device), "mem_get_info", None)
    return ask is not None and num_bytes * _SHARE_OF_FREE_MEMORY <= int(ask(device)[0])


def weights_needed(tags: Iterable[Tag], root: nn.Module) -> SplitError:
    """The error for code that looks at the values of a parameter or buffer that has none."""
    names = sorted({tag.name for tag in tags if tag.kind == "state"})
    return SplitError(
        f"the code looks at values of {', '.join(map(repr, names))}, which has none while the step is "
        "traced: the module is on the meta device, or too large for the device. Build it with its weights, "
        f"or keep such a value outside of tensors [at {user_line(root)}]"
    )
