"""Where the samples of a batch stand: in the rows of its tensors, or one by one in lists.

Collating stacks samples to tensors with a row for each. What cannot be stacked, such as images of several
sizes and their boxes, is left in lists or tuples with an item for each sample, whose tensors have lengths of
their own: these say nothing of how many samples there are.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_pipeline.errors import ConfigurationError

Array = Tensor | np.ndarray[Any, Any]
_LIBRARIES = frozenset({"builtins", "collections", "numpy", "pandas", "torch", "torchmetrics", "lightning"})
_PLAIN = (bool, int, float, complex, str, bytes, Tensor, np.ndarray, torch.device, torch.dtype, torch.Size)
OVERRIDE = "override `split_batch(batch, num_microbatches)` on the LightningModule"


class Samples(NamedTuple):
    """Of one batch.

    Attributes:
        number: How many.
        one_by_one: Whether every list and tuple of this length is known to hold an item for each sample.
        is_list: Whether the batch itself is a list with an item for each.
        collated: Whether a list of so many tensors of one length holds columns, as torch's collating has it.
    """

    number: int
    one_by_one: bool = False
    is_list: bool = False
    collated: bool = False


class Loaded(NamedTuple):
    """What is known of the loaders that a batch is from.

    Attributes:
        several: Whether a batch is put together of batches of several.
        sizes: How many samples one has, where that is known: as many as was asked for, or what is left over.
        number: Of several loaders, samples of the one whose were cut in the batches before; 0: it is not
            known.
        collated: Whether torch's own function has made batches of several of samples.
    """

    several: bool = False
    sizes: frozenset[int] = frozenset()
    number: int = 0
    collated: bool = False


def samples_of(batch: Any, loaded: Loaded | None = None) -> Samples:
    """How many samples a batch has: the length that explains most of its tensors.

    A length explains a tensor that has it as its first dimension, or that stands in a list or tuple of this
    length with items that are alike, where anything beside such lists has that length, too, or their own
    tensors differ in theirs. Where several explain as many, it is the most common first dimension, and of
    two the first one's. Of batches of several loaders, it is the largest one's, and later that of the same
    loader. Without any tensor that has a dimension, the lengths of the lists count. NumPy arrays count as
    tensors here.

    Args:
        batch: What the dataloader gave.
        loaded: What is known of it.

    Raises:
        ConfigurationError: Nothing in the batch has a length, no length is the most common one, or a list
            can be read in two ways.
    """
    rows = [array.shape[0] for array in arrays_in(batch)]
    if isinstance(batch, list) and _are_single(batch):
        if len(set(rows)) == 1:
            raise ConfigurationError(
                f"a list of {len(batch)} with numbers and tensors of length {rows[0]} can be so many samples "
                f"as the data set gives them, or batches of several loaders: {OVERRIDE}"
            )
        return Samples(len(batch), one_by_one=True)
    if loaded is not None and (told := _told(batch, loaded)) is not None:
        return told
    lists = [one for one in _lists(batch) if is_list(one)] if rows else []
    stacked = {array.shape[0] for array in _stacked(batch, top=True)}
    shown = {length for length in map(len, lists) if _is_shown(batch, lists, stacked, length)}
    objects = {len(one) for one in lists if are_objects(one)} & shown
    for length in objects:
        beside = any(len(one) == length and isinstance(one[0], Tensor) for one in lists)
        if _explained(batch, length) == len(rows) and (len(set(rows)) > 1 or beside):
            return Samples(length, one_by_one=True)
    best = max(shown, key=lambda length: _score(batch, lists, length), default=None)
    try:
        usual = _most_common(batch, loaded)
    except ConfigurationError:
        if best is None:
            raise
        return Samples(best, one_by_one=True)
    if best is not None and _score(batch, lists, best) > _score(batch, lists, usual):
        return Samples(best, one_by_one=True)
    if usual in objects and set(rows) == {usual}:
        raise ConfigurationError(
            f"a list of {usual} dictionaries with tensors of length {usual} in a batch of {usual} samples "
            f"can be one for each sample or {usual} batches: {OVERRIDE}"
        )
    return Samples(usual, one_by_one=usual in objects, collated=loaded is not None and loaded.collated)


def _told(batch: Any, loaded: Loaded) -> Samples | None:
    """What the loaders say themselves; None where the batch has to."""
    if loaded.several and loaded.number:
        return Samples(loaded.number, collated=loaded.collated)
    if isinstance(batch, list) and _holds_samples(batch, loaded):
        return Samples(len(batch), one_by_one=True, is_list=True)
    return None


def _holds_samples(batch: list[Any], loaded: Loaded) -> bool:
    """Whether a list holds samples that are not stacked, such as `collate_fn=list` leaves."""
    lengths = {array.shape[0] for array in arrays_in(batch)}
    if loaded.several or not lengths or not are_alike(batch):
        return False
    if not loaded.sizes:  # a sampler of batches says of how many samples
        return len(lengths) > 1 and len(batch) > 2 and all(map(items_of, batch))
    if len(batch) not in loaded.sizes or (len(batch) == 2 and len(lengths) == 1):
        return False
    if all(map(items_of, batch)):
        return len(lengths) > 1 or not lengths <= loaded.sizes
    # A list of tensors may be one of inputs, targets and the like, of as many samples as were left over.
    ragged = len({item.shape for item in batch}) > 1 and len(batch) == max(loaded.sizes)
    return len(batch) > 2 and not lengths & loaded.sizes and (len(lengths) > 1 or ragged)


def _explained(batch: Any, length: int, *, top: bool = True) -> int:
    """How many tensors a number of samples explains."""
    if isinstance(batch, Tensor | np.ndarray):
        return int(batch.ndim > 0 and batch.shape[0] == length)
    if not top and is_list(batch) and len(batch) == length and are_alike(batch):
        return sum(1 for _ in arrays_in(batch))
    return sum(_explained(item, length, top=False) for item in _telling(batch))


def _is_shown(batch: Any, lists: Sequence[Any], stacked: set[int], length: int) -> bool:
    """Whether stacked tensors say that there are so many samples; where none is, the kind of the lists."""
    if stacked:
        return length in stacked
    own = [one for one in lists if len(one) == length]
    if any(are_objects(one) or not _has_arrays(one) for one in own):
        return True
    ragged = any(len({item.shape[:1] for item in one if isinstance(item, Tensor)}) > 1 for one in own)
    return ragged and len(own) == len(lists) and not isinstance(batch, list) and all(map(are_alike, own))


def _score(batch: Any, lists: Sequence[Any], length: int) -> tuple[int, int]:
    plain = sum(len(one) == length and not _has_arrays(one) for one in lists)
    return _explained(batch, length), plain


def _most_common(batch: Any, loaded: Loaded | None) -> int:
    lengths = [array.shape[0] for array in arrays_in(batch)] or list(_list_lengths(batch))
    if not lengths:
        raise ConfigurationError(
            f"a batch of type {type(batch).__name__} has no tensor with a dimension and no list to split: "
            f"{OVERRIDE}"
        )
    counts = Counter(lengths)
    (length, count), *others = counts.most_common()
    is_shared = count > 1 and bool(others) and others[0][1] == count
    if is_shared and (loaded is None or loaded.several or not loaded.sizes) and _are_batches(batch):
        return max(one for one, number in counts.items() if number == count)
    if is_shared or (count == 1 and len(counts) > 2):
        raise ConfigurationError(
            f"the parts of a batch have lengths {lengths}, none of them more common than all others, so the "
            f"number of samples cannot be told: {OVERRIDE}"
        )
    return length


def _are_batches(batch: Any) -> bool:
    """Whether these are batches of several loaders, each of its own size."""
    parts = parts_of(batch)
    return len(parts) > 1 and all(
        bool(parts_of(part)) and len({array.shape[0] for array in arrays_in(part)}) == 1 for part in parts
    )


def has_samples(batch: Any) -> bool:
    """Whether there is anything to split: a tensor with a dimension, or a list."""
    return _has_arrays(batch) or any(True for _ in _list_lengths(batch))


def are_samples(values: Any, samples: Samples, *, top: bool) -> bool:
    """Whether a list or tuple holds an item per sample, and is not `[inputs, targets]` as collating makes it.

    Args:
        values: The list or tuple.
        samples: Of the batch that it stands in.
        top: Whether it is that batch.

    Raises:
        ConfigurationError: It can be read in two ways.
    """
    size = samples.number
    if not is_list(values) or len(values) != size or (top and not isinstance(values, list)):
        return False
    if top and (samples.is_list or _are_single(values)):
        return True
    batched = [is_batched(item, size) for item in values]
    if top:
        of_lists = all(is_list(item) and len(item) == size for item in values)  # each with an item per sample
        tensors = any(isinstance(item, Tensor) and item.ndim for item in values)
        return not (any(batched) or tensors or of_lists)
    if not _has_arrays(values):
        return isinstance(values, list) or samples.one_by_one or are_texts(values, size)
    if samples.one_by_one and are_alike(values):
        return True
    if isinstance(values, tuple):
        return False
    if samples.collated and _are_columns(values):
        return False
    if all(batched) and all(isinstance(item, Tensor) for item in values):
        raise ConfigurationError(
            f"a list of {size} tensors of length {size} in a batch of {size} samples can be one tensor per "
            f"sample or {size} batched tensors: {OVERRIDE}, or collate it into a tuple"
        )
    return not any(batched) or (not all(batched) and are_alike(values))


def _are_columns(values: Sequence[Any]) -> bool:
    """Whether these are tensors of one length."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    return len(tensors) == len(values) and len({tensor.shape[:1] for tensor in tensors}) == 1


def are_texts(values: Sequence[Any], size: int) -> bool:
    """Whether it holds names, paths or other texts, or lists of them that are no columns of this length.

    `default_collate` makes tuples of texts, with one for each sample.
    """
    columns = all(is_list(item) and len(item) == size for item in values)
    return not columns and all(map(_is_text, values))


def _is_text(value: Any) -> bool:
    if isinstance(value, str | bytes | PathLike):
        return True
    return is_list(value) and len(value) > 0 and all(map(_is_text, value))


def is_batched(value: Any, size: int) -> bool:
    """Whether a part of a batch holds a tensor with a row for each of so many samples."""
    return any(array.shape[0] == size for array in arrays_in(value))


def is_list(value: Any) -> bool:
    """Whether it is a list, or a tuple without names."""
    return isinstance(value, list) or (isinstance(value, tuple) and not hasattr(value, "_fields"))


def _are_single(values: Sequence[Any]) -> bool:
    """Whether items are samples as a data set gives them, with numbers that collating makes tensors of."""
    containers = all(is_list(item) or _is_object(item) for item in values) and are_alike(values)
    return containers and len(values) > 0 and all(any(map(_is_number, parts_of(item))) for item in values)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor | np.ndarray) and not value.ndim)


def _is_object(value: Any) -> bool:
    return isinstance(value, Mapping) or (dataclasses.is_dataclass(value) and not isinstance(value, type))


def are_objects(values: Sequence[Any]) -> bool:
    """Whether it holds dictionaries or dataclasses with tensors, which are not stacked as they are."""
    return all(map(_is_object, values)) and _has_arrays(values) and are_alike(values)


def are_alike(values: Sequence[Any]) -> bool:
    """Whether items are of one kind: tensors of one type and number of dimensions, or containers alike."""
    return len({_kind(value) for value in values if not _is_empty(value)}) <= 1


def _kind(value: Any) -> Any:
    if isinstance(value, Tensor | np.ndarray):
        return type(value), value.dtype, value.ndim
    return type(value), None if isinstance(value, Mapping) else len(parts_of(value))


def _is_empty(value: Any) -> bool:
    """Whether it is a tensor that could be of any kind, such as the boxes of an image without any."""
    return isinstance(value, Tensor | np.ndarray) and value.ndim > 0 and len(value) == 0


def _stacked(value: Any, *, top: bool) -> Iterator[Array]:
    """Tensors and arrays with a dimension that stand in no list or tuple but the batch itself."""
    if isinstance(value, Tensor | np.ndarray):
        if value.ndim:
            yield value
    elif top or not is_list(value):
        for item in _telling(value):
            yield from _stacked(item, top=False)


def _lists(value: Any, *, top: bool = True) -> Iterator[Any]:
    """Lists and tuples in a batch that are not empty, outermost ones; the batch is none of them."""
    if not top and is_list(value) and len(value):
        yield value
        return
    for item in parts_of(value):
        yield from _lists(item, top=False)


def _has_arrays(value: Any) -> bool:
    return any(True for _ in arrays_in(value))


def arrays_in(value: Any) -> Iterator[Array]:
    """All tensors and arrays with a dimension, in order."""
    if isinstance(value, Tensor | np.ndarray):
        if value.ndim:
            yield value
        return
    for item in _telling(value):
        yield from arrays_in(item)


def _list_lengths(value: Any) -> Iterator[int]:
    if isinstance(value, list):
        yield len(value)
    for item in parts_of(value):
        yield from _list_lengths(item)


def items_of(value: Any) -> list[Any]:
    """What stands in a container; nothing where it is none that is looked into."""
    if isinstance(value, list | tuple):  # before mappings, which take longer to tell
        return list(value)
    if isinstance(value, Mapping):
        return list(value.values())
    if _is_object(value):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return []


def parts_of(value: Any) -> list[Any]:
    """What stands in a container, or in a batch that is an object of the user's own class."""
    return items_of(value) or list((attributes_of(value) or {}).values())


def _telling(value: Any) -> list[Any]:
    """What says how many samples there are: not objects of one class in a list, of which each has one."""
    parts = parts_of(value)
    if not is_list(value):
        return parts
    classes = Counter(type(part) for part in parts if not items_of(part) and _dictionary_of(part) is not None)
    most = 1 if isinstance(value, list) else 2  # texts of two languages, both padded
    return [part for part in parts if classes[type(part)] <= most]


def attributes_of(value: Any) -> dict[str, Any] | None:
    """What an object of a class of the user's holds, if that is a batch: its tensors have as many rows each.

    Such are a padded batch with its lengths, and images with their mask. A graph has rows of nodes and of
    edges, and is not looked into. Nor is what holds other objects.

    Args:
        value: Anything.
    """
    own = _dictionary_of(value)
    if own is None or not all(map(_is_plain, own.values())):
        return None
    return own if len({array.shape[0] for item in own.values() for array in arrays_in(item)}) == 1 else None


def arrays_apart(value: Any, name: str, depth: int = 3) -> Iterator[tuple[str, Array]]:
    """Tensors of an object that is not looked into, such as a graph, with their names.

    Args:
        value: The object.
        name: Its own.
        depth: How far down to go.
    """
    own = value if isinstance(value, dict) else _dictionary_of(value)
    for key, item in (own or {}).items():
        inner = f"{name}[{key!r}]" if isinstance(value, dict) else f"{name}.{key}"
        if isinstance(item, Tensor | np.ndarray):
            if item.ndim:
                yield inner, item
        elif depth:
            yield from arrays_apart(item, inner, depth - 1)


def _dictionary_of(value: Any) -> dict[str, Any] | None:
    """The attributes of an object of a class that is the user's and that nobody calls."""
    if type(value).__module__.partition(".")[0] in _LIBRARIES or isinstance(value, type) or callable(value):
        return None
    own = getattr(value, "__dict__", None)
    return own if type(own) is dict else None


def _is_plain(value: Any, depth: int = 2) -> bool:
    """Whether a value is an array, number or text, or a list or dictionary of such."""
    if isinstance(value, list | tuple | dict) and depth:
        return all(_is_plain(item, depth - 1) for item in items_of(value))
    return value is None or isinstance(value, _PLAIN)
