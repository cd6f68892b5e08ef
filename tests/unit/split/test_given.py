"""Lists and dictionaries that a unit is given and changes: further outputs of the call."""

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import nn

from lightning_pipeline.model.tensors.containers import contents_of, refill
from tests.unit.split.nets import MORE_CUTS, WIDTH, Block, Net, assert_works, seeded


class Appends(Block):
    def forward(self, x, feats):
        feats.append(torch.tanh(x))
        return super().forward(x)


class ListArgument(Net):
    def __init__(self) -> None:
        super().__init__(Appends)

    def body(self, h):
        feats = []
        for layer in self.layers:
            h = layer(h, feats)
        return h + sum(feats)


def test_a_list_that_units_fill_reaches_the_last_stage():
    assert_works(ListArgument, cuts=MORE_CUTS)


class Updates(Block):
    """As the modules of sentence-transformers."""

    def forward(self, features):
        hidden = super().forward(features["hidden"])
        features.update({"hidden": hidden, "layers": [*features.get("layers", []), hidden.mean(-1)]})
        return features


class Features(Net):
    def __init__(self) -> None:
        super().__init__(Updates)

    def training_step(self, batch, batch_idx):
        features = {"hidden": self.emb(batch["x"]), "mask": batch["x"] > 0}
        for layer in self.layers:
            assert layer(features) is features
        assert features["mask"].any()
        return self.loss(features["hidden"] * features["mask"], batch) + sum(
            layer.pow(2).mean() for layer in features["layers"]
        )


def test_a_dictionary_that_units_update_and_return_is_the_same_one_on_every_stage():
    assert_works(Features, cuts=MORE_CUTS)


class Branches(Net):
    """HRNet: `x[i] = branch(x[i])` inside a unit."""

    class Block(Block):
        def forward(self, x):
            x[0] = super().forward(x[0])
            x[1] = x[1] + x[0].mean()
            return x

    def __init__(self) -> None:
        super().__init__(Branches.Block)

    def training_step(self, batch, batch_idx):
        x = [self.emb(batch["x"]), self.emb(2 * batch["x"])]
        for layer in self.layers:
            x = [2 * h for h in layer(x)]
        return self.loss(x[0] + x[1], batch)


def test_items_of_a_list_that_a_unit_replaces_are_carried():
    assert_works(Branches, cuts=MORE_CUTS)


class LooksAtValues(Appends):
    """Cannot run fake, so the trace runs it on made-up input."""

    def forward(self, x, feats):
        assert float(x.detach().sum()) < 1e9
        return super().forward(x, feats)


class ReallyRun(ListArgument):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = LooksAtValues()
        self.double()


def test_a_unit_that_is_traced_on_made_up_input_fills_the_list_too():
    assert_works(ReallyRun, cuts=MORE_CUTS)


class Frozen(OrderedDict):
    """As the configuration of a diffusers model."""

    def _refuse(self, *args, **kwargs):
        raise TypeError("a FrozenDict cannot be changed")

    __setitem__ = __delitem__ = setdefault = pop = update = clear = _refuse

    def __init__(self, *args) -> None:
        for key, value in dict(*args).items():
            OrderedDict.__setitem__(self, key, value)

    def __deepcopy__(self, memo):
        return Frozen(self)


class Configured(Net):
    def __init__(self) -> None:
        super().__init__()
        self.config = Frozen({"width": WIDTH, "scales": [1.0, 2.0]})

    def body(self, h):
        assert list(self.config) == ["width", "scales"]
        return super().body(h * self.config["scales"][1])


def test_an_immutable_dictionary_of_the_module_survives_the_trace():
    assert_works(Configured)
    module = seeded(Configured)
    saved = contents_of(module.config)
    OrderedDict.__setitem__(module.config, "more", 1)
    refill(module.config, saved)
    assert type(module.config) is Frozen
    assert dict(module.config) == saved


class BaseLayer(nn.Module):
    """timm's DLA: a stack with an attribute called `base_layer`, which is no adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([Block() for _ in range(4)])

    def forward(self, h):
        h = self.base_layer(h)
        for layer in self.layers:
            h = layer(h)
        return h


class Dla(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        self.model = BaseLayer().double()

    def body(self, h):
        return self.model(h)


def test_a_model_with_a_base_layer_is_cut():
    assert_works(Dla, cuts=[["model.layers.1"]])


@dataclass
class ByLayer:
    """As a configuration of Gemma 4: a value that varies by layer is refused where it is asked of the whole."""

    width: int
    scale: float

    def __getattribute__(self, name):
        if name == "width":
            raise ValueError("varies by layer")
        return super().__getattribute__(name)


class Scales(nn.Linear):
    def forward(self, x, config):
        return super().forward(torch.tanh(x)) * config.scale


class RefusesFields(Net):
    def __init__(self) -> None:
        super().__init__(lambda: Scales(WIDTH, WIDTH))
        self.config = ByLayer(WIDTH, 1.5)

    def body(self, h):
        for layer in self.layers:
            h = layer(h, self.config)
        return h


def test_a_configuration_that_refuses_a_field_is_left_alone():
    assert_works(RefusesFields, cuts=MORE_CUTS)
