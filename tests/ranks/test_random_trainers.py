"""Trainers with flags, callbacks and data drawn at random. `benchmarks/random_trainers.py` runs more of them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.pool import Pool
from tests.random_trainers import compare, run

Ranks = Callable[[int], Pool]


@pytest.mark.parametrize("seed", [39, 40, 42])
def test_a_random_trainer_does_what_it_does_on_one_device(ranks: Ranks, tmp_path: Path, seed: int) -> None:
    expected = run(None, seed, str(tmp_path / "one"))
    assert not isinstance(expected, str), expected
    for found in ranks(2)(run, {"stages": 2, "num_microbatches": 2}, seed, str(tmp_path / "two")):
        compare(found, expected)
