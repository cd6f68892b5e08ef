"""Streams that draw from what the module holds give one device's batches: experiences that an agent plays."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.agents import KINDS, Agent
from tests.pool import Pool
from tests.random_streams import drawn, run
from tests.ranks.lightning_cases import assert_same, trainer, weights

Ranks = Callable[[int], Pool]


def learnt(pipeline: dict[str, Any] | None, options: dict[str, Any]) -> Any:
    module, run = Agent(**options), trainer(pipeline, max_epochs=2)
    run.fit(module)
    logs = {name: float(value) for name, value in run.callback_metrics.items()}
    return weights(module), logs | {f"seen {n}": one for n, one in enumerate(module.seen)}


HOOKED = [
    {"kind": "numpy", "hook": "fit start"},
    {"kind": "list", "hook": "fit start"},
    {"kind": "count", "hook": "fit start"},
    {"kind": "world", "hook": "epoch start"},
    {"kind": "torch", "validates": True},
    {"kind": "buffer", "hook": "fit start"},
    {"kind": "buffer", "hook": "batch start"},
]


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_stream_draws_from_its_module_is_drawn_once(kind: str, mapped: bool) -> None:
    options = {"kind": kind, "mapped": mapped}
    assert_same(learnt({"stages": 1, "num_microbatches": 2}, options), learnt(None, options))


@pytest.mark.parametrize("options", HOOKED, ids=lambda one: " ".join(map(str, one.values())))
def test_hooks_that_play_before_a_stream_is_read_are_seen_by_it(options: dict[str, Any]) -> None:
    assert_same(learnt({"stages": 1, "num_microbatches": 2}, options), learnt(None, options))


def test_every_stage_has_what_a_stream_draws_from_its_module(ranks: Ranks) -> None:
    for options in ({"kind": "world"}, {"kind": "buffer", "hook": "fit start"}):
        expected = learnt(None, options)
        last, first = ranks(2)(learnt, {"stages": 2, "num_microbatches": 2}, options)
        assert_same(last, expected)
        assert_same((first[0], {}), (expected[0], {}))


@pytest.mark.parametrize("seed", range(8))
def test_random_agents_learn_what_they_learn_on_one_device(seed: int) -> None:
    expected = run(drawn(seed), None)
    assert not isinstance(expected, str), expected
    found = run(drawn(seed), {"stages": 1, "num_microbatches": 2})
    assert not isinstance(found, str), found
    assert_same(found, expected)
