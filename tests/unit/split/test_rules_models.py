"""R18, R20, R21 and R2: kinds of models and how they are put together."""

import types

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from lightning_pipeline.model.trace.units import find_units
from tests.unit.split.nets import WIDTH, Block, Net, assert_works, batch_of, same_or_refused, seeded
from tests.unit.split.pipe import Module, alone, assert_same, piped


class Dictionary(Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleDict({"first": Block(), "second": Block(), "third": nn.Linear(WIDTH, 2)})

    def training_step(self, batch, batch_idx):
        h = batch["x"]
        for layer in self.net.values():
            h = layer(h)
        return F.mse_loss(h, batch["y"])


class Numbered(Module):
    def __init__(self) -> None:
        super().__init__()
        for i in range(3):
            setattr(self, f"block{i}", Block())
        self.last = nn.Linear(WIDTH, 2)

    def training_step(self, batch, batch_idx):
        h = batch["x"]
        for i in range(3):
            h = getattr(self, f"block{i}")(h)
        return F.mse_loss(self.last(h), batch["y"])


class Wrapped(Module):
    """Everything in one module without containers, which has to be expanded."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = Block(), Block(), nn.Linear(WIDTH, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.b(self.a(x)))

    def __init__(self) -> None:
        super().__init__()
        self.model = Wrapped.Model()

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.model(batch["x"]), batch["y"])


class TwoNames(Wrapped):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = self.model.a
        self.blocks = nn.ModuleList([self.model.a, self.model.b])

    def training_step(self, batch, batch_idx):
        h = self.encoder(batch["x"])
        return F.mse_loss(self.model.c(self.blocks[1](h)), batch["y"])


class Sequential(Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            Block(), nn.ReLU(inplace=True), Block(), nn.Dropout(0.0), nn.Linear(WIDTH, 2)
        )

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.net(batch["x"]), batch["y"])


class SameModuleTwice(Net):
    """One module object at two places of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2] = self.layers[1]

    def body(self, h):
        return self.layers[3](self.layers[2](self.layers[1](self.layers[0](h))))


@pytest.mark.parametrize("kind", [Dictionary, Numbered, Wrapped, TwoNames, Sequential, SameModuleTwice])
def test_units_are_found_however_they_are_held(kind):
    assert_works(kind, cuts=[1, 2, 3])


def test_units_are_named_by_their_first_name_and_found_once():
    names = [unit.name for unit in find_units(seeded(TwoNames), at_least=3)]
    assert len(names) == len(set(names)) == 3


class InstanceForward(Net):
    """A `forward` put on the instance, as accelerate does."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.forward = types.MethodType(lambda self, x: Block.forward(self, x) * 2.0, layer)


def test_a_forward_of_the_instance_is_called_and_restored():
    assert_works(InstanceForward)
    module = seeded(InstanceForward)
    expected = alone(module, batch_of())
    split = piped(module, batch_of(), stages=2).splits[1]
    split.restore(module.state_dict())
    assert_same(alone(split.root, batch_of()), expected)
    assert all("forward" in vars(layer) for layer in split.root.layers)


class Encoder(Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)
        self.head = nn.Linear(WIDTH, 2)
        self.double()

    def training_step(self, batch, batch_idx):
        h = self.encoder(batch["x"], src_key_padding_mask=batch["pad"])
        return F.mse_loss(self.head(h)[~batch["pad"]], batch["y"][~batch["pad"]])

    validation_step = training_step


def padded() -> dict[str, Tensor]:
    pad = torch.zeros(4, 5, dtype=torch.bool)
    pad[0, 3:] = pad[2, 4:] = pad[3, 2:] = True
    return {**batch_of(4, 5), "pad": pad}


def test_a_transformer_encoder_with_a_padding_mask_trains_and_evaluates():
    assert_works(Encoder, batch=padded(), cuts=[2, 4])
    module = seeded(Encoder).eval()
    expected = alone(module, padded(), step="validation_step")
    for stages in (1, 2, 3):
        outcome = piped(module, padded(), stages=stages, step="validation_step", split_by="training_step")
        for mine, theirs in zip(outcome.outputs, expected.outputs, strict=True):
            torch.testing.assert_close(mine, theirs)


class Recurrent(Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnns = nn.ModuleList(
            [nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.GRU(WIDTH, WIDTH, batch_first=True)]
        )
        self.head = nn.Linear(WIDTH, 2)
        self.double()

    def training_step(self, batch, batch_idx):
        h, (last, cell) = self.rnns[0](batch["x"])
        h, _ = self.rnns[1](h, last)
        return F.mse_loss(self.head(h), batch["y"]) + cell.pow(2).mean()


class Packed(Recurrent):
    def training_step(self, batch, batch_idx):
        h = self.rnns[0](batch["x"])[0]
        packed = pack_padded_sequence(h, batch["lengths"], batch_first=True, enforce_sorted=False)
        h, _ = pad_packed_sequence(self.rnns[1](packed)[0], batch_first=True, total_length=5)
        return F.mse_loss(self.head(h), batch["y"])


class Flattened(Recurrent):
    def training_step(self, batch, batch_idx):
        self.rnns[0].flatten_parameters()
        return super().training_step(batch, batch_idx)


def test_recurrent_layers_are_units():
    assert_works(Recurrent, batch=batch_of(4, 5), cuts=[2, 3])
    assert_works(Flattened, batch=batch_of(4, 5), cuts=[2])


def test_packed_sequences_are_right_or_refused():
    batch = {**batch_of(4, 5), "lengths": torch.tensor([5, 3, 2, 4])}
    same_or_refused(
        Packed, "cannot be traced|another stage|steers the code|PackedSequence", batch=batch, cuts=[2, 3]
    )


class MaskedTokens(Net):
    """MLM: a mask of the batch picks rows of a value of the model."""

    def loss(self, h, batch):
        return F.mse_loss(self.head(h[batch["mask"]]), batch["y"][batch["mask"]])


class MaskedBetween(Net):
    """MAE: rows are dropped between units, and put back."""

    def training_step(self, batch, batch_idx):
        h = self.emb(batch["x"])
        kept = self.layers[1](self.layers[0](h[batch["mask"]]))
        full = torch.zeros_like(h)
        full[batch["mask"]] = kept
        return self.loss(self.layers[3](self.layers[2](full)), batch)


class Repeated(Net):
    """TTS: rows are repeated by durations of the batch."""

    def training_step(self, batch, batch_idx):
        h = self.layers[0](self.emb(batch["x"]))
        h = torch.repeat_interleave(h, batch["times"], dim=0)
        h = self.layers[3](self.layers[2](self.layers[1](h)))
        return F.mse_loss(self.head(h), torch.repeat_interleave(batch["y"], batch["times"], dim=0))


@pytest.mark.parametrize("kind", [MaskedTokens, MaskedBetween, Repeated])
def test_selections_by_values_of_the_batch_are_right_or_refused(kind):
    mask, times = torch.tensor([1, 0, 1, 1]).bool(), torch.tensor([1, 2, 1, 3])
    batch = {**batch_of(), "mask": mask, "times": times}
    same_or_refused(
        kind, "cannot be traced|steers the code|another stage", batch=batch, cuts=[["layers.1"], ["head"]]
    )


class Scripted(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.jit.script(_scaled)

    def body(self, h):
        for layer in self.layers:
            h = self.scale(layer(h), 1.5)
        return h

    def __deepcopy__(self, memo):
        made = Scripted()
        made.load_state_dict(self.state_dict())
        return made


def _scaled(x: Tensor, factor: float) -> Tensor:
    return torch.relu(x * factor) + 0.1 * x


class PassThrough(torch.autograd.Function):
    """Returns its input, and reverses the gradient."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, g):
        return -0.5 * g


class Reversed(Net):
    def body(self, h):
        for layer in self.layers:
            h = PassThrough.apply(layer(h))
        return h


class Straight(Net):
    """Straight-through estimator."""

    def body(self, h):
        for layer in self.layers:
            h = layer(h)
            h = h + (torch.round(h) - h).detach()
        return h


class Einsum(Net):
    def body(self, h):
        for layer in self.layers:
            q = layer(h)
            h = h + torch.einsum("ik,jk,jl->il", q, q, h).softmax(-1)
        return h


@pytest.mark.parametrize("kind", [Scripted, Reversed, Straight, Einsum])
def test_glue_of_many_kinds_equals_one_process(kind):
    assert_works(kind)


class Compiled(Net):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.compile(backend="eager")


def test_units_compiled_in_place_are_right_or_refused():
    same_or_refused(Compiled, "compile|cannot be traced|fake", cuts=[["layers.1"]])


class ObjectArgument(Net):
    """A plain object carries the state from unit to unit."""

    class State:
        def __init__(self, h):
            self.h = h

    class Takes(Block):
        def forward(self, state):
            return super().forward(state.h)

    def __init__(self) -> None:
        super().__init__(ObjectArgument.Takes)

    def body(self, h):
        for layer in self.layers:
            h = layer(ObjectArgument.State(h))
        return h


class ObjectReturned(ObjectArgument):
    class Returns(Block):
        def forward(self, state):
            return ObjectArgument.State(super().forward(state.h))

    def __init__(self) -> None:
        Net.__init__(self, ObjectReturned.Returns)

    def body(self, h):
        state = ObjectArgument.State(h)
        for layer in self.layers:
            state = layer(state)
        return state.h


class ObjectChanged(ObjectArgument):
    class Changes(Block):
        def forward(self, state):
            state.h = super().forward(state.h)
            return state.h.mean()

    def __init__(self) -> None:
        Net.__init__(self, ObjectChanged.Changes)

    def body(self, h):
        state = ObjectArgument.State(h)
        for layer in self.layers:
            layer(state)
        return state.h


@pytest.mark.parametrize("kind", [ObjectArgument, ObjectReturned, ObjectChanged])
def test_plain_objects_between_units_are_right_or_refused(kind):
    same_or_refused(kind, "object|State|another stage|are together|not sent|beside its output")
