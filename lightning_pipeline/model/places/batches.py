"""What a step does to the batch that it is given, which hooks after it are to find done."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_pipeline.data import items_of
from lightning_pipeline.model.places.owners import MISSING
from lightning_pipeline.model.tensors import map_tensors, tensors_in, version_of

Path = tuple[Any, ...]
_KINDS = (list, tuple, Mapping)
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), Tensor})


class BatchChanges(NamedTuple):
    """What one run has changed.

    Attributes:
        put: Entries of containers in the batch that were added or replaced, by the keys that lead there.
        taken: Those that were taken out.
        given: The batch as it was given.
        written: Tensors in that which were written in place, by `id`.
    """

    put: dict[Path, Any]
    taken: tuple[Path, ...]
    given: Any
    written: frozenset[int]

    def __bool__(self) -> bool:
        return bool(self.put or self.taken or self.written)


class BatchAsGiven:
    """What a step is given, before it runs: containers of its own.

    Args:
        args: Arguments of the step.
        deep: Whether containers in the batch are looked into; else it is alone, which costs next to nothing.
    """

    def __init__(self, args: Sequence[Any], *, deep: bool = True) -> None:
        batch = args[0] if args else None
        if deep:
            self._held = [(path, held, _entries(held)) for path, held in _containers(batch, ())]
            self._given, tensors = _as_it_is(batch), list(tensors_in(batch))
        else:
            entries = _entries(batch) if isinstance(batch, _KINDS) else {}
            self._held = [((), batch, entries)] if entries and _holds(batch) else []
            self._given = list(entries.values()) if isinstance(batch, list | tuple) else entries or batch
            tensors = [one for one in (*entries.values(), batch) if isinstance(one, Tensor)]
        self._tensors = [(tensor, version_of(tensor)) for tensor in tensors]

    @property
    def is_refilled(self) -> bool:
        """After the step: whether it has put entries in, or taken some out."""
        put, taken = self._refilled()
        return bool(put or taken)

    def changes(self, is_unknown: Callable[[Tensor], bool]) -> BatchChanges:
        """After the step: what it has changed; what it has put in is without its graph.

        Args:
            is_unknown: Whether a tensor was written with what this rank does not know.
        """
        put, taken = self._refilled()
        written = (tensor for tensor, version in self._tensors if version_of(tensor) != version)
        known = frozenset(id(tensor) for tensor in written if not is_unknown(tensor))
        return BatchChanges(map_tensors(Tensor.detach, put), tuple(taken), self._given, known)

    def _refilled(self) -> tuple[dict[Path, Any], list[Path]]:
        """Entries that were put in, and the keys of those that were taken out."""
        put, taken = dict[Path, Any](), list[Path]()
        for path, held, before in self._held:
            now = _entries(held)
            put |= {(*path, key): v for key, v in now.items() if before.get(key, MISSING) is not v}
            taken += [(*path, key) for key in before if key not in now]
        return put, taken


class Merging(NamedTuple):
    """An entry of the batch that micro-batches have put into theirs.

    Attributes:
        values: What they have put there, in order; `MISSING` where one has not.
        is_of_one: Whether it belongs to samples of one of them.
    """

    values: list[Any]
    is_of_one: bool


def put_by_place(batch: Any, changes: Sequence[BatchChanges], sizes: Sequence[int]) -> dict[Path, Merging]:
    """What micro-batches have put in, by the place in the batch. Arguments as of `write_into`."""
    found, begin = dict[Path, Merging](), 0
    for number, (one, size) in enumerate(zip(changes, sizes, strict=True)):
        for path, value in one.put.items():
            place, of_one = _in_whole(batch, one.given, path, begin, size, sum(sizes))
            if place is not None:
                empty = Merging([MISSING] * len(sizes), of_one)
                found.setdefault(place, empty).values[number] = value
        begin += size
    return found


def taken_by_all(batch: Any, changes: Sequence[BatchChanges], sizes: Sequence[int]) -> list[Path]:
    """What every micro-batch that has it has taken out, by the place in the batch."""
    found, begin = dict[Path, int](), 0
    alone = set()
    for one, size in zip(changes, sizes, strict=True):
        for path in one.taken:
            place, of_one = _in_whole(batch, one.given, path, begin, size, sum(sizes))
            if place is not None and not (of_one and isinstance(_item(batch, place[:-1]), list)):
                found[place] = found.get(place, 0) + 1
                alone |= {place} if of_one else set()
        begin += size
    return [place for place, number in found.items() if place in alone or number == len(sizes)]


def change_entries(batch: Any, put: Mapping[Path, Any], taken: Sequence[Path]) -> None:
    """Put entries into containers of a batch, and take some out."""
    for path, value in put.items():
        holder, key = _item(batch, path[:-1]), path[-1]
        if isinstance(holder, list) and key == len(holder):
            holder.append(value)
        elif isinstance(holder, list | MutableMapping):
            holder[key] = value
        else:
            object.__setattr__(holder, key, value)
    for path in reversed(taken):  # of lists from the end
        holder = _item(batch, path[:-1])
        if isinstance(holder, list | MutableMapping) and path[-1] in _entries(holder):
            del holder[path[-1]]


def write_into(batch: Any, changes: Sequence[BatchChanges], sizes: Sequence[int]) -> dict[int, Tensor]:
    """Write into the tensors of a batch what its micro-batches have in theirs.

    Args:
        batch: The whole.
        changes: By micro-batch, which are cut of it by rows.
        sizes: Samples of each.

    Returns:
        The tensors that were written, by their number in the batch.
    """
    numbers = {id(tensor): number for number, tensor in enumerate(tensors_in(batch))}
    found, begin = dict[int, Tensor](), 0
    for one, size in zip(changes, sizes, strict=True):
        for tensor, place, part in _pairs(batch, one.given, begin, size, sum(sizes)) if one.written else ():
            if id(part) in one.written:
                with torch.no_grad():
                    place.copy_(part)
                found[numbers[id(tensor)]] = tensor
        begin += size
    return found


def _pairs(
    whole: Any, part: Any, begin: int, size: int, total: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Tensors of a batch, where a micro-batch has its own in them, and what it has."""
    if isinstance(whole, Tensor) and isinstance(part, Tensor):
        by_rows = whole.dim() > 0 and whole.shape[0] == total
        place = whole.narrow(0, begin, size) if by_rows and whole.shape != part.shape else whole
        if place.shape == part.shape:
            yield whole, place, part
        return
    wholes, parts = items_of(whole), items_of(part)
    if _is_cut(whole, part, size, total):
        wholes = wholes[begin : begin + size]
    for one, other in zip(wholes, parts, strict=True) if len(wholes) == len(parts) else ():
        yield from _pairs(one, other, begin, size, total)


def _is_cut(whole: Any, part: Any, size: int, total: int) -> bool:
    """Whether these hold an item for each sample, of which the micro-batch has its own."""
    if not isinstance(whole, list | tuple) or not isinstance(part, list | tuple):
        return False
    return size != total and (len(whole), len(part)) == (total, size)


def _in_whole(
    whole: Any, part: Any, path: Path, begin: int, size: int, total: int
) -> tuple[Path | None, bool]:
    """The keys of an entry in the batch, by those in a micro-batch, and whether no other has such samples."""
    found, of_one = list[Any](), False
    for key in path[:-1]:
        is_cut = _is_cut(whole, part, size, total)
        own, of_part = _entries(whole), _entries(part)
        there = begin + key if is_cut else key
        if there not in own or key not in of_part or not (is_cut or len(own) == len(of_part)):
            return None, False
        whole, part, of_one = own[there], of_part[key], of_one or is_cut
        found.append(there)
    is_alike = isinstance(whole, list) == isinstance(part, list) and not isinstance(whole, tuple)
    if not is_alike or not _holds(whole):
        return None, False
    if _is_cut(whole, part, size, total):  # items of its own samples; nothing else may be put there
        is_item = isinstance(path[-1], int) and path[-1] < size
        return ((*found, begin + path[-1]), True) if is_item else (None, False)
    return (*found, path[-1]), of_one


def _entries(value: Any) -> dict[Any, Any]:
    """What is in a container, by what it is found by; nothing in what is none that batches are made of."""
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if isinstance(value, Mapping):
        return dict(value)
    names = [field.name for field in dataclasses.fields(value)] if items_of(value) else []
    return {name: getattr(value, name) for name in names}


def _holds(value: Any) -> bool:
    """Whether it is a container that a step may change."""
    if isinstance(value, list | MutableMapping):
        return True
    return dataclasses.is_dataclass(value) and not isinstance(value, type | Mapping | tuple)


def _item(value: Any, path: Path) -> Any:
    for key in path:
        value = value[key] if isinstance(value, list | tuple | Mapping) else getattr(value, key)
    return value


def _containers(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Containers that a step may change, with the keys that lead there."""
    if type(value) in _PLAIN:
        return
    if _holds(value):
        yield path, value
    for key, item in _entries(value).items():
        if type(item) not in _PLAIN:
            yield from _containers(item, (*path, key))


def _as_it_is(value: Any) -> Any:
    """Lists and dictionaries with what is in these containers now."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, list | tuple):
        return [item if type(item) in _PLAIN else _as_it_is(item) for item in value]
    return {key: _as_it_is(item) for key, item in _entries(value).items()} or value
