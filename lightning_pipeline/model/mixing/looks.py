"""Whether a step mixes samples: it is run without units once more, with another sample in one's place.

A sample that a unit is given then differs from the first run's only where it is the one that was exchanged.
Anything else that differs was made of several samples, whatever functions and numbers of Python made it.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_pipeline.model.mixing.rows import Functions, Run
from lightning_pipeline.model.random import MicrobatchSeeds
from lightning_pipeline.model.tensors import is_placeholder, map_tensors, tensors_in, user_line


class _Reached(NamedTuple):
    """What a unit was given.

    Attributes:
        unit: Its number.
        line: Where in the user's code it was called.
        values: The tensors that no unit has made, and the numbers; None for others.
    """

    unit: int
    line: str
    values: list[Any]


class Reached(Functions):
    """One run of a step, of which is noted what units are given and what functions give.

    Args:
        root: The LightningModule.
        elsewhere: Parameters and buffers that some ranks do not have.

    Attributes:
        units: The calls of units.
        results: What functions gave, with the line and how many calls of units there had been.
    """

    def __init__(self, root: nn.Module, elsewhere: Iterable[Tensor] = ()) -> None:
        self._root = root
        self.units: list[_Reached] = []
        self.results: list[tuple[Any, Any, str, int]] = []
        self._sure = True  # no number was read of what some ranks do not have
        self._of_module: dict[int, Any] = {id(one): one for one in elsewhere}
        """These and what is made of them, held: no identity comes twice."""

    def unit(self, number: int, given: Any, seeds: MicrobatchSeeds) -> None:
        """A unit is called."""
        floats = [one for part in (given[0], given[1].values()) for one in part if type(one) is float]
        values = [*(self._kept(tensor) for tensor in tensors_in(given)), *(floats if self._sure else ())]
        self.units.append(_Reached(number, user_line(self._root), values))

    def call(self, func: Any, args: Any, kwargs: Any, run: Run) -> Any:
        """A function is called."""
        result = run(func, args, kwargs)
        if any(is_placeholder(one) or id(one) in self._of_module for one in tensors_in((args, kwargs))):
            made = list(tensors_in(result))
            self._of_module.update({id(one): one for one in made})
            self._sure = self._sure and bool(made)
        if isinstance(result, Tensor):
            self.results.append((func, self._kept(result), user_line(self._root), len(self.units)))
        return result

    def _kept(self, tensor: Tensor) -> Tensor | None:
        """A copy, where every rank has it: not of what is made of weights, which one stage alone may have."""
        plain = tensor.layout is torch.strided and not is_placeholder(tensor)
        return tensor.detach().clone() if plain and id(tensor) not in self._of_module else None


def exchanges(samples: int) -> list[tuple[int, Callable[[Tensor], Tensor]]]:
    """Which sample is exchanged in each run, and what its row is made of.

    Args:
        samples: How many there are.
    """
    last = samples - 1

    def like(row: int, other: int) -> Callable[[Tensor], Tensor]:
        def exchanged(tensor: Tensor) -> Tensor:
            found = tensor.clone()
            found[row] = tensor[other]
            return found

        return exchanged

    def farther(tensor: Tensor) -> Tensor:
        found = tensor.clone()
        if tensor.is_floating_point() and tensor.element_size() > 1:  # numbers of one byte have no largest
            found[0] = tensor[0] * 1.5 + tensor.abs().max()
        return found

    return [(0, like(0, last)), (last, like(last, 0)), (0, farther)]


def with_another(batch: Any, samples: int, made: Callable[[Tensor], Tensor]) -> Any:
    """A batch in which one sample is another.

    Args:
        batch: Its arguments.
        samples: How many it has.
        made: Makes a tensor with that sample exchanged.
    """

    def exchanged(tensor: Tensor) -> Tensor:
        plain = tensor.layout is torch.strided and tensor.dim() > 0
        return made(tensor) if plain and tensor.shape[0] == samples else tensor

    return map_tensors(exchanged, batch)


def mixed_between(
    first: Reached, again: Reached, others: Sequence[tuple[int, Reached]], samples: int
) -> dict[str, Any]:
    """Lines at which samples were mixed, by which function, and how many calls of units there had been.

    Args:
        first: The run as it is.
        again: The same once more: what differs then says nothing of samples.
        others: Runs with a sample exchanged, and which one.
        samples: How many there are.
    """
    if not _is_same(first, again):
        return {}
    touched: dict[int, set[int]] = {0: set(), samples - 1: set()}
    for row, other in others:
        if [one.unit for one in first.units] != [one.unit for one in other.units]:
            continue  # it went elsewhere, which says nothing
        for place, (before, after) in enumerate(zip(first.units, other.units, strict=True)):
            for pair in zip(before.values, after.values, strict=False):
                kind = _changed(*pair, row, samples)
                if kind == "others":
                    return _line(first, other, row, samples, place)
                if kind == "all":
                    touched[row].add(place)
    start, end = touched.values()
    one_by_one = start and end and not start & end and len(first.units) >= samples
    if (start or end) and not one_by_one:
        place = min(start | end)
        return {first.units[place].line: ("one for all samples", place)}
    return {}


def _is_same(first: Reached, again: Reached) -> bool:
    pairs = zip(first.units, again.units, strict=False)
    return len(first.units) == len(again.units) and all(
        one.unit == other.unit
        and all(not _differs(*both) for both in zip(one.values, other.values, strict=False))
        for one, other in pairs
    )


def _differs(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return type(one) is float and one != other
    return one.shape != other.shape or not torch.equal(one.nan_to_num(), other.nan_to_num())


def _line(first: Reached, other: Reached, row: int, samples: int, place: int) -> dict[str, tuple[str, int]]:
    """Where a sample first followed from another one before a call of a unit."""
    for (func, before, line, position), (same, after, *_) in zip(first.results, other.results, strict=False):
        if func is not same or position > place:
            break
        if _changed(before, after, row, samples) == "others":
            return {line: (getattr(func, "__name__", "a function").strip("_"), position)}
    return {first.units[place].line: ("what a unit is given", place)}


def _changed(before: Any, after: Any, row: int, samples: int) -> str:
    """What differs where a sample was exchanged: "" for nothing or it alone, "others", "all" without rows."""
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return "all" if type(before) is float and before != after else ""
    if before.shape != after.shape or before.dtype != after.dtype:
        return ""
    if before.is_floating_point():
        before, after = before.double(), after.double()
    differs = ~torch.isclose(before, after, rtol=1e-6, atol=0.0, equal_nan=True)
    if not bool(differs.any()):
        return ""
    many = [dim for dim, size in enumerate(differs.shape) if size % samples == 0]
    if not many:
        return "all"
    return "" if any(_is_of_one(differs, dim, row, samples) for dim in many) else "others"


def _is_of_one(differs: Tensor, dim: int, row: int, samples: int) -> bool:
    """Whether nothing but one sample differs along a dimension that has each of them once or more often."""
    flat = differs.movedim(dim, 0).flatten(1).any(1) if differs.dim() > 1 else differs
    times = len(flat) // samples
    for before in (one for one in range(1, times + 1) if times % one == 0):
        cut = flat.reshape(before, samples, times // before).any(2).any(0)
        if not bool(cut[torch.arange(samples, device=cut.device) != row].any()):
            return True
    return False
