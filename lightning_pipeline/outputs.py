"""Lists that a step fills (`self.outputs.append(x)`) hold one entry per batch, as on one device."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from lightning_pipeline.errors import ConfigurationError

Merge = Callable[[list[Any], list[int]], Any]


class StepLists:
    """Merges what the micro-batches of one batch appended to the lists of a module.

    Only lists that this stage really fills; those that the end of the step fills are guarded on the other
    stages.

    Args:
        module: The LightningModule, before the step.
        step: Name of the step, for messages.
    """

    def __init__(self, module: nn.Module, step: str) -> None:
        self._module, self._step = module, step
        self._before = {name: (found, len(found)) for name, found in _lists(module)}

    def merge(self, sizes: list[int], merge: Merge) -> None:
        """Make one entry of those that the micro-batches appended, in place.

        Args:
            sizes: Samples of each micro-batch.
            merge: Merges one value per micro-batch.

        Raises:
            ConfigurationError: Micro-batches appended different numbers of items.
        """
        if len(sizes) == 1:
            return
        for name, found in _lists(self._module):
            before = self._before.get(name)
            start = before[1] if before is not None and before[0] is found else 0
            added = found[start:]
            each, rest = divmod(len(added), len(sizes))
            if rest:
                raise ConfigurationError(
                    f"{self._step} appended {len(added)} items to self.{name} in {len(sizes)} micro-batches: "
                    "append the same number in each, so that they can be merged to what one device has"
                )
            found[start:] = [merge(added[position::each], sizes) for position in range(each)]


def _lists(module: nn.Module) -> Iterator[tuple[str, list[Any]]]:
    """Lists that are attributes of the module, or values of dictionaries that are."""
    for name, value in list(vars(module).items()):
        if type(value) is list:
            yield name, value
        elif isinstance(value, dict) and not name.startswith("_") and type(value).__module__ != _GUARDS:
            yield from ((f"{name}[{key!r}]", inner) for key, inner in value.items() if type(inner) is list)


_GUARDS = "lightning_pipeline.split.elsewhere"
