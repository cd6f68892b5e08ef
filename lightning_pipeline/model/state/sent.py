"""What the last stage tells the others after a batch: values that the next step reads there."""

import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping
from operator import is_
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from lightning_pipeline.model.places import MISSING, Kept, Place
from lightning_pipeline.model.rules import Rows
from lightning_pipeline.model.tensors import is_placeholder, map_tensors, tensors_in

_MOST = 1 << 16  # bytes of a tensor that every rank is told whether it reads it or not
_FEW = 16
MOST_COMPARED = 4096
"""Elements of a tensor that is compared with another rank's."""
_SMALL = (type(None), bool, int, float, complex, str)
_DICTS = (dict, OrderedDict, Counter, defaultdict)
Gradients = dict[str, dict[int, Tensor]]
"""Of what a step leaves: by label of the place, and by number of the tensor in what stands there; on CPU."""


class Sent(NamedTuple):
    """A value on its way to the other ranks.

    Attributes:
        value: With tensors on CPU, without their graph.
        on_device: For each tensor in it, whether it was on the device of the run.
        is_there: Whether there is a value at all.
    """

    value: Any
    on_device: list[bool]
    is_there: bool = True

    @classmethod
    def of(cls, value: Any) -> "Sent":
        """Make a value ready that is small, or travels."""
        if value is MISSING:
            return cls(None, [], is_there=False)
        value = _packed(value)
        on_device = [tensor.device.type != "cpu" for tensor in tensors_in(value)]
        return cls(map_tensors(lambda tensor: tensor.detach().cpu(), value), on_device)

    def received(self, device: torch.device) -> Any:
        """The value on this rank.

        Args:
            device: Of the run.
        """
        if not self.is_there:
            return MISSING
        places = iter(self.on_device)
        return _unpacked(map_tensors(lambda t: t.to(device) if next(places) else t, self.value))


class _Deque(NamedTuple):
    """A deque on its way."""

    items: list[Any]
    longest: int | None


class _Dict(NamedTuple):
    """A dictionary of the standard library on its way, without what makes its entries; see `let_make`."""

    kind: type[dict[Any, Any]]
    items: dict[Any, Any]


def _packed(value: Any) -> Any:
    """The same with tuples in the place of deques and dictionaries, in which tensors are found."""
    if isinstance(value, deque):
        return _Deque([_packed(item) for item in value], value.maxlen)
    if type(value) in (list, tuple):
        return type(value)(map(_packed, value))
    if type(value) not in _DICTS:
        return value
    items = {key: _packed(item) for key, item in value.items()}
    return items if type(value) is dict else _Dict(type(value), items)


def _unpacked(value: Any) -> Any:
    if type(value) is _Deque:
        return deque(map(_unpacked, value.items), value.longest)
    if type(value) is _Dict:
        items = _unpacked(value.items)
        return defaultdict(None, items) if value.kind is defaultdict else value.kind(items)
    if type(value) in (list, tuple):
        return type(value)(map(_unpacked, value))
    return {key: _unpacked(item) for key, item in value.items()} if type(value) is dict else value


class Added(NamedTuple):
    """What a batch has added to the end of a list.

    Attributes:
        before: How many items there were.
        items: Those that came.
    """

    before: int
    items: Sent

    def into(self, own: Any, device: torch.device) -> bool:
        """Add them to the list of this rank, if that is as it was on the last stage.

        Args:
            own: What stands there.
            device: Of the run.
        """
        if type(own) not in (list, deque) or len(own) != self.before:
            return False
        own.extend(self.items.received(device))
        return True


class AddedInside(NamedTuple):
    """What a batch has put into a dictionary, and into lists in it.

    Attributes:
        entries: By key, of those that have changed.
    """

    entries: "dict[Any, Added | AddedInside | Sent]"

    def into(self, own: Any, device: torch.device) -> bool:
        """Put it into the dictionary of this rank, if that is as it was on the last stage.

        Args:
            own: What stands there.
            device: Of the run.
        """
        if type(own) not in _DICTS:
            return False
        for key, one in self.entries.items():
            if isinstance(one, Sent):
                own[key] = one.received(device)
            elif key not in own or not one.into(own[key], device):
                return False
        return True


class FromLast(NamedTuple):
    """What the last stage tells the others after a batch.

    Attributes:
        values: By label.
        added: To lists and dictionaries that stay where they are, by label.
        rows: What cuts a value by rows, by label, of those as well that are not sent.
        unmerged: Labels of what has no value for the batch.
        elsewhere: Labels of where it has what stands for a value of another stage, which has that.
    """

    values: dict[str, Sent]
    added: dict[str, Added | AddedInside]
    rows: dict[str, Rows]
    unmerged: list[str]
    elsewhere: list[str]


def added_to(value: Any, start: Kept) -> Added | AddedInside | None:
    """What few items a batch has added to a list's end, or to a dictionary; None where it did anything else.

    Args:
        value: What stands there now.
        start: What stood there when the batch began.
    """
    if value is not start.value or not start.inner:
        return None
    stood = {id(held): saved for held, saved in start.inner}
    found = _added(value, stood, start.changed)
    return found if found is not None and _size_added(found) <= _MOST else None


def _added(value: Any, stood: Mapping[int, Any], changed: set[int]) -> Added | AddedInside | None:
    """The same, of any size, by what stood in each container, and which have changed."""
    if type(value) in _DICTS:
        return _added_inside(value, stood, changed)
    if type(value) not in (list, deque):
        return None
    before, now = list(stood[id(value)]), list(value)
    if any(id(item) in changed for item in before):
        return None
    lost = range(
        len(before) + 1 if getattr(value, "maxlen", None) == len(now) else 1
    )  # by a deque that is full
    kept = next((len(before) - n for n in lost if _is_same(before[n:], now)), None)
    if kept is None or not travels(now[kept:]):
        return None
    return Added(len(before), Sent.of(now[kept:]))


def _added_inside(value: Any, stood: Mapping[int, Any], changed: set[int]) -> AddedInside | None:
    before, entries = stood[id(value)], dict[Any, Added | AddedInside | Sent]()
    if not before.keys() <= value.keys() or not all(map(_is_key, value)):
        return None
    for key, item in value.items():
        is_old = key in before and item is before[key]
        if is_old and id(item) in changed:
            if (found := _added(item, stood, changed)) is None:
                return None
            entries[key] = found
        elif not is_old or isinstance(item, Tensor):  # that may have been written
            if not travels(item):
                return None
            entries[key] = Sent.of(item)
    return AddedInside(entries)


def _size_added(found: Added | AddedInside | Sent) -> int:
    if isinstance(found, AddedInside):
        return sum(map(_size_added, found.entries.values()))
    return size_of(found.value if isinstance(found, Sent) else found.items.value)


def _is_same(kept: list[Any], now: list[Any]) -> bool:
    """Whether these objects stand at the beginning."""
    return len(kept) <= len(now) and (not kept or kept[-1] is now[len(kept) - 1]) and all(map(is_, kept, now))


def is_small(value: Any) -> bool:
    """Whether every rank may be told this after each batch."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size() <= _MOST
    if type(value) is tuple:
        return len(value) < _FEW and all(map(is_small, value))
    if type(value) in _DICTS:  # of numbers, and of losses
        few = len(value) < _FEW and all(map(_is_key, value)) and all(map(is_small, value.values()))
        return few and travels(value) and size_of(value) <= _MOST
    return type(value) in _SMALL or value is MISSING


def travels(value: Any) -> bool:
    """Whether other ranks can be told this: tensors, arrays, constants, in tuples, lists, dictionaries."""
    if isinstance(value, Tensor):
        return not is_placeholder(value)
    if isinstance(value, numpy.ndarray | numpy.generic):
        return not value.dtype.hasobject
    if type(value) in (list, tuple, deque):
        return all(map(travels, value))
    if type(value) is set:
        return all(type(item) in _SMALL for item in value)
    if type(value) in _DICTS:
        return all(_is_key(key) and travels(item) for key, item in value.items())
    return type(value) in _SMALL


def _is_key(key: Any) -> bool:
    return type(key) in _SMALL or (type(key) is tuple and all(map(_is_key, key)))


def size_of(value: Any) -> int:
    """Bytes of the tensors and arrays in something that travels, and a guess for the rest."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, numpy.ndarray | numpy.generic):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(size_of, value.values()))
    if isinstance(value, list | tuple | set | deque):
        return sum(map(size_of, value))
    return len(value) if isinstance(value, str) else 8


def left_in(places: Iterable[Place], largest: int | None = None) -> tuple[dict[str, Sent], list[str]]:
    """On the last stage: what stands there, by label, as far as it can be sent, and the labels of the rest.

    Args:
        places: Where.
        largest: Bytes that may be sent; the smallest are first.
    """
    values = {place.label: place.get() for place in places}
    sizes = {n: size_of(value) for n, value in values.items() if value is MISSING or travels(value)}
    sent: dict[str, Sent] = {}
    total = 0
    for label in sorted(sizes, key=sizes.__getitem__):
        total += sizes[label]
        if largest is None or total <= largest:
            sent[label] = Sent.of(values[label])
    return sent, [label for label in values if label not in sent]


def put_in(places: Iterable[Place], left: Mapping[str, Sent], device: torch.device) -> None:
    """Let this rank have what the last stage had. Lists stay the lists that they are.

    Args:
        places: Where.
        left: From `left_in`.
        device: Of the run.
    """
    for place in places:
        if place.label not in left:
            continue
        value, own = left[place.label].received(device), place.get()
        let_make(value, own)
        if type(own) is type(value) and isinstance(own, list | dict | set | deque):
            fill(own, value)
        else:
            place.put(value)


def let_make(value: Any, own: Any) -> None:
    """Let a `defaultdict` that was sent, and those in it, make entries as the one that stands here.

    Args:
        value: From the last stage.
        own: What stood in its place.
    """
    if not isinstance(value, defaultdict) or not isinstance(own, defaultdict):
        return
    value.default_factory = own.default_factory
    inner = [item for item in value.values() if isinstance(item, defaultdict)]
    made = own.default_factory() if inner and own.default_factory is not None else None
    for item in inner:
        let_make(item, made)


def fill(container: Any, whole: Any) -> None:
    """Give a container other contents."""
    if isinstance(container, list):
        container[:] = whole
        return
    container.clear()
    (container.extend if isinstance(container, deque) else container.update)(whole)


def leaves_compared(value: Any) -> float:
    """How many numbers, texts and small tensors or arrays on the processor it holds; inf if there is else.

    Args:
        value: What stands in a place.
    """
    if isinstance(value, list | tuple | dict | deque | set):
        few = len(value) <= MOST_COMPARED
        items = value.values() if isinstance(value, dict) else value
        return sum(map(leaves_compared, items)) if few else math.inf
    if isinstance(value, Tensor):
        plain = value.layout is torch.strided and not (is_placeholder(value) or value.is_complex())
        return value.numel() if plain and value.device.type == "cpu" else math.inf
    if isinstance(value, numpy.ndarray):
        return value.size if value.dtype.kind in "biuf" else math.inf
    return 1 if type(value) in (bool, int, float, str, type(None)) else math.inf
