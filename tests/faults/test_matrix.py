"""Something goes wrong on one rank: all end in time, and each names the rank and what happened there."""

import re
import signal
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback

from tests.faults.cases import (
    BOUND,
    EVERY,
    SOON,
    Faulty,
    Ranks,
    after_fault,
    faulty,
    fit,
    outcomes_of,
    say_when,
    whole,
)
from tests.pool import Outcome


def named(outcome: Outcome, rank: int) -> bool:
    return f"(global rank {rank})" in outcome.output


@pytest.mark.parametrize(
    "point",
    [
        "setup", "on_train_batch_end", whole("configure_optimizers"), whole("train_dataloader"),
        whole("on_train_start"), whole("on_validation_start"), whole("on_save_checkpoint"), whole("on_fit_end"),
        whole("teardown"),
    ],
)  # fmt: skip
def test_an_exception_in_a_hook_is_told_by_all(ranks: Ranks, tmp_path: Path, point: str) -> None:
    outcomes = outcomes_of(ranks, faulty, "fail", point, 1, str(tmp_path))
    for outcome in outcomes:
        assert outcome.exit_code == 1, outcome
        assert after_fault(outcome, outcomes) < SOON
        assert "boom-17" in outcome.output, outcome.output


def test_others_do_not_wait_for_a_callback_that_uploads(ranks: Ranks, tmp_path: Path) -> None:
    outcomes = outcomes_of(
        ranks, faulty, "fail", "on_train_batch_end", 1, str(tmp_path), 2, True, without=[1]
    )
    assert outcomes[0].exit_code == 1
    assert after_fault(outcomes[0], outcomes) < SOON
    assert "boom-17" in outcomes[0].output


@pytest.mark.parametrize(
    ("point", "rank"),
    [whole("preamble", 1), ("on_train_batch_end", 0), whole("on_validation_batch_start", 1)],
)
def test_a_stopped_rank_is_named_after_step_timeout(
    ranks: Ranks, tmp_path: Path, point: str, rank: int
) -> None:
    outcomes = outcomes_of(ranks, faulty, "stop", point, rank, str(tmp_path), 3, size=3, without=[rank])
    for outcome in outcomes:
        if outcome.rank != rank:
            assert outcome.exit_code == 1, outcome
            assert after_fault(outcome, outcomes) < BOUND
            assert "StageTimeoutError" in outcome.output
            assert re.search(rf"because pipeline rank . \(global rank {rank}\) is stuck", outcome.output)


class AsksAMetric(Faulty):
    """Every rank asks for the value that the last stage works out, and leaves in rank 0's store."""

    def on_validation_epoch_end(self) -> None:
        self.here("on_validation_epoch_end")
        self.error.compute()


def asks_a_metric(fault: str, rank: int, folder: str) -> None:
    fit(AsksAMetric(fault, "on_validation_epoch_end", rank), folder, 3)


@pytest.mark.parametrize(("fault", "bound"), [whole("stop", BOUND), ("kill", SOON)])
def test_a_lost_rank_0_ends_the_wait_for_a_metric(
    ranks: Ranks, tmp_path: Path, fault: str, bound: float
) -> None:
    outcomes = outcomes_of(ranks, asks_a_metric, fault, 0, str(tmp_path), size=3, without=[0])
    for outcome in outcomes[1:]:
        assert outcome.exit_code == 1, outcome
        assert after_fault(outcome, outcomes) < bound
        assert re.search(r"because pipeline rank 2 \(global rank 0\) is stuck", outcome.output)


class AsksAlone(Faulty):
    def on_train_epoch_end(self) -> None:
        if self.trainer.global_rank == 1:
            say_when()
            self.error.compute()


def asks_alone(folder: str) -> None:
    fit(AsksAlone("fail", "nowhere", 0), folder, 2)


def test_a_metric_that_one_rank_asks_for_alone_is_named(ranks: Ranks, tmp_path: Path) -> None:
    outcomes = outcomes_of(ranks, asks_alone, str(tmp_path))
    for outcome in outcomes:
        assert outcome.exit_code == 1, outcome
        assert after_fault(outcome, outcomes) < BOUND
        assert "(global rank 1) in waiting for the value of metric 'error'" in outcome.output
        assert "belong outside of `if trainer.is_global_zero`" in outcome.output


@pytest.mark.parametrize(
    ("point", "rank"),
    [("setup", 1), whole("on_fit_start", 0), whole("on_train_batch_end", 1), whole("on_train_end", 0)],
)
def test_a_killed_rank_is_named(ranks: Ranks, tmp_path: Path, point: str, rank: int) -> None:
    outcomes = outcomes_of(ranks, faulty, "kill", point, rank, str(tmp_path), 3, size=3)
    for outcome in outcomes:
        if outcome.rank == rank:
            assert outcome.exit_code == -signal.SIGKILL, outcomes
        else:
            assert outcome.exit_code == 1, outcome
            assert after_fault(outcome, outcomes) < SOON
            assert named(outcome, rank), outcome.output


@pytest.mark.parametrize("rank", [0, whole(1)])
def test_a_rank_that_is_killed_in_its_last_hook_is_named(ranks: Ranks, tmp_path: Path, rank: int) -> None:
    outcomes = outcomes_of(ranks, faulty, "kill", "on_fit_end", rank, str(tmp_path))
    other = outcomes[1 - rank]
    assert other.exit_code == 1, other
    assert after_fault(other, outcomes) < BOUND
    assert named(other, rank), other.output


def test_stop_iteration_in_a_forward_is_an_error_of_that_rank(ranks: Ranks, tmp_path: Path) -> None:
    outcomes = outcomes_of(ranks, faulty, "end_data", "preamble", 1, str(tmp_path))
    for outcome in outcomes:
        assert outcome.exit_code == 1
        assert after_fault(outcome, outcomes) < SOON
        assert "StopIteration: boom-17" in outcome.output
        assert "AttributeError" not in outcome.output


class EndsInValidation(Faulty):
    def on_validation_start(self) -> None:
        self.here("on_validation_start", 2)  # not in the sanity check, where nobody catches it


def ends_in_validation(folder: str) -> None:
    fit(EndsInValidation("end_data", "on_validation_start", 1), folder, 2)


def test_an_end_of_data_that_a_hook_raises_on_one_rank_is_named(ranks: Ranks, tmp_path: Path) -> None:
    outcomes = outcomes_of(ranks, ends_in_validation, str(tmp_path))
    for outcome in outcomes:
        assert outcome.exit_code == 1
        assert after_fault(outcome, outcomes) < SOON
        assert "the ranks are not at the same place of a hook" in outcome.output
        assert "global rank 1 is in a collective" in outcome.output


class FailsToSetUp(Callback):
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if trainer.global_rank == 1:
            say_when()
            raise ValueError("boom-17")


def fails_to_set_up(folder: str) -> None:
    fit(Faulty("fail", "nowhere", 0), folder, 2, FailsToSetUp())


def test_a_callback_that_fails_to_set_up_on_one_rank_is_told_by_all(ranks: Ranks, tmp_path: Path) -> None:
    outcomes = outcomes_of(ranks, fails_to_set_up, str(tmp_path))
    for outcome in outcomes:
        assert outcome.exit_code == 1, outcome
        assert after_fault(outcome, outcomes) < SOON
        assert "boom-17" in outcome.output, outcome.output


class StopsAlone(Callback):
    def __init__(self, hook: str) -> None:
        self.hook = hook

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if self.hook == "on_validation_end" and not trainer.sanity_checking and trainer.global_rank == 1:
            trainer.should_stop = True


class StopsInHook(Faulty):
    def on_train_epoch_end(self) -> None:
        if self.trainer.global_rank == 1:
            self.trainer.should_stop = True


def stopped(hook: str, folder: str) -> tuple[int, int]:
    kind = StopsInHook if hook == "on_train_epoch_end" else Faulty
    trainer = fit(kind("fail", "nowhere", 0), folder, 2, StopsAlone(hook), max_epochs=3)
    return trainer.current_epoch, trainer.global_step


@pytest.mark.parametrize("hook", ["on_train_epoch_end", "on_validation_end"])
def test_one_rank_that_asks_to_stop_stops_all_at_the_end_of_that_epoch(
    ranks: Ranks, tmp_path: Path, hook: str
) -> None:
    assert ranks(2)(stopped, hook, str(tmp_path), group=False, timeout=30) == [(1, 4), (1, 4)]


@pytest.mark.parametrize(
    ("point", "visit"),
    [
        ("on_validation_batch_start", 4),  # in an epoch
        whole("on_validation_end", 1),  # in the sanity check
        whole("on_validation_end", 2),
        whole("on_save_checkpoint", 1),
        whole("on_train_epoch_end", 1),
    ],
)
def test_a_sigterm_anywhere_in_a_fit_ends_all_ranks_alike_with_a_checkpoint(
    ranks: Ranks, tmp_path: Path, point: str, visit: int
) -> None:
    outcomes = outcomes_of(ranks, terminated, point, str(tmp_path), "terminate", 1, visit)
    for outcome in outcomes:
        assert outcome.value == "terminated", outcome
        assert after_fault(outcome, outcomes) < SOON
    assert any(path.name.endswith(".ckpt") for path in tmp_path.iterdir())


def test_a_sigterm_to_all_ranks_and_again_ends_them_once(ranks: Ranks, tmp_path: Path) -> None:
    outcomes = outcomes_of(ranks, terminated, "on_train_batch_start", str(tmp_path), "terminate_twice", EVERY)
    for outcome in outcomes:
        assert outcome.value == "terminated", outcome
        assert after_fault(outcome, outcomes) < SOON
    assert any(path.name.endswith(".ckpt") for path in tmp_path.iterdir())


def terminated(point: str, folder: str, fault: str, rank: int, visit: int = 1) -> str:
    try:
        fit(Faulty(fault, point, rank, visit), folder, 2)
    except SystemExit:
        return "terminated"
    return "finished"


def sleeping(hook: str, folder: str, hook_timeout: float) -> None:
    strategy = {"step_timeout": 2, "hook_timeout": hook_timeout}
    fit(Faulty("sleep", hook, 1), folder, 2, strategy=strategy, max_epochs=1)


@pytest.mark.parametrize("hook", [whole("on_train_batch_end"), "on_fit_end"])
def test_a_rank_that_is_busy_in_a_hook_has_hook_timeout(ranks: Ranks, tmp_path: Path, hook: str) -> None:
    outcomes = outcomes_of(ranks, sleeping, hook, str(tmp_path), 3.5, without=[1])
    first = outcomes[0]
    assert first.exit_code == 1, first
    assert f"is alive and busy with {hook}" in first.output
    assert re.search(rf"\(global rank 1\) is stuck in {hook}", first.output)
    assert 3.5 < after_fault(first, outcomes) < 3.5 + 2
