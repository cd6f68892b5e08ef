"""A rank that fails ends all ranks with the first cause, and bad settings end them alike."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_pipeline.errors import ConfigMismatchError, StageFailedError
from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, loader, trainer

Ranks = Callable[[int], Pool]


class RaisesInStep(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.net[0](batch[0])
        if batch_idx == 1 and self.trainer.global_rank == 1:
            raise ValueError("too much")
        loss = (self.net[1:](out) - batch[1]).square().mean()
        if batch_idx == 1 and getattr(self, "late", False):
            raise ValueError("too much")
        return loss


class RaisesInTail(RaisesInStep):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if batch_idx == 1 and self.trainer.global_rank == 0:
            raise ValueError("too much")
        return loss


class RaisesBefore(Regression):
    """Where there is no group yet."""

    def __init__(self, origin: int) -> None:
        super().__init__()
        self.origin = origin

    def configure_callbacks(self) -> Any:
        if self.trainer.global_rank == self.origin:
            raise ValueError("too early")
        return []


def fit_raising_before(origin: int) -> None:
    trainer({"stages": 2}).fit(RaisesBefore(origin), loader())


@pytest.mark.parametrize("rank0_store", [False, True])
@pytest.mark.parametrize("origin", [0, 1])
def test_a_rank_that_fails_before_the_start_is_named_and_not_waited_for(
    ranks: Ranks, origin: int, rank0_store: bool
) -> None:
    outcomes = ranks(2).outcomes(
        fit_raising_before, origin, timeout=60, group=False, rank0_store=rank0_store, dies=True
    )
    assert not any(outcome.hung for outcome in outcomes)  # `init_timeout` is 300 s
    assert "ValueError: too early" in outcomes[origin].output
    told = f"global rank {origin} failed before it came to the start of the run: ValueError: too early"
    assert told in outcomes[1 - origin].output


class RaisesInHook(Regression):
    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_rank == 1 and self.trainer.global_step == 2:
            raise ValueError("too much")


def fit_raising(kind: str, folder: str) -> None:
    module = {"step": RaisesInStep, "tail": RaisesInTail, "hook": RaisesInHook}[kind]()
    saver = ModelCheckpoint(folder, save_on_exception=True)
    run = trainer({"stages": 2, "num_microbatches": 4}, enable_checkpointing=True, callbacks=[saver])
    run.fit(module, loader())


@pytest.mark.parametrize(("kind", "origin"), [("step", 1), ("tail", 0), ("hook", 1)])
def test_both_ranks_report_the_first_cause(ranks: Ranks, tmp_path: Any, kind: str, origin: int) -> None:
    outcomes = ranks(2).outcomes(fit_raising, kind, str(tmp_path), timeout=30, dies=True)
    for outcome in outcomes:
        assert outcome.exit_code == 1
        assert outcome.seconds < 10
        assert "ValueError: too much" in outcome.output
    assert "StageFailedError" in outcomes[1 - origin].output or "Error" in outcomes[1 - origin].output


class RaisesAtEnd(Regression):
    raises = True

    def on_train_epoch_end(self) -> None:
        if self.raises:
            raise ValueError("too much")


def fit_again() -> str:
    module, pipeline = RaisesAtEnd(), {"stages": 2, "num_microbatches": 2}
    with pytest.raises((ValueError, StageFailedError)):
        trainer(pipeline).fit(module, loader())
    module.raises = False
    with pytest.raises(ConfigMismatchError) as told:
        trainer(pipeline).fit(module, loader())
    return str(told.value)


def test_the_module_of_a_run_that_failed_is_told_from_one_that_differs(ranks: Ranks) -> None:
    for told in ranks(2)(fit_again, group=False):
        assert "the module is what a run that failed has left" in told
        assert "parameter net.0.weight is empty on global rank 0" in told or "on global rank 1" in told


class Closures(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Outside(Regression):
    """Trains a number that it keeps in a list, where no module sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = [nn.Parameter(torch.ones((), dtype=torch.float64))]

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * self.scales[0]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), *self.scales])


class Manual(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Steers(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.net[0](batch[0])
        if hidden.abs().sum() > 0:
            return hidden.square().mean()
        return (self.net[1:](hidden) - batch[1]).square().mean()


def fit_bad(kind: str, pipeline: dict[str, Any]) -> None:
    options: dict[str, Any] = {"pruning": {"callbacks": [pl.callbacks.ModelPruning("l1_unstructured")]}}
    kinds = {"lbfgs": Closures, "outside": Outside, "manual": Manual, "steers": Steers}
    run = trainer(pipeline, **options.get(kind, {}))
    run.fit(kinds.get(kind, Regression)(), loader())


@pytest.mark.parametrize(
    ("kind", "pipeline", "message"),
    [
        ("lbfgs", {"stages": 2}, "ConfigurationError: LBFGS"),
        ("outside", {"stages": 2}, "ConfigurationError: group 0 of optimizer 0 .* not among the module's"),
        ("steers", {"stages": 2}, "(Split|Placeholder)Error.*test_lightning_failure.py"),
        ("pruning", {"stages": 2}, "ConfigurationError.*ModelPruning"),
        ("plain", {"stages": 2, "partition": ["net.9"]}, "PartitionError: .*net.9"),
        ("plain", {"stages": 2, "partition": ["net.0"]}, "PartitionError: .*out of order"),
        ("plain", {"stages": 2, "units": ["net"]}, "PartitionError: 2 stages .* 1 unit"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_bad_input_ends_every_rank_with_the_same_message(
    ranks: Ranks, kind: str, pipeline: dict[str, Any], message: str
) -> None:
    import re

    for outcome in ranks(2).outcomes(fit_bad, kind, pipeline, timeout=30, dies=True):
        assert outcome.exit_code == 1, outcome
        assert outcome.seconds < 10
        assert re.search(f"(?s){message}", outcome.output), outcome.output


class OneRankCannotTrace(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.global_rank == 1:
            raise ValueError("no library on this machine")
        return self.loss(batch)


def fit_one_rank() -> None:
    trainer({"stages": 2}).fit(OneRankCannotTrace(), loader())


def test_a_rank_that_cannot_set_up_ends_the_others(ranks: Ranks) -> None:
    for outcome in ranks(2).outcomes(fit_one_rank, timeout=30, dies=True):
        assert outcome.exit_code == 1
        assert outcome.seconds < 10
        assert "no library on this machine" in outcome.output
