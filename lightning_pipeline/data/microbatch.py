"""A batch becomes micro-batches, and what they return becomes what one device would have returned."""

import copy
import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_pipeline.data.mappings import unfillable, with_values
from lightning_pipeline.data.samples import (
    OVERRIDE,
    Array,
    Loaded,
    Samples,
    are_samples,
    arrays_apart,
    arrays_in,
    attributes_of,
    has_samples,
    parts_of,
    samples_of,
)
from lightning_pipeline.errors import ConfigurationError

_PLAIN = frozenset({int, float, str})


def batch_size_of(batch: Any, loaded: Loaded | None = None) -> int:
    """How many samples a batch has. See `samples_of`, which raises the same."""
    return samples_of(batch, loaded).number


def split_batch(
    batch: Any, num_microbatches: int, *, at_least: int = 1, loaded: Loaded | None = None
) -> list[tuple[Any, int]]:
    """Cut a batch into micro-batches, as evenly as possible; fewer when it has fewer samples.

    Every tensor whose first dimension is the batch's is split, and every list of that length with an item for
    each sample (see `are_samples`), tuples too where collating has put samples into them, such as texts.
    Mappings of any class, tuples, lists, named tuples and dataclasses are walked through, and objects of
    other classes whose tensors have as many rows each (see `attributes_of`). Everything else is handed to
    all micro-batches as it is: 0-dim tensors, tensors of other lengths such as a shared mask, strings,
    numbers, other objects. A shared tensor whose length happens to be the batch's is split too:
    override then. A batch with nothing to split, such as a number or None, is one micro-batch.

    Args:
        batch: What the dataloader gave.
        num_microbatches: How many to make. At least 1.
        at_least: Samples that each should have; fewer are made so that it does.
        loaded: What is known of the loader.

    Returns:
        Pairs of a micro-batch and its number of samples.

    Raises:
        ConfigurationError: The batch has no length, none left, or a part that can be read in two ways.

    Example:
        >>> [(part.tolist(), size) for part, size in split_batch(torch.arange(3), 2)]
        [([0, 1], 2), ([2], 1)]
    """
    if num_microbatches == 1 or not has_samples(batch):
        return [(batch, _size_or_one(batch, loaded))]
    samples = samples_of(batch, loaded)
    size = samples.number
    if size == 0:
        raise ConfigurationError("the batch is empty, nothing to split: check the dataset's last batch")
    parts = max(1, min(num_microbatches, size // at_least))
    if parts == 1:
        return [(batch, size)]
    sizes = [size // parts + (index < size % parts) for index in range(parts)]
    starts = [sum(sizes[:index]) for index in range(parts)]
    return [
        (_take(batch, start, start + length, samples, top=True), length)
        for start, length in zip(starts, sizes, strict=True)
    ]


class Cut(NamedTuple):
    """What a micro-batch got of one place in a batch.

    Attributes:
        name: The place, as `batch[0]['x']`.
        whole: Shape of the tensor, or length of the list, in the batch.
        part: The same in the micro-batch.
    """

    name: str
    whole: tuple[int, ...]
    part: tuple[int, ...]


def how_cut(batch: Any, part: Any) -> tuple[list[Cut], list[Cut]]:
    """How a batch was cut: the places that were, and those that each micro-batch gets whole.

    Args:
        batch: What the dataloader gave.
        part: A micro-batch that `split_batch` made of it.

    Example:
        >>> cut, whole = how_cut((torch.zeros(4, 2), torch.zeros(3)), (torch.zeros(2, 2), torch.zeros(3)))
        >>> cut, whole
        ([Cut(name='batch[0]', whole=(4, 2), part=(2, 2))], [Cut(name='batch[1]', whole=(3,), part=(3,))])
    """
    places = list(_places(batch, part, "batch"))
    return [one for one in places if one.whole != one.part], [one for one in places if one.whole == one.part]


class SharedPlaces:
    """Places of batches that once were longer or shorter than the samples: all of these share what is there.

    Class weights from the collate function are no samples in a last batch of as many samples as classes, nor
    are the objects of all images in a batch that has as many of them as images.
    """

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._cut: str | None = None
        self._lengths: dict[str, set[int]] = {}

    def learn(self, batch: Any, part: Any) -> None:
        """Look at a batch and its first micro-batch."""
        cut, whole = how_cut(batch, part)
        self._names.update(name for name, _, _ in whole)
        for place in cut:
            self._lengths.setdefault(place.name, set()).add(place.whole[0])
        if self._cut is None and cut:
            self._cut = cut[0].name

    def breaks(self, batch: Any, part: Any) -> bool:
        """Whether a place that was cut in batches before is whole in this one, with another length.

        Args:
            batch: Of several loaders.
            part: A micro-batch of it.
        """
        _, whole = how_cut(batch, part)
        lengths = [(self._lengths.get(place.name), place.whole[0]) for place in whole]
        return any(before is not None and now not in before for before, now in lengths)

    def cut_before(self, batch: Any) -> int:
        """How long that is which was cut in the batches before; 0 where nobody knows."""
        return next(
            (place.whole[0] for place in _places(batch, batch, "batch") if place.name == self._cut), 0
        )

    def kept(self, batch: Any, part: Any) -> Any:
        """A micro-batch with what stands in such places whole."""
        return self._kept(batch, part, "batch") if self._names else part

    def _kept(self, value: Any, part: Any, name: str) -> Any:
        if isinstance(value, Tensor | np.ndarray):
            return value if name in self._names else part
        own = parts_of(part)
        if not own or len(own) != len(parts_of(value)):
            return part
        keys = list(value) if isinstance(value, Mapping) else range(len(own))
        found = zip(keys, parts_of(value), own, strict=True)
        made = [self._kept(item, of_part, f"{name}[{key!r}]") for key, item, of_part in found]
        if all(mine is before for mine, before in zip(made, own, strict=True)):
            return part
        following = iter(made)
        return rebuilt(part, lambda item, key: next(following))


def _places(value: Any, part: Any, name: str) -> Iterator[Cut]:
    """Tensors and arrays with a dimension, in order, also of objects that are not looked into.

    A list that was cut is one place.
    """
    if isinstance(value, Tensor | np.ndarray):
        if value.ndim:
            yield Cut(name, tuple(value.shape), tuple(part.shape))
        return
    items, own = parts_of(value), parts_of(part)
    if len(items) != len(own):
        yield Cut(name, (len(items),), (len(own),))
        return
    keys = list(value) if isinstance(value, Mapping) else range(len(items))
    for key, item, of_part in zip(keys, items, own, strict=True):
        yield from _places(item, of_part, f"{name}[{key!r}]")
    for place, array in () if items else arrays_apart(value, name):
        yield Cut(place, tuple(array.shape), tuple(array.shape))


def _size_or_one(batch: Any, loaded: Loaded | None) -> int:
    try:
        return max(1, batch_size_of(batch, loaded))
    except ConfigurationError:  # nothing is split, so that nobody need know
        return 1


def _take(value: Any, start: int, end: int, samples: Samples, *, top: bool = False) -> Any:
    """The samples from `start` to `end` of a value that may be split."""
    if isinstance(value, Tensor | np.ndarray):
        return value[start:end] if _is_split(value, samples.number) else value
    if are_samples(value, samples, top=top):
        return value[start:end]
    if isinstance(value, PackedSequence):
        raise ConfigurationError(f"a PackedSequence cannot be split by samples: {OVERRIDE}")
    if _knows_its_size(value, samples.number):
        return value[start:end]
    return rebuilt(value, lambda item, _: _take(item, start, end, samples))


def _knows_its_size(value: Any, size: int) -> bool:
    """Whether it is a mapping that is cut as a tensor is, such as a `TensorDict`."""
    own = getattr(value, "batch_size", None) if isinstance(value, Mapping) else None
    return isinstance(own, torch.Size) and len(own) > 0 and own[0] == size


def _is_split(array: Array, size: int) -> bool:
    if array.ndim == 0 or array.shape[0] != size:
        return False
    if isinstance(array, Tensor) and (array.layout is not torch.strided or array.is_nested):
        raise ConfigurationError(f"a tensor with layout {array.layout} cannot be split: {OVERRIDE}")
    return True


def rebuilt(value: Any, change: Callable[[Any, Any], Any]) -> Any:
    """The same container with changed items; `change` gets each item and its key."""
    if isinstance(value, Mapping):
        changed = {key: change(item, key) for key, item in value.items()}
        return changed if type(value) is dict else _filled(value, changed)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(change(item, index) for index, item in enumerate(value)))
    if isinstance(value, list | tuple):
        return type(value)(change(item, index) for index, item in enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        result = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(result, field.name, change(getattr(value, field.name), field.name))
        return result
    if (attributes := attributes_of(value)) is not None:
        result = copy.copy(value)
        for name, item in attributes.items():
            object.__setattr__(result, name, change(item, name))
        return result
    return value


def _filled(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    made = with_values(mapping, items)
    if made is None:
        raise ConfigurationError(f"{unfillable(type(mapping))}; or {OVERRIDE}")
    return made


def signature_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable:
    """What shapes of activations usually depend on: structure, and each leaf's shape, dtype and device type.

    Numbers and strings count by type only (an index of the batch is new each time), None and bools by value.
    Where more matters, the message says that it is not as agreed.
    """
    return _leaf_signature(list(args)), _leaf_signature(dict(kwargs))


def _leaf_signature(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return tuple(value.shape), str(value.dtype), value.device.type
    if isinstance(value, np.ndarray):
        return tuple(value.shape), str(value.dtype)
    if value is None or isinstance(value, bool):
        return value
    if type(value) in _PLAIN:
        return type(value).__name__, 0
    if isinstance(value, Mapping):
        return tuple((str(key), _leaf_signature(item)) for key, item in value.items())
    items = parts_of(value)
    if items and any(True for _ in arrays_in(value)):
        return type(value).__name__, *(_leaf_signature(item) for item in items)
    return type(value).__name__, len(items)
