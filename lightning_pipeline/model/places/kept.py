"""Weights that objects keep beside a module's own lists of them: `self.tracked = list(self.parameters())`."""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipeline.model.places.owners import Guard
from lightning_pipeline.model.tensors import attributes_of, items_of

_LISTED = ("_parameters", "_buffers", "_modules")
_LONG, _MOST = (
    10_000,
    200_000,
)  # items of a container that is looked into, such as no dataset, and objects in all


def exchange_kept(root: nn.Module, beside: Iterable[object], others: Mapping[int, Tensor]) -> None:
    """Put other tensors in the place of those that attributes keep, in containers and in the user's objects.

    Args:
        root: The LightningModule; what it and its modules list as theirs is left alone.
        beside: What else may keep some, such as callbacks and the data module.
        others: What comes into its place, by the identity of a tensor.
    """
    if not others:
        return
    walk = _Walk(others)
    for module in root.modules():
        own = vars(module)
        walk.entries(own, [key for key in own if key not in _LISTED])
    for holder in beside:
        walk.entries(vars(holder), list(vars(holder)))
    walk.run()


class _Walk:
    """Goes through what is kept, each object once.

    Args:
        others: See `exchange_kept`.
    """

    def __init__(self, others: Mapping[int, Tensor]) -> None:
        self._others = others
        self._pending = deque[Any]()
        self._seen: dict[int, Any] = {}

    def run(self) -> None:
        """All that is below what was met so far."""
        while self._pending and len(self._seen) < _MOST:
            value = self._pending.popleft()
            own = value if isinstance(value, list | deque | dict) else attributes_of(value)
            if own is not None:
                self.entries(own, [key for key, _ in items_of(own)])

    def entries(self, holder: Any, keys: Iterable[Any]) -> None:
        """Those of a container, or the attributes of an object."""
        for key in keys:
            value = holder[key]
            new = self._new(value)
            if new is not value:
                holder[key] = new
        if isinstance(holder, dict) and any(id(key) in self._others for key in holder):
            renamed = [(self._others.get(id(key), key), value) for key, value in holder.items()]
            holder.clear()
            holder.update(renamed)

    def _new(self, value: Any) -> Any:
        """What stands in the place of a value, which is looked into later, or at once if it is fixed."""
        if isinstance(value, Guard):  # for what another stage has, which raises where it is used
            return value
        if isinstance(value, Tensor):
            return self._others.get(id(value), value)
        if isinstance(value, tuple | set | frozenset):
            return self._made_anew(value)
        if isinstance(value, Optimizer):
            self._later(value.param_groups)
        elif not isinstance(value, nn.Module):
            self._later(value)
        return value

    def _made_anew(self, value: Any) -> Any:
        if len(value) > _LONG:
            return value
        items = [self._new(item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)

    def _later(self, value: Any) -> None:
        holds = isinstance(value, list | deque | dict)
        if (holds and len(value) > _LONG) or (not holds and attributes_of(value) is None):
            return
        if id(value) not in self._seen:
            self._seen[id(value)] = value
            self._pending.append(value)
