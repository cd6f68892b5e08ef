"""Buffers that a unit advances in each forward whatever it is given: once a batch, as on one device."""

import pytest
import torch
import torch._dynamo.backends.debugging
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils import spectral_norm as by_hook
from torch.utils.checkpoint import checkpoint

from tests.ranks.lightning_cases import FEATURES, Regression, loader, trainer

pytestmark = pytest.mark.usefixtures("no_group_is_left")

STAGED = {"stages": 1, "stages_per_rank": 2, "schedule": "Interleaved1F1B"}
WAYS = {
    "two": {**STAGED, "num_microbatches": 2},
    "four": {**STAGED, "num_microbatches": 4},
    "GPipe": {"stages": 1, "schedule": "GPipe", "num_microbatches": 3},
    "ZBH1": {"stages": 1, "schedule": "ZBH1", "num_microbatches": 4},
}


class Counts(nn.Module):
    """How often it ran, which scales what it gives."""

    def __init__(self, width=8):
        super().__init__()
        self.map = nn.Linear(width, 8).double()
        self.register_buffer("runs", torch.zeros((), dtype=torch.long))
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))

    def count(self, x):
        self.runs += 1
        self.scale.mul_(0.9)

    def forward(self, x):
        if self.training:
            self.count(x)
        return self.map(x) * self.scale


class SetsAnew(Counts):
    """Other tensors each time."""

    def count(self, x):
        self.runs = self.runs + 1
        self.scale = self.scale * 0.9


class RunsAgain(Counts):
    """Once more in the backward, where it counts too."""

    def inner(self, x):
        return super().forward(x)

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


class RunsTheNormAgain(nn.Module):
    def __init__(self):
        super().__init__()
        self.map = parametrizations.spectral_norm(nn.Linear(8, 8).double())

    def forward(self, x):
        return checkpoint(self.map, x, use_reentrant=False)


class CountsSamples(Counts):
    """As many as it is given: what all micro-batches have had is the batch's."""

    def count(self, x):
        self.runs += len(x)

    def forward(self, x):
        self.count(x)
        return self.map(x)


class Observes(Counts):
    """Beside its largest value, which follows from the samples of all micro-batches."""

    def __init__(self):
        super().__init__()
        self.register_buffer("largest", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        found = super().forward(x)
        self.largest = torch.maximum(self.largest, found.detach().abs().max() / self.scale)
        return found


class Averages(nn.Module):
    """A mean over batches, which goes by their count: over micro-batches it is the same by their count."""

    def __init__(self):
        super().__init__()
        self.map = nn.Linear(8, 8).double()
        self.register_buffer("runs", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(8, dtype=torch.float64))

    def forward(self, x):
        self.runs += 1
        self.mean += (x.detach().mean(0) - self.mean) / self.runs
        return self.map(x)


def normed(*places):
    def change(net):
        for place in places:
            parametrizations.spectral_norm(net[place])

    return change


def hooked(net):
    by_hook(net[2])
    by_hook(net[6])


def in_place_of(place, make):
    def change(net):
        net[place] = make()

    return change


CHANGES = {
    "spectral norm": normed(2),
    "of several": normed(0, 2, 6),
    "by hook": hooked,
    "counts": in_place_of(2, Counts),
    "first": in_place_of(0, lambda: Counts(FEATURES)),
    "last": in_place_of(4, Counts),
    "anew": in_place_of(2, SetsAnew),
    "again": in_place_of(2, RunsAgain),
    "samples": in_place_of(2, CountsSamples),
    "beside what follows samples": in_place_of(2, Observes),
    "norm again": in_place_of(2, RunsTheNormAgain),
    "beside a batch norm": lambda net: net.insert(3, nn.BatchNorm1d(8).double().eval()),
}


class Changed(Regression):
    def __init__(self, change):
        super().__init__()
        change(self.net)


class Twice(Changed):
    """Its layers are called twice a batch, as a discriminator is."""

    def loss(self, batch):
        return super().loss(batch) + super().loss([batch[0] * 0.5, batch[1]])


def fitted(change, pipeline, kind=Changed):
    module = kind(change)
    run = trainer(
        pipeline, max_epochs=2, num_sanity_val_steps=0, enable_progress_bar=False, enable_model_summary=False
    )
    run.fit(module, loader(), loader(seed=4))
    return module.state_dict(), {name: float(value) for name, value in run.callback_metrics.items()}


def check(change, way, kind=Changed):
    (found, logs), (expected, expected_logs) = (fitted(change, p, kind) for p in (WAYS[way], None))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12, msg=name)
    assert logs == pytest.approx(expected_logs, rel=1e-10)


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_unit_advances_whatever_it_is_given_advances_once_a_batch(name):
    check(CHANGES[name], "two")


@pytest.mark.parametrize("way", ["four", "GPipe", "ZBH1"])
def test_so_it_does_under_other_schedules(way):
    check(normed(2, 6), way)


def test_a_unit_that_is_called_twice_a_batch_advances_twice():
    check(normed(2, 6), "two", Twice)


class ReadsTheNormed(Changed):
    """The step reads a weight that a reading advances, too: a norm that is logged."""

    def loss(self, batch):
        loss = super().loss(batch)
        self.log("norm", self.net[6].weight.norm())
        return loss


@pytest.mark.parametrize("way", ["GPipe", "ZBH1"])
def test_a_weight_that_the_step_reads_besides_is_advanced_by_both(way):
    check(normed(2, 6), way, ReadsTheNormed)


def test_running_statistics_go_on_from_micro_batch_to_micro_batch():
    found, _ = fitted(lambda net: net.insert(3, nn.BatchNorm1d(8, momentum=None).double()), WAYS["two"])
    assert int(found["net.3.num_batches_tracked"]) == 12  # three batches of two, in two epochs


def test_a_count_by_which_a_mean_goes_counts_what_the_mean_has():
    (found, _), (expected, _) = (
        fitted(in_place_of(2, Averages), pipeline) for pipeline in (WAYS["two"], None)
    )
    torch.testing.assert_close(found["net.2.mean"], expected["net.2.mean"], rtol=1e-10, atol=1e-12)
    assert int(found["net.2.runs"]) == 2 * int(expected["net.2.runs"])


ran: list[None] = []


def noted(graph, inputs):
    """As aot_eager, which traces and differentiates as inductor does; notes each run of the forward."""
    compiled = torch._dynamo.backends.debugging.aot_eager(graph, inputs)
    return lambda *args: (ran.append(None), compiled(*args))[1]


def test_a_compiled_layer_is_run_compiled_for_micro_batches_alone():
    torch._dynamo.reset()
    ran.clear()
    change = in_place_of(2, lambda: torch.compile(Counts(), backend=noted))
    fitted(change, WAYS["two"])
    assert len(ran) == 2 * 2 * 2 * 3, "two epochs, training and validation, two micro-batches, three batches"
