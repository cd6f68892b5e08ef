"""Numbers that note what code decides by them, and how seldom a batch is looked at for it."""

import copy
import math
import operator

import pytest
import torch

from lightning_pipeline.model.places import Decisions, Numbers, outcome
from tests.unit.split.nets import Net, batch_of, seeded
from tests.unit.split.pipe import piped

ones = torch.ones(2)
DECIDED = {
    "remainder": lambda n: n % 100 == 0,
    "reflected": lambda n: 7 - n > 3,
    "fraction": lambda n: 0.25 <= n / 10 < 0.5,
    "truth": lambda n: not n,
    "least": lambda n: min(n, 3) == 3,
    "quotient": lambda n: divmod(n, 3)[1] == 1,
    "whole": lambda n: int(n * 0.5),
    "rounded": lambda n: round(n / 3) > 1,
    "floor": lambda n: math.floor(n / 4),
    "among": lambda n: n in (1, 4),
    "in a set": lambda n: n in {1, 4},
    "both": lambda n: n > 2 and n % 2 == 0,
    "power": lambda n: 2**n > 20,
    "bits": lambda n: n & 1 == 1,
    "sign": lambda n: -abs(-n) <= -4,
    "root": lambda n: math.sqrt(n) > 1.5,
    "index": lambda n: ["even", "odd"][n % 2],
    "text": lambda n: f"{n}" in ("1", "4"),
    "range": lambda n: len(range(n // 3)),
}


def decided(rule, number):
    decisions, entries = Decisions(), {"count": number}
    place = Numbers(lambda: entries, "loop.").place("count")
    with decisions.noting([place]):
        result = rule(entries["count"])
    assert type(entries["count"]) is int
    return result, decisions


@pytest.mark.parametrize("name", DECIDED)
def test_a_number_whose_comparisons_come_out_alike_leads_to_the_same(name):
    rule, results, known = DECIDED[name], {}, {}
    for number in range(8):
        result, decisions = decided(rule, number)
        assert result == rule(number)
        assert decisions.labels() == {"loop.count"}
        known |= decisions.made
        assert all(outcome(one, lambda _, n=number: n) == then for one, then in decisions.made.items())
    for number in range(20):
        key = tuple(outcome(one, lambda _, n=number: n) for one in known)
        assert results.setdefault(key, rule(number)) == rule(number), number


def test_a_number_that_is_only_computed_with_decides_nothing():
    result, decisions = decided(lambda n: [0.5 * n, copy.deepcopy(n), (n + 1) * ones], 3)
    assert result[:2] == [1.5, 3]
    assert result[2].tolist() == [4, 4]
    assert not decisions.made


def test_too_long_a_computation_is_known_by_its_number():
    def grown(n):
        for _ in range(50):
            n = n + n
        return n > 5

    result, decisions = decided(grown, 3)
    assert result
    assert decisions.made == {("at", "loop.count"): 3}


def test_what_no_number_comes_of_is_no_outcome():
    assert outcome(("eq", ("truediv", 1, ("at", "n")), 1), lambda _: 0) is None
    assert outcome(("gt", ("at", "n"), 1), lambda _: "text") is None


class LogsNowAndThen(Net):
    """Logs in every third batch and counts its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.batches = 0

    def training_step(self, batch, batch_idx):
        loss = self.loss(self.body(self.emb(batch["x"])), batch)
        if batch_idx % 3 == 0:
            self.log("loss", loss)
        self.batches += 1
        return loss


def test_a_batch_is_looked_at_only_where_a_decision_is_new():
    found = piped(seeded(LogsNowAndThen), batch_of(), 2, steps=9, each=lambda module, number: batch_of())
    for split in found.splits:
        ways = split._finder._steps["training_step"]
        assert list(map(operator.itemgetter(2), ways.decided)) == [(True,), (False,)]
    assert found.module is None or found.module.batches == 9


class Unsteady(Net):
    """Compares a count of its own with another number each time, as with the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.batches = 0

    def training_step(self, batch, batch_idx):
        any(self.batches < -1 - 100 * float(batch_idx) - number for number in range(60))
        self.batches += 1
        return self.loss(self.body(self.emb(batch["x"])), batch)


def test_numbers_compared_with_ever_new_ones_are_known_by_themselves():
    found = piped(seeded(Unsteady), batch_of(), 2, steps=6, each=lambda module, number: batch_of())
    for split in found.splits:
        decisions = split._finder._steps["training_step"].decisions
        assert len(decisions) < 10
        assert ("at", "batches") in decisions
