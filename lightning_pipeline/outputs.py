"""Lists that a step fills (`self.outputs.append(x)`): one entry per batch on the last stage, guarded elsewhere."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from torch import nn

from lightning_pipeline.errors import PlaceholderError

Merge = Callable[[list[Any], list[int]], Any]
_INTERNAL = frozenset(vars(nn.Module())) | {"_metric_attributes", "_loaded_optimizer_states_dict"}


class _Elsewhere:
    """Stands in a guarded list for what only the last stage has. Any use of it says so."""

    def __init__(self, message: str) -> None:
        self._message = message

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise PlaceholderError(self._message)

    __torch_function__ = classmethod(lambda cls, function, types, args=(), kwargs=None: _refuse_first(args))
    __array__ = __float__ = __int__ = __bool__ = __len__ = __iter__ = __getitem__ = _refuse
    __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = __truediv__ = __rtruediv__ = _refuse


def _refuse_first(args: Sequence[Any]) -> NoReturn:
    stack = list(args)
    for value in stack:
        if isinstance(value, _Elsewhere):
            value._refuse()
        if isinstance(value, list | tuple):
            stack.extend(list.__iter__(value) if isinstance(value, list) else value)
    raise PlaceholderError("a list that the last stage fills was read on another stage")


class GuardedList(list[Any]):
    """A list that the step fills on the last stage only. It can be cleared and appended to, but not read."""

    def __init__(self, message: str) -> None:
        super().__init__([_Elsewhere(message)])
        self.message = message

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise PlaceholderError(self.message)

    __iter__ = __getitem__ = __len__ = __contains__ = __add__ = __reversed__ = _refuse
    pop = index = count = copy = sort = _refuse

    def __bool__(self) -> bool:
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        return GuardedList, (self.message,)

    def __repr__(self) -> str:
        return f"<list that is filled on the last stage: {self.message}>"


class StepLists:
    """Looks after the lists of a LightningModule over one step.

    Args:
        module: The LightningModule.
        step: Name of the step, for messages.
    """

    def __init__(self, module: nn.Module, step: str) -> None:
        self._module, self._step = module, step
        self._before = {name: (found, list.__len__(found)) for name, found, _ in _lists(module)}

    def grown(self) -> list[str]:
        """Names of the lists that have more items than before the step."""
        return [name for name, found, _ in _lists(self._module) if list.__len__(found) > self._start(name, found)]

    def _start(self, name: str, found: list[Any]) -> int:
        before = self._before.get(name)
        return before[1] if before is not None and before[0] is found else 0

    def merge(self, names: Sequence[str], sizes: list[int], merge: Merge) -> None:
        """On the last stage: make one entry of what the micro-batches appended.

        Args:
            names: From `grown`.
            sizes: Samples of each micro-batch.
            merge: Merges one value per micro-batch.

        Raises:
            PlaceholderError: Micro-batches appended different numbers of items.
        """
        for name, found, _ in list(_lists(self._module)):
            if name not in names or len(sizes) == 1:
                continue
            start = self._start(name, found)
            added = found[start:]
            each, rest = divmod(len(added), len(sizes))
            if rest:
                raise PlaceholderError(
                    f"{self._step} appended {len(added)} items to self.{name} in {len(sizes)} micro-batches: "
                    "append the same number in each, so that they can be merged to what one device has"
                )
            found[start:] = [merge(added[position::each], sizes) for position in range(each)]

    def guard(self, names: Sequence[str]) -> None:
        """On other stages: make reading these lists an error, and drop what this stage appended.

        Args:
            names: The lists that the last stage filled, or that this one did.
        """
        for name, found, put in list(_lists(self._module)):
            if name in names:
                if isinstance(found, GuardedList) and list.__len__(found):
                    list.__setitem__(found, slice(1, None), [])
                else:
                    put(GuardedList(self._message(name)))

    def _message(self, name: str) -> str:
        return (
            f"self.{name} is filled by {self._step}, which ends on the last stage, so this rank does not have its "
            "values: log them with self.log or a torchmetrics object, which is right on every rank, or read the "
            "list only where self.trainer.strategy.has_last_stage"
        )


def _lists(module: nn.Module) -> Iterator[tuple[str, list[Any], Callable[[Any], None]]]:
    """Lists that are attributes of the module, or values of its dictionaries: name, list, how to replace it."""
    attributes = vars(module)
    for name, value in list(attributes.items()):
        if name in _INTERNAL or name.startswith("_pl_"):
            continue
        if isinstance(value, list):
            yield name, value, _setter(attributes, name)
        elif isinstance(value, dict) and not name.startswith("_"):
            for key, inner in list(value.items()):
                if isinstance(inner, list):
                    yield f"{name}[{key!r}]", inner, _setter(value, key)


def _setter(holder: dict[Any, Any], key: Any) -> Callable[[Any], None]:
    return lambda value: holder.__setitem__(key, value)
