"""What a step does to its batch: hooks after it, and loaders that keep their batches, find it done."""

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

    def __init__(self) -> None:
        self.kept = [{"x": x, "y": y, "name": f"batch {number}"} for number, (x, y) in enumerate(loader())]

    def __iter__(self) -> Iterator[dict[str, Any]]:
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
