"""Where a module keeps its tensors, and how others are put in their places."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from lightning_pipeline.model.tensors import contents_of, filled_by, items_of, refill
from lightning_pipeline.registry import named_parameters_of

_REGISTRIES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
_DEPTH = 4  # of containers in attributes


def named_states(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers under all their names."""
    yield from named_parameters_of(module, remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def replace(module: nn.Module, by: dict[int, Tensor]) -> None:
    """Put tensors in the places of others; tied ones stay tied, and parameters stay parameters.

    Args:
        module: To be changed.
        by: The new ones, by `id` of the old ones.
    """
    old = {id(tensor): tensor for _, tensor in named_states(module) if id(tensor) in by}
    made = {number: _alike(tensor, by[number]) for number, tensor in old.items()}

    def other(tensor: Tensor) -> Tensor:
        return made.get(id(tensor), tensor)

    for part in module.modules():
        for held in (part._parameters, part._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    held[name] = other(tensor)  # type: ignore[assignment]
        for name, value in vars(part).items():
            if name not in _REGISTRIES:
                vars(part)[name] = substituted(value, other)
        if isinstance(part, nn.RNNBase):
            part._init_flat_weights()  # holds references to its parameters beside the list of them


def _alike(old: Tensor, new: Tensor) -> Tensor:
    """The new tensor with all that the old one is told by beside its values."""
    if not isinstance(old, nn.Parameter):
        return new
    made = nn.Parameter(new, requires_grad=old.requires_grad)
    known = {*vars(old.detach()), "_is_param"}  # what a tensor without memory has of its own
    for name, value in vars(old).items():
        if name not in known:
            setattr(made, name, value)
    made._backward_hooks = old._backward_hooks
    return made


def substituted(value: Any, other: Callable[[Tensor], Any], depth: int = _DEPTH) -> Any:
    """A value of an attribute with other tensors in it; containers are changed in place, tuples are not.

    Args:
        value: Anything.
        other: Gives what stands for a tensor, or the tensor itself.
        depth: Of the containers that are looked into.
    """
    if isinstance(value, Tensor):
        return other(value)
    held = filled_by(value)
    if held is None or depth == 0 or len(held) > 1000:
        return value
    found = {key: substituted(item, other, depth - 1) for key, item in items_of(held)}
    if all(found[key] is item for key, item in items_of(held)):
        return value
    if isinstance(held, tuple):
        items = list(found.values())
        return type(held)(*items) if hasattr(held, "_fields") else type(held)(items)
    known = contents_of(held)
    refill(held, found if isinstance(known, dict) else type(known)(found.values()))
    return value
