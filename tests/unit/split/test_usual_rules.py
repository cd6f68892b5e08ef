"""What micro-batches have left where no run could tell how one device would have it."""

import pytest

from lightning_pipeline.data import merge_outputs
from lightning_pipeline.model.rules.rules import usual


@pytest.mark.parametrize(
    ("results", "sizes", "expected"),
    [
        ([["kept", "a", "b"], ["kept", "c"]], [2, 1], ["kept", "a", "b", "c"]),
        ([["kept", {"id": 3}, {"id": 4}], ["kept", {"id": 5}, {"id": 6}]], [2, 2],
         ["kept", {"id": 3}, {"id": 4}, {"id": 5}, {"id": 6}]),
        ([["kept", 1.0], ["kept", 3.0]], [2, 2], ["kept", 2.0]),
    ],
    ids=["of samples", "dictionaries of samples", "of batches"],
)  # fmt: skip
def test_a_list_that_grows_by_as_many_items_as_samples_has_those_of_all(results, sizes, expected):
    assert usual(["kept"], results, sizes, merge_outputs) == expected
