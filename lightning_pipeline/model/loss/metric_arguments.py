"""What micro-batches give to a metric, and how that is put together to what the batch gives."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_pipeline.model.loss.bent import DifferentWaysError, together_in_form
from lightning_pipeline.model.loss.events import type_of
from lightning_pipeline.model.loss.follower import Part
from lightning_pipeline.model.tensors import flatten, map_leaves, same_values

_PLAIN = (type(None), bool, str, bytes, torch.dtype, torch.device)


class Kept(NamedTuple):
    """A tensor or a number, and what it is of the batch's."""

    value: Any
    part: Part


class Way(NamedTuple):
    """How values of micro-batches make the batch's.

    Attributes:
        kind: `rows` and `items` are joined, what is `constant` or the `same` is it, what is a `sum` is added
            up, a `mean` is taken by samples; an `open` number is unknown; `each` goes item by item, and
            `apart` is what nothing joins.
        dimension: That samples have, of rows.
        nodes: Of each item.
    """

    kind: str
    dimension: int = 0
    nodes: Any = ()

    @property
    def is_of_samples(self) -> bool:
        """Whether there is nothing but samples."""
        if self.kind == "each":
            nodes = self.nodes.values() if isinstance(self.nodes, dict) else self.nodes
            return all(node.is_of_samples for node in nodes)
        return self.kind in ("rows", "items", "constant", "apart")

    @property
    def is_joined(self) -> bool:
        """Whether it makes anything of all values."""
        if self.kind == "each":
            nodes = self.nodes.values() if isinstance(self.nodes, dict) else self.nodes
            return all(node.is_joined for node in nodes)
        return self.kind != "apart"


def kept(value: Any, part: Callable[[Any], Part] = lambda value: Part()) -> Any:
    """Arguments as they are kept: tensors without their graph, which the step may go on to change."""
    if isinstance(value, Tensor):
        return Kept(value.detach().clone(), part(value))
    if isinstance(value, int | float) and not isinstance(value, bool):
        return Kept(value, part(value))
    if isinstance(value, dict):
        return {key: kept(item, part) for key, item in value.items()}
    return type_of(value)(kept(item, part) for item in value) if isinstance(value, list | tuple) else value


def given(value: Any) -> Any:
    """The arguments themselves."""
    if isinstance(value, Kept):
        return value.value
    if isinstance(value, dict):
        return {key: given(item) for key, item in value.items()}
    return type_of(value)(map(given, value)) if isinstance(value, list | tuple) else value


def are_close(mine: Any, theirs: Any) -> bool:
    """Whether two calls give a metric the same but for rounding."""
    (ours, form), (others, other_form) = map(flatten, (_of_tensors(mine), _of_tensors(theirs)))
    return form == other_form and all(map(_is_close, ours, others))


def _of_tensors(value: Any) -> Any:
    return map_leaves(lambda number: torch.tensor(number, dtype=torch.float64), value, float)


def _is_close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or not one.is_floating_point() or not other.is_floating_point():
        return same_values(one, other)
    rough, (one, other) = (
        max(torch.finfo(one.dtype).eps, torch.finfo(other.dtype).eps),
        (one.double(), other.double()),
    )
    scale = float(one.abs().nan_to_num(posinf=0.0).max()) if one.numel() else 0.0
    return torch.allclose(one, other, rtol=rough**0.6, atol=rough**0.75 * scale, equal_nan=True)


def way_of(values: Sequence[Any], whole: Any, sizes: Sequence[int]) -> Way:
    """How values of micro-batches make the batch's.

    Args:
        values: One of each micro-batch, as they are kept.
        whole: What the step of the whole batch gave, where units compute nothing; None: that is not known.
        sizes: Samples of each.
    """
    first = values[0]
    theirs = whole.value if isinstance(whole, Kept) else None
    if isinstance(first, Kept) and isinstance(first.value, Tensor):
        return _way_of_tensors([value.value for value in values], theirs, sizes)
    if isinstance(first, Kept):
        return Way(_kind_of_numbers(values, theirs, sizes))
    if isinstance(first, dict):
        found = whole if isinstance(whole, dict) else {}
        nodes = {key: way_of([value[key] for value in values], found.get(key), sizes) for key in first}
        return Way("each", nodes=nodes)
    if isinstance(first, list) and _are_items(values, whole, sizes):
        return Way("items")
    if isinstance(first, list | tuple):
        paired = isinstance(whole, list | tuple) and len(whole) == len(first)
        others = whole if paired else [None] * len(first)
        columns = zip(*values, strict=True)
        return Way(
            "each",
            nodes=[way_of(list(column), other, sizes) for column, other in zip(columns, others, strict=True)],
        )
    alike = isinstance(first, _PLAIN) and all(value == first for value in values)
    return Way("constant" if alike else "apart")


def _way_of_tensors(values: Sequence[Tensor], whole: Any, sizes: Sequence[int]) -> Way:
    first = values[0]
    if not first.dim():
        return Way("mean")
    if isinstance(whole, Tensor) and whole.dim() == first.dim():
        grown = [d for d in range(first.dim()) if whole.shape[d] != first.shape[d]]
        return Way("rows", grown[0]) if grown else Way("mean")
    by_samples = all(value.shape[0] == size for value, size in zip(values, sizes, strict=False))
    alike = len({value.shape for value in values}) == 1
    return Way("rows") if by_samples or not alike else Way("mean")


def _kind_of_numbers(values: Sequence[Kept], whole: Any, sizes: Sequence[int]) -> str:
    numbers = [value.value for value in values]
    if all(value.part.is_known for value in values):
        return "mean"
    if isinstance(whole, int | float):
        if all(number == whole for number in numbers):
            return "same"
        return "sum" if math.isclose(math.fsum(numbers), whole) else "open"
    if any(number != numbers[0] for number in numbers) or numbers == list(sizes):
        return "sum" if numbers == list(sizes) else "open"
    return "same"


def _are_items(values: Sequence[Any], whole: Any, sizes: Sequence[int]) -> bool:
    lengths = [len(value) for value in values]
    if isinstance(whole, list):
        return len(whole) != lengths[0]
    return lengths == list(sizes)[: len(lengths)] or len(set(lengths)) > 1


def join(values: Sequence[Any], way: Way, sizes: Sequence[int], doubt: Callable[[], None]) -> Any:
    """The batch's value.

    Args:
        values: One of each micro-batch, as they are kept.
        way: How they make it.
        sizes: Samples of each.
        doubt: Called where nobody knows, and the mean by samples is taken.
    """
    first = values[0]
    if way.kind == "each":
        if isinstance(first, dict):
            return {
                key: join([value[key] for value in values], node, sizes, doubt)
                for key, node in way.nodes.items()
            }
        columns = zip(*values, strict=True)
        return type_of(first)(
            join(list(column), node, sizes, doubt) for column, node in zip(columns, way.nodes, strict=True)
        )
    if way.kind == "items":
        return [given(item) for value in values for item in value]
    if way.kind == "constant":
        return first
    if way.kind == "rows":
        return torch.cat([value.value for value in values], way.dimension)
    return _number(values, way.kind, sizes, doubt)


def _number(values: Sequence[Kept], kind: str, sizes: Sequence[int], doubt: Callable[[], None]) -> Any:
    numbers = [value.value for value in values]
    if not isinstance(numbers[0], Tensor):
        if kind == "same" and all(number == numbers[0] for number in numbers):
            return numbers[0]
        return sum(numbers) if kind == "sum" else float(_total(values, kind, sizes, doubt))
    result = _total(values, kind, sizes, doubt).to(numbers[0].device)
    return (result if numbers[0].is_floating_point() else result.round()).to(numbers[0].dtype)


def _total(values: Sequence[Kept], kind: str, sizes: Sequence[int], doubt: Callable[[], None]) -> Tensor:
    """What is worked out from the batch's sums, else the sum of the parts, else the mean by samples."""
    numbers, parts = [value.value for value in values], [value.part for value in values]
    bent = [part.bent for part in parts if part.bent is not None]
    if len(bent) == len(values):
        with suppress(DifferentWaysError):
            return together_in_form(bent)
    has_parts = not bent and all(part.value is not None for part in parts)
    is_plain = isinstance(numbers[0], Tensor) or kind == "mean"
    known = has_parts and (is_plain or all(part.is_known for part in parts))
    unclear = any(part.is_unclear or part.read != parts[0].read for part in parts) or not (known or is_plain)
    if (bent or unclear) and _differ(numbers):
        doubt()
    terms = [
        part.value if known else number * (size / sum(sizes))
        for number, part, size in zip(numbers, parts, sizes, strict=True)
    ]
    return torch.stack([torch.as_tensor(term).detach().double() for term in terms]).sum(0)


def _differ(numbers: Sequence[Any]) -> bool:
    return any(bool((torch.as_tensor(number) != torch.as_tensor(numbers[0])).any()) for number in numbers)
