"""Lists and dictionaries that a unit is given and changes are further outputs of the call."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from lightning_pipeline.model.tensors.containers import contents_of, items_of, refill
from lightning_pipeline.model.tensors.structure import Structure, describe, flatten, map_tensors, unflatten

_CHANGED = "changed"
_PLAIN = frozenset({Tensor, type(None), bool, int, float, str})


class Given:
    """The arguments of one call of a unit, as they were before it.

    A container that holds something else afterwards (`features.update(...)`, `results.append(x)`,
    `x[i] = branch(x[i])`) is described behind the output. What was among the arguments already is not
    described but referred to by its place, for every stage has it.

    Args:
        args: Positional arguments.
        kwargs: Keyword arguments.

    Attributes:
        things: Everything among them, and inside lists, tuples and dictionaries of them, in order.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._is_plain = not takes_containers(args, kwargs)
        self.things = list(_walk(args))
        self.things += _walk(kwargs)
        self._before = [
            (place, contents_of(thing))
            for place, thing in enumerate(self.things)
            if isinstance(thing, list | dict)
        ]

    def take_apart(self, output: Any) -> tuple[list[Tensor], Structure]:
        """The tensors of an output, and of what else the call has changed, and how they belong together."""
        if self._is_plain:
            return flatten(output)
        changed = [place for place, before in self._before if _differs(self.things[place], before)]
        if not changed and isinstance(output, Tensor) and not _is_index(output):  # the common case
            return flatten(output)
        tensors: list[Tensor] = []
        if not changed:
            return tensors, describe(output, tensors, self._indices())
        known = self.places()
        parts = [describe(output, tensors, known)]
        for place in changed:
            held = self.things[place]
            contents = tuple(describe(item, tensors, known) for _, item in items_of(held))
            keys = tuple(held) if isinstance(held, dict) else None
            parts.append(Structure("contents", (place, keys), contents))
        return tensors, Structure(_CHANGED, None, tuple(parts))

    def _indices(self) -> dict[int, int]:
        """Places of masks, lengths and positions, whose values code may need: handed on as they are."""
        return {
            id(thing): place
            for place, thing in enumerate(self.things)
            if isinstance(thing, Tensor) and _is_index(thing)
        }

    def places(self) -> dict[int, int]:
        """The place of each thing among the arguments, by its id."""
        return {id(thing): place for place, thing in enumerate(self.things)}

    def put_together(self, tensors: list[Any], structure: Structure) -> Any:
        """The output, from its tensors; the containers among the arguments get their new contents."""
        if structure.kind != _CHANGED:
            return unflatten(tensors, structure, self.things)
        output, *changes = structure.children
        for _, (place, keys), contents in changes:
            items = [unflatten(tensors, item, self.things) for item in contents]
            refill(self.things[place], items if keys is None else dict(zip(keys, items, strict=True)))
        return unflatten(tensors, output, self.things)

    def carry_over(self, copies: "Given", output: Any, change: Callable[[Tensor], Tensor]) -> Any:
        """What a call with copies of these arguments did, done to these.

        Args:
            copies: Of them, which went through the call.
            output: What it returned.
            change: Applied to each tensor that it made.

        Returns:
            The output, with these arguments in the place of their copies.
        """
        tensors, structure = copies.take_apart(output)
        if structure.kind != _CHANGED:  # also where there was nothing to change
            same = {key: self.things[place] for key, place in copies._indices().items()}
            return map_tensors(lambda t: same[id(t)] if id(t) in same else change(t), output)
        return self.put_together([change(tensor) for tensor in tensors], structure)


def _is_index(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def takes_containers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether there is anything that a call might change, or hand on as it is."""
    if _PLAIN.issuperset(map(type, args)) and not kwargs:  # the common case, kept short
        return False
    return any(map(_may_change, args)) or any(map(_may_change, kwargs.values()))


def _may_change(value: Any) -> bool:
    """Whether it holds what a call might change, or a mask, a length or a position among several values."""
    if isinstance(value, tuple):
        return any((isinstance(one, Tensor) and _is_index(one)) or _may_change(one) for one in value)
    return isinstance(value, list | dict)


def _walk(value: Any) -> Iterator[Any]:
    """Everything inside lists, tuples and dictionaries, in order, and these themselves."""
    for item in value.values() if isinstance(value, dict) else value:
        yield item
        if isinstance(item, list | tuple | dict):
            yield from _walk(item)


def _differs(container: Any, before: Any) -> bool:
    if len(container) != len(before) or (isinstance(before, dict) and list(container) != list(before)):
        return True
    pairs = zip(items_of(container), items_of(before), strict=True)
    return any(now is not then for (_, now), (_, then) in pairs)
