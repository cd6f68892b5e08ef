"""R3, R8: side outputs of units, state that a step writes."""

from functools import lru_cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.unit.split.nets import WIDTH, Block, Net, assert_works, batch_of, same_or_refused, seeded
from tests.unit.split.pipe import alone, assert_same, piped


class AuxiliaryLoss(Block):
    def __init__(self) -> None:
        super().__init__()
        self.aux = 0.0
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.aux = x.pow(2).mean()
        return super().forward(x)


class ReadsAttributes(Net):
    def __init__(self) -> None:
        super().__init__(AuxiliaryLoss)

    def loss(self, h, batch):
        return super().loss(h, batch) + sum(layer.aux for layer in self.layers)


class Appending(AuxiliaryLoss):
    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.pow(2).mean())
        return Block.forward(self, x)


class ReadsLists(Net):
    def __init__(self) -> None:
        super().__init__(Appending)

    def loss(self, h, batch):
        total = super().loss(h, batch) + sum(sum(layer.seen) for layer in self.layers)
        for layer in self.layers:
            layer.seen.clear()
        return total


class HooksInside(Net):
    """Hooks on a child of a unit, and on a unit, that keep what they see."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = []
        for layer in self.layers:
            layer.m.register_forward_hook(self._keep)

    def _keep(self, module, inputs, output):
        self.kept.append(output.pow(2).mean())

    def loss(self, h, batch):
        total = super().loss(h, batch) + sum(self.kept)
        self.kept.clear()
        return total


class CountsCalls(Block):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) / self.calls


class ReadsCounter(Net):
    def __init__(self) -> None:
        super().__init__(CountsCalls)

    def loss(self, h, batch):
        return super().loss(h, batch) * sum(layer.calls for layer in self.layers)


@pytest.mark.parametrize("kind", [ReadsAttributes, ReadsLists, HooksInside, ReadsCounter])
def test_side_outputs_of_units_are_right_or_refused(kind):
    same_or_refused(
        kind,
        "beside its output|set by a unit's forward|changes a list|another stage|kept together|are together",
    )


class HookOnUnit(Net):
    def __init__(self) -> None:
        super().__init__()
        self.kept = []
        for layer in self.layers:
            layer.register_forward_hook(self._keep)

    def _keep(self, module, inputs, output):
        self.kept.append(output)

    def training_step(self, batch, batch_idx):
        self.kept.clear()
        total = super().training_step(batch, batch_idx)
        return total + sum(h.pow(2).mean() for h in self.kept)


class OwnCounter(Net):
    """A unit's own state that only the unit reads: every micro-batch begins with that of the batch."""

    def __init__(self) -> None:
        super().__init__(CountsCalls)
        self.once_per_batch = [f"layers.{number}.calls" for number in range(len(self.layers))]


@pytest.mark.parametrize("kind", [HookOnUnit, OwnCounter])
def test_what_a_hook_on_a_unit_keeps_and_what_a_unit_counts_is_right(kind):
    assert_works(kind, steps=2)


class Annealed(Net):
    once_per_batch = ("tau",)

    def __init__(self) -> None:
        super().__init__()
        self.tau = 1.0

    def training_step(self, batch, batch_idx):
        h = self.body(self.emb(batch["x"]) * self.tau)
        self.tau *= 0.5
        return self.loss(h, batch)


class AnnealedFirst(Net):
    """Updated before the model: each stage does it, once per batch."""

    once_per_batch = ("tau",)

    def __init__(self) -> None:
        super().__init__()
        self.tau = 1.0

    def training_step(self, batch, batch_idx):
        self.tau *= 0.5
        return self.loss(self.body(self.emb(batch["x"]) * self.tau), batch)


class Memories(Net):
    """Transformer-XL: the step keeps hidden states for the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.mems = None

    def training_step(self, batch, batch_idx):
        h = self.emb(batch["x"])
        kept = []
        for i, layer in enumerate(self.layers):
            kept.append(h.detach())
            h = layer(h if self.mems is None else h + self.mems[i])
        self.mems = kept
        return self.loss(h, batch)


class MemoryAtEnd(Net):
    def __init__(self) -> None:
        super().__init__()
        self.last = None

    def training_step(self, batch, batch_idx):
        h = self.body(self.emb(batch["x"]))
        if self.last is not None:
            h = h + self.last
        self.last = h.detach()
        return self.loss(h, batch)


class PlainTensorAverage(Net):
    """A running mean in a plain attribute, changed in place, read before the model."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(WIDTH, dtype=torch.float64)

    def training_step(self, batch, batch_idx):
        h = self.emb(batch["x"]) - self.mean
        h = self.body(h)
        self.mean.mul_(0.9).add_(0.1 * h.detach().mean(0))
        return self.loss(h, batch)


def test_hidden_states_kept_for_the_next_step_are_those_of_the_whole_batch_or_refused():
    """Those of the end row for row, in micro-batches of 3, 3 and 2; a list of all stages' stays on the last."""
    batch = batch_of(8)
    for stages in (2, 3):
        for kind in (MemoryAtEnd, Memories):
            found = piped(seeded(kind), batch, stages=stages, num_microbatches=3, steps=3)
            expected = alone(seeded(kind), batch, num_microbatches=1, steps=3)
            for name, gradient in expected.gradients.items():
                torch.testing.assert_close(found.gradients[name], gradient, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", [Annealed, AnnealedFirst, PlainTensorAverage])
def test_state_for_the_next_step_is_right_or_refused(kind):
    same_or_refused(
        kind,
        "is read by training_step before|written by training_step|is filled by the end|another stage",
        steps=3,
    )


def test_state_that_only_the_start_uses_works():
    assert_works(AnnealedFirst, steps=3)


class Toggles(Net):
    """An evaluation pass inside the step; the exit comes in between."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def training_step(self, batch, batch_idx):
        self.eval()
        with torch.no_grad():
            target = self.body(self.norm(self.emb(batch["x"])))
        self.train()
        h = self.body(self.norm(self.emb(batch["x"])))
        return self.loss(h, batch) + F.mse_loss(h, target)


class FlagToggles(Net):
    def training_step(self, batch, batch_idx):
        self.emb.requires_grad_(False)
        h = self.body(self.emb(batch["x"]))
        self.emb.requires_grad_(True)
        return self.loss(h, batch)


@pytest.mark.parametrize("kind", [Toggles, FlagToggles])
def test_flags_that_a_step_toggles_are_put_back(kind):
    assert_works(kind, steps=2)


class CodebookAverage(Net):
    """A buffer that glue between units averages: used by the same step, or not at all."""

    used = True

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("avg", torch.ones(WIDTH, dtype=torch.float64))

    def body(self, h):
        for i, layer in enumerate(self.layers):
            h = layer(h)
            if i == 1:
                self.avg.mul_(0.9).add_(0.1 * h.detach().mean(0))
                h = h - self.avg if self.used else h
        return h


class CodebookUnused(CodebookAverage):
    used = False


class BufferFromBatch(Net):
    once_per_batch = ("steps",)

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=torch.float64))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def training_step(self, batch, batch_idx):
        self.steps += 1
        self.mean.lerp_(batch["x"].mean(0), 0.5)
        return self.loss(self.body(self.emb(batch["x"] - self.mean)), batch)


class BufferReplaced(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("avg", torch.ones(WIDTH, dtype=torch.float64))

    def loss(self, h, batch):
        self.avg = 0.9 * self.avg + 0.1 * h.detach().mean(0)
        return super().loss(h - self.avg, batch)


@pytest.mark.parametrize("kind", [CodebookAverage, BufferFromBatch, BufferReplaced])
def test_buffers_that_a_step_writes_are_right_or_refused(kind):
    same_or_refused(kind, "written by training_step|another stage|together", steps=3, num_microbatches=3)


class Prototypes(Net):
    """SwAV: the step normalises a parameter before it runs the model."""

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            weight = self.layers[2].m.weight
            weight.copy_(F.normalize(weight, dim=1))
        return super().training_step(batch, batch_idx)


class MovedPrototypes(Net):
    """A parameter that the step normalises by giving it other memory."""

    def training_step(self, batch, batch_idx):
        weight = self.layers[2].m.weight
        weight.data = F.normalize(weight.data, dim=1)
        return super().training_step(batch, batch_idx)


class NormedInside(Block):
    """A unit that halves its own weight."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.m.weight.mul_(0.5)
        return super().forward(x)


class OwnPrototypes(Net):
    def __init__(self) -> None:
        super().__init__(NormedInside)


class LooksInside(NormedInside):
    """One that is run on made-up input in the trace."""

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        return h if torch.isfinite(h).all() else h.clamp(-1.0, 1.0)


class LookingPrototypes(Net):
    def __init__(self) -> None:
        super().__init__(LooksInside)


def test_a_parameter_that_the_step_normalises_first_works():
    assert_works(Prototypes, num_microbatches=1, steps=2)


@pytest.mark.parametrize("split_backward", [False, True])
@pytest.mark.parametrize("kind", [Prototypes, MovedPrototypes, OwnPrototypes, LookingPrototypes])
def test_a_backward_sees_the_weight_of_its_own_micro_batch(kind, split_backward):
    expected = alone(seeded(kind), batch_of(), steps=2)
    found = piped(seeded(kind), batch_of(), stages=3, steps=2, split_backward=split_backward)
    assert_same(found, expected)


def test_an_average_that_nobody_reads_in_the_step_is_that_of_the_whole_batch():
    found = piped(seeded(CodebookUnused), batch_of(), stages=2, steps=3)
    expected = alone(seeded(CodebookUnused), batch_of(), num_microbatches=1, steps=3)
    torch.testing.assert_close(found.buffers["avg"], expected.buffers["avg"], rtol=1e-10, atol=1e-10)


def test_a_buffer_written_and_read_at_one_place_works():
    assert_works(BufferFromBatch, steps=3)


class Normed(Net):
    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)))


def test_running_statistics_are_those_of_real_micro_batches_only():
    assert_works(Normed, steps=2, batch=batch_of(6))


@lru_cache(maxsize=8)
def _table(width: int, sign: int) -> Tensor:
    return torch.arange(width, dtype=torch.float64).mul(sign)


_CACHE: dict[int, Tensor] = {}


class Caching(Block):
    """Fills a `lru_cache`, a dictionary of the file and an attribute on first use."""

    mask = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.tril(torch.ones(WIDTH, WIDTH, dtype=x.dtype))
        if WIDTH not in _CACHE:
            _CACHE[WIDTH] = torch.ones(WIDTH, dtype=x.dtype)
        return super().forward(x @ self.mask + _table(WIDTH, 1)) + _CACHE[WIDTH]


class Cached(Net):
    def __init__(self) -> None:
        super().__init__(Caching)


def test_caches_filled_in_a_unit_hold_no_placeholder_after_the_trace():
    _table.cache_clear()
    _CACHE.clear()
    module = seeded(Cached)
    split_first = piped(module, batch_of(), stages=2, steps=2)
    assert_same(split_first, alone(module, batch_of(), steps=2))
    assert type(_table(WIDTH, 1)) is Tensor
    assert type(_CACHE[WIDTH]) is Tensor
