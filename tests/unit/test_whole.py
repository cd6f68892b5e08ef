"""`make test` leaves out all rows but the last, and what is named; `make test-rest` runs exactly what it leaves out."""

import time
from typing import Any

import pytest

from tests import whole


class Collected:
    """What `mark` asks of a test that pytest has collected."""

    def __init__(self, nodeid: str, *marks: str) -> None:
        self.nodeid, self.marks = nodeid, [*marks]

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.marks else None

    def add_marker(self, mark: Any) -> None:
        self.marks.append(mark.name)


def left_out(*items: Any, only_some: bool = True) -> list[str]:
    whole.mark(items, only_some=only_some)
    return [item.nodeid for item in items if "whole" in item.marks]


def test_of_a_matrix_the_last_row_runs_daily_and_elsewhere_all() -> None:
    rows = [f"tests/ranks/test_a.py::test_it[{row}]" for row in "123"]
    quick = [f"tests/unit/schedules/test_a.py::test_it[{row}]" for row in "12"]
    assert left_out(*map(Collected, [*rows, *quick, "tests/ranks/test_a.py::test_alone"])) == rows[:2]


def test_a_last_row_that_is_marked_itself_leaves_the_one_before() -> None:
    rows = [f"tests/faults/test_a.py::test_it[{row}]" for row in "123"]
    assert left_out(*map(Collected, rows[:2]), Collected(rows[2], "whole")) == [rows[0], rows[2]]


def test_all_rows_of_what_takes_long_are_left_out_and_a_name_that_is_none_is_told() -> None:
    long = "tests/unit/test_imports.py::test_in_a_fresh_process"
    assert long in whole.LATER
    rows = [f"{long}[1]", f"{long}[2]"]
    assert left_out(*map(Collected, rows), only_some=False) == rows
    with pytest.raises(pytest.UsageError, match="tests that are none: .*test_in_a_fresh_process"):
        left_out(Collected("tests/unit/test_imports.py::test_else"), only_some=False)
    assert left_out(Collected("tests/unit/test_imports.py::test_else")) == []


def test_where_time_ends_another_file_is_the_first_each_day() -> None:
    items: Any = [Collected(f"tests/test_{file}.py::test_{number}") for file in "abc" for number in "12"]
    names = [item.nodeid for item in items]
    assert [item.nodeid for item in whole.in_turn(items)] == names
    days = [[item.nodeid for item in whole.in_turn(items, 86_400.0 * day)] for day in range(3)]
    assert {day[0] for day in days} == {names[0], names[2], names[4]}
    assert all(sorted(day) == sorted(names) for day in days)
    assert whole.in_turn([], 1.0) == []


def test_what_comes_late_is_left_out_and_says_why() -> None:
    whole.leave_out_late(time.time() + 60)
    with pytest.raises(pytest.skip.Exception, match="the time that CI has"):
        whole.leave_out_late(time.time() - 1)
