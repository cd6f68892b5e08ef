"""What the runs of a step for the batch as one are taken for, beside what its micro-batches have told."""

from collections.abc import Iterator

import pytest
import torch

from lightning_pipeline.hooks.reports import Report
from lightning_pipeline.model.rehearsal.as_one import Heard
from lightning_pipeline.run.batch.as_one import told_otherwise

OF_PARTS = Report(loss_dtype=torch.float64, values=torch.tensor([1.0], dtype=torch.float64))


@pytest.mark.parametrize(
    ("losses", "filled", "twice", "told", "made"),
    [
        ([1.0, 1.0], False, False, [], 1),  # the first run tells the same
        ([1.0, 1.0], False, True, [], 2),
        ([2.0, 2.0], False, False, [2.0], 2),
        ([2.0, 3.0], False, False, [], 2),  # it goes by what metrics gave
        ([1.0, 1.0], True, False, [], 2),
        ([2.0, 2.0], True, False, [], 1),  # it goes by values that were made up
        ([1.0, 2.0], True, False, [], 2),
        ([2.0, 1.0], True, True, [], 1),
    ],
)
def test_what_differs_is_taken_where_it_goes_by_nothing_that_was_made_up(
    losses: list[float], filled: bool, twice: bool, told: list[float], made: int
) -> None:
    ran = []

    def runs() -> Iterator[Heard]:
        for loss in losses:
            ran.append(loss)
            yield Heard(loss, {}, [], is_sure=True)

    found = told_otherwise(
        OF_PARTS, None, {}, 4, runs, trains=True, is_filled=lambda: filled, twice=lambda: twice
    )
    assert [one.theirs for one in found.told] == told
    assert len(ran) == made
    if filled and losses != [1.0, 1.0]:
        assert not found.is_made  # nothing was compared
