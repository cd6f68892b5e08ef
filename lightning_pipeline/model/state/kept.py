"""What a step keeps in attributes for each micro-batch becomes what it keeps for a batch."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeline.errors import ConfigurationError
from lightning_pipeline.model.state.elsewhere import Unmerged, attribute_name
from lightning_pipeline.model.tensors import map_tensors
from lightning_pipeline.model.trace import Trace

Merge = Callable[[list[Any], list[int]], Any]
_MISSING = object()
_MOST = 1000  # in a longer dictionary only entries with a new key are looked at


class _Place:
    """An attribute, or an entry of a dictionary, that each micro-batch sets anew."""

    def __init__(self, owner: dict[Any, Any], key: Any, seen: Any) -> None:
        self.owner, self.key, self.seen = owner, key, seen
        self.values: list[Any] = []
        self.times = 0

    def look(self) -> None:
        value = self.owner.get(self.key, _MISSING)
        if value is not self.seen:
            self.times, self.seen = self.times + 1, value
        self.values.append(map_tensors(Tensor.detach, value) if value is not _MISSING else value)


class Kept:
    """Follows the attributes of one batch on the stage that sets them last on its rank.

    Args:
        root: The LightningModule.
        trace: What the step does with attributes.
    """

    def __init__(self, root: nn.Module, trace: Trace) -> None:
        self._root, self._step = root, trace.step
        self._names: dict[int, str] = {}
        self._places = [_Place(vars(h), name, vars(h).get(name, _MISSING)) for h, name in trace.assigned]
        self._holders = [*trace.assigned]
        entries = [(vars(h).get(name), keys, h, name) for h, name, keys in trace.entries]
        self._dicts = [(d, *rest) for d, *rest in entries if type(d) in (dict, defaultdict)]  # not a guard
        self._entries: dict[tuple[int, Any], _Place] = {}
        self._before = {id(d): dict(d) for d, *_ in self._dicts if len(d) <= _MOST}
        self._lengths = {id(d): len(d) for d, *_ in self._dicts}
        self._counters = [(h, name, _number(h, name)) for h, name in trace.counters]

    def before(self) -> None:
        """A micro-batch comes: counters begin where the batch found them."""
        for holder, name, start in self._counters:
            if isinstance(start, Tensor):
                with torch.no_grad():
                    holder._buffers[name].copy_(start)
            else:
                vars(holder)[name] = start

    def after(self) -> None:
        """A micro-batch has run: note what it set."""
        for place in self._places:
            place.look()
        for dictionary, keys, *_ in self._dicts:
            self._look_at_entries(dictionary, keys)

    def _look_at_entries(self, dictionary: dict[Any, Any], only: frozenset[Any] | None) -> None:
        before = self._before.get(id(dictionary))
        keys: Any = dictionary if before is not None else _newest(dictionary, self._lengths[id(dictionary)])
        for key in [k for k in keys if only is None or k in only]:
            place = self._entries.get((id(dictionary), key))
            if place is None:
                old = _MISSING if before is None else before.get(key, _MISSING)
                if dictionary[key] is old:
                    continue
                place = self._entries[id(dictionary), key] = _Place(dictionary, key, old)
            place.look()

    def merge(self, sizes: Sequence[int], merge: Merge) -> set[int]:
        """Put in each place what the batch as a whole would have left there.

        Args:
            sizes: Samples of each micro-batch.
            merge: Merges one value per micro-batch.

        Returns:
            Identities of the lists that are done with.
        """
        done: set[int] = set()
        if len(sizes) == 1:
            return done
        for place, (holder, name) in zip(self._places, self._holders, strict=True):
            if place.times:
                done.add(id(place.seen))
                whole = _merged(place, sizes, merge)
                what = attribute_name(self._root, holder, name)
                place.owner[name] = Unmerged(what, self._step) if whole is _MISSING else whole
                done.add(id(place.owner[name]))
        for place in self._entries.values():
            if place.times == len(sizes):
                done.add(id(place.seen))
                whole = _merged(place, sizes, merge)
                place.owner[place.key] = self._unmerged(place) if whole is _MISSING else whole
                done.add(id(place.owner[place.key]))
        return done

    def _unmerged(self, place: _Place) -> Unmerged:
        holder, name = next((h, name) for d, _, h, name in self._dicts if d is place.owner)
        return Unmerged(f"entry {place.key!r} of {attribute_name(self._root, holder, name)}", self._step)


def _merged(place: _Place, sizes: Sequence[int], merge: Merge) -> Any:
    """What one device would have; `_MISSING` where that is not known."""
    values = place.values
    if len(values) != len(sizes) or any(value is _MISSING for value in values):
        return _MISSING
    if all(value is values[0] for value in values) and not isinstance(values[0], int):
        return values[0]
    small = all(isinstance(value, bool | int | str) for value in values)  # their objects are often shared
    if place.times < len(sizes) and not small:
        return _MISSING
    try:
        return merge(values, list(sizes))
    except ConfigurationError:
        return _MISSING


def _newest(dictionary: dict[Any, Any], length: int) -> list[Any]:
    keys = reversed(dictionary)
    return [next(keys) for _ in range(len(dictionary) - length)]


def _number(holder: Any, name: str) -> Any:
    value = vars(holder).get(name, _MISSING)
    return holder._buffers[name].clone() if value is _MISSING else value
