"""Weights that `on_train_end` renames, adds, moves into other layers or takes out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, loader, trainer

Ranks = Callable[[int], Pool]


class Pruned(Regression):
    """Makes pruning permanent."""

    def __init__(self) -> None:
        super().__init__()
        prune.l1_unstructured(self.net[0], "weight", amount=0.3)

    def on_train_end(self) -> None:
        prune.remove(self.net[0], "weight")


class Normalised(Regression):
    """Takes a parametrization out."""

    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.net[0])

    def on_train_end(self) -> None:
        parametrize.remove_parametrizations(self.net[0], "weight")


class Adds(Regression):
    """A temperature, and a buffer for calibration."""

    def on_train_end(self) -> None:
        self.register_parameter("temperature", nn.Parameter(torch.ones(1)))
        self.net[0].register_buffer("calibration", torch.ones(3))


class Wraps(Regression):
    """Puts a layer into another one."""

    def on_train_end(self) -> None:
        self.net[0] = nn.Sequential(self.net[0], nn.Identity())


KINDS = {kind.__name__: kind for kind in (Pruned, Normalised, Adds, Wraps)}


def state_after(pipeline: dict[str, Any] | None, kind: str) -> dict[str, Tensor]:
    module = KINDS[kind]()
    trainer(pipeline).fit(module, loader())
    return {name: value.detach().clone() for name, value in module.state_dict().items() if not value.is_meta}


@pytest.mark.parametrize("kind", KINDS)
def test_weights_have_the_names_and_values_of_one_device(ranks: Ranks, kind: str) -> None:
    expected = state_after(None, kind)
    found = [state_after({"stages": 1, "num_microbatches": 2}, kind)]
    found += ranks(2)(state_after, {"stages": 2, "num_microbatches": 2}, kind, group=False)[:1]
    for own in found:
        torch.testing.assert_close(own, expected, rtol=1e-6, atol=1e-9)
