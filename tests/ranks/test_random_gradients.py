"""Modules whose hooks read and change gradients, drawn at random. `benchmarks/random_gradients.py` runs more."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.pool import Pool
from tests.random_gradients import run

Ranks = Callable[[int], Pool]


def compare(found: Any, expected: Any) -> None:
    """Weights, logs and what hooks have noted.

    Raises:
        AssertionError: They are not those of one device.
    """
    ((weights, logs), notes), ((their_weights, their_logs), their_notes) = found, expected
    assert len(notes) == len(their_notes)
    for note, theirs in zip(notes, their_notes, strict=True):
        if isinstance(note, float):
            assert note == pytest.approx(theirs, rel=1e-7)
        else:
            assert note[:2] == theirs[:2]
            assert note[2] == {
                name: one if one is None else pytest.approx(one, rel=1e-7, abs=1e-12)
                for name, one in theirs[2].items()
            }, note[:2]
    assert logs == pytest.approx(their_logs, rel=1e-9)
    for name, value in their_weights.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.filterwarnings("ignore:training_step returned no loss")
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("seed", [0, 58, 146])
def test_gradients_in_hooks_are_those_of_one_device(ranks: Ranks, seed: int, stages: int) -> None:
    expected = run(None, seed)
    for found in ranks(stages)(run, {"stages": stages, "num_microbatches": 2}, seed, group=False):
        compare(found, expected)
