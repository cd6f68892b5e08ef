"""The table of the fault matrix has every row, and every test that it names is there."""

import importlib

import pytest

from tests.faults.rows import ROWS


def test_every_row_is_there() -> None:
    assert list(ROWS) == [
        *(f"F{number:02}" for number in range(1, 47)),
        *(f"B{number}" for number in range(15)),
    ]


@pytest.mark.parametrize("name", ROWS)
def test_the_tests_of_a_row_are_there(name: str) -> None:
    for test in ROWS[name].tests:
        path, _, function = test.partition("::")
        module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
        assert callable(getattr(module, function)), test
