"""What glue makes of placeholders serves again in the next micro-batch, unless glue changes it in place."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipeline._torch import FakeTensorMode
from lightning_pipeline.errors import SplitError
from lightning_pipeline.model.tensors import TensorSpec
from lightning_pipeline.model.tensors.cache import PlaceholderCache
from lightning_pipeline.model.tensors.operations import is_placeholder
from lightning_pipeline.model.tensors.placeholder import PlaceholderMode
from tests.unit.split.nets import Net, assert_works, batch_of, seeded
from tests.unit.split.pipe import assert_whole


@pytest.fixture
def placeholder() -> Tensor:
    return PlaceholderMode().make(TensorSpec((2, 3), (3, 1), torch.float32, "cpu", True))


def remembering(*placeholders: Tensor) -> PlaceholderCache:
    remembered = PlaceholderCache()
    for tensor in placeholders:
        remembered.keep(tensor)
    return remembered


def test_the_same_function_of_the_same_placeholders_gives_the_same_placeholder(placeholder: Tensor) -> None:
    call = remembering(placeholder).call
    total = call(torch.add, (placeholder, placeholder), {})
    assert call(torch.add, (placeholder, placeholder), {}) is total
    assert call(Tensor.view, (total, 3, 2), {}) is call(Tensor.view, (total, 3, 2), {})


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda call, p: call(torch.mul, (p, 1), {}), lambda call, p: call(torch.mul, (p, 2), {})),
        (
            lambda call, p: call(torch.sum, (p,), {"dim": 1}),
            lambda call, p: call(torch.sum, (p,), {"dim": 0}),
        ),
        (lambda call, p: call(torch.add, (p, 1), {}), lambda call, p: call(torch.sub, (p, 1), {})),
    ],
)
def test_other_arguments_give_another(
    placeholder: Tensor, first: Callable[..., Any], second: Callable[..., Any]
) -> None:
    call = remembering(placeholder).call
    assert first(call, placeholder) is not second(call, placeholder)


def test_a_type_that_equals_another_gives_another() -> None:
    whole = PlaceholderMode().make(TensorSpec((2,), (1,), torch.int64, "cpu", False))
    call = remembering(whole).call
    assert call(torch.mul, (whole, 1), {}).dtype == torch.int64
    assert call(torch.mul, (whole, 1.0), {}).dtype == torch.float32


def test_gradients_on_or_off_give_another(placeholder: Tensor) -> None:
    call = remembering(placeholder).call
    with torch.no_grad():
        assert not call(torch.exp, (placeholder,), {}).requires_grad
    assert call(torch.exp, (placeholder,), {}).requires_grad


def test_what_is_not_known_is_computed_anew(placeholder: Tensor) -> None:
    call = remembering().call
    assert call(torch.exp, (placeholder,), {}) is not call(torch.exp, (placeholder,), {})


@pytest.mark.parametrize(
    ("read", "args"),
    [
        (Tensor.layout.__get__, ()),  # type: ignore[attr-defined]  # as `placeholder.layout` under a mode
        (Tensor.__getitem__, (0,)),
        (Tensor.__rsub__, (1,)),
    ],
)
def test_what_reads_ends_nothing(placeholder: Tensor, read: Any, args: tuple[Any, ...]) -> None:
    call = remembering(placeholder).call
    total = call(torch.exp, (placeholder,), {})
    call(read, (placeholder, *args), {})
    assert call(torch.exp, (placeholder,), {}) is total


def test_adding_in_place_ends_it(placeholder: Tensor) -> None:
    call = remembering(placeholder).call
    total = call(torch.exp, (placeholder,), {})
    with torch.no_grad():
        call(Tensor.__iadd__, (total, 1), {})
    assert call(torch.exp, (placeholder,), {}) is not total


def test_a_change_of_the_shape_in_place_ends_it(placeholder: Tensor) -> None:
    call = remembering(placeholder).call
    total = call(torch.exp, (placeholder,), {})
    call(Tensor.unsqueeze_, (total, 0), {})
    assert call(torch.exp, (placeholder,), {}).shape == (2, 3)


class InPlaceOnGlue(Net):
    """Glue that a later stage sees as placeholders, changed in place, in its shape too."""

    def body(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(h)
            wide = h + 1
            wide.unsqueeze_(0).mul_(2)
            h = wide.squeeze(0)
        return h


def test_gradients_stay_right_where_glue_writes_into_its_results() -> None:
    assert_works(InPlaceOnGlue, batch_of(6), num_microbatches=3, steps=2)


class WeightedAfterACheck(Net):
    """Each run of the step is to be told that the check holds."""

    def loss(self, h: Tensor, batch: dict[str, Any]) -> Tensor:
        out, weight = self.head(h), batch["y"][:, 0].abs()
        if not (out.abs() < 100).all().item():
            raise ValueError("too large")
        return ((out - batch["y"]).pow(2).mean(1) * weight).sum() / weight.sum()


def test_each_run_without_units_is_told_that_what_code_checks_holds() -> None:
    assert_whole(seeded(WeightedAfterACheck), batch_of(6), 2, 3)


class MeanOfTheLarge(Net):
    """How many there are is made up anew in each run without units."""

    def loss(self, h: Tensor, batch: dict[str, Any]) -> Tensor:
        out = self.head(h)
        chosen = out.pow(2).masked_select(out.abs() > 0.3)
        return chosen.sum() / chosen.numel()


def test_a_size_that_one_run_without_units_makes_up_is_not_anothers() -> None:
    with pytest.raises(SplitError, match="is divided by what differs between micro-batches"):
        assert_whole(seeded(MeanOfTheLarge), batch_of(6), 2, 3)


def test_what_an_operation_on_a_weight_gives_is_known_from_the_last_time(placeholder: Tensor) -> None:
    layer = nn.Linear(3, 4)

    def taken_apart() -> int:
        return FakeTensorMode.cache_info().bypasses.get("non-fake tensor", 0)

    outputs, before = [layer(placeholder)], taken_apart()
    outputs.append(layer(placeholder))
    assert taken_apart() == before
    assert [output.shape for output in outputs] == [(2, 4)] * 2
    assert all(output.requires_grad and is_placeholder(output) for output in outputs)
    written = torch.zeros(2, 3)
    assert written.add_(placeholder.detach()) is written
