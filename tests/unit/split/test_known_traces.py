"""What an earlier trace has found is handed on to later ones, and is checked there rather than found anew."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_pipeline.model.split import known_steps
from lightning_pipeline.model.trace import Trace, trace_step, tracing
from lightning_pipeline.model.trace.units import find_units
from tests.unit.split.nets import Block, Net, batch_of, seeded
from tests.unit.split.pipe import alone, assert_same, piped
from tests.unit.split.test_ports import KINDS, Attributes, Hooks


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    """What a function of ours is called with from now on."""
    calls: list[Any] = []
    original = getattr(owner, name)

    def count(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, count)
    return calls


def traced(module: Any, batch: Any = None, like: Trace | None = None) -> Trace:
    batch = batch_of() if batch is None else batch
    return trace_step(module, "training_step", (batch, 0), units=find_units(module), like=like)


def seen_in(trace: Trace) -> Any:
    """What a cut is made from, and what messages are made of."""
    calls = [(call.unit, call.nth, call.structure, call.specs, call.reads) for call in trace.calls]
    return calls, trace.ports, trace.tail, trace.transient, trace.leaking_units()


@pytest.mark.parametrize("kind", KINDS)
def test_ports_that_an_earlier_trace_has_found_are_not_looked_for_again(kind, monkeypatch):
    module = seeded(kind)
    first = traced(module)
    runs = counted(monkeypatch, tracing, "_traced")
    later = traced(module, batch_of(6), like=first)
    assert len(runs) == 1
    assert seen_in(later) == seen_in(traced(module, batch_of(6)))


class OneMore(Attributes):
    """From some epoch on, what the first layer put into a list is read as well."""

    also: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.kept = [[] for _ in self.layers]
        for layer, kept in zip(self.layers, self.kept, strict=True):
            layer.m.register_forward_hook(
                lambda module, inputs, output, kept=kept: kept.append(output.mean())
            )

    def __deepcopy__(self, memo):
        copy = type(self)()
        copy.load_state_dict(self.state_dict())
        copy.also = self.also
        return copy

    def loss(self, h, batch):
        total = super().loss(h, batch)
        if self.also is not None:
            total = total + self.kept[self.also][0]
        for kept in self.kept:
            kept.clear()
        return total


def test_a_port_that_no_earlier_trace_has_found_is_found():
    module = seeded(OneMore)
    first = traced(module)
    module.also = 0
    later = traced(module, like=first)
    assert not first.porting.hooks and later.porting.hooks
    assert seen_in(later) == seen_in(traced(module))


class Fewer(Hooks):
    """Some batches read nothing of what hooks keep."""

    def loss(self, h, batch):
        if "plain" in batch:
            self.holder[0].clear()
        return super().loss(h, batch)


def test_a_port_that_is_not_used_carries_nothing():
    module = seeded(Fewer)
    later = traced(module, {**batch_of(), "plain": 1}, like=traced(module))
    assert not later.leaking_units()
    assert {tag.call for tag in later.tail if tag.kind == "value"} == {len(later.calls) - 1}


class Counts(Net):
    """Leaves behind how many samples it has seen, and its last output."""

    def __init__(self, block: Callable[[], Block] = Block) -> None:
        super().__init__(block)
        self.samples, self.last = 0, torch.zeros(0, dtype=torch.float64)

    def training_step(self, batch, batch_idx):
        h = self.body(self.emb(batch["x"]))
        self.samples += len(h)
        self.last = h.detach()
        return self.loss(h, batch)


@pytest.mark.parametrize("follow", [False, True])
def test_rules_and_divisors_of_a_batch_take_one_more_trace(follow, monkeypatch):
    module = seeded(Counts)
    runs = counted(monkeypatch, known_steps, "trace_step")
    found = piped(module, batch_of(), num_microbatches=2, follow=follow)
    assert [len(args[2][0]["x"]) for args in runs] == [4, 4]  # each of two ranks, both micro-batches as one
    assert_same(found, alone(module, batch_of(), num_microbatches=2))
    assert [split.root.samples for split in found.splits] == [4, 4]
    assert len(found.splits[1].root.last) == 4


CHANGES: dict[str, Callable[[Any], Any]] = {
    "number": lambda module: setattr(module, "scale", 2.0),
    "number in a dictionary": lambda module: module.given.update(wide=True),
    "rows": lambda module: setattr(module, "last", torch.zeros(3, dtype=torch.float64)),
    "rows in a list": lambda module: module.rows.append(torch.zeros(3)),
    "flag of a parameter": lambda module: module.head.weight.requires_grad_(False),
    "mode of a unit": lambda module: module.layers[1].eval(),
    "of a unit": lambda module: setattr(module.layers[0], "calls", 1),
}


class Holding(Counts):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.given, self.rows = 1.0, {"wide": False}, []


@pytest.mark.parametrize("change", list(CHANGES.values()), ids=list(CHANGES))
def test_a_trace_is_not_taken_again_where_the_module_is_another(change, monkeypatch):
    (split,) = piped(seeded(Holding), batch_of(), stages=1, how=[], num_microbatches=2).splits
    batch = ((batch_of(6), 0), {})
    first = split.known.traced_like("training_step", batch)
    assert split.known.traced_like("training_step", batch) is first
    change(split.root)
    assert split.known.traced_like("training_step", batch) is not first


def test_a_trace_is_not_taken_again_for_another_batch():
    (split,) = piped(seeded(Holding), batch_of(), stages=1, how=[], num_microbatches=2).splits
    asked = split.known.traced_like
    first = asked("training_step", ((batch_of(6), 0), {}))
    assert asked("training_step", ((batch_of(6, seed=2), 0), {})) is first
    assert asked("training_step", ((batch_of(5), 0), {})) is not first
    assert asked("training_step", ((batch_of(6), 1), {})) is not first
    assert asked("training_step", (({**batch_of(6), "more": 1}, 0), {})) is not first


class ByValue(Net):
    """A value of the batch chooses how many layers are called."""

    def training_step(self, batch, batch_idx):
        h = self.emb(batch["x"])
        for layer in self.layers[: 2 if float(batch["x"][0, 0]) > 0 else 4]:
            h = layer(h)
        return self.loss(h, batch)


def test_a_trace_that_has_read_a_value_is_not_taken_again():
    (split,) = piped(seeded(ByValue), batch_of(), stages=1, how=[], num_microbatches=1).splits
    paths = []
    for sign in (1.0, -1.0):
        batch = batch_of(6)
        batch["x"][0, 0] = sign
        paths.append(split.known.traced_like("training_step", ((batch, 0), {})).path)
    assert [len(path) for path in paths] == [4, 6]


class Asks(Net):
    """Code asks whether something holds of what layers give, and calls the same layers either way."""

    def training_step(self, batch, batch_idx):
        h = self.emb(batch["x"])
        for layer in self.layers:
            h = layer(h)
        loss = self.loss(h, batch)
        if loss > 1e6:
            self.large = True
        return loss


@pytest.mark.parametrize("kind", [*KINDS, Asks])
def test_a_trace_without_costs_shows_the_same_beside_them(kind):
    module, batch = seeded(kind), batch_of(6)
    step = "training_step", (batch, 0)
    whole = trace_step(module, *step, units=find_units(module))
    cheap = trace_step(module, *step, units=find_units(module), costs=False)
    for trace in (cheap, whole):  # numbers of memory that code between units keeps
        for tags in (trace.tail, *(call.reads for call in trace.calls)):
            tags -= {tag for tag in tags if tag.kind == "saved"}
    assert seen_in(cheap) == seen_in(whole)
    assert [one.place.label for one in cheap.effects] == [one.place.label for one in whole.effects]
    assert not any(call.flops or call.saved for call in cheap.calls) and any(c.flops for c in whole.calls)


def test_where_outputs_alone_are_wanted_a_step_does_not_go_the_other_way_too(monkeypatch):
    (split,) = piped(seeded(Asks), batch_of(), stages=1, how=[], num_microbatches=2).splits
    asked, batch = split.known.traced_like, ((batch_of(6), 0), {})
    runs = counted(monkeypatch, tracing, "_traced")
    outputs = asked("training_step", batch, outputs_alone=True)
    assert len(runs) == 1 and outputs.asked
    both = asked("training_step", batch)  # what the step leaves behind is in this one alone
    assert len(runs) == 3 and [one.place.label for one in both.effects] == ["large"]
    assert [call.specs for call in outputs.calls] == [call.specs for call in both.calls]
