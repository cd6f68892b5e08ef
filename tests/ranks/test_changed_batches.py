"""What a step does to its batch: hooks after it, and loaders that keep their batches, find it done."""

import warnings
from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from lightning_pipeline.errors import PlaceholderError
from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, loader, trainer

Ranks = Callable[[int], Pool]


class Batches:
    """A loader that keeps its batches, which are dictionaries."""

    def __init__(self, made: Callable[[dict[str, Any]], Any] = lambda batch: batch) -> None:
        batches = [{"x": x, "y": y, "name": f"batch {number}"} for number, (x, y) in enumerate(loader())]
        self.kept = [made(batch) for batch in batches]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.kept)

    def __len__(self) -> int:
        return len(self.kept)


class Puts(Regression):
    """An entry, which a hook reads; takes another one out."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        outputs = self.net(batch["x"])
        batch["outputs"] = outputs.detach()
        batch["kind"] = "training"
        batch.pop("name", None)
        return nn.functional.mse_loss(outputs, batch["y"])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append((sorted(batch), float(batch["outputs"].sum()), batch["kind"]))


class Replaces(Puts):
    """An entry by what the network makes, which the next epoch trains on."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        outputs = self.net(batch["x"])
        loss = nn.functional.mse_loss(outputs, batch["y"])
        batch["y"] = 0.5 * batch["y"] + 0.5 * outputs.detach()
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(batch["y"].sum()))


class Writes(Replaces):
    """Writes into the batch's own tensor, in every epoch again."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch["x"].mul_(0.9)
        return nn.functional.mse_loss(self.net(batch["x"]), batch["y"])


class Sees(Callback):
    """Reads in a callback what a validation step has put in."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_validation_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, *args: Any
    ) -> None:
        self.seen.append(float(batch["outputs"].sum()))


class Validates(Puts):
    """Puts an entry in a validation step."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        batch["outputs"] = self.net(batch["x"])


KINDS = {kind.__name__: kind for kind in (Puts, Replaces, Writes, Validates)}


def found(pipeline: dict[str, Any] | None, kind: str) -> dict[str, Any]:
    module, sees, batches = KINDS[kind](), Sees(), Batches()
    validates = {"val_dataloaders": Batches()} if kind == "Validates" else {}
    trainer(pipeline, callbacks=[sees] if validates else []).fit(module, batches, **validates)
    tensors = {name: value.detach() for name, value in module.named_parameters()}
    tensors |= {
        f"{number} {key}": batch[key] for number, batch in enumerate(batches.kept) for key in ("x", "y")
    }
    return {**tensors, "seen": module.seen, "sees": sees.seen}


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_find_the_batch_as_the_step_leaves_it(ranks: Ranks, kind: str) -> None:
    expected = found(None, kind)
    one_rank = {"stages": 1, "stages_per_rank": 2, "schedule": "Interleaved1F1B", "num_microbatches": 2}
    for ours in (
        found(one_rank, kind),
        *ranks(2)(found, {"stages": 2, "num_microbatches": 2}, kind, group=False),
    ):
        for name in ("seen", "sees"):
            assert approximately(ours.pop(name)) == approximately(expected[name])
        torch.testing.assert_close(ours, {key: expected[key] for key in ours}, rtol=1e-9, atol=1e-9)


def approximately(seen: list[Any]) -> list[Any]:
    return [tuple(map(rounded, one)) if isinstance(one, tuple) else rounded(one) for one in seen]


def rounded(value: Any) -> Any:
    return round(value, 9) if isinstance(value, float) else value


class Sums(Puts):
    """A sum over the samples: nobody knows that it is one."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        outputs = self.net(batch["x"])
        batch["outputs"] = outputs.detach().abs().sum()
        return nn.functional.mse_loss(outputs, batch["y"])


def test_an_entry_that_is_no_row_of_each_sample_is_refused_where_it_is_read() -> None:
    with pytest.raises(PlaceholderError, match="entry 'outputs' of the batch is set by training_step"):
        trainer({"stages": 1, "num_microbatches": 2}).fit(Sums(), Batches())


class Boxes(Writes):
    """Writes tensors of a list with one for each sample, and tensors that come after it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        boxes = torch.stack([one.clamp_(max=0.5) for one in batch["boxes"]])
        batch["z"].mul_(0.5)
        return nn.functional.mse_loss(self.net(batch["x"]), batch["y"]) + 0 * boxes.sum()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append((float(torch.stack(batch["boxes"]).sum()), float(batch["z"].sum())))


def boxes_seen(pipeline: dict[str, Any] | None) -> list[Any]:
    module, batches = Boxes(), Batches()
    for batch in batches.kept:
        del batch["name"]
        rows = torch.arange(4.0 * len(batch["x"])).reshape(-1, 4) / 10
        batch |= {"boxes": list(rows), "z": rows.clone(), "a": 2 * rows, "b": 3 * rows, "c": 4 * rows}
    trainer(pipeline).fit(module, batches)
    return approximately(module.seen)


def test_lists_with_a_tensor_for_each_sample_are_written_too(ranks: Ranks) -> None:
    expected = boxes_seen(None)
    assert boxes_seen({"stages": 1, "num_microbatches": 2}) == expected
    assert ranks(2)(boxes_seen, {"stages": 2, "num_microbatches": 2}, group=False) == [expected, expected]


class Mapping(UserDict[str, Any]):
    """As tokenizers of Transformers give them."""


NESTED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "tuple": lambda batch: (batch["x"], {"y": batch["y"], "name": batch["name"]}),
    "list": lambda batch: [batch["x"], batch["y"], batch["name"]],
    "mapping": lambda batch: Mapping(batch),
    "samples": lambda batch: {"x": batch["x"], "each": [{"y": y, "name": "sample"} for y in batch["y"]]},
}


class Nested(Puts):
    """Changes containers in the batch, or the batch that is no dictionary."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch["x"] if not isinstance(batch, list | tuple) else batch[0]
        outputs = self.net(x)
        if isinstance(batch, tuple | Mapping):
            held = batch[1] if isinstance(batch, tuple) else batch
            held["outputs"], y = outputs.detach(), held["y"]
            held.pop("name", None)
        elif isinstance(batch, list):
            y, batch[1] = batch[1], 0.5 * (batch[1] + outputs.detach())
            batch.append("seen")
        else:
            y = torch.stack([one["y"] for one in batch["each"]])
            for number, one in enumerate(batch["each"]):
                one["y"] = 0.5 * (one["y"] + outputs[number].detach())
                one.pop("name", None)
        return nn.functional.mse_loss(outputs, y)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if isinstance(batch, tuple | Mapping):
            held = batch[1] if isinstance(batch, tuple) else batch
            self.seen.append((float(held["outputs"].sum()), len(held)))
        elif isinstance(batch, list):
            self.seen.append((float(batch[1].sum()), len(batch), batch[-1]))
        else:
            self.seen.append((float(sum(one["y"].sum() for one in batch["each"])), len(batch["each"][0])))


def nested(pipeline: dict[str, Any] | None, kind: str) -> tuple[list[Any], dict[str, Tensor]]:
    module = Nested()
    trainer(pipeline).fit(module, Batches(NESTED[kind]))
    return approximately(module.seen), {name: value.detach() for name, value in module.named_parameters()}


@pytest.mark.parametrize("kind", NESTED)
def test_containers_in_a_batch_are_as_the_step_leaves_them(ranks: Ranks, kind: str) -> None:
    seen, weights = nested(None, kind)
    pipeline = {"stages": 2, "num_microbatches": 2}
    for own, weight in (
        nested({"stages": 1, "num_microbatches": 2}, kind),
        *ranks(2)(nested, pipeline, kind, group=False),
    ):
        assert own == seen
        torch.testing.assert_close(weight, weights, rtol=1e-9, atol=1e-9)


class Late(Puts):
    """Puts an entry into a batch that is traced as those before it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        outputs = self.net(batch["x"])
        if len(self.seen) == 2:
            batch["outputs"] = outputs.detach()
        return nn.functional.mse_loss(outputs, batch["y"])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(batch["outputs"].sum()) if "outputs" in batch else 0.0)


def late(pipeline: dict[str, Any] | None) -> tuple[list[Any], list[str]]:
    module = Late()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer(pipeline).fit(module, Batches())
    return approximately(module.seen), [str(one.message) for one in told]


def test_an_entry_that_a_later_batch_is_given_is_there_or_told_of(ranks: Ranks) -> None:
    expected, _ = late(None)
    assert late({"stages": 1, "num_microbatches": 2})[0] == expected
    found = ranks(2)(late, {"stages": 2, "num_microbatches": 2}, group=False)
    told = [text for _, texts in found for text in texts]
    assert any("training_step has changed 'the batch' on the last stage alone" in text for text in told)


class Large(Puts):
    """Writes more than other ranks are told: before the network, or after a layer."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.late = late

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not self.late:
            batch["image"].mul_(0.5)
            batch["x"].mul_(0.9)
        outputs = self.net(batch["x"])
        if self.late:
            batch["image"][:, 0] += outputs.detach().sum(1)
        batch["kind"] = "training"
        return nn.functional.mse_loss(outputs, batch["y"])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append((float(batch["image"].sum()), float(batch["x"].sum()), batch["kind"]))


def large(pipeline: dict[str, Any] | None, late: bool) -> tuple[list[Any], list[str]]:
    def made(batch: dict[str, Any]) -> dict[str, Any]:
        image = torch.ones(len(batch["x"]), 200_000, dtype=torch.float64)
        return {"image": image, **batch}

    module = Large(late)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer(pipeline, max_epochs=1).fit(module, Batches(made))
    return approximately(module.seen), [str(one.message) for one in told]


@pytest.mark.parametrize("late", [False, True])
def test_large_tensors_that_a_step_writes_are_written_by_each_rank_or_told_of(
    ranks: Ranks, late: bool
) -> None:
    expected, _ = large(None, late)
    last, first = ranks(2)(large, {"stages": 2, "num_microbatches": 2}, late, group=False)
    assert last[0] == expected
    told = any("too large to be told to this rank" in text for text in first[1])
    assert told == late and (late or first[0] == expected)
