"""Weights that a hook before a layer's forward makes of others: pruned ones, and a spectral norm of old."""

from collections.abc import Callable
from typing import Any

import pytest
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
