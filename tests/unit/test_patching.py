"""The ledger of what a run replaces."""

import gc
import random
import types
import weakref
from itertools import permutations

import pytest

from lightning_pipeline import patching
from lightning_pipeline.patching import all_undone, patch, patched


class Thing:
    kind = "class"

    def __init__(self) -> None:
        self.own = "own"


def standing() -> list[str]:
    """Of what is replaced here, and not by modules of other tests that are not gone yet."""
    return [name for name in patching.standing() if name.startswith(("Thing.", "made_up."))]


def owners() -> list[tuple[object, str]]:
    module = types.ModuleType("made_up")
    module.there = 1  # type: ignore[attr-defined]
    return [(Thing(), "own"), (Thing(), "kind"), (Thing(), "new"), (Thing, "kind"), (Thing, "new"),
            (module, "there"), (module, "new")]  # fmt: skip


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_in_whatever_order_patches_are_undone_what_was_there_before_is_there_after(
    order: tuple[int, ...],
) -> None:
    for owner, name in owners():
        before = dict(vars(owner))
        undo = [patch(owner, name, number) for number in range(3)]
        for count, number in enumerate(order):
            assert getattr(owner, name) == max(order[count:])
            undo[number]()
            undo[number]()  # does nothing
        assert dict(vars(owner)) == before
    assert standing() == []


def test_what_is_replaced_is_put_back_after_an_exception() -> None:
    thing = Thing()

    def fails() -> None:
        with patched(thing, {"own": 1, "new": 2}):
            assert vars(thing) == {"own": 1, "new": 2} and standing() == ["Thing.own", "Thing.new"]
            raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        fails()
    assert vars(thing) == {"own": "own"} and standing() == []


def test_all_are_undone_in_reverse_where_one_raises() -> None:
    called: list[int] = []

    def undo(number: int) -> None:
        called.append(number)
        if number == 1:
            raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        all_undone([lambda: undo(0), lambda: undo(1), lambda: undo(2)])()
    assert called == [2, 1, 0]


def test_any_mixture_of_patching_and_undoing_ends_where_it_began() -> None:
    draw, thing = random.Random(3), Thing()
    open_ones: list[object] = []
    for _ in range(500):
        if open_ones and draw.random() < 0.5:
            open_ones.pop(draw.randrange(len(open_ones)))()  # type: ignore[operator]
        else:
            open_ones.append(patch(thing, draw.choice(["own", "kind", "new"]), draw.random()))
    for undo in open_ones:
        undo()  # type: ignore[operator]
    assert vars(thing) == {"own": "own"} and standing() == []


def test_the_ledger_keeps_no_owner_alive() -> None:
    thing = Thing()
    gone = weakref.ref(thing)
    patch(thing, "own", 1)
    assert standing() == ["Thing.own"]
    del thing
    gc.collect()
    assert gone() is None and standing() == []
