"""Weights that hooks make of others: pruned ones, a spectral norm of old, averages in plain objects."""

from collections.abc import Callable
from typing import Any

import pytest
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.nn.utils import prune, spectral_norm

from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, assert_same, loader, trainer
from tests.ranks.test_one_device_replicas import ByHand

Ranks = Callable[[int], Pool]


def linears(module: Any) -> list[nn.Linear]:
    return [layer for layer in module.net if isinstance(layer, nn.Linear)]


class Pruned(Regression):
    """From the second epoch on, so that weights have other names in mid-run."""

    def on_train_epoch_end(self) -> None:
        if not self.current_epoch:
            for layer in linears(self):
                prune.l1_unstructured(layer, "weight", 0.3)


class PrunedByHand(ByHand, Pruned):
    pass


class NormedByHand(ByHand):
    def __init__(self) -> None:
        super().__init__()
        for layer in linears(self):
            spectral_norm(layer)

    def on_validation_batch_end(self, *args: Any) -> None:
        for layer in linears(self):
            assert layer.weight.shape == layer.weight_orig.shape


def fitted(
    pipeline: dict[str, Any] | None, kind: type[Regression]
) -> tuple[dict[str, Tensor], dict[str, float]]:
    module, run = kind(), trainer(pipeline, max_epochs=2)
    run.fit(module, loader(24), loader(8))
    state = {name: value.clone() for name, value in module.state_dict().items()}
    return state, {name: float(value) for name, value in run.callback_metrics.items()}


@pytest.mark.parametrize("kind", [Pruned, PrunedByHand, NormedByHand])
def test_weights_that_hooks_make_of_others_are_one_devices(ranks: Ranks, kind: type[Regression]) -> None:
    expected = fitted(None, kind)
    assert any(name.endswith("_orig") for name in expected[0])
    for found in ranks(2)(fitted, {"stages": 2, "num_microbatches": 2}, kind, group=False):
        assert_same(found, expected)


class Average:
    """Of weights, in a plain object."""

    def __init__(self, module: nn.Module) -> None:
        self.kept = {name: p.detach().clone() for name, p in module.named_parameters()}

    def update(self, module: nn.Module) -> None:
        for name, p in module.named_parameters():
            self.kept[name].lerp_(p.detach(), 0.1)


class Averages(Regression):
    def on_fit_start(self) -> None:
        self.average = Average(self.net)

    def on_before_zero_grad(self, *args: Any) -> None:
        self.average.update(self.net)


class AveragesBeside(Callback):
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.average = Average(pl_module.net)

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.average.update(pl_module.net)


def averaged(pipeline: dict[str, Any] | None) -> list[dict[str, Tensor]]:
    module, beside = Averages(), AveragesBeside()
    trainer(pipeline, max_epochs=1, callbacks=[beside]).fit(module, loader())
    return [module.average.kept, beside.average.kept]


def test_averages_in_a_plain_object_are_whole_after_the_run(ranks: Ranks) -> None:
    expected = averaged(None)
    for found in ranks(2)(averaged, {"stages": 2, "num_microbatches": 2}, group=False):
        for mine, theirs in zip(found, expected, strict=True):
            assert_same((mine, {}), (theirs, {}))
