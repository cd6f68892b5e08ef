"""Numbers, texts, lists and optional tensors that layers return beside their tensor."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from lightning_pipeline.errors import PipelineError
from tests.pool import Pool
from tests.ranks.lightning_cases import FEATURES, TARGETS, Regression, loader, trainer

Ranks = Callable[[int], Pool]
ONE_RANK = {"stages": 1, "num_microbatches": 2}
TWO_RANKS = {"stages": 2, "num_microbatches": 2}


class Beside(nn.Module):
    """Returns something beside its tensor."""

    def __init__(self, what: Callable[[Any, Tensor, int], Any]) -> None:
        super().__init__()
        self.linear, self.scale, self.what = nn.Linear(FEATURES, 8), nn.Parameter(torch.ones(())), what

    def forward(self, x: Tensor, step: int = 0, extra: bool = False) -> tuple[Tensor, Any]:
        hidden = torch.tanh(self.linear(x))
        return hidden, hidden.abs() if extra else self.what(self, hidden, step)


class Returns(Regression):
    """Two layers, of which the first does."""

    def __init__(self, what: Callable[[Any, Tensor, int], Any] = lambda layer, hidden, step: None) -> None:
        super().__init__()
        self.net = nn.Sequential()
        self.first, self.second = Beside(what).double(), nn.Linear(8, TARGETS).double()

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        hidden, found = self.first(batch[0], batch_idx)
        return self.second(hidden), found

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        hidden, found = self.first(batch[0], batch_idx)
        self.log("found", float(found))
        self.log("val_loss", nn.functional.mse_loss(self.second(hidden), batch[1]))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden, found = self.first(batch[0], batch_idx)
        self.log("now", float(found))
        return float(found) * nn.functional.mse_loss(self.second(hidden), batch[1])


LABELS = ("cat", "dog", "owl")
RETURNED: dict[str, Callable[[Any, Tensor, int], Any]] = {
    "steps": lambda layer, hidden, step: 3 + step % 2,
    "name": lambda layer, hidden, step: f"batch {step}",
    "labels": lambda layer, hidden, step: [LABELS[int(one)] for one in hidden[:, :3].argmax(1)],
    "numbers": lambda layer, hidden, step: {"first": hidden[:, 0].tolist()},
}
LOGGED: dict[str, Callable[[Any, Tensor, int], Any]] = {
    "steps": lambda layer, hidden, step: 3 + step % 2,
    "even": lambda layer, hidden, step: step % 2 == 0,
    "scale": lambda layer, hidden, step: layer.scale.item() + step,
    "norm": lambda layer, hidden, step: float(layer.linear.weight.detach().norm()),
}


def predicted(pipeline: dict[str, Any] | None, kind: str) -> list[Any]:
    run = trainer(pipeline)
    found = run.predict(Returns(RETURNED[kind]), loader())
    return [beside for _, beside in found or []] if run.is_global_zero else []


@pytest.mark.parametrize("kind", RETURNED)
def test_predictions_have_what_layers_return_for_their_own_samples(ranks: Ranks, kind: str) -> None:
    expected = predicted(None, kind)
    assert predicted(ONE_RANK, kind) == expected
    assert ranks(2)(predicted, TWO_RANKS, kind, group=False) == [expected, []]


def fitted(pipeline: dict[str, Any] | None, kind: str) -> dict[str, Any]:
    module, run = Returns(LOGGED[kind]), trainer(pipeline)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run.fit(module, loader(), loader(seed=4))
    logged = {name: float(run.callback_metrics[name]) for name in ("found", "val_loss", "now")}
    return {**logged, **{name: value.detach() for name, value in module.named_parameters()}}


@pytest.mark.parametrize("kind", LOGGED)
def test_numbers_that_layers_return_are_those_of_the_batch(ranks: Ranks, kind: str) -> None:
    expected = fitted(None, kind)
    for found in (fitted(ONE_RANK, kind), *ranks(2)(fitted, TWO_RANKS, kind, group=False)):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


def test_numbers_that_differ_between_micro_batches_are_told_of() -> None:
    module, run = Returns(lambda layer, hidden, step: hidden.detach().abs().max().item()), trainer(ONE_RANK)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run.fit(module, loader(), loader(seed=4))
    said = [str(one.message) for one in told]
    for name in ("now", "found"):
        expected = f"self.log('{name}', ...) is given is a Python number that differs"
        assert any(expected in one for one in said), said


class Sometimes(Returns):
    """An argument says whether the layer returns a second tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden, extra = self.first(batch[0], extra=batch_idx % 2 == 1 or self.current_epoch == 1)
        loss = nn.functional.mse_loss(self.second(hidden), batch[1])
        if extra is not None:
            loss = loss + extra.mean()
        self.seen.append(0.0 if extra is None else float(extra.detach().mean()))
        self.log("loss", loss)
        self.log("extra", 0.0 if extra is None else extra.mean())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.first(batch[0], extra=batch_idx > 0)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        hidden, extra = self.first(batch[0], extra=batch_idx == 1)
        return self.second(hidden), extra


def fitted_sometimes(pipeline: dict[str, Any] | None) -> dict[str, Any]:
    module, run = Sometimes(), trainer(pipeline)
    run.fit(module, loader(), loader(seed=4))
    logged = {name: float(run.callback_metrics[name]) for name in ("loss", "extra")}
    found = {**logged, **{name: value.detach() for name, value in module.named_parameters()}}
    return {**found, "seen": torch.tensor(module.seen)}


def test_layers_may_return_a_tensor_in_some_batches(ranks: Ranks) -> None:
    expected = fitted_sometimes(None)
    for found in (fitted_sometimes(ONE_RANK), *ranks(2)(fitted_sometimes, TWO_RANKS, group=False)):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


def predicted_sometimes(pipeline: dict[str, Any] | None) -> list[Any]:
    run = trainer(pipeline)
    found = run.predict(Sometimes(), loader())
    return (
        [None if extra is None else extra.sum().item() for _, extra in found or []]
        if run.is_global_zero
        else []
    )


def test_predictions_may_have_a_tensor_in_some_batches(ranks: Ranks) -> None:
    expected = predicted_sometimes(None)
    for found in (predicted_sometimes(ONE_RANK), ranks(2)(predicted_sometimes, TWO_RANKS, group=False)[0]):
        assert found == [one if one is None else pytest.approx(one) for one in expected]


class Alone(nn.Module):
    """Returns a tensor alone, or two where it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, 8)

    def forward(self, x: Tensor, extra: bool = False) -> Any:
        hidden = torch.tanh(self.linear(x))
        return (hidden, hidden.abs()) if extra else hidden


class OneOrTwo(Sometimes):
    """The layer is asked in one batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Alone().double()

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            hidden, extra = self.first(batch[0], extra=True)
            return self.second(hidden), extra
        return self.second(self.first(batch[0])), None


def predicted_one_or_two(pipeline: dict[str, Any] | None) -> list[Any]:
    run = trainer(pipeline)
    found = run.predict(OneOrTwo(), loader())
    if not run.is_global_zero:
        return []
    return [None if extra is None else extra.sum().item() for _, extra in found or []]


def test_a_layer_may_return_a_tensor_alone_or_two(ranks: Ranks) -> None:
    expected = predicted_one_or_two(None)
    for found in (predicted_one_or_two(ONE_RANK), ranks(2)(predicted_one_or_two, TWO_RANKS, group=False)[0]):
        assert found == [one if one is None else pytest.approx(one) for one in expected]


class OfItsOwn(Sometimes):
    """An attribute of the layer says so."""

    def on_train_epoch_start(self) -> None:
        aside = self.current_epoch
        self.first.what = lambda layer, hidden, step: hidden.abs() if aside else None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden, extra = self.first(batch[0])
        loss = nn.functional.mse_loss(self.second(hidden), batch[1])
        return loss if extra is None else loss + extra.mean()


def refused(pipeline: dict[str, Any]) -> str:
    try:
        trainer(pipeline).fit(OfItsOwn(), loader())
    except PipelineError as error:
        return str(error)
    return ""


def test_what_no_argument_chooses_is_refused_with_the_layer(ranks: Ranks) -> None:
    for found in ranks(2)(refused, TWO_RANKS, group=False):
        assert "unit 'first' returns 2 tensors now, and 1 when training_step was traced" in found


class Shapes(Returns):
    """Divides by how many samples the layer had, which it returns, beside something that does not leave it."""

    def __init__(self) -> None:
        super().__init__(lambda layer, hidden, step: (hidden.shape, len(hidden), object()))
        self.total = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden, (shape, count, _) = self.first(batch[0])
        each = (self.second(hidden) - batch[1]).pow(2)
        own = batch[1] > 0
        self.total += shape[0]
        self.log("mean", each.sum() / count)
        return (each * own).sum() / own.sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...


def fitted_shapes(pipeline: dict[str, Any] | None) -> dict[str, Any]:
    module, run = Shapes(), trainer(pipeline)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="training_step|what training_step|what self.log")
        run.fit(module, loader())
    found = {name: value.detach() for name, value in module.named_parameters()}
    return {**found, "mean": float(run.callback_metrics["mean"]), "total": module.total}


def test_counts_and_shapes_that_layers_return_are_those_of_the_batch(ranks: Ranks) -> None:
    expected = fitted_shapes(None)
    for found in (fitted_shapes(ONE_RANK), *ranks(2)(fitted_shapes, TWO_RANKS, group=False)):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


class Arrays(Returns):
    """An array does not leave its layer."""

    def __init__(self) -> None:
        super().__init__(lambda layer, hidden, step: hidden.detach().numpy())


def arrays(pipeline: dict[str, Any] | None) -> Any:
    run = trainer(pipeline)
    try:
        found = run.predict(Arrays(), loader())
    except PipelineError as error:
        return str(error)
    return [beside for _, beside in found or []]


def test_an_array_is_refused_where_another_stage_reads_it(ranks: Ranks) -> None:
    for expected, found in zip(arrays(None), arrays(ONE_RANK), strict=True):
        numpy.testing.assert_allclose(found, expected)
    for found in ranks(2)(arrays, TWO_RANKS, group=False):
        assert (
            "a module returns a numpy.ndarray, which is made of neither tensors, numbers nor texts" in found
        )
