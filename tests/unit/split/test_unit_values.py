"""R18 and R19: what units compute chooses rows, or the code that runs, before other units are called."""

import pytest
import torch
import torch.nn.functional as F

from lightning_pipeline.errors import SplitError
from lightning_pipeline.model.trace import Guesses, choices, find_units, trace_step, tracer
from tests.unit.split.nets import WIDTH, Net, assert_works, batch_of, same_or_refused, seeded
from tests.unit.split.programs import BY_VALUE, Program, outcome_of

WHOLE = {**batch_of(5, 6), "mask": torch.arange(30).reshape(5, 6) % 3 > 0}


class ByValue(Net):
    """Rows are chosen by what the first layers compute; `choose` says how."""

    def training_step(self, batch, batch_idx):
        h = self.layers[1](self.layers[0](self.emb(batch["x"])))
        h, y = self.choose(h, batch["y"], batch)
        return F.mse_loss(self.head(self.layers[3](self.layers[2](h))), y)


class Kept(ByValue):
    def choose(self, h, y, batch):
        kept = h.detach().mean(-1) > h.detach().mean()
        return h[kept], y[kept]


class KeptAndMasked(ByValue):
    def choose(self, h, y, batch):
        kept = (h.detach().mean(-1) > -1.0) & batch["mask"]
        return h[kept], y[kept]


class Placed(ByValue):
    def choose(self, h, y, batch):
        sample, place = torch.nonzero(h.detach().sum(-1) > h.detach().sum(-1).mean(), as_tuple=True)
        return h[sample, place], y[sample, place]


class Selected(ByValue):
    def choose(self, h, y, batch):
        high = torch.masked_select(h, h > 0)
        return h + high.mean(), y


class Classes(ByValue):
    def choose(self, h, y, batch):
        classes, which = torch.unique(h.detach().argmax(-1), return_inverse=True)
        sums = h.new_zeros(len(classes), WIDTH).index_add(0, which.flatten(), h.flatten(0, 1))
        return h + sums[which], y


class Durations(ByValue):
    """A predictor of durations, as models of speech have."""

    def choose(self, h, y, batch):
        times = 1 + (h.detach()[:, 0].sum(-1) > 0).long()
        return h.repeat_interleave(times, 0), y.repeat_interleave(times, 0)


@pytest.mark.parametrize("kind", [Kept, KeptAndMasked, Placed, Selected, Classes, Durations])
def test_rows_may_be_chosen_by_what_units_compute(kind):
    assert_works(
        kind, batch=WHOLE, num_microbatches=3, steps=2, cuts=(["layers.2"], ["layers.0", "layers.3"])
    )


class Branches(Net):
    """`if` and numbers by what layers compute, with other layers after it."""

    def body(self, h):
        for layer in self.layers:
            h = layer(h)
            if h.mean() > 0.05:
                h = h * 2
            h = h / (1.0 + h.detach().abs().max().item())
            self.log("largest", h.detach().abs().max().item())
        return h


class Guards(Net):
    def body(self, h):
        for layer in self.layers:
            h = layer(h)
            assert torch.isfinite(h).all(), "not finite"
            if torch.isnan(h).any():
                raise ValueError("nan")
        return h


class Counts(Net):
    """What is counted after such a look is what one device counts."""

    def __init__(self) -> None:
        super().__init__()
        self.clipped, self.seen = 0, 0

    def body(self, h):
        for layer in self.layers:
            h = layer(h)
            self.seen += 1
            if h.abs().max() > 1.0:
                self.clipped += 1
                h = h.clamp(-1.0, 1.0)
        return h


@pytest.mark.parametrize("kind", [Branches, Guards, Counts])
def test_numbers_of_units_may_steer_the_code_before_other_units(kind):
    assert_works(
        kind, batch=batch_of(6), num_microbatches=3, steps=2, cuts=(["layers.2"], ["layers.0", "layers.3"])
    )


class Exits(Net):
    """Which layers are called depends on values: no stage before it could know."""

    def body(self, h):
        for number, layer in enumerate(self.layers):
            h = layer(h)
            if number == 1 and h.abs().max() > 0:
                break
        return h


def test_units_that_are_called_by_values_are_right_within_a_stage_or_refused_with_the_line():
    cuts = (["layers.1"], ["layers.2"], ["layers.3"])
    worked = same_or_refused(Exits, "computed by the model .*test_unit_values.py", cuts=cuts)
    assert worked == [True, True, False]


class Loops(Net):
    """Goes on for as long as a value says so, or until it does."""

    def body(self, h):
        while h.norm() > 1.0:
            h = h / 2
        while not h.detach().norm() > 2.0:
            h = h * 3
        while h.detach().abs().max().item() > 0.1:
            h = h / 2
        return super().body(h)


def test_loops_between_units_that_values_end_are_traced_to_their_end(monkeypatch) -> None:
    monkeypatch.setattr(choices, "_OTHERWISE_EACH", 10)
    assert_works(Loops)


class GoesOn(Net):
    def body(self, h):
        h = super().body(h)
        while h.detach().abs().max().item() > -1:  # no answer ends it
            h = self.step(h)
        return h


class Turns(GoesOn):
    def step(self, h):
        return h


class Calls(GoesOn):
    def step(self, h):
        return self.layers[0](h)


@pytest.mark.parametrize(("kind", "says"), [(Turns, "goes on for as long as"), (Calls, "again and again")])
def test_a_loop_that_no_answer_ends_is_refused(kind, says, monkeypatch) -> None:
    monkeypatch.setattr(tracer, "_MOST_CALLS", 5)
    monkeypatch.setattr(choices, "_ENDLESS", 150)
    module = seeded(kind)
    with pytest.raises(SplitError, match=says):
        trace_step(module, "training_step", (batch_of(), 0), units=find_units(module))


class Runs(Net):
    """Does something after the model where a value says so."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.after(loss)
        return loss

    def after(self, loss):
        pass


class Ends(Runs):
    def after(self, loss):
        if loss > 5:
            print("too large")
            raise SystemExit(1)


class Fails(Runs):
    def after(self, loss):
        if loss > 5:
            raise RuntimeError("too large")


class Finite(Runs):
    def after(self, loss):
        if torch.isnan(loss).any() or not torch.isfinite(loss) or (~torch.isfinite(loss.detach())).any():
            self.found = "not finite"
        assert torch.isfinite(loss).all()


class Reads(Runs):
    def after(self, loss):
        self.last = loss.item()


@pytest.mark.parametrize(("kind", "times"), [(Runs, 1), (Reads, 1), (Finite, 1), (Ends, 2), (Fails, 2)])
def test_a_step_that_asks_nothing_is_traced_once_and_the_other_answer_surfaces_nowhere(
    kind, times, capsys, monkeypatch
) -> None:
    runs, run = [], tracer.Tracer.run
    monkeypatch.setattr(tracer.Tracer, "run", lambda *args: runs.append(1) or run(*args))
    module = seeded(kind)
    trace = trace_step(module, "training_step", (batch_of(), 0), units=find_units(module))
    assert len(runs) == times
    assert not trace.ended_early
    assert all(effect.place.key != "found" for effect in trace.effects)
    assert capsys.readouterr() == ("", "")


class Writes(Net):
    """Goes through its layers until what they give says that it is done, as a loop over tokens does."""

    def body(self, h):
        for _ in range(3):
            h = super().body(h)
            if bool((h > 0).all()):
                break
        return h


class WritesUntilAny(Net):
    def body(self, h):
        for _ in range(3):
            h = super().body(h)
            if (h > 0).any():
                break
        return h


@pytest.mark.parametrize("kind", [Branches, Kept, Exits, Writes, WritesUntilAny])
def test_a_trace_names_the_line_where_a_batch_may_be_divided_by_its_values(kind) -> None:
    module = seeded(kind)
    trace = trace_step(module, "training_step", (batch_of(), 0), units=find_units(module))
    assert trace.divided_at.startswith("test_unit_values.py:")


@pytest.mark.parametrize("kind", [Net, Guards, Reads, Finite, Ends])
def test_a_batch_is_not_divided_by_what_asks_for_nan_or_by_what_no_unit_follows(kind) -> None:
    module = seeded(kind)
    trace = trace_step(module, "training_step", (batch_of(), 0), units=find_units(module))
    assert trace.divided_at == ""


def test_what_is_asked_of_all_holds_and_of_any_does_not() -> None:
    h, read = torch.ones(2), torch.ops.aten._local_scalar_dense.default
    aten = torch.ops.aten
    for opposite in (False, True):
        made = Guesses(opposite=opposite)
        every, some, no_nan = torch.tensor(True), torch.tensor(True), torch.isnan(h)
        made.note(aten.all.default, [h], [every])
        made.note(aten.any.default, [h], [some])
        made.note(aten.isnan.default, [h], [no_nan])
        assert [made.answer(read, one) for one in (every, some)] == [not opposite, opposite]
        made.note(aten.any.default, [no_nan], [some])
        assert made.answer(read, some) is False
        made.note(aten.logical_not.default, [some], [every])
        assert made.answer(read, every) is True


@pytest.mark.parametrize("statement", BY_VALUE)
def test_each_statement_by_value_is_right_on_one_rank_with_two_stages_too(statement: str) -> None:
    unit = ("unit", 1)
    statements = (unit, (statement, 3), unit, (statement, 6), ("read", 0), unit, unit, (statement, 4))
    for folded in (False, True):
        program = Program(("plain",) * 5, statements, False, 3, 2, folded=folded)
        assert outcome_of(program) == "equal"
