"""What is recorded over micro-batches is what one device would have logged."""

import warnings

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric

from lightning_pipeline.errors import ConfigurationError
from lightning_pipeline.hooks.gradients import SetAside
from lightning_pipeline.hooks.step_logs import LogRecorder
from lightning_pipeline.model.loss import Part


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"mean": MeanMetric()})


def recorded(calls: list[tuple[int, str, float, dict[str, object]]], sizes: list[int]) -> dict[str, float]:
    recorder = LogRecorder(Module())
    recorder.begin(sizes)
    for microbatch, name, value, options in calls:
        recorder.log(microbatch, name, torch.tensor(value, dtype=torch.float64), **options)
    report = recorder.report(None)
    assert report.values is not None
    return {entry.name: float(value) for entry, value in zip(report.entries, report.values, strict=True)}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (1.0 * 3 + 4.0 * 1) / 4),
        ({"reduce_fx": "sum"}, 5.0),
        ({"reduce_fx": torch.max}, 4.0),
        ({"reduce_fx": "min"}, 1.0),
        (
            {"batch_size": 10},
            (1.0 * 3 + 4.0 * 1) / 4,
        ),  # one number for micro-batches of two sizes: the batch's
    ],
)
def test_values_are_reduced_over_microbatches(options: dict[str, object], expected: float) -> None:
    found = recorded([(0, "a", 1.0, options), (1, "a", 4.0, options)], [3, 1])
    assert found == {"a": pytest.approx(expected)}


def test_a_name_that_some_microbatches_log_is_averaged_over_those() -> None:
    found = recorded([(0, "a", 1.0, {}), (0, "b", 7.0, {}), (1, "a", 3.0, {})], [1, 1])
    assert found == {"a": 2.0, "b": 7.0}


def test_a_given_batch_size_is_summed_and_a_metric_is_found_by_its_path() -> None:
    module = Module()
    recorder = LogRecorder(module)
    recorder.begin([2, 2])
    for microbatch in range(2):
        recorder.log(microbatch, "a", 1.0, batch_size=5)
        recorder.log_dict(microbatch, {"m": module.inner["mean"], "b": 2}, on_epoch=True)
    a, metric, b = recorder.report(torch.tensor(1.0)).entries
    assert (a.batch_size, metric.metric, metric.dtype, b.options) == (
        10,
        "inner.mean",
        None,
        (("on_epoch", True),),
    )


def test_a_python_number_that_differs_between_microbatches_is_warned_of_once() -> None:
    recorder = LogRecorder(Module())
    recorder.part_of = lambda value, always: Part(value / 2)

    def log_twice() -> None:
        for _ in range(2):
            recorder.begin([1, 1])
            for microbatch, value in enumerate([1.0, 3.0]):
                recorder.log(microbatch, "rate", value)
                recorder.log(microbatch, "same", 2.0)
            assert recorder.report(None).values.tolist() == [2.0, 2.0]  # type: ignore[union-attr]
            recorder.warn_of_guesses()

    with pytest.warns(UserWarning, match=r"self.log\('rate', ...\) is given is a Python number") as warned:
        log_twice()
    assert len(warned) == 1


def test_a_number_that_is_known_by_other_means_is_not_warned_of() -> None:
    recorder = LogRecorder(Module())
    recorder.part_of = lambda value, always: Part(value / 2)
    recorder.begin([1, 1])
    for microbatch, value in enumerate([1.0, 3.0]):
        recorder.log(microbatch, "rate", value)
    recorder.report(None)
    assert list(recorder.guesses) == ["rate"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recorder.warn_of_guesses({"rate"})


def test_what_cannot_be_logged_is_refused() -> None:
    recorder = LogRecorder(Module())
    recorder.begin([1])
    with pytest.raises(ConfigurationError, match="no attribute of the LightningModule"):
        recorder.log(0, "m", MeanMetric())
    with pytest.raises(ConfigurationError, match="2 elements"):
        recorder.log(0, "m", torch.zeros(2))
    with pytest.raises(ValueError, match=r"`self\.log\(m, None\)` was called, but `NoneType` values cannot"):
        recorder.log(0, "m", None)
    with pytest.raises(ConfigurationError, match="sync_dist_group"):
        recorder.log(0, "m", 1.0, sync_dist_group=object())


def three_parameters() -> list[nn.Parameter]:
    """Two of them have a gradient of 1."""
    found = [nn.Parameter(torch.zeros(1)) for _ in range(3)]
    found[0].grad, found[1].grad = torch.ones(1), torch.ones(1)
    return found


def gradients_of(parameters: list[nn.Parameter]) -> list[float | None]:
    return [None if one.grad is None else one.grad.item() for one in parameters]


def backwards(gradients: SetAside, parameters: list[nn.Parameter]) -> None:
    """Those of two micro-batches, for all but the second parameter."""
    for made in (2.0, 3.0):
        with gradients.accumulating():
            for one in parameters[::2]:
                one.grad = torch.full((1,), made) if one.grad is None else one.grad + made


@pytest.mark.parametrize("is_read", [False, True])
def test_fresh_gradients_survive_zero_grad_and_add_to_accumulated_ones(is_read: bool) -> None:
    gradients, three = SetAside(), three_parameters()
    gradients.begin(three, is_read=is_read)
    assert gradients_of(three) == [1.0, 1.0, None]  # as long as no backward has begun
    assert gradients.held() == []
    backwards(gradients, three)
    assert gradients_of(three) == ([1.0, 1.0, None] if is_read else [5.0, None, 5.0])
    assert [id(one) for one, _ in gradients.held()] == [id(one) for one in three[:: 2 if is_read else 1][:2]]
    assert [total.item() for _, total in gradients.totals()] == [6.0, 1.0, 5.0]
    gradients.end()
    assert gradients_of(three) == [1.0, 1.0, None]
    gradients.put_back()
    assert gradients_of(three) == [6.0, 1.0, 5.0]


@pytest.mark.parametrize("known", [False, True])
def test_gradients_that_nobody_looks_at_are_freed_unless_the_step_is_known_to_read_them(known: bool) -> None:
    gradients, three = SetAside(), three_parameters()
    gradients.begin(three, drop=() if known else {id(one) for one in three}, is_read=known)
    assert gradients_of(three) == ([1.0, 1.0, None] if known else [None, None, None])
    assert gradients.note_read() is known
    backwards(gradients, three)
    assert gradients_of(three) == ([1.0, 1.0, None] if known else [5.0, None, 5.0])
    gradients.end()
    assert gradients_of(three) == ([1.0, 1.0, None] if known else [None, None, None])


def test_gradients_that_are_looked_at_later_are_there_if_the_step_reads_them_before_a_backward() -> None:
    gradients, three = SetAside(), three_parameters()
    gradients.begin(three)
    assert gradients.note_read()
    backwards(gradients, three)
    assert gradients_of(three) == [1.0, 1.0, None]


def test_a_step_that_fails_leaves_gradients_as_they_were() -> None:
    for ran in (False, True):
        gradients, three = SetAside(), three_parameters()
        gradients.begin(three)
        if ran:
            backwards(gradients, three)
        gradients.cancel()
        assert gradients_of(three) == [1.0, 1.0, None]
