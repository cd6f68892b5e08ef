"""R1, R5, R9, R15, R17: what crosses a cut, what comes back, and what leaves the step."""

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.unit.split.nets import WIDTH, Block, Net, assert_works, batch_of, same_or_refused, seeded
from tests.unit.split.pipe import alone, assert_same, piped


@dataclass
class Out:
    hidden: Tensor
    extra: Tensor | None = None
    name: str = ""


class Pair(NamedTuple):
    hidden: Tensor
    count: int


def returning(make, take):
    """A net whose blocks wrap their output, and whose glue takes it out again."""

    class Wrapping(Block):
        def forward(self, x):
            return make(super().forward(x))

    class Wrapped(Net):
        def __init__(self) -> None:
            super().__init__(Wrapping)

        def body(self, h):
            for layer in self.layers:
                h = take(layer(h))
            return h

    return Wrapped


STRUCTURES = {
    "dict": returning(lambda h: {"h": h, "none": None, "k": 2}, lambda o: o["h"] * o["k"]),
    "tuple": returning(lambda h: (h, h * 2, None), lambda o: o[0] + o[1]),
    "list": returning(lambda h: [h, [h + 1, 3.0]], lambda o: o[0] * o[1][1] + o[1][0]),
    "dataclass": returning(lambda h: Out(h, name="a"), lambda o: o.hidden if o.extra is None else o.extra),
    "namedtuple": returning(lambda h: Pair(h, 3), lambda o: o.hidden / o.count),
    "complex": returning(lambda h: torch.complex(h, h * 2), lambda o: o.real * 0.5 + o.imag + o.abs() * 0.1),
    "integers": returning(lambda h: (h, h.argmax(1)), lambda o: o[0] + F.one_hot(o[1], WIDTH)),
    "bools": returning(lambda h: (h, h > 0), lambda o: torch.where(o[1], o[0], o[0] * 0.3)),
    "transposed": returning(lambda h: h.t(), lambda o: o.t()),
    "expanded": returning(lambda h: h.mean(0, keepdim=True).expand(h.shape), lambda o: o + 0.1),
    "strided": returning(lambda h: torch.cat([h, h * 2], 1)[:, ::2], lambda o: o),
    "scalar": returning(lambda h: (h, h.mean()), lambda o: o[0] + o[1]),
    "empty": returning(lambda h: (h, h[:0]), lambda o: torch.cat([o[0], o[1]])),
    "frozen": returning(lambda h: (h, h.detach()), lambda o: o[0] + o[1]),
}  # fmt: skip


@pytest.mark.parametrize("name", STRUCTURES)
def test_units_may_return_anything(name):
    assert_works(STRUCTURES[name])


class NoneOutput(Net):
    class Sometimes(Block):
        def forward(self, x):
            return super().forward(x), None if x.shape[0] % 2 else x

    def __init__(self) -> None:
        super().__init__(NoneOutput.Sometimes)

    def body(self, h):
        for layer in self.layers:
            h, extra = layer(h)
            h = h if extra is None else h + extra
        return h


def test_an_output_that_is_none_for_some_micro_batches_is_right_or_refused():
    same_or_refused(NoneOutput, "another stage|path|traced", batch=batch_of(5), num_microbatches=2)


class PythonOutput(Net):
    class Measures(Block):
        def forward(self, x, factor):
            return super().forward(x), factor * 2

    def __init__(self) -> None:
        super().__init__(PythonOutput.Measures)

    def training_step(self, batch, batch_idx):
        factor = len(batch["name"][0])
        h = self.emb(batch["x"])
        for layer in self.layers:
            h, factor = layer(h, factor)
            factor = 1 + factor % 5
        return self.loss(h, batch) * factor


def test_python_values_that_a_unit_makes_of_the_batch_travel():
    assert_works(PythonOutput, batch={**batch_of(), "name": ["a", "bbbb", "ccc", "dd"]}, num_microbatches=4)


class Detached(Net):
    def body(self, h):
        for i, layer in enumerate(self.layers):
            h = layer(h.detach() if i == 2 else h)
        return h


class FrozenEncoder(Net):
    def __init__(self) -> None:
        super().__init__()
        self.emb.requires_grad_(False)
        self.layers[0].requires_grad_(False)

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            h = self.layers[0](self.emb(batch["x"]))
        for layer in self.layers[1:]:
            h = layer(h)
        return self.loss(h, batch)


class FrozenMiddle(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1].requires_grad_(False)
        self.layers[2].m.bias.requires_grad_(False)


class NoGradMiddle(Net):
    def body(self, h):
        h = self.layers[0](h)
        with torch.no_grad():
            t = self.layers[2](self.layers[1](h))
        return self.layers[3](h + t)


class Unused(Net):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(WIDTH, WIDTH)
        self.double()

    def body(self, h):
        return self.layers[3](self.layers[1](self.layers[0](h)))


class SomeOutputsUnread(Net):
    class Two(Block):
        def __init__(self) -> None:
            super().__init__()
            self.side = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return super().forward(x), self.side(x)

    def __init__(self) -> None:
        super().__init__(SomeOutputsUnread.Two)

    def body(self, h):
        for layer in self.layers:
            h, _ = layer(h)
        return h


@pytest.mark.parametrize(
    "kind", [Detached, FrozenEncoder, FrozenMiddle, NoGradMiddle, Unused, SomeOutputsUnread]
)
def test_none_is_not_zero(kind):
    assert_works(kind, num_microbatches=3)


class Checkpointed(Net):
    reentrant = False

    def body(self, h):
        for layer in self.layers:
            h = checkpoint(layer, h, use_reentrant=self.reentrant)
        return h


class Reentrant(Checkpointed):
    reentrant = True


class ReentrantBesideATeacher(Reentrant):
    """A module that is in no region is put into another mode after them."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(WIDTH, WIDTH).double().requires_grad_(False)

    def body(self, h):
        h = super().body(h)
        self.teacher.eval()
        return h + self.teacher(h)


class InsideUnit(Net):
    class Inner(Block):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    def __init__(self) -> None:
        super().__init__(InsideUnit.Inner)


class CheckpointedWithGlue(Net):
    def body(self, h):
        for layer in self.layers:
            h = checkpoint(lambda v, part=layer: torch.tanh(part(v * 2)) + v, h, use_reentrant=False)
        return h


class Segment(Net):
    def run(self, h):
        for layer in self.layers:
            h = layer(h)
        return h

    def body(self, h):
        return checkpoint(self.run, h, use_reentrant=False)


@pytest.mark.parametrize(
    "kind", [Checkpointed, Reentrant, ReentrantBesideATeacher, InsideUnit, CheckpointedWithGlue]
)
def test_activation_checkpointing_changes_no_number(kind):
    assert_works(kind)


def test_a_checkpoint_over_several_units_keeps_them_together():
    worked = same_or_refused(
        Segment, "one segment of activation checkpointing", cuts=[["head"], ["layers.0"], ["layers.2"]]
    )
    assert worked == [True, True, False]


class Siamese(Net):
    def training_step(self, batch, batch_idx):
        one = self.body(self.emb(batch["x"]))
        two = self.body(self.emb(batch["x"].flip(0) * 0.5))
        return self.loss(one, batch) + F.mse_loss(one, two) + self.loss(two, batch)


class Recurrent(Net):
    def body(self, h):
        return super().body(super().body(h))


class SharedHead(Net):
    """Deep supervision: one head reads every layer."""

    def training_step(self, batch, batch_idx):
        h = self.emb(batch["x"])
        total = 0.0
        for layer in self.layers:
            h = layer(h)
            total = total + self.loss(h, batch)
        return total


class UNet(Net):
    def body(self, h):
        down = self.layers[0](h)
        deep = self.layers[1](down)
        up = self.layers[2](deep + down)
        return self.layers[3](torch.cat([up[:, :2], h[:, 2:]], 1))


class MomentumPair(Net):
    """A second tower under no_grad as a target (BYOL without the update)."""

    def __init__(self) -> None:
        super().__init__()
        self.target = nn.ModuleList([Block(), Block()])
        self.target.requires_grad_(False)
        self.double()

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            t = self.target[1](self.target[0](batch["x"]))
        h = self.body(self.emb(batch["x"]))
        return self.loss(h, batch) + F.mse_loss(h, t)


@pytest.mark.parametrize("kind", [Siamese, SharedHead, UNet, MomentumPair])
def test_shared_and_skipping_paths_equal_one_process(kind):
    assert_works(kind, num_microbatches=3)


def test_a_recurrence_is_one_atom():
    worked = same_or_refused(Recurrent, "circle|are together", cuts=[["head"], ["layers.0"], ["layers.2"]])
    assert worked == [True, True, False]


class ReturnsDict(Net):
    def training_step(self, batch, batch_idx):
        h = self.emb(batch["x"])
        early = h.pow(2).mean()
        h = self.body(h)
        loss = self.loss(h, batch)
        return {"loss": loss + early, "early": early, "parts": [h, {"n": h.shape[0]}]}


class ReturnsNoneAtEnd(Net):
    """A guard against bad micro-batches, decided by the last stage."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if batch["skip"].any() else loss


class ReturnsNoneAtStart(Net):
    def training_step(self, batch, batch_idx):
        if batch["skip"].any():
            return None
        return super().training_step(batch, batch_idx)


class ReturnsNoneByLoss(Net):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if not torch.isfinite(loss) else loss


def test_a_returned_dict_arrives_as_it_was():
    assert_works(ReturnsDict)
    module = seeded(ReturnsDict)
    mine, theirs = piped(module, batch_of(), stages=3).outputs, alone(module, batch_of()).outputs
    for one, other in zip(mine, theirs, strict=True):
        assert one["parts"][1] == other["parts"][1]
        torch.testing.assert_close(one["early"], other["early"])
        torch.testing.assert_close(one["parts"][0], other["parts"][0])
        assert not one["early"].requires_grad


@pytest.mark.parametrize("kind", [ReturnsNoneAtEnd, ReturnsNoneAtStart])
@pytest.mark.parametrize("skipped", [(0, 0, 1, 0), (1, 1, 1, 1), (0, 1, 0, 1)])
def test_none_skips_a_micro_batch(kind, skipped):
    assert_works(kind, batch={**batch_of(), "skip": torch.tensor(skipped).bool()}, num_microbatches=4)


def test_none_for_a_loss_that_is_not_finite_skips_it():
    batch = batch_of()
    batch["y"][2] = float("nan")
    assert_works(ReturnsNoneByLoss, batch=batch, num_microbatches=4)


class PopsBatch(Net):
    def training_step(self, batch, batch_idx):
        y = batch.pop("y")
        batch["extra"] = 1
        return self.loss(self.body(self.emb(batch.pop("x"))), {"y": y})


def test_a_step_may_take_its_batch_apart():
    assert_works(PopsBatch, steps=2)


class ByShape(Net):
    def body(self, h):
        position = torch.arange(h.shape[1], dtype=h.dtype).unsqueeze(1)
        for layer in self.layers:
            h = layer(h + position / h.shape[1])
        return h


def test_shapes_may_change_between_micro_batches_and_steps():
    module = seeded(ByShape)
    for length in (3, 5, 2):
        assert_works(ByShape, batch=batch_of(5, length), num_microbatches=3)
    split = piped(module, batch_of(4, 3), stages=3).splits
    from tests.unit.split.pipe import Outcome, _collect, _run_batch

    for length, size in ((5, 3), (3, 4), (1, 1)):
        batch = batch_of(size, length)
        for each in split:
            for _, parameter in each.owned_parameters():
                parameter.grad = None
        outcome = Outcome(splits=split)
        _run_batch(split, [((batch, 0), {})], [1.0], "training_step", length, outcome, False)
        _collect(split, outcome)
        assert_same(outcome, alone(module, batch, num_microbatches=1))


class TokenSelection(Net):
    """The number of rows depends on the batch: other shapes under one signature."""

    def training_step(self, batch, batch_idx):
        h = self.emb(batch["x"][batch["keep"]])
        for layer in self.layers:
            h = layer(h) / h.shape[0]
        return self.loss(h, {"y": batch["y"][batch["keep"]]})


def test_shapes_that_follow_from_values_of_the_batch_are_right():
    keep = torch.tensor([1, 1, 1, 0, 0, 1]).bool()
    assert_works(TokenSelection, batch={**batch_of(6), "keep": keep}, num_microbatches=3)


class Queries(Net):
    """As MaskFormer: learned queries that no code calls, and a loss that matches by numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Embedding(1, WIDTH)
        self.double()

    def body(self, h):
        return super().body(h + self.queries.weight)

    def loss(self, h, batch):
        out = self.head(h)
        order = out.detach().sum(1).numpy().argsort()
        return F.mse_loss(out[torch.from_numpy(order)], batch["y"])


def test_the_end_may_need_values_where_a_unit_gives_its_weight_alone():
    assert_works(Queries)


class RanksByAnEarlyValue(Net):
    """As EoMT: what is made of an early output, which is gone itself, is read as an array at the end."""

    def body(self, h):
        h = self.layers[0](h)
        self.early, h = h.sum(1), self.layers[1](h)
        return self.layers[3](self.layers[2](h))

    def loss(self, h, batch):
        out, early = self.head(h), self.early
        self.early = None
        order = (early.detach() + out.detach().sum(1)).numpy().argsort()
        return F.mse_loss(out[torch.from_numpy(order)], batch["y"])


def test_what_is_made_of_an_early_value_arrives_where_the_end_needs_it():
    assert_works(RanksByAnEarlyValue)


class Clamping(Block):
    """As DETR's encoder layers: looks at its values."""

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        return h if torch.isfinite(h).all() else h.clamp(-1.0, 1.0)


class ClampsAndMatches(Queries):
    """As conditional DETR: the step is traced once more on each stage, for its loss needs values."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Clamping() for _ in range(4)]).double()


def test_a_unit_that_looks_at_values_is_known_on_stages_that_do_not_hold_it():
    assert_works(ClampsAndMatches, steps=2)
