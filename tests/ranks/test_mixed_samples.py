"""Samples that a step mixes over two ranks: weights of every stage equal one device's on the whole batch."""

from typing import Any

import pytest

from tests.faults.cases import Ranks
from tests.ranks.lightning_cases import assert_same
from tests.unit.split.test_mixing import (
    by_numbers_between,
    fitted,
    flipped,
    mixup,
    whitened,
)

MIXING = flipped, whitened, by_numbers_between
SCHEDULES: list[dict[str, Any]] = [
    {"schedule": "1F1B"}, {"schedule": "ZBH1"}, {"schedule": "Interleaved1F1B", "stages_per_rank": 2},
]  # fmt: skip


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda given: given["schedule"])
def test_ranks_have_their_samples_of_what_one_device_mixes(ranks: Ranks, schedule: dict[str, Any]) -> None:
    expected = [fitted(function, None) for function in MIXING]
    found = ranks(2)(all_fitted, {"stages": 2, "num_microbatches": 3, **schedule}, group=False)
    for on_rank in found:
        for one, other in zip(on_rank, expected, strict=True):
            assert_same(one, other)


def test_ranks_draw_alike_to_mix_samples(ranks: Ranks) -> None:
    found = ranks(2)(fitted, mixup, {"stages": 2, "num_microbatches": 3}, group=False)
    expected = ranks(2)(fitted, mixup, {"stages": 2, "num_microbatches": 1}, group=False)
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)


def all_fitted(pipeline: dict[str, Any]) -> list[Any]:
    return [fitted(function, pipeline) for function in MIXING]
