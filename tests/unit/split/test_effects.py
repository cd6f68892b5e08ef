"""What a step leaves behind is what one device leaves, on every stage, whatever the micro-batches."""

import copy
import itertools
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.demos import Transformer
from torch import Tensor, nn

from tests.unit.split.nets import WIDTH, Block, Net, batch_of, seeded
from tests.unit.split.pipe import Module, Outcome, piped

STAGES = {2: ["layers.1"], 3: ["layers.0", "layers.2"]}
SIZES = pytest.mark.parametrize(("stages", "num_microbatches"), [(2, 1), (2, 4), (3, 2)])


def both(
    kind: Any, stages: int, num_microbatches: int, steps: int = 2, **options: Any
) -> tuple[Outcome, Any]:
    """Through the stages, and the whole batches on one device; the gradients of both are equal."""
    module = seeded(kind)
    found = piped(
        module, batch_of(), stages=stages, how=STAGES[stages], num_microbatches=num_microbatches, steps=steps,
        **options,
    )  # fmt: skip
    reference = copy.deepcopy(module)
    for _ in range(steps):
        reference.training_step(batch_of(), 0).backward()
    for name, parameter in reference.named_parameters():
        mine = found.gradients[name]
        assert (mine is None) == (parameter.grad is None), name
        if mine is not None:
            torch.testing.assert_close(
                mine, parameter.grad, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
            )
    return found, reference


def assert_same_values(one: Any, other: Any) -> None:
    """Nested values are equal, numbers up to rounding."""
    (mine, structure), (theirs, expected) = map(torch.utils._pytree.tree_flatten, (one, other))
    assert structure == expected, (one, other)
    for a, b in zip(mine, theirs, strict=True):
        if isinstance(b, float | Tensor):
            torch.testing.assert_close(a, b)
        else:
            assert a == b, (one, other)


def assert_left(kind: Any, stages: int, num_microbatches: int, **options: Any) -> None:
    """Gradients, and what `kind.left` reads of the module on every stage, are those of one device."""
    found, reference = both(kind, stages, num_microbatches, **options)
    expected = kind.left(reference)
    for split in dict.fromkeys(found.splits):
        assert_same_values(kind.left(split.root), expected)


class Counts(Net):
    """Numbers from their last value, with no source that anyone reads."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = self.seen = self.tokens = self.right = 0
        self.ema = self.total = self.sse = self.best = 0.0
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def training_step(self, batch, batch_idx):
        self.steps += 1
        self.seen += len(batch["x"])
        self.tokens += batch["x"].numel()
        self.count += 1
        out = self.head(self.body(self.emb(batch["x"])))
        loss = F.mse_loss(out, batch["y"])
        self.ema = 0.9 * self.ema + 0.1 * loss.item()
        self.total += loss.item()
        self.sse += ((out - batch["y"]) ** 2).sum().item()
        self.right += int((out > 0).sum())
        self.best = max(self.best, out.max().item())
        return loss

    def left(self):
        numbers = self.steps, self.seen, self.tokens, self.right, self.count
        return *numbers, self.ema, self.total, self.sse, self.best


class Containers(Net):
    """Lists of numbers and of rows, a deque that is full, dictionaries, an object."""

    def __init__(self) -> None:
        super().__init__()
        self.names, self.ids = [], []
        self.recent = deque([torch.zeros(()).double()] * 3, maxlen=3)
        self.sums, self.by_name = {}, {}
        self.store = SimpleNamespace(inputs=[], counts={"a": 0})

    def training_step(self, batch, batch_idx):
        self.names.append("step")
        self.ids.extend(batch["x"][:, 0].tolist())
        self.recent.append(batch["x"].mean())
        self.sums["x"] = self.sums.get("x", 0.0) + batch["x"].sum().item()
        self.by_name["mean"] = batch["x"].mean().item()
        self.store.inputs.append(batch["x"])
        self.store.counts["a"] += len(batch["x"])
        return super().training_step(batch, batch_idx)

    def left(self):
        store = self.store.inputs, self.store.counts
        return self.names, self.ids, list(self.recent), self.sums, self.by_name, *store


class SetAnew(Net):
    """Lists and dictionaries that are there already, and new ones in their place."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.outs, self.first = {}, [], None

    def training_step(self, batch, batch_idx):
        h = self.body(self.emb(batch["x"]))
        self.seen, self.outs = {"rows": len(batch["x"])}, ["a", "b"]
        self.first = batch["x"][:1]
        return self.loss(h, batch)

    def left(self):
        return self.seen, self.outs, self.first


class ByAWeight(Net):
    """Averages of what a weight between units has a part in, which only the first stage computes with."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.linspace(-1, 1, WIDTH, dtype=torch.float64))
        self.register_buffer("average", torch.zeros(WIDTH, dtype=torch.float64))
        self.register_buffer("bound_anew", torch.zeros(WIDTH, dtype=torch.float64))

    def training_step(self, batch, batch_idx):
        h = batch["x"] + self.shift
        made = h.detach().mean(0)
        self.average.mul_(0.9).add_(0.1 * made)
        self.bound_anew = 0.9 * self.bound_anew + 0.1 * made
        return self.loss(self.body(self.emb(h)), batch)

    def left(self):
        return self.average, self.bound_anew


class Lazy(Net):
    """A mask, a flag and a table made at first use, before the model, in it and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = self.scale = self.after = None
        self.installed = False

    def body(self, h):
        if self.mask is None or self.mask.shape != h.shape[-1:]:
            self.mask = torch.linspace(0.5, 1.0, h.shape[-1], dtype=h.dtype)
        if not self.installed:
            self.installed = True
        for number, layer in enumerate(self.layers):
            h = layer(h * self.mask)
            if number == 2 and self.scale is None:
                self.scale = torch.full((WIDTH,), 0.5, dtype=h.dtype)
        return h * self.scale

    def loss(self, h, batch):
        if self.after is None:
            self.after = torch.ones(2, dtype=h.dtype)
        return super().loss(h, batch) * self.after.sum()

    def left(self):
        return self.mask, self.scale, self.after, self.installed


class ByMode(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.0 if self.training else 0.5)


class EvalTarget(Net):
    """A3: a second pass in evaluation mode; the mode is put back when upstream stages are done."""

    def __init__(self) -> None:
        super().__init__(ByMode)

    def training_step(self, batch, batch_idx):
        y = self.body(self.emb(batch["x"]))
        self.eval()
        with torch.no_grad():
            target = self.body(self.emb(batch["x"]))
        self.train()
        return self.loss(y, batch) + F.mse_loss(y, target)

    def left(self):
        return [module.training for module in self.modules()]


class LeftInEval(Net):
    """A backbone that the step leaves in another mode after its last call."""

    def training_step(self, batch, batch_idx):
        h = self.body(self.emb(batch["x"]))
        self.layers.eval()
        return self.loss(h, batch)

    def left(self):
        return [module.training for module in self.modules()]


class Frozen(Net):
    """A4: the gradients of a pass are switched off and on again."""

    def training_step(self, batch, batch_idx):
        h = self.emb(batch["x"])
        for layer in self.layers:
            layer.requires_grad_(False)
        target = self.body(h)
        for layer in self.layers:
            layer.requires_grad_(True)
        return self.loss(self.body(h), batch) + 0 * target.sum()

    def left(self):
        return all(p.requires_grad for p in self.parameters())


class GradMode(Net):
    """A5: gradients are switched off and on by calls."""

    def training_step(self, batch, batch_idx):
        torch.set_grad_enabled(False)
        target = self.body(self.emb(batch["x"]))
        torch.set_grad_enabled(True)
        h = self.body(self.emb(batch["x"]))
        return self.loss(h, batch) + F.mse_loss(h, target)

    def left(self):
        return torch.is_grad_enabled()


class TemporaryHook(Net):
    """A6: a hook for one pass, and one that stays after the step."""

    def training_step(self, batch, batch_idx):
        handle = self.layers[0].register_forward_hook(lambda m, i, o: 2 * o)
        h = self.body(self.emb(batch["x"]))
        handle.remove()
        h = h + self.body(self.emb(batch["x"]))
        if not self.layers[1]._forward_hooks:
            self.layers[1].register_forward_hook(lambda m, i, o: 0.5 * o)
        return self.loss(h, batch)

    def left(self):
        return [len(layer._forward_hooks) for layer in self.layers]


class Scaled(Block):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class AnnealedLayers(Net):
    """A7: attributes of layers: annealed at the end, and off for a reference pass."""

    def __init__(self) -> None:
        super().__init__(Scaled)
        self.dropout = nn.Dropout(0.5).eval()

    def training_step(self, batch, batch_idx):
        h = self.body(self.dropout(self.emb(batch["x"])))
        for layer in self.layers:
            layer.before, layer.scale = layer.scale, 0.0
        with torch.no_grad():
            target = self.body(self.emb(batch["x"]))
        for layer in self.layers:
            layer.scale = 0.5 * layer.before
        self.dropout.p *= 0.5
        return self.loss(h, batch) + F.mse_loss(h, target)

    def left(self):
        return [layer.scale for layer in self.layers], self.dropout.p


class Decayed(Net):
    """A16: weights and an attribute multiplied at the start of the step, in place and by `.data`."""

    def __init__(self) -> None:
        super().__init__(Scaled)

    def training_step(self, batch, batch_idx):
        self.layers[0].m.weight.data.mul_(0.95)
        self.layers[1].m.weight.data = 0.9 * self.layers[1].m.weight.data
        with torch.no_grad():
            self.layers[2].m.weight.mul_(0.8)
        self.layers[3].scale *= 0.9
        return super().training_step(batch, batch_idx)

    def left(self):
        return self.layers[3].scale


class ByLoss(Net):
    """What depends on a unit's values, set at the end and read at the start of the next step."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.mean = 1.0, torch.zeros(WIDTH, dtype=torch.float64)

    def training_step(self, batch, batch_idx):
        h = self.body(self.scale * (self.emb(batch["x"]) - self.mean))
        loss = self.loss(h, batch)
        self.scale = 0.5 * self.scale + 0.1 * float(h.detach().mean())
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return loss

    def left(self):
        return self.scale, self.mean


class Carried(Net):
    """State with the samples' dimension, from batch to batch: cut by rows and joined by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.hidden = None, None

    def training_step(self, batch, batch_idx):
        h = self.emb(batch["x"])
        h = self.layers[0](h if self.last is None else h + self.last)
        for layer in self.layers[1:]:
            h = layer(h)
        if self.hidden is not None:
            h = h + self.hidden[0][0] + self.hidden[1][0]
        self.last = h.detach()
        self.hidden = (h.detach()[None], 2 * h.detach()[None])
        return self.loss(h, batch)

    def left(self):
        return self.last, self.hidden


class Iterators(Net):
    """A10: data fetched in the step, counters that are iterators."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count()
        self.extra = iter([torch.full((WIDTH,), float(n), dtype=torch.float64) for n in range(9)])

    def training_step(self, batch, batch_idx):
        self.last = next(self.numbers)
        return self.loss(self.body(self.emb(batch["x"] + next(self.extra))), batch)

    def left(self):
        return self.last, next(self.numbers)


class IteratorsInContainers(Net):
    """The same in a dictionary and in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = [itertools.count(), itertools.count()]
        rows = [torch.full((WIDTH,), float(n), dtype=torch.float64) for n in range(9)]
        self.extra = {"a": {"b": iter(rows)}}

    def training_step(self, batch, batch_idx):
        self.last = next(self.numbers[1])
        return self.loss(self.body(self.emb(batch["x"] + next(self.extra["a"]["b"]))), batch)

    def left(self):
        return self.last, next(self.numbers[0]), next(self.numbers[1])


class Averages(Net):
    """A mean of all batches, which after the first one alone is that of its micro-batches' means."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.total, self.average = 0, 0.0, 0.0
        self.meters = {"a": SimpleNamespace(n=0, mean=0.0), "b": [SimpleNamespace(n=0, mean=0.0)]}

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.total += loss.item() * len(batch["x"])
        self.count += len(batch["x"])
        self.average = self.total / self.count
        for factor, meter in enumerate((self.meters["a"], self.meters["b"][0]), start=1):
            meter.n += len(batch["x"])
            meter.mean += (factor * loss.item() - meter.mean) * len(batch["x"]) / meter.n
        return loss

    def left(self):
        meters = self.meters["a"], self.meters["b"][0]
        return self.average, *((meter.n, meter.mean) for meter in meters)


class TensorsInContainers(Net):
    """Statistics in tensors that no module knows, changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.held = {"before": torch.zeros(WIDTH).double(), "after": [torch.zeros(WIDTH).double()]}
        self.store = SimpleNamespace(mean=torch.zeros(WIDTH).double())

    def training_step(self, batch, batch_idx):
        x = batch["x"] + self.held["before"]
        with torch.no_grad():
            self.held["before"].mul_(0.9).add_(0.1 * batch["x"].mean(0))
        h = self.body(self.emb(x))
        with torch.no_grad():
            self.held["after"][0].mul_(0.9).add_(0.1 * h.mean(0))
            self.store.mean += h.mean(0)
        return self.loss(h, batch)

    def left(self):
        return self.held, self.store.mean


KINDS = [
    TensorsInContainers, Counts, Containers, SetAnew, ByAWeight, Lazy, EvalTarget, LeftInEval, Frozen, GradMode, TemporaryHook, AnnealedLayers,
    Decayed, ByLoss, Carried, Iterators, IteratorsInContainers,
]  # fmt: skip


@SIZES
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_leaves_what_one_device_leaves(kind, stages, num_microbatches):
    assert_left(kind, stages, num_microbatches)


@SIZES
def test_a_mean_of_all_batches_is_that_of_one_device(stages, num_microbatches):
    module = seeded(Averages)
    found = piped(
        module, batch_of(), stages, num_microbatches, steps=3, how=STAGES[stages],
        each=lambda mine, step: batch_of(seed=step),
    )  # fmt: skip
    reference = copy.deepcopy(module)
    for step in range(3):
        reference.training_step(batch_of(seed=step), step)
    for split in dict.fromkeys(found.splits):
        assert_same_values(Averages.left(split.root), Averages.left(reference))


@pytest.mark.parametrize("kind", [Decayed, AnnealedLayers, Frozen])
def test_several_stages_of_one_rank_leave_what_one_device_leaves(kind):
    module = seeded(kind)
    found = piped(module, batch_of(), stages=4, ranks=[[0, 2], [1, 3]], steps=2)
    reference = copy.deepcopy(module)
    for _ in range(2):
        reference.training_step(batch_of(), 0).backward()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(found.gradients[name], parameter.grad, rtol=1e-9, atol=1e-12)
    for split in dict.fromkeys(found.splits):
        assert_same_values(kind.left(split.root), kind.left(reference))


class Named(Block):
    """A class whose subclasses need a name, so that nobody may make one in passing."""

    def __init_subclass__(cls, *, name: str, **options: Any) -> None:
        super().__init_subclass__(**options)
        assert name not in NAMES
        NAMES.add(name)


NAMES: set[str] = set()


class Tanh(Named, name="tanh"):
    pass


def test_no_subclass_is_made_of_a_users_class():
    found, _ = both(lambda: Net(Tanh), 2, 2)
    assert {type(layer) for layer in found.splits[0].root.layers} == {Tanh}
    assert len(NAMES) == 1


class Demo(Module):
    """Lightning's own demo, with a mask and an encoding that are made at first use."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Transformer(vocab_size=11, ninp=8, nhid=8, dropout=0.0)
        self.double()

    def training_step(self, batch, batch_idx):
        inputs, target = batch
        return F.nll_loss(self.model(inputs, target), target.reshape(-1))


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_the_demo_transformer_equals_one_device(num_microbatches):
    module = seeded(Demo)
    batch = list(torch.randint(0, 11, (2, 4, 5), generator=torch.Generator().manual_seed(0)))
    found = piped(module, batch, stages=2, num_microbatches=num_microbatches, steps=2)
    reference = copy.deepcopy(module)
    for _ in range(2):
        reference.training_step(batch, 0).backward()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(found.gradients[name], parameter.grad, rtol=1e-9, atol=1e-12)
    for split in found.splits:
        torch.testing.assert_close(split.root.model.src_mask, reference.model.src_mask)
