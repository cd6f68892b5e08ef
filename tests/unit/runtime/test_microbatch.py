"""Cutting batches and merging what came back."""

import warnings
from collections import UserDict, namedtuple
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from torch.utils._pytree import tree_map_only
from transformers import BatchEncoding
from transformers.modeling_outputs import SequenceClassifierOutput

from lightning_pipeline.data.fingerprint import fingerprint
from lightning_pipeline.data.mappings import of_class
from lightning_pipeline.data.merge import merge_outputs
from lightning_pipeline.data.microbatch import batch_size_of, signature_of, split_batch
from lightning_pipeline.errors import ConfigurationError
from lightning_pipeline.run.batch.parts import split_arguments

Pair = namedtuple("Pair", "inputs targets")


@dataclass
class Sample:
    image: Tensor
    name: str


def test_sizes_are_as_even_as_possible() -> None:
    parts = split_batch(torch.arange(10), 4)
    assert [size for _, size in parts] == [3, 3, 2, 2]
    assert torch.equal(torch.cat([part for part, _ in parts]), torch.arange(10))


def test_a_batch_smaller_than_the_number_of_microbatches_gives_fewer() -> None:
    assert [size for _, size in split_batch((torch.zeros(3, 2), torch.zeros(3)), 8)] == [1, 1, 1]


def test_tensors_and_lists_of_the_batch_are_split_and_the_rest_is_handed_on() -> None:
    mask = torch.zeros(5, 5)
    batch = {"x": torch.arange(4), "y": torch.arange(4.0), "names": list("abcd"), "mask": mask,
             "scale": torch.tensor(2.0), "task": "cloze", "list": [1, 2], "array": np.arange(4)}  # fmt: skip
    first, second = (part for part, _ in split_batch(batch, 2))
    assert second["x"].tolist() == [2, 3]
    assert second["y"].tolist() == [2.0, 3.0]
    assert first["names"] == ["a", "b"]
    assert second["array"].tolist() == [2, 3]
    assert first["mask"] is mask
    assert first["scale"] == 2.0
    assert first["task"] == "cloze"
    assert first["list"] == [1, 2]


@pytest.mark.parametrize("length", [2, 3])
def test_a_collated_list_of_tensors_is_structure_whatever_the_batch_size(length: int) -> None:
    parts = split_batch([torch.zeros(length, 5), torch.arange(length)], 2)
    assert [type(part) for part, _ in parts] == [list, list]
    assert parts[0][0][0].shape == (length - 1, 5)
    assert parts[1][0][1].tolist() == [length - 1]


def test_containers_keep_their_types() -> None:
    batch = (
        Pair(torch.zeros(4), torch.ones(4)),
        BatchEncoding({"ids": torch.arange(4)}),
        Sample(torch.zeros(4), "a"),
    )
    pair, encoding, sample = split_batch(batch, 2)[1][0]
    assert isinstance(pair, Pair)
    assert pair.targets.tolist() == [1.0, 1.0]
    assert isinstance(encoding, BatchEncoding)
    assert encoding["ids"].tolist() == [2, 3]
    assert isinstance(sample, Sample)
    assert sample.image.shape == (2,)
    assert sample.name == "a"
    assert batch[1]["ids"].tolist() == [0, 1, 2, 3]


class ReadOnly(Mapping[str, Any]):
    """Keeps its values inside, and something beside them."""

    def __init__(self, items: Any = (), source: str = "nowhere") -> None:
        self.kept, self.source = dict(items), source

    def __getitem__(self, key: str) -> Any:
        return self.kept[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.kept)

    def __len__(self) -> int:
        return len(self.kept)


class Written(ReadOnly, MutableMapping[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        self.kept[key] = value

    def __delitem__(self, key: str) -> None:
        del self.kept[key]


class Constant(dict[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError("cannot be written")

    update = __setitem__  # type: ignore[assignment]


class Sized(Written):
    """Refuses values of another length, and is cut as a tensor is: as tensordict's."""

    batch_size = torch.Size([4])

    def __setitem__(self, key: str, value: Any) -> None:
        assert value.shape[:1] == self.batch_size
        self.kept[key] = value

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self.kept[key]
        part = Sized({name: value[key] for name, value in self.kept.items()}, self.source)
        part.batch_size = torch.Size([len(part["x"])])
        return part


@pytest.mark.parametrize("make", [ReadOnly, Written, Constant, Sized, UserDict, MappingProxyType])
def test_mappings_of_any_class_are_cut_and_stay_as_they_were(make: Any) -> None:
    batch = make({"x": torch.arange(4), "y": torch.arange(4.0)})
    if isinstance(batch, ReadOnly):
        batch.source = "file"
    parts = [part for part, _ in split_batch({"inside": batch}, 2)]
    assert [type(part["inside"]) for part in parts] == [type(batch)] * 2
    assert [part["inside"]["x"].tolist() for part in parts] == [[0, 1], [2, 3]]
    assert [part["inside"]["y"].tolist() for part in parts] == [[0.0, 1.0], [2.0, 3.0]]
    assert batch["x"].tolist() == [0, 1, 2, 3]
    assert not isinstance(batch, ReadOnly) or {part["inside"].source for part in parts} == {"file"}


class WithMore(dict[str, Any]):
    def __init__(self) -> None:
        super().__init__(more=1)


def test_a_dictionary_that_adds_keys_of_its_own_is_made_again() -> None:
    assert of_class(WithMore, {"x": 2}) == {"more": 1, "x": 2}
    assert type(of_class(Constant, {"x": 2})) is Constant


def test_fingerprints_look_into_mappings_of_any_class() -> None:
    one, same, other = (fingerprint((ReadOnly({"x": torch.full((2,), n)}), 1)) for n in (1.0, 1.0, 2.0))
    assert one == same != other


class Stubborn(ReadOnly):
    def __init__(self, x: Tensor) -> None:
        super().__init__({"x": x})

    def __copy__(self) -> Any:
        raise TypeError("cannot be copied")


def test_a_mapping_that_can_be_filled_in_no_way_is_refused_by_its_name() -> None:
    with pytest.raises(
        ConfigurationError, match=r"a .*Stubborn cannot be made .*Stubborn\(\{\.\.\.\}\).*split_batch"
    ):
        split_batch(Stubborn(torch.arange(4)), 2)


def test_lists_of_dicts_are_samples() -> None:
    batch = ([{"boxes": torch.zeros(n, 4)} for n in (1, 5, 7, 2)], torch.zeros(4, 3), torch.zeros(4))
    part, size = split_batch(batch, 2)[1]
    assert size == 2
    assert [target["boxes"].shape[0] for target in part[0]] == [7, 2]


def _images(number: int) -> list[Tensor]:
    return [torch.zeros(3, 8, 8) for _ in range(number)]


def _objects(*numbers: int) -> list[dict[str, Tensor]]:
    return [{"boxes": torch.zeros(n, 4), "labels": torch.zeros(n)} for n in numbers]


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ((torch.zeros(4, 3, 8, 8), _objects(2, 2, 2, 2)), ((2, 3, 8, 8), [{"boxes": (2, 4), "labels": (2,)}] * 2)),
        ((_images(4), _objects(2, 2, 1, 1)), ([(3, 8, 8)] * 2, [{"boxes": (1, 4), "labels": (1,)}] * 2)),
        ((_images(4), _objects(3, 3, 3, 3)), ([(3, 8, 8)] * 2, [{"boxes": (3, 4), "labels": (3,)}] * 2)),
        ((_images(4), _objects(1, 7, 4, 4)), ([(3, 8, 8)] * 2, [{"boxes": (4, 4), "labels": (4,)}] * 2)),
        (
            (tuple(_images(3)), tuple(_objects(3, 1, 3))),
            (((3, 8, 8),), ({"boxes": (3, 4), "labels": (3,)},)),
        ),
        ((tuple(_images(4)), (0, 1, 2, 3)), (((3, 8, 8), (3, 8, 8)), (2, 3))),
        ((torch.zeros(4, 3), [torch.zeros(n, 4) for n in (1, 2, 3, 4)]), ((2, 3), [(3, 4), (4, 4)])),
        ([{"image": torch.zeros(3, 8, n + 1), "mask": torch.zeros(8), "label": n} for n in range(4)],
         [{"image": (3, 8, 3), "mask": (8,), "label": 2}, {"image": (3, 8, 4), "mask": (8,), "label": 3}]),
        ([(torch.zeros(6, 2), torch.zeros(5), n) for n in range(4)], [((6, 2), (5,), 2), ((6, 2), (5,), 3)]),
        ((torch.zeros(8), torch.zeros(8), [torch.zeros(n) for n in (64, 32, 16)]), ((4,), (4,), [(64,), (32,), (16,)])),
        ({"one": [{"x": torch.zeros(4)}] * 2, "two": [{"x": torch.zeros(4)}] * 2},
         {"one": [{"x": (2,)}] * 2, "two": [{"x": (2,)}] * 2}),
        ((torch.zeros(4, 3), [torch.zeros(1, 4), torch.zeros(0), torch.zeros(3, 4), torch.zeros(4, 4)]),
         ((2, 3), [(3, 4), (4, 4)])),
        (([torch.zeros(8, 3), torch.zeros(8, 3)], torch.zeros(8)), ([(4, 3), (4, 3)], (4,))),
        ({"views": [torch.zeros(8, 3) for _ in range(4)]}, {"views": [(4, 3)] * 4}),
        ([{"x": torch.zeros(8, 2)}, {"x": torch.zeros(8, 2)}], [{"x": (4, 2)}] * 2),
    ],
    ids=["images and two objects each", "lists", "as many objects as channels", "as many objects as samples",
         "tuples", "tuples and numbers", "boxes alone", "dictionaries as they are", "pairs as they are",
         "shared levels", "views of dictionaries", "an image without boxes", "views",
         "views alone", "several loaders"],
)  # fmt: skip
def test_lists_hold_samples_where_collating_has_left_them_so(batch: Any, expected: Any) -> None:
    part, _ = split_batch(batch, 2)[1]
    shapes = tree_map_only(Tensor, lambda tensor: tuple(tensor.shape), part)
    assert shapes == expected


def test_per_sample_outputs_are_joined_whatever_their_lengths() -> None:
    parts = [_objects(2, 5), _objects(1, 2)]
    assert [len(one["labels"]) for one in merge_outputs(parts, [2, 2])] == [2, 5, 1, 2]
    assert [len(one["labels"]) for one in merge_outputs([*map(tuple, parts)], [2, 2])] == [2, 5, 1, 2]


def test_lists_of_columns_stay_columns() -> None:
    merged = merge_outputs([[torch.zeros(2), torch.zeros(3)], [torch.ones(2), torch.zeros(3)]], [2, 2])
    assert [tensor.shape[0] for tensor in merged] == [4, 3]


def test_the_most_common_length_is_the_batch_size() -> None:
    assert batch_size_of({"mask": torch.zeros(7, 7), "x": torch.zeros(4, 7), "y": torch.zeros(4)}) == 4
    assert batch_size_of(["a", "b"]) == 2


@pytest.mark.parametrize("batch", ["text", None, 7, {"scale": torch.tensor(2.0)}], ids=repr)
def test_a_batch_with_nothing_to_split_is_one_micro_batch(batch: object) -> None:
    assert split_batch(batch, 4) == [(batch, 1)]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (torch.zeros(0, 3), "batch is empty"),
        ([torch.zeros(3), torch.zeros(5), torch.zeros(7)], r"lengths \[3, 5, 7\], none of them"),
        ((torch.zeros(2), [torch.zeros(2), torch.zeros(2)]), "can be one tensor per sample or 2 batched"),
        ((torch.zeros(2, 3), _objects(2, 2)), "a list of 2 dictionaries"),
        ([(torch.zeros(6), n) for n in range(4)], "a list of 4 with numbers and tensors of length 6"),
        ([(torch.zeros(3, 8, 8), torch.zeros(1, 8, 8))] * 4, "none of them more common"),
        ((torch.zeros(2), torch.zeros(2), pack_sequence([torch.zeros(2), torch.zeros(1)])), "PackedSequence"),
        (torch.zeros(4, 4).to_sparse(), "layout torch.sparse_coo cannot be split"),
    ],
)
def test_what_cannot_be_split_is_refused(batch: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        split_batch(batch, 2)


def test_signatures_tell_shapes_and_flags_but_not_numbers() -> None:
    def of(x: Tensor, index: int = 0, **options: Any) -> Any:
        return signature_of(({"x": x, "names": ["a"]}, index), options)

    assert of(torch.zeros(2, 3), 0) == of(torch.ones(2, 3), 7)
    others = [of(torch.zeros(2, 4)), of(torch.zeros(2, 3).double()), of(torch.zeros(2, 3), flag=True)]
    assert len({of(torch.zeros(2, 3)), *others}) == 4
    assert of(torch.zeros(1), flag=True) != of(torch.zeros(1), flag=False)


def test_outputs_are_merged_to_what_one_device_returns() -> None:
    outputs = [
        {"loss": torch.tensor(1.0), "logits": torch.zeros(2, 3), "correct": torch.tensor(2), "names": [*"ab"],
         "batch_idx": 5, "count": 2, "acc": 0.5, "none": None, "task": "x", "pair": (torch.ones(2), 1.0)},
        {"loss": torch.tensor(4.0), "logits": torch.ones(1, 3), "correct": torch.tensor(2), "names": ["c"],
         "batch_idx": 5, "count": 1, "acc": 1, "none": None, "task": "x", "pair": (torch.zeros(1), 4.0)},
    ]  # fmt: skip
    merged = merge_outputs(outputs, [2, 1])
    assert merged["loss"] == 2.0
    assert merged["logits"].shape == (3, 3)
    assert merged["correct"] == 4
    assert merged["names"] == ["a", "b", "c"]
    assert merged["batch_idx"] == 5
    assert merged["count"] == 3
    assert merged["acc"] == pytest.approx(2 / 3)
    assert merged["none"] is None
    assert merged["task"] == "x"
    assert merged["pair"][0].tolist() == [1.0, 1.0, 0.0]
    assert merged["pair"][1] == 2.0


def test_a_model_output_stays_one() -> None:
    outputs = [
        SequenceClassifierOutput(loss=torch.tensor(float(n)), logits=torch.zeros(n, 2)) for n in (1, 3)
    ]
    merged = merge_outputs(outputs, [1, 3])
    assert isinstance(merged, SequenceClassifierOutput)
    assert merged.loss == 2.5
    assert merged.logits is not None
    assert merged.logits.shape == (4, 2)
    assert outputs[0].logits.shape == (1, 2)


def test_numpy_arrays_and_a_list_of_two_tensors_are_merged_item_by_item() -> None:
    merged = merge_outputs([[np.zeros((2, 3)), torch.zeros(2)], [np.ones((2, 3)), torch.ones(2)]], [2, 2])
    assert merged[0].shape == (4, 3)
    assert merged[1].tolist() == [0, 0, 1, 1]


def test_one_microbatch_is_handed_on() -> None:
    output = object()
    assert merge_outputs([output], [3]) is output


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (
            [{"a": torch.zeros(3)}, {"a": torch.ones(3)}],
            r"output\['a'\].*shapes \(3,\), \(3,\) do not begin with",
        ),
        ([None, torch.tensor(1.0)], "its types differ: NoneType, Tensor"),
        ([("a",), ("b",)], r"output\[0\]: its values of type str differ"),
        ([{"a": 1.0}, {"b": 1.0}], "its keys or lengths differ"),
        ([object(), object()], "override `merge_outputs"),
        ([torch.tensor(True), torch.tensor(False)], "truth values differ"),
    ],
)
def test_what_cannot_be_merged_is_refused(outputs: list[Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        merge_outputs(outputs, [2, 2])


def test_what_has_rows_and_is_not_cut_is_said() -> None:
    """Points of several sets, joined, and a target for each set: the points explain more tensors than the sets."""
    sets = {"points": torch.zeros(12, 3), "set": torch.arange(12) // 3, "y": torch.zeros(4)}
    with pytest.warns(
        UserWarning, match=r"'set'\] \(12,\) to \(6,\); each part gets whole: batch\['y'\] \(4,\)"
    ):
        split_arguments(LightningModule(), "training_step", [sets], 2, says=True)
    boxes = [torch.zeros(images, 4) for images in (2, 1, 3, 1)]
    plain = {"x": torch.zeros(4, 3), "boxes": boxes, "mask": torch.zeros(1, 5), "scale": torch.tensor(2.0)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parts = split_arguments(LightningModule(), "training_step", [plain], 2, says=True)
    assert parts.how_cut(plain).startswith(
        "The batch was cut into micro-batches by the first dimension: batch['x'] (4, 3) to (2, 3), "
        "batch['boxes'] (4,) to (2,); each part gets whole: batch['mask'] (1, 5)."
    )


def test_an_error_of_a_step_says_how_many_samples_micro_batches_have() -> None:
    batch = torch.zeros(6, 3)
    parts = split_arguments(LightningModule(), "training_step", [batch], 3)
    with pytest.raises(RuntimeError, match="out of range") as raised, parts.explained(batch):
        batch[:2].topk(3, 0)
    assert raised.value.__notes__ == [
        "The step ran on micro-batches of 2 of the batch's 6 samples. What fails with so few (the largest "
        "three, a variance) needs fewer micro-batches: num_microbatches=1 has them all. What relates "
        "samples with each other (an adjacency matrix) is cut by rows alone, unless `split_batch(batch, "
        "num_microbatches)` on the LightningModule cuts it."
    ]
    parts = split_arguments(LightningModule(), "training_step", [batch], 1)
    with pytest.raises(RuntimeError, match="out of range") as raised, parts.explained(batch):
        batch[:2].topk(3, 0)
    assert not hasattr(raised.value, "__notes__")


@pytest.mark.parametrize(
    "names", [("a", "b", "c"), (b"a", b"b", b"c"), (Path("a"), Path("b"), Path("c"))],
    ids=["texts", "bytes", "paths"],
)  # fmt: skip
def test_a_tuple_of_texts_is_cut_with_its_samples_and_joined(names: tuple[object, ...]) -> None:
    parts = [part for part, _ in split_batch((torch.zeros(3, 2), names), 2)]
    assert [part[1] for part in parts] == [names[:2], names[2:]]
    assert merge_outputs([part[1] for part in parts], [2, 1]) == names


def test_a_tuple_of_lists_of_texts_is_cut_with_its_samples() -> None:
    captions = (["a"], ["b", "c"], ["d"])
    parts = [part for part, _ in split_batch((torch.zeros(3, 2), captions), 2)]
    assert [part[1] for part in parts] == [captions[:2], captions[2:]]


def test_a_tuple_of_columns_and_one_that_is_the_same_for_all_are_left_as_they_are() -> None:
    columns = (["a", "b"], ["c", "d"])
    parts = [part for part, _ in split_batch((torch.zeros(2, 2), columns), 2)]
    assert parts[0][1] == (["a"], ["c"])
    assert merge_outputs([("a", "b"), ("a", "b")], [2, 2]) == ("a", "b")


class Labelled(Tensor):
    """A project's own class, of which each row has a label."""

    def reshape(self, *shape: Any) -> Tensor:
        raise ValueError(f"labels do not fit {shape}")


def test_tensors_of_a_class_of_its_own_are_told_apart_without_its_methods() -> None:
    batch = torch.arange(6.0).view(2, 3)
    found = fingerprint(batch.as_subclass(Labelled))
    assert found == fingerprint(batch.clone().as_subclass(Labelled))
    assert found != fingerprint((batch + 1).as_subclass(Labelled))
