"""What a step returned and has made of its batch, put together from its micro-batches', told to all ranks."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_pipeline._torch import tree_leaves
from lightning_pipeline.data import items_of, merge_outputs
from lightning_pipeline.errors import ConfigurationError
from lightning_pipeline.hooks import LogRecorder
from lightning_pipeline.model.loss import Part
from lightning_pipeline.model.mixing import is_cut_by_rows
from lightning_pipeline.model.places import (
    MISSING,
    BatchChanges,
    change_entries,
    put_by_place,
    taken_by_all,
    write_into,
)
from lightning_pipeline.model.state import Elsewhere, Unmerged
from lightning_pipeline.model.tensors import is_placeholder, map_tensors, tensors_in
from lightning_pipeline.run.batch.differences import Difference, MergeFailure, keys_of, with_parts, written

_RETURNED = (
    "{} of a batch",
    "return the tensors that it is made of, log it, or override merge_outputs(outputs, sizes)",
)
_TOLD = bool | int | float | complex | str | bytes | None
_LARGEST_WRITTEN = 1 << 20  # elements of a tensor of the batch that a step writes in place
_SMALL = 4096  # elements of an entry of what a step returns, which every rank is then told


class ReturnedNumbers:
    """Puts numbers that a step returns together as those that it logs: sums, means over what counts, roots.

    Args:
        module: The LightningModule.
        part_of: What a number of the micro-batch that runs is of the batch's.

    Attributes:
        guesses: Numbers of this batch that are not known to be one device's, and what to say of them.
    """

    def __init__(self, module: LightningModule, part_of: Callable[..., Part]) -> None:
        self._module, self._numbers = module, LogRecorder(module, _RETURNED)
        self._numbers.part_of = part_of
        self._step, self._sizes = "", list[int]()
        self.whole_begins, self.whole_is_unlike = self._numbers.whole_begins, self._numbers.whole_is_unlike
        self.warn_of_guesses = self._numbers.warn_of_guesses

    @property
    def guesses(self) -> dict[str, str]:
        """Numbers of this batch that are not known to be one device's, and what to say of them."""
        return self._numbers.guesses

    def begin(self, step: str, sizes: Sequence[int]) -> None:
        """Forget the last batch.

        Args:
            step: Name of the user's method.
            sizes: Samples of each micro-batch.
        """
        self._step, self._sizes = step, list(sizes)
        self._numbers.begin(sizes)

    def take(self, microbatch: int, result: Any) -> None:
        """What the step returned for a micro-batch."""
        size = self._sizes[microbatch] if len(self._sizes) > 1 else None
        for place, number in () if size is None else self._found(result, size):
            self._numbers.take(microbatch, self._name(place), number)

    def take_of_whole(self, result: Any, is_sure: bool) -> None:
        """What it returns for the whole batch, as far as units do not compute it.

        Args:
            result: That.
            is_sure: Whether no value of units was made up.
        """
        for place, number in self._found(result, sum(self._sizes)):
            if not isinstance(number, Tensor) or not is_placeholder(number):
                self._numbers.take_of_whole(self._name(place), number, is_sure=is_sure)

    def merged(self, outputs: list[Any], sizes: list[int]) -> Any:
        """What the step returned for the batch, with the numbers that are known of it.

        Args:
            outputs: What it returned for each micro-batch.
            sizes: Samples of each.

        Returns:
            That, or `MergeFailure` where our rules say nothing of it.
        """
        if hasattr(self._module, "merge_outputs"):
            return merge_of(self._module)(outputs, sizes)
        try:
            return self._with_known(merge_outputs(outputs, sizes))
        except ConfigurationError as error:
            return MergeFailure(error, self._by_entry(outputs, sizes))

    def _by_entry(self, outputs: list[Any], sizes: list[int]) -> dict[Any, Any] | None:
        """The entries that can be put together, for hooks, which may read no other; a prediction is read."""
        keys = list(outputs[0]) if type(outputs[0]) is dict else []
        if self._step == "predict_step" or any(type(one) is not dict or list(one) != keys for one in outputs):
            return None
        found = {}
        for key in keys:
            try:
                found[key] = merge_outputs([{key: one[key]} for one in outputs], sizes)[key]
            except ConfigurationError:
                found[key] = Unmerged(f"entry {key!r} of what it returned", self._step)
        return found

    def _with_known(self, output: Any) -> Any:
        """What was put together by rules for values, with the numbers that are known for the batch."""
        if len(self._sizes) < 2:
            return output
        known = self._numbers.of_batch()
        if not known:
            return output
        parts = [
            Difference(place, "", "", _like(number, known[self._name(place)]))
            for place, number in _numbers_in(output, ())
            if self._name(place) in known
        ]
        return with_parts(output, parts)

    def _found(self, result: Any, size: int) -> Iterator[tuple[tuple[Any, ...], Any]]:
        trains = self._step == "training_step"  # of which the loss is told apart
        if not trains or isinstance(result, Mapping):
            for place, number in _numbers_in(result, (), size):
                if not trains or place[0] != "loss":
                    yield place, number

    def _name(self, place: tuple[Any, ...]) -> str:
        return f"{self._step}{written(place)}"


def _numbers_in(value: Any, place: tuple[Any, ...], size: int = -1) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Numbers, with the keys that lead to them; lists with one for each sample are left out."""
    if isinstance(value, Tensor):
        if value.dim() == 0 and not value.is_complex() and value.dtype is not torch.bool:
            yield place, value
    elif type(value) in (int, float):
        yield place, value
    elif not (isinstance(value, list | tuple) and len(value) == size):
        for key, item in zip(keys_of(value), items_of(value), strict=True):
            yield from _numbers_in(item, (*place, key), size)


def _like(number: Any, value: Tensor) -> Any:
    """A number of the batch, of the kind that micro-batches have."""
    if isinstance(number, Tensor):
        whole = value if number.is_floating_point() else value.round()
        return whole.to(number.device, number.dtype).reshape(())
    return float(value) if isinstance(number, float) else round(float(value))


def merge_of(module: LightningModule) -> Callable[[list[Any], list[int]], Any]:
    """The user's `merge_outputs`, or ours."""
    return getattr(module, "merge_outputs", merge_outputs)


def checked(output: Any) -> Any:
    """What a step returned for a batch.

    Raises:
        ConfigurationError: Our rules do not put it together, and nothing else stands for it.
    """
    if not isinstance(output, MergeFailure):
        return output
    if output.parts is None:
        raise output.error
    return output.parts


class _Large(NamedTuple):
    """Stands for a part of what a step returned that the other ranks are not told.

    Attributes:
        place: The keys that lead to it.
    """

    place: tuple[Any, ...]


def told_of(output: Any) -> Any:
    """What other ranks than the last stage's are told: entries that are small, on the processor."""
    if type(output) is dict:
        return {key: _small(value, (key,)) for key, value in output.items()}
    return _small(output, ())


def as_told(told: Any, step: str, device: torch.device) -> Any:
    """What such a rank has for it.

    Args:
        told: By the last stage.
        step: Name of the user's method.
        device: For tensors.
    """
    if isinstance(told, _Large):
        entry = f"entry {told.place[0]!r} of " if told.place else ""
        return Elsewhere(f"{entry}what {step} returned")
    if type(told) is dict:
        return {key: as_told(value, step, device) for key, value in told.items()}
    return map_tensors(lambda tensor: tensor.to(device), told)


def _small(value: Any, place: tuple[Any, ...]) -> Any:
    """A value that all ranks are told: numbers, texts and tensors of few elements."""
    leaves = tree_leaves(value)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor | np.ndarray)]
    plain = all(isinstance(leaf, Tensor | np.ndarray | np.generic | _TOLD) for leaf in leaves)
    count = sum(math.prod(tensor.shape) for tensor in tensors)
    if not plain or len(leaves) > _SMALL or count > _SMALL:
        return _Large(place)
    return map_tensors(lambda tensor: tensor.detach().cpu(), value)


def may_differ(value: Any, samples: int) -> bool:
    """Whether it holds whole numbers, truths or texts, which may agree with the batch's by chance.

    Args:
        value: What the step returns for the batch as one.
        samples: Of the batch; lists with an item for each are joined.
    """
    if isinstance(value, Tensor):
        return value.dim() == 0 and value.dtype is torch.bool
    if isinstance(value, bool | int | str | np.generic):
        return True
    if isinstance(value, list | tuple) and len(value) == samples:
        return False
    return any(may_differ(item, samples) for item in items_of(value))


class ChangedBatch(NamedTuple):
    """What other ranks are told.

    Attributes:
        put: Entries, by the keys that lead to them.
        taken: Those of which were taken out.
        written: Tensors that were written, by their number.
        large: Numbers of those that nobody is told.
    """

    put: Any
    taken: list[Any]
    written: dict[int, Tensor]
    large: list[int]


def changed(
    batch: Any, step: str, changes: Sequence[BatchChanges], parts: Sequence[Any], sizes: Sequence[int]
) -> ChangedBatch:
    """On the last stage: let a batch be what one device leaves of it.

    Entries with a row for each sample are joined; others raise when they are read, for nobody knows what they
    would be for all of the samples.

    Args:
        batch: That the step was given, not split.
        step: Name of the user's method.
        changes: Of each micro-batch.
        parts: The micro-batches, where the user has cut them; else they are in the batch's order.
        sizes: Samples of each.

    Returns:
        What the others are told.
    """
    if not any(changes):
        return ChangedBatch({}, [], {}, [])
    in_order = len(parts) < 2 or is_cut_by_rows(batch, parts, sizes)
    written = write_into(batch, changes, sizes) if in_order else {}
    taken = taken_by_all(batch, changes, sizes)
    put = {}
    for path, (values, is_of_one) in put_by_place(batch, changes, sizes).items():
        if is_of_one:  # a dictionary for each sample
            values = [value for value in values if value is not MISSING]
            if not in_order:
                continue
        by_rows = in_order and all(_is_of_rows(*pair) for pair in zip(values, sizes, strict=False))
        joined = torch.cat(values) if by_rows and len(values) > 1 else values[0]
        is_text = isinstance(values[0], str | bool | None) and all(one == values[0] for one in values)
        is_known = by_rows or is_text or len(values) == 1
        put[path] = joined if is_known else Unmerged(f"entry {path[-1]!r} of the batch", step)
    change_entries(batch, put, taken)
    small = {number: one.cpu() for number, one in written.items() if one.numel() <= _LARGEST_WRITTEN}
    told = {path: _small(value, path[-1:]) for path, value in put.items()}
    return ChangedBatch(told, taken, small, [number for number in written if number not in small])


def _is_of_rows(value: Any, size: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == size


def take(
    batch: Any, told: ChangedBatch, step: str, device: torch.device,
    changes: Sequence[BatchChanges], sizes: Sequence[int],
) -> bool:  # fmt: skip
    """On the other ranks: the same.

    Args:
        batch: That the step was given, not split.
        told: By the last stage.
        step: Name of the user's method.
        device: Of the run.
        changes: By micro-batch, what this rank has seen of the step, for what is not told.
        sizes: Samples of each.

    Returns:
        Whether all is known.
    """
    own = write_into(batch, changes, sizes) if told.large and len(changes) == len(sizes) else {}
    tensors = list(tensors_in(batch)) if told.written else []
    with torch.no_grad():
        for number, values in told.written.items():
            tensors[number].copy_(values)
    change_entries(batch, as_told(told.put, step, device), told.taken)
    return own.keys() >= set(told.large)
