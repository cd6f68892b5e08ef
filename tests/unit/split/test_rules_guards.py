"""R0, R4, R6, R12, R16, R19, R22: what a part of a model cannot do raises, naming module and line."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_pipeline.errors import PipelineError, PlaceholderError, SplitError
from lightning_pipeline.model.tensors import is_placeholder
from tests.unit.split.nets import (
    CUTS,
    WIDTH,
    Block,
    Net,
    assert_refused,
    assert_works,
    batch_of,
    same_or_refused,
    seeded,
)
from tests.unit.split.pipe import piped


class Penalty(Net):
    def loss(self, h, batch):
        return super().loss(h, batch) + 1e-2 * sum(p.pow(2).sum() for p in self.parameters())


class NamedPenalty(Net):
    def loss(self, h, batch):
        return super().loss(h, batch) + sum(
            p.abs().sum() for n, p in self.layers.named_parameters() if "weight" in n
        )


class StateDict(Net):
    def training_step(self, batch, batch_idx):
        scale = sum(v.sum() for v in self.state_dict().values())
        return super().training_step(batch, batch_idx) * scale


class Teacher(Net):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.ModuleList([Block() for _ in range(4)])
        self.teacher.requires_grad_(False)
        self.double()

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            for p, q in zip(self.layers.parameters(), self.teacher.parameters(), strict=True):
                q.lerp_(p, 0.1)
        h = t = self.emb(batch["x"])
        for layer, teacher in zip(self.layers, self.teacher, strict=True):
            h, t = layer(h), teacher(t)
        return self.loss(h, batch) + F.mse_loss(h, t)


@pytest.mark.parametrize("kind", [Penalty, NamedPenalty, StateDict])
def test_a_loop_over_all_parameters_in_a_step_is_right_or_refused(kind):
    same_or_refused(kind, "another stage|spread|keep")


@pytest.mark.parametrize("stages", [2, 3])
def test_an_average_of_weights_that_a_step_keeps_is_that_of_one_device(stages):
    module = seeded(Teacher)
    found = piped(module, batch_of(), stages=stages, steps=2)
    reference = copy.deepcopy(module)
    for _ in range(2):
        reference.training_step(batch_of(), 0).backward()
    expected = dict(reference.named_parameters())
    held = [
        (name, parameter)
        for split in found.splits
        for name, parameter in split.root.named_parameters()
        if not is_placeholder(parameter)
    ]
    assert {name for name, _ in held} == set(expected)
    for name, parameter in held:
        torch.testing.assert_close(parameter, expected[name], rtol=1e-9, atol=1e-12)
        if parameter.grad is not None:
            torch.testing.assert_close(found.gradients[name], expected[name].grad, rtol=1e-9, atol=1e-12)


class DirectPenalty(Net):
    """The same reached by other ways: modules' own parameters, and `_parameters`."""

    def loss(self, h, batch):
        penalty = sum(m.weight.pow(2).sum() for m in self.modules() if isinstance(m, nn.Linear))
        return super().loss(h, batch) + 1e-2 * penalty


class UnitPenalty(Net):
    def loss(self, h, batch):
        return super().loss(h, batch) + sum(
            p.pow(2).sum() for layer in self.layers for p in layer.parameters()
        )


@pytest.mark.parametrize("kind", [DirectPenalty, UnitPenalty])
def test_a_penalty_over_single_units_is_right_or_refused(kind):
    same_or_refused(kind, r"parameters\(\) of|another stage")


def test_every_stage_lists_the_parameters_of_the_whole_model():
    whole = seeded(Net)
    for split in piped(whole, batch_of(), stages=2).splits:
        found = list(split.root.named_parameters())
        assert [(name, p.shape, p.dtype, p.requires_grad) for name, p in found] == [
            (name, p.shape, p.dtype, p.requires_grad) for name, p in seeded(Net).named_parameters()
        ]
        assert 0 < sum(map(is_placeholder, split.root.parameters())) < 12
        assert all(isinstance(p, nn.Parameter) and p.is_leaf for _, p in found)
        assert dict(split.owned_parameters()).keys() == {n for n, p in found if not is_placeholder(p)}


def test_a_unit_of_another_stage_called_outside_a_step_raises():
    first, last = piped(seeded(Net), batch_of(), stages=2).splits
    x = batch_of()["x"]
    with pytest.raises(
        SplitError, match=r"unit 'layers.2' is on stage 1 and is called outside.*nets.py:\d+ in body"
    ):
        first.root.body(x)
    with pytest.raises(SplitError, match="unit 'emb' is on stage 0"):
        last.root.emb(x)
    assert isinstance(last.root.head(x), Tensor)
    with pytest.raises((PlaceholderError, RuntimeError)):
        float((x @ last.root.emb.weight).detach().sum())


def test_a_restored_module_is_whole_and_unpatched():
    module = seeded(Net)
    states = {name: value.clone() for name, value in module.state_dict().items()}
    split = piped(module, batch_of(), stages=2).splits[1]
    split.restore(states)
    assert list(split.root.state_dict()) == list(module.state_dict())
    assert not any("forward" in vars(m) or "parameters" in vars(m) for m in split.root.modules())
    torch.testing.assert_close(split.root.body(batch_of()["x"]), module.body(batch_of()["x"]))


class SwallowsExit(Net):
    def training_step(self, batch, batch_idx):
        try:
            h = self.body(self.emb(batch["x"]))
        except:  # noqa: E722
            h = batch["x"]
        return self.loss(h, batch)


class SwallowsAndReturns(Net):
    def training_step(self, batch, batch_idx):
        try:
            return super().training_step(batch, batch_idx)
        except BaseException:
            return batch["x"].sum()


class SwallowsAndRaises(Net):
    def training_step(self, batch, batch_idx):
        try:
            return super().training_step(batch, batch_idx)
        except BaseException as error:
            raise ValueError("bad batch") from error


@pytest.mark.parametrize("kind", [SwallowsAndReturns, SwallowsAndRaises])
def test_code_that_swallows_the_exit_is_told_so(kind):
    assert_refused(kind, "bare `except:`", cuts=[*CUTS, ["head"]])


def test_code_that_swallows_the_exit_and_calls_the_model_again_is_right_or_told_so():
    same_or_refused(SwallowsExit, "bare `except:`", cuts=[*CUTS, ["head"]])


class CatchesException(Net):
    def training_step(self, batch, batch_idx):
        try:
            return super().training_step(batch, batch_idx)
        except Exception:
            return None


def test_code_that_catches_exception_works():
    assert_works(CatchesException)


class NanAssert(Net):
    def body(self, h):
        for layer in self.layers:
            h = layer(h)
            assert not torch.isnan(h).any()
        return h


class ScalarBranch(Net):
    def body(self, h):
        for layer in self.layers:
            h = layer(h)
            if h.mean() > 0:
                h = h * 0.5
        return h


class ItemBetween(Net):
    def body(self, h):
        for layer in self.layers:
            h = layer(h)
            h = h / (1.0 + abs(h.mean().item()))
        return h


class NumpyBetween(Net):
    def body(self, h):
        scale = 1.0
        for layer in self.layers:
            h = layer(h)
            scale = scale + float(h.detach().numpy().mean())
        return h * scale


class TolistBetween(Net):
    def body(self, h):
        for layer in self.layers:
            h = layer(h)
            order = sorted(h.detach().mean(1).tolist())
            h = h * (1.0 + order[0])
        return h


class DataDependentLength(Net):
    def body(self, h):
        for layer in self.layers:
            h = layer(h)
            chosen = torch.nonzero(h[:, 0] > 0)
            h = h * (1.0 + chosen.shape[0])
        return h


@pytest.mark.parametrize(
    "kind", [NanAssert, ScalarBranch, ItemBetween, NumpyBetween, TolistBetween, DataDependentLength]
)
def test_values_of_another_stage_in_control_flow_are_those_of_one_process(kind):
    assert_works(kind)


class ForcesByGrad(Net):
    def training_step(self, batch, batch_idx):
        x = batch["x"].clone().requires_grad_()
        energy = self.head(self.body(self.emb(x))).sum()
        force = torch.autograd.grad(energy, x, create_graph=True)[0]
        return F.mse_loss(force[:, :2], batch["y"])


class BackwardInside(Net):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        loss.backward(retain_graph=True)
        return loss


class FuncGrad(Net):
    def training_step(self, batch, batch_idx):
        force = torch.func.grad(lambda x: self.head(self.body(self.emb(x))).sum())(batch["x"])
        return F.mse_loss(force[:, :2], batch["y"])


class Vmapped(Net):
    def training_step(self, batch, batch_idx):
        h = torch.func.vmap(lambda x: self.body(self.emb(x)))(batch["x"])
        return self.loss(h, batch)


class InsideFunctionalGrad(Net):
    """Differentiated with respect to one unit's input, between units."""

    def body(self, h):
        for layer in self.layers[:3]:
            h = layer(h)
        g = torch.autograd.grad(self.layers[3](h).sum(), h, create_graph=True)[0]
        return h + g


@pytest.mark.parametrize("kind", [ForcesByGrad, BackwardInside, FuncGrad, Vmapped, InsideFunctionalGrad])
def test_differentiating_inside_the_step_is_refused(kind):
    assert_refused(kind, r"gradient is taken inside|torch.func|test_rules_guards.py:\d+")


class HookOnOutput(Net):
    def body(self, h):
        for layer in self.layers:
            h = layer(h)
            if h.requires_grad:
                h.register_hook(lambda g: g * 3.0)
        return h


class HookOnDerived(Net):
    def body(self, h):
        for layer in self.layers:
            h = layer(h) * 2.0
            if h.requires_grad:
                h.register_hook(lambda g: g * 3.0)
        return h


class RetainsGrad(Net):
    def body(self, h):
        h = self.layers[1](self.layers[0](h))
        h.retain_grad()
        return self.layers[3](self.layers[2](h))


def test_gradient_hooks_at_a_cut_count_once():
    assert_works(HookOnOutput, cuts=[*CUTS, ["layers.2"], ["head"]])
    assert_works(RetainsGrad)
    same_or_refused(HookOnDerived, r"register_hook at test_rules_guards.py:\d+")


class ManyStages(Net):
    pass


def test_more_stages_than_units_is_refused():
    with pytest.raises(PipelineError, match="9 stages were asked for, but the model has"):
        piped(seeded(ManyStages), batch_of(), stages=9)


class Wide(Net):
    def body(self, h):
        h = h.clone()
        h[:, :WIDTH] = super().body(h)
        return h


def test_an_unsent_value_never_reaches_the_loss():
    assert_works(Wide)


def test_a_message_names_the_module_and_the_line():
    class Odd(Net):
        def body(self, h):
            return h if bool(self.layers[0](h).sum() > 0) else super().body(h)

    with pytest.raises(
        SplitError, match=r"unit 'head' is called .* steers the code at test_rules_guards.py:\d+"
    ):
        piped(seeded(Odd), batch_of(), stages=2)


def test_a_failed_step_leaves_the_module_usable():
    split = piped(seeded(Net), batch_of(), stages=2).splits[1]
    split.begin("training_step", [((batch_of(), 0), {})], weights=[1.0], key=(0, 9))
    split.failed()
    assert isinstance(split.root.head(batch_of()["x"]), Tensor)
    with pytest.raises(AssertionError, match=r"begin\(\) comes"):
        split.programs[1].forward(0, None)
