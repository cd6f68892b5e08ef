"""What units give away beside their output is a further output of the call, so the cut may go between them."""

from collections import deque

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import MixtralConfig, MixtralForCausalLM

from lightning_pipeline.model.cut.graph import atoms_of
from lightning_pipeline.model.trace import trace_step
from lightning_pipeline.model.trace.units import find_units
from tests.unit.split.nets import Block, Net, assert_works, batch_of, seeded
from tests.unit.split.pipe import Module, alone, assert_same, piped


class Auxiliary(Block):
    def __init__(self) -> None:
        super().__init__()
        self.aux = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.aux = x.pow(2).mean()
        return super().forward(x)


class Attributes(Net):
    """An auxiliary loss in an attribute of each layer."""

    def __init__(self) -> None:
        super().__init__(Auxiliary)

    def loss(self, h, batch):
        return super().loss(h, batch) + sum(layer.aux for layer in self.layers)


class Appending(Block):
    def __init__(self, kind=list) -> None:
        super().__init__()
        self.seen = kind()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.pow(2).mean())
        return super().forward(x)


class Lists(Net):
    """A list of each layer that the end of the step reads and empties."""

    def __init__(self, kind=Appending) -> None:
        super().__init__(kind)

    def loss(self, h, batch):
        total = super().loss(h, batch) + sum(sum(layer.seen) for layer in self.layers)
        for layer in self.layers:
            layer.seen.clear()
        return total


class Deques(Lists):
    def __init__(self) -> None:
        super().__init__(lambda: Appending(deque))


class Shared(Net):
    """A list of the whole module, which its layers know and fill."""

    class Layer(Block):
        def forward(self, x: Tensor) -> Tensor:
            self.losses.append(x.pow(2).mean())
            return super().forward(x)

    def __init__(self) -> None:
        super().__init__(Shared.Layer)
        self.losses: list[Tensor] = []
        for layer in self.layers:
            layer.losses = self.losses

    def training_step(self, batch, batch_idx):
        self.losses.clear()
        return super().training_step(batch, batch_idx) + sum(self.losses)


class Hooks(Net):
    """Hooks on a child of each layer that keep what they see in a list of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.holder = [[]]
        kept = self.holder[0]
        for layer in self.layers:
            layer.m.register_forward_hook(lambda module, inputs, output: kept.append(output.tanh().mean()))

    def __deepcopy__(self, memo):
        copy = type(self)()
        copy.load_state_dict(self.state_dict())
        return copy

    def loss(self, h, batch):
        total = super().loss(h, batch) + sum(self.holder[0])
        self.holder[0].clear()
        return total


class HooksAndAttributes(Attributes):
    """A hook that looks at numbers stands beside an auxiliary loss, and is left where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = [0.0]
        for layer in self.layers:
            layer.m.register_forward_hook(self._look)

    def _look(self, module, inputs, output):
        assert output.detach().abs().max().item() < 1e9


class Sampled(Net):
    """Layers that look at numbers and keep a divergence, in two passes that both read all of it."""

    class Layer(Block):
        def forward(self, x: Tensor) -> Tensor:
            assert self.m.weight.abs().max().item() < 1e9
            self.divergence = self.m.weight.pow(2).sum() * x.mean()
            return super().forward(x)

    def __init__(self) -> None:
        super().__init__(Sampled.Layer)

    def training_step(self, batch, batch_idx):
        total = 0.0
        for _ in range(2):
            total = total + super().training_step(batch, batch_idx)
            total = total + sum(layer.divergence for layer in self.layers)
        return total


KINDS = [Attributes, Lists, Deques, Shared, Hooks, Sampled]


@pytest.mark.parametrize("kind", KINDS)
def test_side_outputs_cross_every_cut(kind):
    assert_works(kind, cuts=[["layers.0"], ["layers.1", "layers.3"]], steps=2)


class Skipping(Attributes):
    """Layers with side outputs, of which some batches leave one out."""

    def __init__(self) -> None:
        super().__init__()
        self.skips = False

    def body(self, h):
        for number, layer in enumerate(self.layers):
            if number != 1 or not self.skips:
                h = layer(h)
            else:
                layer.aux = 0.0
        return h


def test_another_way_through_layers_with_side_outputs_is_that_of_one_device():
    def each(root, number):
        root.skips = number % 2 == 1
        return batch_of(seed=number)

    module = seeded(Skipping)
    options = {"steps": 3, "each": each}
    mine = piped(module, batch_of(), how=["layers.2"], **options)
    assert_same(mine, alone(module, None, **options))


@pytest.mark.parametrize("kind", KINDS)
def test_layers_with_side_outputs_are_atoms_of_their_own(kind):
    module = seeded(kind)
    trace = trace_step(module, "training_step", (batch_of(), 0), units=find_units(module))
    assert all(len(atom.units) == 1 for atom in atoms_of(trace))


def test_a_hook_that_looks_at_values_stays_in_its_unit():
    assert_works(HooksAndAttributes, cuts=[["layers.1"], ["layers.3"]])


class Steering(Hooks):
    """One hook keeps what it sees, one beside it changes the output."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.m.register_forward_hook(lambda module, inputs, output: 2 * output)


def test_beside_a_hook_that_changes_the_output_layers_stay_together_and_are_right():
    assert_works(Steering, cuts=[["layers.0"]])


class Reused(Attributes):
    """Two passes: what the first one left is read in between."""

    def training_step(self, batch, batch_idx):
        h = self.body(self.emb(batch["x"]))
        first = sum(layer.aux for layer in self.layers)
        return self.loss(self.body(self.emb(2 * batch["x"])) + h * first, batch)


def test_each_call_has_its_own_side_output():
    assert_works(Reused, cuts=[["layers.0"], ["layers.1", "layers.3"]])


class Recomputed(Attributes):
    def body(self, h):
        for layer in self.layers:
            h = checkpoint(layer, h, use_reentrant=False)
        return h


def test_side_outputs_of_checkpointed_layers_cross_a_cut():
    assert_works(Recomputed, cuts=[["layers.0"], ["layers.1", "layers.3"]])


class Mixture(Module):
    """As mixtures of experts are trained: with the loss that balances the routers."""

    def __init__(self, **asked) -> None:
        super().__init__()
        config = MixtralConfig(
            vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, num_local_experts=4, max_position_embeddings=32, use_cache=False,
        )  # fmt: skip
        self.model = MixtralForCausalLM(config)
        self.asked = asked

    def training_step(self, batch, batch_idx):
        out = self.model(**batch, **self.asked)
        more = [t.pow(2).mean() for t in (out.attentions or ()) if t is not None]
        return out.loss + sum(more)


@pytest.mark.parametrize(
    ("stages", "asked"), [(2, {"output_attentions": True}), (3, {"output_router_logits": True})]
)
def test_a_mixture_of_experts_is_spread_evenly_with_its_router_logits(stages, asked):
    torch.manual_seed(0)
    module = Mixture(**asked)
    if "output_attentions" in asked:
        module.model.set_attn_implementation("eager")
    ids = torch.randint(0, 64, (4, 8))
    batch = {"input_ids": ids, "labels": ids}
    outcome, expected = piped(module, batch, stages, how="parameters"), alone(module, batch)
    torch.testing.assert_close(outcome.losses, expected.losses)
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(outcome.gradients[name], gradient, rtol=1e-4, atol=1e-7)
    held = [sum(p.numel() for _, p in split.owned_parameters()) for split in outcome.splits]
    assert min(held) > sum(held) / stages / 2, held
