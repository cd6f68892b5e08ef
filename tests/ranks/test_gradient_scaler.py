"""`precision="16-mixed"`: all stages scale alike, and skip a step where any of them overflows."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn

from lightning_pipeline.errors import ConfigurationError
from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, loader, trainer, weights

Ranks = Callable[[int], Pool]


class Half(Regression):
    """The gradients of one stage overflow in one batch: its first layer's, or its last one's."""

    def __init__(self, overflows: int | None = None, gradient: float = float("inf")) -> None:
        super().__init__()
        self.float()
        self.gradient = gradient
        if overflows is not None:
            self.net[overflows].weight.register_hook(self.overflowing)

    def overflowing(self, gradient: Tensor) -> Tensor:
        return torch.full_like(gradient, self.gradient) if self.trainer.global_step == 2 else gradient

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        out = self.net(batch[0].float())
        loss = nn.functional.mse_loss(out, batch[1].float())
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...


class Scales(Callback):
    """The scale before each step, and how many steps were taken."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, run: Any, module: Any, *args: Any) -> None:
        self.seen.append(run.precision_plugin.scaler.get_scale())


def fit_half(
    pipeline: dict[str, Any] | None, overflows: int | None, path: Path | None = None, **options: Any
) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=4)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    module, scales = Half(overflows), Scales()
    run = trainer(pipeline, plugins=[plugin], callbacks=[scales], **options)
    run.fit(module, loader(samples=40), ckpt_path=path, weights_only=False)
    return weights(module), scales.seen, run


def fit_without_trainer(
    pipeline: dict[str, Any] | None, overflows: int | None, path: Path | None = None,
    options: dict[str, Any] | None = None,
) -> Any:  # fmt: skip
    return fit_half(pipeline, overflows, path, **(options or {}))[:2]


@pytest.mark.parametrize("schedule", ["1F1B", "ZBH1"])
@pytest.mark.parametrize("overflows", [None, 0, 6])
def test_all_stages_scale_and_skip_alike(ranks: Ranks, overflows: int | None, schedule: str) -> None:
    expected, scales = fit_without_trainer(None, overflows)
    assert (min(scales) < scales[0]) == (overflows is not None)
    pipeline = {"stages": 2, "num_microbatches": 1, "schedule": schedule}
    for found, seen in ranks(2)(fit_without_trainer, pipeline, overflows):
        assert seen == scales
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)


def test_micro_batches_accumulation_and_clipping(ranks: Ranks) -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    expected, scales = fit_without_trainer(None, 6, None, options)
    pipeline = {"stages": 2, "num_microbatches": 4, "on_nonfinite": "raise"}  # the scaler decides
    for found, seen in ranks(2)(fit_without_trainer, pipeline, 6, None, options):
        assert seen == scales
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def resumed(folder: str) -> Any:
    pipeline = {"stages": 2, "num_microbatches": 1}
    whole = fit_without_trainer(pipeline, 0, None, {"max_epochs": 2})
    first = fit_half(pipeline, 0, max_epochs=1)[2]
    first.save_checkpoint(Path(folder) / "half")
    later = fit_without_trainer(pipeline, 0, Path(folder) / "half", {"max_epochs": 2})
    return whole, later


def test_the_scale_is_in_checkpoints(ranks: Ranks, tmp_path: Path) -> None:
    for (whole, scales), (later, seen) in ranks(2)(resumed, str(tmp_path)):
        assert seen == scales[5:]
        torch.testing.assert_close(later, whole, rtol=0, atol=0)


def fit_replicas(gradient: float, only: str) -> Any:
    """Both replicas see the same batches; on ranks that `only` leaves out the gradient is 0."""
    here = not only or os.environ["RANK"] in only
    plugin = MixedPrecision(
        "16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=4)
    )
    module, scales = Half(0, gradient if here else 0.0), Scales()
    pipeline = {"stages": 2, "num_microbatches": 1, "data_parallel_size": 2}
    run = trainer(pipeline, plugins=[plugin], callbacks=[scales], use_distributed_sampler=False, max_steps=3)
    run.fit(module, loader(samples=40))
    return weights(module), scales.seen


@pytest.mark.parametrize(
    ("gradient", "only", "skips"), [(3e38, "", False), (float("inf"), "", True), (float("inf"), "3", True)]
)
def test_replicas_scale_and_skip_alike(ranks: Ranks, gradient: float, only: str, skips: bool) -> None:
    results = ranks(4)(fit_replicas, gradient, only)
    for found, seen in results:
        assert (min(seen) < seen[0]) == skips
        assert seen == results[0][1]
        torch.testing.assert_close(found, results[0][0], rtol=0, atol=0)
        assert all(bool(torch.isfinite(value).all()) for value in found.values())


class Own(torch.amp.GradScaler):
    """One of the user's."""


def test_a_scaler_of_the_users_own_class_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="gradient scaler of class Own decides on one stage's"):
        trainer({"stages": 2}, plugins=[MixedPrecision("16-mixed", "cpu", Own("cpu"))])
