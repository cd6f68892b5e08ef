"""Layers whose own forward mixes samples: each micro-batch mixes its own, and a warning names the layer."""

import re
import warnings

import pytest
import torch
import torch._dynamo.backends.debugging
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_pipeline.model.rehearsal.unit_mixing import UnitMixing
from tests.ranks.lightning_cases import FEATURES, TARGETS, Regression, assert_same, loader, trainer, weights

pytestmark = pytest.mark.usefixtures("no_group_is_left")

STAGED = {"stages": 1, "stages_per_rank": 3, "schedule": "Interleaved1F1B", "num_microbatches": 2}
WIDTH = 8
_SAID = re.compile(r"in (\w+) the forward of (.*) mixes the samples that it is given")


class Does(nn.Module):
    """A layer, and what is done to its output.

    Args:
        function: Does it.
        inner: The layer.
    """

    def __init__(self, function=lambda h: h, inner=None):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH).double() if inner is None else inner
        self.function = function

    def forward(self, h):
        return self.function(self.inner(h))


class Mixing(Does):
    """One of another name."""


def with_deviation(h):
    """As the last block of a discriminator has it."""
    return torch.cat([h[:, 1:], h.std(0).mean().expand(len(h), 1)], 1)


def within_capacity(h):
    """Two experts, each of which takes half of the samples, those that like it most."""
    best = h[:, :2].softmax(1).topk(len(h) // 2, dim=0).indices
    made = h.clone()
    for expert, rows in enumerate(best.T):
        made[rows] = made[rows] * (2.0 + expert)
    return made


def normed_by_gradient(h):
    with torch.enable_grad():
        x = h.detach().requires_grad_()
        (gradient,) = torch.autograd.grad((x - x.mean(0)).square().sum(), x)
    return h + gradient


MIXING = {
    "mean": lambda h: h - h.mean(0),
    "deviation": with_deviation,
    "softmax": lambda h: h.softmax(0) * h,
    "capacity": within_capacity,
    "maximum": lambda h: h / h.abs().max(),
    "neighbours": lambda h: h + 0.5 * h.roll(1, 0),
    "attention over samples": lambda h: (h @ h.T).softmax(-1) @ h,
    "a gradient": normed_by_gradient,
    "one for all": lambda h: h if h.mean() > 9 else h * h.mean(),
    "those before": lambda h: h.cumsum(0),
    "the one before": lambda h: h - torch.cat([torch.zeros_like(h[:1]), h[:-1]]),
}


class Net(Regression):
    """Five layers, of which some are others.

    Args:
        layers: By place.
    """

    def __init__(self, layers):
        super().__init__()
        made = [nn.Linear(FEATURES, WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(3))]
        self.net = nn.Sequential(*made, nn.Linear(WIDTH, TARGETS)).double()
        for place, make in layers.items():
            self.net[place] = make()


def fitted(make, pipeline=STAGED, batch_size=8, **options):
    """Weights and logs of a fit, and which units were warned of in which step, in the order of the warnings."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        module = make()
        options = {"max_epochs": 1, "num_sanity_val_steps": 0, "limit_val_batches": 0} | options
        run = trainer(
            pipeline, enable_progress_bar=False, enable_model_summary=False, **options
        )  # fmt: skip
        run.fit(module, loader(batch_size=batch_size), loader(seed=4, batch_size=batch_size))
    said = [found.groups() for one in seen if (found := _SAID.search(str(one.message)))]
    logs = {name: float(value) for name, value in run.callback_metrics.items()}
    return (weights(module), logs), said


def said_of(layers, **options):
    return fitted(lambda: Net(layers), **options)[1]


@pytest.mark.parametrize("name", MIXING)
def test_a_layer_that_mixes_samples_is_warned_of_with_its_name_and_class(name):
    assert said_of({2: lambda: Mixing(MIXING[name])}) == [("training_step", "net.2 (Mixing)")]


class AlongTheFirst(nn.LSTM):
    """As `nn.LSTM` is by default: time comes first, and each row is taken for a moment."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, h):
        return super().forward(h)[0]


def test_a_recurrent_layer_along_the_samples_is_warned_of():
    assert said_of({2: AlongTheFirst}) == [("training_step", "net.2 (AlongTheFirst)")]


def test_the_first_and_the_last_are_found_and_all_are_in_one_warning():
    layers = {
        0: lambda: Mixing(MIXING["mean"], nn.Linear(FEATURES, WIDTH).double()),
        2: lambda: Mixing(MIXING["softmax"]),
        4: lambda: Mixing(MIXING["mean"], nn.Linear(WIDTH, TARGETS).double()),
    }
    assert said_of(layers) == [("training_step", "net.0 (Mixing), net.2 (Mixing), net.4 (Mixing)")]


def test_a_layer_behind_one_that_mixes_is_not_blamed():
    layers = {1: lambda: Mixing(MIXING["mean"]), 2: Does, 3: lambda: Does(torch.tanh)}
    assert said_of(layers) == [("training_step", "net.1 (Mixing)")]


class BetweenLayers(Net):
    """What its third layer is given is mixed, by the step."""

    def loss(self, batch):
        h = self.net[:2](batch[0])
        return F.mse_loss(self.net[2:](h - h.mean(0)), batch[1])


def test_a_layer_that_is_given_mixed_samples_is_not_blamed():
    assert fitted(lambda: BetweenLayers({2: Does}))[1] == []


class Attends(nn.Module):
    """Over the features of a sample, in pairs."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(2, 1, dropout=0.3, batch_first=True).double()

    def forward(self, h):
        h = h.reshape(len(h), 4, 2)
        return self.attention(h, h, h, need_weights=False)[0].flatten(1)


class Recurs(nn.Module):
    """Over the features of a sample, time first, with a dropout between its layers.

    Args:
        packs: Whether samples have lengths of their own, which follow from their values.
    """

    def __init__(self, packs=False):
        super().__init__()
        self.packs, self.rnn = packs, nn.GRU(2, 2, 2, dropout=0.4).double()

    def forward(self, h):
        steps = h.reshape(len(h), 4, 2).transpose(0, 1)
        if not self.packs:
            return self.rnn(steps)[0].transpose(0, 1).flatten(1)
        lengths = 1 + (h.detach()[:, :3] > 0).sum(1).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(steps, lengths, enforce_sorted=False)
        out = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], total_length=4)[0]
        return out.transpose(0, 1).flatten(1)


class Looks(nn.Module):
    """Up in a table."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, WIDTH).double()

    def forward(self, h):
        return h + self.table((h > 0).sum(1) % 4)


class Chooses(nn.Module):
    """An expert for each sample, without a capacity: the rows of each are worked out together."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)) for _ in range(2)
        )
        self.double()

    def forward(self, h):
        chosen, made = (h[:, 0] > h[:, 1]).long(), torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            made = made.index_add(0, rows, expert(h[rows]))
        return made


class Convolves(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv1d(2, 2, 3, padding=1).double()

    def forward(self, h):
        return self.convolution(h.reshape(len(h), 2, 4)).flatten(1)


def with_depth(h):
    """Samples skip it by chance."""
    return h * (torch.rand(len(h), 1) > 0.5) + torch.randn_like(h)


APART = {
    "dropout": lambda: Does(lambda h: F.dropout(h, 0.5)),
    "draws": lambda: Does(with_depth),
    "layer norm": lambda: Does(inner=nn.LayerNorm(WIDTH).double()),
    "attention": Attends,
    "RNN": Recurs,
    "packed RNN": lambda: Recurs(packs=True),
    "embedding": Looks,
    "experts": Chooses,
    "convolution": Convolves,
    "checkpoint": lambda: Does(lambda h: checkpoint(torch.tanh, h, use_reentrant=False)),
    "encoder": lambda: Does(
        lambda h: h.flatten(1),
        nn.Sequential(
            nn.Unflatten(1, (4, 2)), nn.TransformerEncoderLayer(2, 1, 4, batch_first=True)
        ).double(),
    ),
    "raises": lambda: Does(lambda h: h if len(h) > 1 and not (h[0] == h[1]).all() else 1 / 0),
}


@pytest.mark.parametrize("name", APART)
def test_a_layer_that_keeps_samples_apart_is_not_blamed(name):
    assert said_of(dict.fromkeys((1, 2, 3), APART[name]), limit_val_batches=1) == []


class TimeFirst(Regression):
    """Its layers are given steps, samples and features, of which the second are the samples.

    Args:
        function: What is done between the first layer and the second, inside one of them.
        steps: Of each sample.
    """

    def __init__(self, function, steps):
        super().__init__()
        self.steps = steps
        inner = nn.Linear(steps, steps).double()
        self.net = nn.Sequential(
            nn.Linear(1, steps).double(), Mixing(function, inner), nn.Linear(steps, TARGETS).double()
        )

    def loss(self, batch):
        steps = batch[0][:, : self.steps, None].transpose(0, 1)
        return F.mse_loss(self.net(steps).mean(0), batch[1])


@pytest.mark.parametrize("steps", [3, 4])  # the micro-batches have 4 samples
def test_samples_are_found_where_they_are_not_first_and_other_dimensions_are_as_long(steps):
    for function, found in (
        (lambda h: h - h.mean(1, keepdim=True), [("training_step", "net.1 (Mixing)")]),
        (lambda h: h - h.mean(0) + h.softmax(2).cumsum(0), []),
    ):
        assert fitted(lambda function=function: TimeFirst(function, steps))[1] == found


class PerElement(Regression):
    """Its second layer gives a row for each element of a sample, and two numbers in it."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(FEATURES, WIDTH).double(),
            Does(lambda h: h.reshape(-1, 2)),
            nn.Linear(2, 2).double(),
        )

    def loss(self, batch):
        made = self.net(batch[0]).reshape(len(batch[0]), WIDTH)
        return F.mse_loss(made[:, :TARGETS], batch[1])


def test_two_numbers_of_an_element_are_not_taken_for_two_samples():
    assert fitted(PerElement, batch_size=4)[1] == []


def normed_by(norm):
    return lambda: Mixing(
        lambda h: h - h.mean(0), nn.Sequential(nn.Linear(WIDTH, WIDTH), norm(WIDTH)).double()
    )


def test_batch_norms_are_not_told_of_twice():
    with warnings.catch_warnings(record=True):
        assert said_of({2: normed_by(nn.BatchNorm1d)}, limit_val_batches=1) == [
            ("validation_step", "net.2 (Mixing)")  # in which the norm has its running statistics
        ]
    assert said_of({2: lambda: nn.BatchNorm1d(WIDTH).double()}, limit_val_batches=1) == []


class Trained(Mixing):
    """Mixes in training alone."""

    def forward(self, h):
        return super().forward(h) if self.training else self.inner(h)


def test_each_kind_of_step_is_told_of_once():
    layers = {2: lambda: Mixing(MIXING["mean"]), 3: lambda: Trained(MIXING["mean"])}
    assert said_of(layers, max_epochs=2, limit_val_batches=2) == [
        ("training_step", "net.2 (Mixing), net.3 (Trained)"),
        ("validation_step", "net.2 (Mixing)"),
    ]


def test_one_micro_batch_is_not_warned_of():
    assert said_of({2: lambda: Mixing(MIXING["mean"])}, pipeline=STAGED | {"num_microbatches": 1}) == []


@pytest.mark.parametrize("batch_size", [2, 5])
def test_micro_batches_of_one_sample_are_tried_with_others(batch_size):
    layers = {1: lambda: Mixing(MIXING["mean"]), 2: lambda: Mixing(MIXING["softmax"]), 3: Recurs}
    pipeline = STAGED | {"num_microbatches": batch_size}
    found = said_of(layers, pipeline=pipeline, batch_size=batch_size, limit_train_batches=1)
    assert found == [("training_step", "net.1 (Mixing), net.2 (Mixing)")]


class Criterion(nn.Module):
    """Compares the samples of what it is given, as the last layer."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, h, y):
        return F.cross_entropy(self.scale * h @ y.T, torch.arange(len(h)))


class Compared(Net):
    def __init__(self, layers):
        super().__init__(layers)
        self.criterion = Criterion()

    def training_step(self, batch, batch_idx):
        return self.criterion(self.net(batch[0]), batch[1])


def test_with_a_loss_over_the_batch_its_criterion_is_not_warned_of_and_a_layer_before_is():
    over_batch = {"stages": 1, "schedule": "GPipe", "num_microbatches": 2, "loss_over_batch": True}
    assert fitted(lambda: Compared({}), over_batch)[1] == []
    found = fitted(lambda: Compared({2: lambda: Mixing(MIXING["mean"])}), over_batch)[1]
    assert found == [("training_step", "net.2 (Mixing)")]


ran: list[None] = []


def noted(graph, inputs):
    """As aot_eager, which traces and differentiates as inductor does; notes each run of the forward."""
    compiled = torch._dynamo.backends.debugging.aot_eager(graph, inputs)
    return lambda *args: (ran.append(None), compiled(*args))[1]


@pytest.fixture
def no_looks(monkeypatch):
    """What keeps layers from being tried, from now on."""

    def begin():
        torch.distributed.destroy_process_group()
        monkeypatch.setattr(UnitMixing, "look", lambda *_: None)

    return begin


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_layer_is_warned_of_and_runs_compiled_as_often(in_place, no_looks):
    def compiled():
        made = Mixing(MIXING["mean"])
        if in_place:
            made.compile(backend=noted)
        return made if in_place else torch.compile(made, backend=noted)

    def said():
        torch._dynamo.reset()
        ran.clear()
        return said_of({2: compiled}), len(ran)

    found, number = said()
    assert found == [("training_step", "net.2 (Mixing)")]
    assert number >= 3 * 2, "three batches, two micro-batches"
    no_looks()
    assert said() == ([], number)


class Keeps(nn.Module):
    """Numbers of its own: a count of its forwards, what it saw, and what it drew."""

    def __init__(self):
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH).double()
        self.register_buffer("runs", torch.zeros((), dtype=torch.float64))
        self.calls, self.seen = 0, []

    def forward(self, h):
        self.runs += len(h)
        self.calls += len(h)
        self.seen.append(len(h))
        h = F.dropout(self.map(h), 0.3) + torch.randn_like(h)
        return h - h.mean(0) * self.runs / self.calls


def test_trying_layers_changes_no_numbers(no_looks):
    def kept():
        modules = []

        def make():
            modules.append(Net({1: Keeps, 2: Keeps}))
            return modules[0]

        found, said = fitted(make, limit_val_batches=1)
        layers = modules[0].net[1:3]
        return found, [(float(one.runs), one.calls, one.seen) for one in layers], len(said)

    (found, numbers, said) = kept()
    assert said == 2
    no_looks()
    (expected, as_before, unsaid) = kept()
    assert unsaid == 0
    assert numbers == as_before
    assert_same(found, expected, 0.0)


class Wide(Mixing):
    """As large as layers are that are left out."""

    def __init__(self, function):
        super().__init__(function)
        self.table = nn.Parameter(torch.zeros(1, dtype=torch.float64).expand(1 << 26), requires_grad=False)


def test_large_layers_are_left_out():
    assert said_of({2: lambda: Wide(MIXING["mean"]), 3: lambda: Mixing(MIXING["mean"])}) == [
        ("training_step", "net.3 (Mixing)")
    ]
