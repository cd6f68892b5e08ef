"""Something goes wrong inside a unit, on the first, a middle or the last of three stages."""

import signal
from pathlib import Path

import pytest

from tests.faults.cases import (
    BOUND,
    EVERY,
    SOON,
    WHOLE,
    Ranks,
    after_fault,
    faulty,
    in_units,
    outcomes_of,
    whole,
)
from tests.pool import Outcome
from tests.ranks.lightning_cases import fit

FIRST, MIDDLE, LAST = 2, 1, 0  # global ranks of the stages; the last hosts the store


def ended(outcomes: list[Outcome], rank: int, bound: float, *told: str) -> None:
    for outcome in outcomes:
        if outcome.rank != rank:
            assert outcome.exit_code == 1, outcome
            assert after_fault(outcome, outcomes) < bound, outcome
            assert f"(global rank {rank})" in outcome.output, outcome.output
            assert all(text in outcome.output for text in told), outcome.output


@pytest.mark.parametrize(
    ("fault", "point", "rank"),
    [
        ("kill", "forward", MIDDLE),  # F01
        whole("kill", "backward", LAST),  # F02, F03
        whole("abort", "forward", FIRST),  # F11
        whole("leave", "forward", MIDDLE),  # F08
    ],
)
def test_a_process_that_ends_is_named(
    ranks: Ranks, tmp_path: Path, fault: str, point: str, rank: int
) -> None:
    outcomes = outcomes_of(ranks, in_units, fault, point, rank, str(tmp_path), size=3)
    code = {"kill": -signal.SIGKILL, "abort": -signal.SIGABRT, "leave": 0}[fault]
    assert outcomes[rank].exit_code == code
    ended(outcomes, rank, SOON, "StageFailedError", "its process ended without saying why")


@pytest.mark.parametrize(
    ("fault", "point", "rank", "told"),
    [
        ("fail", "forward", MIDDLE, "boom-17"),  # F05
        whole("fail", "backward", FIRST, "boom-17"),  # F07
        whole("fail", "on_before_optimizer_step", MIDDLE, "boom-17"),  # F07
        ("quit_it", "forward", LAST, "SystemExit"),  # F08
        ("fail", "validation", LAST, "boom-17"),  # F14
        ("interrupt", "forward", LAST, "KeyboardInterrupt"),  # F19
    ],
)
def test_an_exception_in_a_unit_is_told_by_all(
    ranks: Ranks, tmp_path: Path, fault: str, point: str, rank: int, told: str
) -> None:
    outcomes = outcomes_of(ranks, in_units, fault, point, rank, str(tmp_path), size=3)
    ended(outcomes, rank, SOON, "StageFailedError", told)
    assert outcomes[rank].exit_code == 1


@WHOLE
@pytest.mark.quiet
def test_a_rank_that_holds_pythons_lock_is_named(ranks: Ranks, tmp_path: Path) -> None:  # F12
    outcomes = outcomes_of(
        ranks, in_units, "hold", "forward", MIDDLE, str(tmp_path), size=3, without=[MIDDLE]
    )
    ended(outcomes, MIDDLE, BOUND, "StageTimeoutError", "it holds Python's lock")


@pytest.mark.parametrize(("fault", "code"), [("interrupt", 1), ("quit_it", 0)])  # F19, F08
def test_what_all_ranks_do_ends_them_as_one_device(
    ranks: Ranks, tmp_path: Path, fault: str, code: int
) -> None:
    outcomes = outcomes_of(ranks, faulty, fault, "on_train_batch_end", EVERY, str(tmp_path))
    for outcome in outcomes:
        assert outcome.exit_code == code, outcome
        assert after_fault(outcome, outcomes) < SOON
        assert "failed in" not in outcome.output or fault == "interrupt"


def of_odd_sizes() -> object:
    return fit({"stages": 3, "num_microbatches": 2})


def test_fewer_micro_batches_than_stages_and_batches_that_do_not_divide(ranks: Ranks) -> None:  # F24, F25
    expected, _ = fit(None)  # 22 samples in batches of 8
    for weights, _ in ranks(3)(of_odd_sizes):  # type: ignore[misc]
        for name, weight in expected.items():
            assert (weights[name] - weight).abs().max() < 1e-10, name
