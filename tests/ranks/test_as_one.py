"""What no rule follows is seen where a batch is looked at as one: another number than one device's is said."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.ranks.lightning_cases import Regression, loader, trainer

PIPELINE = {"stages": 1, "num_microbatches": 4}
SAYS = "runs once for all of it, as on one device"
Step = Callable[[Any, Tensor, Tensor], Tensor]


def smoothed(self: Any, out: Tensor, y: Tensor) -> Tensor:
    classes = y.argmax(1)
    known = int(classes.max()) + 1
    return -(out.log_softmax(1) * (F.one_hot(classes, 3) * 0.9 + 0.1 / known)).sum(1).mean()


def smoothed_by_numpy(self: Any, out: Tensor, y: Tensor) -> Tensor:
    classes = y.argmax(1)
    known = int(classes.numpy().max()) + 1
    return -(out.log_softmax(1) * (F.one_hot(classes, 3) * 0.9 + 0.1 / known)).sum(1).mean()


def cut_to_a_size(self: Any, out: Tensor, y: Tensor) -> Tensor:
    known = int(y[:, 0].sum().clamp(1, 3))
    return (out[:, :known] - y[:, :known]).pow(2).mean()


def counted(self: Any, out: Tensor, y: Tensor) -> Tensor:
    classes = y.argmax(1)
    self.log("n", torch.zeros(3).index_add_(0, classes, (out.argmax(1) >= 0).float()).max())
    return F.mse_loss(out, y)


def least_of_all(self: Any, out: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(out, y)
    self.least = min(self.least, float(loss.detach()))
    return loss


def share_of_few(self: Any, out: Tensor, y: Tensor) -> Tensor:
    few = y[:, 0] > 0.5
    self.log("n", torch.where(few, (out > y).double().mean(1), 0.0)[few].sum() / len(y))
    return F.mse_loss(out, y)


def plain(self: Any, out: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(F.dropout(out, 0.3), y)
    self.log("loss", loss)
    self.log("largest", (out - y).abs().max())
    self.log("n", len(y))
    self.log("error", self.error(out, y))
    return loss


def fit(step: Step, pipeline: dict[str, Any] | None) -> tuple[dict[str, float], list[str]]:
    """What is logged, and the warnings of what is not one device's."""

    class Told(Regression):
        least = 1.15

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return step(self, self.net(batch[0]), batch[1])

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = trainer(pipeline, max_epochs=1, enable_progress_bar=False, limit_val_batches=0)
        run.fit(Told(), loader(samples=8))
    said = [str(one.message) for one in caught]
    logged = {name: float(value) for name, value in run.callback_metrics.items()}
    logged["left"] = run.lightning_module.least
    return logged, [text for text in said if "micro-batch" in text]


def test_a_loss_that_goes_by_a_number_of_each_micro_batch_is_warned_of() -> None:
    _, said = fit(smoothed_by_numpy, PIPELINE)
    assert any(SAYS in text and "in smoothed_by_numpy" in text for text in said), said


@pytest.mark.parametrize("step", [smoothed, cut_to_a_size])
def test_a_loss_that_goes_by_a_whole_number_of_the_batch_is_one_devices(step: Step) -> None:
    logged, said = fit(step, PIPELINE)
    assert logged == pytest.approx(fit(step, None)[0], rel=1e-6)
    assert not any(SAYS in text for text in said), said


def test_what_one_device_logs_otherwise_is_logged() -> None:
    logged, said = fit(counted, PIPELINE)
    assert logged["n"] == fit(counted, None)[0]["n"]
    assert not said


def test_what_one_device_leaves_otherwise_is_left() -> None:
    logged, said = fit(least_of_all, PIPELINE)
    assert logged["left"] == pytest.approx(fit(least_of_all, None)[0]["left"])
    assert not said


def test_a_choice_by_a_mask_is_one_devices_in_micro_batches_of_one_sample() -> None:
    logged, _ = fit(share_of_few, {"stages": 1, "num_microbatches": 8})
    assert logged["n"] == pytest.approx(fit(share_of_few, None)[0]["n"], rel=1e-6)


def test_a_plain_step_is_not() -> None:
    assert not fit(plain, PIPELINE)[1]


def given(self: Any, out: Tensor, y: Tensor) -> Any:
    return {"out": out, "best": out.argmax(1), "names": [f"{n:.1f}" for n in y[:, 0]], "pair": (out, y)}


def centred(self: Any, out: Tensor, y: Tensor) -> Any:
    return {"out": out, "centred": out - out.mean(0)}


def over_samples(self: Any, out: Tensor, y: Tensor) -> Any:
    return out.softmax(0)


def ordered(self: Any, out: Tensor, y: Tensor) -> Any:
    return (out, out[:, 0].argsort())


def in_a_list(self: Any, out: Tensor, y: Tensor) -> Any:
    return [float(one) for one in out[:, 0] / out[:, 0].sum()]


def largest_alone(self: Any, out: Tensor, y: Tensor) -> Any:
    return out[:, 0].topk(2).values


def returned(step: Any, name: str, pipeline: dict[str, Any] | None = PIPELINE) -> tuple[list[Any], list[str]]:
    """What hooks and callers are given where a step returns this, and the warnings."""
    seen: list[Any] = []

    class Told(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            out = self.net(batch[0])
            return {"loss": F.mse_loss(out, batch[1]), "extra": step(self, out.detach(), batch[1])}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append(outputs["extra"])

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            return step(self, self.net(batch[0]), batch[1])

        def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append(outputs)

        def test_step(self, batch: Any, batch_idx: int) -> Any:
            return step(self, self.net(batch[0]), batch[1])

        def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append(outputs)

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return step(self, self.net(batch[0]), batch[1])

        def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append(outputs)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = trainer(pipeline, max_epochs=1, enable_progress_bar=False)
        getattr(run, name)(Told(), loader(samples=8))
    return seen, [str(one.message) for one in caught if "micro-batches" in str(one.message)]


@pytest.mark.parametrize("name", ["fit", "validate", "test", "predict"])
@pytest.mark.parametrize("step", [given, centred, over_samples, ordered, in_a_list, largest_alone])
def test_what_a_step_returns_is_one_devices(step: Step, name: str) -> None:
    (found, *_), said = returned(step, name)
    (expected, *_), _ = returned(step, name, None)
    for one, other in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        assert (
            one == other
            if isinstance(other, str)
            else torch.allclose(torch.as_tensor(one), torch.as_tensor(other))
        )
    assert not said
