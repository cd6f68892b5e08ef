"""What units compute steers the step: several ranks leave what one device leaves."""

import io
import logging
from collections.abc import Callable
from typing import Any

import lightning_utilities.core.rank_zero as rank_zero

from tests.pool import Pool
from tests.ranks.wrong_cases import difference, fitted

Ranks = Callable[[int], Pool]


def fitted_with(name: str, num_microbatches: int) -> tuple[Any, str]:
    """What a fit over two stages leaves, and what it says."""
    lines, handler = io.StringIO(), logging.StreamHandler()
    handler.setStream(lines)
    rank_zero.log.addHandler(handler)
    try:
        return fitted(name, {"stages": 2, "num_microbatches": num_microbatches}), lines.getvalue()
    finally:
        rank_zero.log.removeHandler(handler)


def test_what_is_done_by_the_value_of_the_loss_is_left_on_every_rank(ranks: Ranks) -> None:
    expected = fitted("D1", None)
    for found, _ in [*ranks(2)(fitted_with, "D1", 1), *ranks(2)(fitted_with, "D1", 4)]:
        assert difference(found, expected) == ""


def test_rows_counted_between_units_are_those_of_one_device_and_the_run_says_who_decides(
    ranks: Ranks,
) -> None:
    expected = fitted("D2", None)
    outcomes = ranks(2)(fitted_with, "D2", 4)
    for found, _ in outcomes:
        assert difference(found, expected) == ""
    says = outcomes[0][1]
    assert says.count("each of 4 micro-batches decides by its own values") == 1, says
    assert "wrong_cases.py" in says


def test_a_sum_over_rows_repeated_by_values_is_right(ranks: Ranks) -> None:
    expected = fitted("D3", None)
    for found, _ in [*ranks(2)(fitted_with, "D3", 1), *ranks(2)(fitted_with, "D3", 4)]:
        assert difference(found, expected) == ""
