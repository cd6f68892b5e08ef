"""What a step makes what it gives to units of, whatever the values are, and how these units stand."""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_pipeline.model.mixing.calls import Functions, Run, target_of
from lightning_pipeline.model.mixing.meetings import name_of
from lightning_pipeline.model.mixing.standing import standing_of
from lightning_pipeline.model.random import MicrobatchSeeds
from lightning_pipeline.model.tensors import tensors_in


class Derivations(Functions):
    """One run of a step without units, of which is noted how it comes to what it gives them.

    Whole numbers are left out: they may be how many samples there are.

    Attributes:
        calls: For each call of a unit what it is given is made of, and how the unit stands.
    """

    def __init__(self) -> None:
        self._counts = Counter[int]()
        self._standing: Hashable = None
        self.calls: dict[tuple[int, int], Hashable] = {}
        self._last: tuple[int, int] = (0, 0)
        self._made: dict[int, tuple[Tensor, Hashable]] = {}  # held: no identity comes twice

    def begin(self, batch: Any) -> None:
        """The step begins, with these arguments."""
        for place, tensor in enumerate(tensors_in(batch)):
            self._made[id(tensor)] = tensor, ("batch", place)

    def stands(self, module: nn.Module) -> None:
        """This unit is about to be called."""
        self._standing = standing_of(module)

    def unit(self, number: int, given: Any, seeds: MicrobatchSeeds) -> None:
        """A unit is called."""
        self._last = number, self._counts[number]
        self._counts[number] += 1
        self.calls[self._last] = tuple(self._parts(given)), self._standing

    def answered(self, output: Any) -> None:
        """The unit has returned this."""
        for leaf, tensor in enumerate(tensors_in(output)):
            self._made[id(tensor)] = tensor, (*self._last, leaf)

    def call(self, func: Any, args: Any, kwargs: Any, run: Run) -> Any:
        """A function is called."""
        made = hash((name_of(func), *self._parts((args, kwargs))))
        result, target = run(func, args, kwargs), target_of(func, args)
        for place, tensor in enumerate(tensors_in(result)):
            if not any(tensor is one for one in args):
                self._made[id(tensor)] = tensor, (made, place)
        if target is not None:
            self._made[id(target)] = target, made
        return result

    def _parts(self, value: Any) -> Iterator[Hashable]:
        if isinstance(value, Tensor):
            yield self._made[id(value)][1] if id(value) in self._made else "kept"
        elif isinstance(value, Mapping):
            yield from self._parts(list(value.values()))
        elif isinstance(value, list | tuple):
            for one in value:
                yield from self._parts(one)
        elif isinstance(value, bool | float):
            yield value


def are_alike(runs: Sequence[Derivations]) -> bool:
    """Whether all that call a unit give it the same, by how it is made, and find it in the same state."""
    first = {key: call for run in runs for key, call in run.calls.items()}
    return all(run.calls[key] == call for key, call in first.items() for run in runs if key in run.calls)
