"""What a step keeps in attributes is after a batch what one device has, whatever the micro-batches."""

import itertools
from collections import deque, namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.pool import Pool, RankFailure
from tests.ranks.lightning_cases import Regression, loader, trainer

Ranks = Callable[[int], Pool]


class Keeps(Regression):
    """Sets attributes anew, by name and by key; fills lists, deques and an object; counts."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None
        self.first: tuple[Tensor, Tensor] | None = None
        self.by_batch: dict[int, Tensor] = {}
        self.recent: deque[Tensor] = deque(maxlen=5)
        self.values: deque[float] = deque(maxlen=5)
        self.store = SimpleNamespace(losses=[])
        self.steps = self.seen = 0
        self.weight = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.batch = batch
        self.steps += 1
        self.seen += len(batch[0])
        self.features: list[Tensor] = []
        out = self.net(batch[0])
        self.features.append(out.detach())
        loss = nn.functional.mse_loss(out, self.batch[1]) + min(1.0, self.steps / 4) * out.pow(2).mean()
        self.last = loss.detach()
        self.recent.append(self.last)
        self.values.append(loss.item())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        out = self.net(batch[0])
        if batch_idx == 0:
            self.first = (batch[0], out)
        self.by_batch[batch_idx] = nn.functional.mse_loss(out, batch[1])
        self.store.losses.append(float(self.by_batch[batch_idx]))

    def on_train_epoch_end(self) -> None:
        last, recent = self.last, torch.stack(list(self.recent))
        self.log_dict({"last": last, "recent": recent.mean(), "held": float(len(recent))})
        self.log_dict({"values": sum(self.values) / len(self.values), "feature": self.features[0].mean()})
        self.log_dict({"rows": float(len(self.batch[0])), "features": float(len(self.features))})
        self.log_dict({"steps": float(self.steps), "seen": float(self.seen)})

    def on_validation_epoch_end(self) -> None:
        assert self.first is not None
        self.log("first", self.first[1].mean() + len(self.first[0]))
        self.log("by_batch", torch.stack(list(self.by_batch.values())).mean())
        self.log("stored", sum(self.store.losses) / len(self.store.losses))
        self.log("number_stored", float(len(self.store.losses)))
        self.by_batch.clear()
        self.store.losses = []


def logs_of(pipeline: dict[str, Any] | None, cls: type[Regression] = Keeps) -> dict[str, float]:
    run = trainer(pipeline)
    run.fit(cls(), loader(24), loader(24, seed=4))
    return {name: float(value) for name, value in run.callback_metrics.items()}


@pytest.mark.parametrize(("stages", "num_microbatches"), [(2, 4), (2, 1), (3, 2)])
def test_what_a_step_keeps_is_that_of_one_device(ranks: Ranks, stages: int, num_microbatches: int) -> None:
    expected = logs_of(None)
    assert len(expected) == 14
    for found in ranks(stages)(logs_of, {"stages": stages, "num_microbatches": num_microbatches}):
        assert found == pytest.approx(expected, rel=1e-9)


class LeavesItsLoss(Regression):
    """With its graph, as most write it; and a list that no hook empties."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Any = float("inf")
        self.outputs: list[Tensor] = []
        self.wide: Tensor | None = None
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self.net(batch[0])
        self.last = nn.functional.mse_loss(out, batch[1])
        self.outputs.append(out.detach())
        self.wide = out.detach().unsqueeze(-1).repeat(1, 1, 2000)  # more than is told after each batch
        return {"loss": self.last}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(self.last.item())


def left(pipeline: dict[str, Any] | None) -> list[Any]:
    module = LeavesItsLoss()
    kept = module.outputs
    trainer(pipeline).fit(module, loader(24), loader(24, seed=4))
    assert module.outputs is kept
    assert module.wide is not None
    return [module.seen, module.last.item(), torch.cat(kept), module.wide]


def test_what_steps_leave_is_there_after_the_run_on_every_rank(ranks: Ranks) -> None:
    expected = left(None)
    for found in ranks(2)(left, {"stages": 2, "num_microbatches": 2}):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


class Averages(Regression):
    """The average of a run of batches: neither the sum nor the count alone is that of one device."""

    def __init__(self) -> None:
        super().__init__()
        self.sum, self.number = 0.0, 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.sum += loss.item(); self.number += 1  # fmt: skip  # noqa: E702  # two statements in a line are the case
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("average", self.sum / self.number)
        self.sum, self.number = 0.0, 0


def test_a_sum_and_a_count_that_are_divided_are_those_of_one_device(ranks: Ranks) -> None:
    expected = logs_of(None, Averages)["average"]
    for found in ranks(2)(logs_of, {"stages": 2, "num_microbatches": 4}, Averages):
        assert found["average"] == pytest.approx(expected)


class Bent(Regression):
    """What is neither a mean nor a sum of the micro-batches' values is worked out once more at the batch's end."""

    def made_of(self, loss: Tensor) -> Tensor:
        return loss.exp()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.odd = self.made_of(loss.detach())
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.is_global_zero:
            self.log("odd", self.odd.mean())


class ReadsItAgain(Bent):
    """What follows from it in the step is each micro-batch's own; the batch as one has another."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("again", self.odd + 1.0)
        return loss


def test_what_bends_the_loss_is_that_of_the_batch(ranks: Ranks) -> None:
    expected = logs_of(None, Bent)["odd"]
    for found in ranks(2)(logs_of, {"stages": 2, "num_microbatches": 2}, Bent):
        assert found["odd"] == pytest.approx(expected)


class Takes(ReadsItAgain):
    """It takes from an iterator, so that its batch is not looked at as one."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        next(self.numbers)
        return super().training_step(batch, batch_idx)


def test_what_the_step_reads_again_is_that_of_the_batch_as_one(ranks: Ranks) -> None:
    expected = logs_of(None, ReadsItAgain)
    for found in ranks(2)(logs_of, {"stages": 2, "num_microbatches": 2}, ReadsItAgain):
        assert found["odd"] == pytest.approx(expected["odd"])
        assert found["again"] == pytest.approx(expected["again"])


def test_what_cannot_be_merged_is_refused_when_it_is_read(ranks: Ranks) -> None:
    with pytest.raises(RankFailure, match="attribute 'odd' of the LightningModule is set by training_step"):
        ranks(2)(logs_of, {"stages": 2, "num_microbatches": 2}, Takes)


class Confusion(Regression):
    """Buffers that the end of a step fills, of which one is set anew, and counts of what layers gave."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("matrix", torch.zeros(3, 3, dtype=torch.long))
        self.register_buffer("total", torch.zeros((), dtype=torch.float64))
        self.register_buffer("latest", torch.zeros((), dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.latest = loss.detach()
        self.total += (loss * len(batch[0])).detach()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pairs = 3 * self.net(batch[0]).argmax(1) + batch[1].argmax(1)
        self.matrix += torch.bincount(pairs, minlength=9).view(3, 3)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log_dict({"latest": self.latest, "total": self.total})

    def on_validation_epoch_end(self) -> None:
        self.log("accuracy", self.matrix.trace() / self.matrix.sum())
        self.matrix.zero_()


def test_buffers_that_the_end_of_a_step_writes_are_on_every_rank(ranks: Ranks) -> None:
    expected = logs_of(None, Confusion)
    for found in ranks(2)(logs_of, {"stages": 2, "num_microbatches": 1}, Confusion):
        assert found == pytest.approx(expected, rel=1e-9)
    for found in ranks(2)(logs_of, {"stages": 2, "num_microbatches": 4}, Confusion):
        assert found["accuracy"] == pytest.approx(expected["accuracy"])
        assert found["total"] == pytest.approx(expected["total"])


class Extras(Regression):
    """Reads other entries of what the step returned."""

    times = 1

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:  # type: ignore[override]
        out = self.net(batch[0])
        loss = nn.functional.mse_loss(out, batch[1])
        wide = out.detach().repeat(1, self.times)
        return {"loss": loss, "out": wide, "named": {"kind": "mse", "error": loss.detach()}}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs["named"]["kind"] == "mse"
        self.log("error", outputs["named"]["error"])
        self.log("mean", outputs["out"].mean())


class Wide(Extras):
    times = 1000


def test_small_entries_of_what_a_step_returns_are_on_every_rank(ranks: Ranks) -> None:
    expected = logs_of(None, Extras)
    for number in (1, 2):
        for found in ranks(2)(logs_of, {"stages": 2, "num_microbatches": number}, Extras):
            assert found == pytest.approx(expected, rel=1e-9)


def test_a_large_entry_that_is_on_the_last_stage_names_itself_elsewhere(ranks: Ranks) -> None:
    text = r"entry 'out' of what training_step returned is filled .* \[at test_step_attributes.py:"
    with pytest.raises(RankFailure, match=text):
        ranks(2)(logs_of, {"stages": 2, "num_microbatches": 2}, Wide)


class MakesAClass(Regression):
    """Makes the class of its outputs in the first step, as pytorch-forecasting does."""

    def forward(self, x: Tensor) -> Any:
        prediction = self.net(x)
        if not hasattr(self, "output_class"):

            class Output(namedtuple("output", ["prediction"])):
                def error(self, target: Tensor) -> Tensor:
                    return nn.functional.mse_loss(self.prediction, target)

            self.output_class = Output
        return self.output_class(prediction)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).error(batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self(batch[0]).error(batch[1]))


def test_a_class_that_a_step_makes_once_is_kept(ranks: Ranks) -> None:
    expected = logs_of(None, MakesAClass)
    for found in ranks(2)(logs_of, {"stages": 2, "num_microbatches": 2}, MakesAClass):
        assert found == pytest.approx(expected, rel=1e-9)


class KeepsByLoader(Regression):
    """Keeps what it predicts in a list for each loader, and works it out at the end of the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[list[Any]] | dict[int, list[Any]] = [[], []]
        self.losses: list[Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        out = self.net(batch[0])
        self.kept[dataloader_idx].append((out, batch[1]))
        self.losses.append(nn.functional.mse_loss(out, batch[1]))
        self.log("val_loss", self.losses[-1])

    def on_validation_epoch_end(self) -> None:
        self.log("batches", float(len(self.losses)))
        self.log("mean_of_batches", torch.stack(self.losses).mean())
        self.losses.clear()
        for number in range(2):
            kept = self.kept[number]
            self.log(f"batches_{number}", float(len(kept)))
            out, target = (torch.cat(column) for column in zip(*kept, strict=True))
            self.log(f"rows_{number}", float(len(out)))
            self.log(f"error_{number}", nn.functional.mse_loss(out, target))
            kept.clear()


class KeepsInDictionary(KeepsByLoader):
    def __init__(self) -> None:
        super().__init__()
        self.kept = {0: [], 1: []}


def keep_by_loader(pipeline: dict[str, Any] | None, kind: type[KeepsByLoader]) -> dict[str, float]:
    module = kind()
    run = trainer(pipeline, max_epochs=2)
    run.fit(module, loader(8), [loader(16, seed=4), loader(10, seed=5)])
    return {name: float(value) for name, value in run.callback_metrics.items()}


@pytest.mark.parametrize("kind", [KeepsByLoader, KeepsInDictionary])
def test_lists_in_containers_have_what_one_device_added(ranks: Ranks, kind: type[KeepsByLoader]) -> None:
    """The last batch has 2 samples, so that a micro-batch's list is as long as it has samples."""
    expected = keep_by_loader(None, kind)
    assert (expected["rows_1"], expected["batches"], expected["batches_1"]) == (10, 4, 2)
    for found in ranks(2)(keep_by_loader, {"stages": 2, "num_microbatches": 2}, kind):
        assert found == pytest.approx(expected, rel=1e-6)


class ReadsAfterBatches(Regression):
    """Lists that hooks of batches read, and empty when they like."""

    def __init__(self) -> None:
        super().__init__()
        self.losses, self.rows = list[float](), list[dict[str, Any]]()
        self.latest, self.outs = deque[float](maxlen=3), list[Tensor]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.net(batch[0])
        loss = nn.functional.mse_loss(out, batch[1])
        self.losses.append(loss.item())
        self.latest.append(loss.item())
        self.rows.append({"mean": out.detach().mean(0), "n": len(out)})
        self.outs.append(out.detach())
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("least", min(self.losses))
        self.log("latest", sum(self.latest) / len(self.latest))
        self.log("row", self.rows[-1]["mean"].sum() * self.rows[-1]["n"])
        if len(self.outs) == 2:
            self.log("of_two", torch.cat(self.outs).std())
            self.outs.clear()

    def on_train_epoch_end(self) -> None:
        self.log("mean", sum(self.losses) / len(self.losses))
        self.losses.clear()


def test_hooks_of_batches_read_lists_on_every_rank(ranks: Ranks) -> None:
    expected = logs_of(None, ReadsAfterBatches)
    for number in (1, 3):
        for found in ranks(2)(logs_of, {"stages": 2, "num_microbatches": number}, ReadsAfterBatches):
            assert found == pytest.approx(expected, rel=1e-9)


class Terms(nn.Module):
    """A criterion that keeps its terms."""

    def __init__(self) -> None:
        super().__init__()
        self.terms: dict[str, Any] = {}

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        terms = {"mse": nn.functional.mse_loss(out, y), "l1": nn.functional.l1_loss(out, y)}
        self.terms = {
            "all": {name: term.detach() for name, term in terms.items()},
            "mse": terms["mse"].item(),
        }
        return sum(terms.values(), torch.zeros(()))


class ReadsTerms(Regression):
    """Hooks of batches read dictionaries of losses."""

    def __init__(self) -> None:
        super().__init__()
        self.criterion = Terms()
        self.losses: dict[str, Tensor] = {}
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.net(batch[0])
        self.losses = {"size": out.pow(2).mean(), "terms": self.criterion(out, batch[1])}
        return self.losses["size"] + self.losses["terms"]

    def on_after_backward(self) -> None:
        self.seen.append(float(self.criterion.terms["all"]["l1"]))

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen += [float(self.losses["size"]), float(self.losses["terms"]), self.criterion.terms["mse"]]


def terms_of(pipeline: dict[str, Any] | None) -> list[float]:
    module = ReadsTerms()
    trainer(pipeline, max_epochs=2, limit_val_batches=0).fit(module, loader(24))
    return module.seen


def test_hooks_of_batches_read_dictionaries_of_losses_on_every_rank(ranks: Ranks) -> None:
    expected = terms_of(None)
    for found in ranks(2)(terms_of, {"stages": 2, "num_microbatches": 2}, group=False):
        assert found == pytest.approx(expected, rel=1e-9)
