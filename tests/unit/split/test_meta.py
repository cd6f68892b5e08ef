"""A module on the meta device, without weights, is traced as the same module with them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_pipeline.errors import SplitError
from lightning_pipeline.model.cut.partitioning import partition
from lightning_pipeline.model.trace import Trace, trace_step
from lightning_pipeline.model.trace.units import find_units
from tests.unit.split.models import module_and_batch
from tests.unit.split.pipe import Module

NAMES = ("perceptron", "residual", "unet", "gpt2", "llama", "bert", "t5")
APART = (
    "root",
    "units",
    "effects",
    "unit_attributes",
    "circumstances",
)  # the last: what a library notes of weights
COMPARED = [name for name in Trace.__slots__ if name not in APART]


def assert_traced_alike(meta: Trace, real: Trace) -> None:
    for attribute in COMPARED:
        assert getattr(meta, attribute) == getattr(real, attribute), attribute
    found, expected = (
        [(e.place.label, e.positions, e.from_units, e.deep) for e in trace.effects] for trace in (meta, real)
    )
    assert found == expected
    labels, expected_labels = (
        [(unit, place.label) for unit, place in trace.unit_attributes] for trace in (meta, real)
    )
    assert labels == expected_labels


def trace(make: Callable[[], nn.Module], batch: object, device: str) -> Trace:
    with torch.device(device):
        module = make()
    return trace_step(module, "training_step", (batch, 0), units=find_units(module))


@pytest.mark.parametrize("name", NAMES)
def test_costs_bytes_dependence_and_cut_are_those_of_the_real_module(name: str) -> None:
    batch = module_and_batch(name)[1]
    real, meta = (trace(lambda: module_and_batch(name)[0], batch, device) for device in ("cpu", "meta"))
    assert_traced_alike(meta, real)
    assert partition(meta, 2).bounds == partition(real, 2).bounds


def test_the_module_is_on_the_meta_device_afterwards() -> None:
    batch = module_and_batch("gpt2")[1]
    with torch.device("meta"):
        module, _ = module_and_batch("gpt2")
    before = dict(module.named_parameters(remove_duplicate=False))
    trace_step(module, "training_step", (batch, 0), units=find_units(module))
    after = dict(module.named_parameters(remove_duplicate=False))
    assert all(after[name] is before[name] and before[name].is_meta for name in before)


class Glued(Module):
    """Uses a parameter and a buffer between its units; `look` steers by the value of a buffer."""

    def __init__(self, look: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.position = nn.Parameter(torch.zeros(8))
        self.register_buffer("mask", torch.ones(16, 8).tril())
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.look = look

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.count += 1
        hidden = batch + self.position
        for layer in self.layers:
            if self.look and self.mask[0, 0] > 0:
                hidden = -hidden
            hidden = layer(hidden) * self.mask[: len(batch)]
        return hidden.mean()


def test_parameters_and_buffers_between_units_are_traced_alike() -> None:
    real, meta = (trace(Glued, torch.zeros(2, 8), device) for device in ("cpu", "meta"))
    assert_traced_alike(meta, real)


def test_code_that_looks_at_a_value_on_the_meta_device_is_told_which() -> None:
    trace(lambda: Glued(look=True), torch.zeros(2, 8), "cpu")
    with pytest.raises(SplitError, match=r"values of 'mask', which has none while the step is traced: "):
        trace(lambda: Glued(look=True), torch.zeros(2, 8), "meta")


class Choosing(nn.Module):
    """A unit whose shapes depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.inner(hidden[hidden[:, 0] > self.inner.bias[0].item()])


def test_a_unit_that_needs_values_is_told_to_be_built_with_weights() -> None:
    class Net(Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Choosing(), nn.Linear(8, 8)])

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            for layer in self.layers:
                batch = layer(batch)
            return functional.relu(batch).sum()

    with pytest.raises(SplitError, match=r"'layers.0' cannot be traced on the meta device: .* build the mod"):
        trace(Net, torch.zeros(2, 8), "meta")


def test_operations_inside_operations_are_counted_once() -> None:
    class Net(Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 8)])

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            for layer in self.layers:
                batch = layer(batch)
            return batch.sum()

    for device in ("cpu", "meta"):
        found = trace(Net, torch.zeros(4, 8), device)
        assert [call.flops for call in found.calls] == [2 * 4 * 8 * 16, 2 * 4 * 16 * 8]
