"""Hooks copy a module, or a part of it, that is spread over stages: an average of its weights, say."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, loader, trainer

Ranks = Callable[[int], Pool]


class Averaged(Regression):
    """Copies its layers in a hook, and keeps an average of the first one's weights in the copy."""

    hook = "on_fit_start"

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[nn.Module] = []

    def _copy(self) -> None:
        self.copies = [copy.deepcopy(self.net)]

    def on_fit_start(self) -> None:
        if self.hook == "on_fit_start":
            self._copy()

    def on_train_start(self) -> None:
        if self.hook == "on_train_start":
            self._copy()

    def on_train_batch_end(self, *_: Any) -> None:
        for mine, layer in zip(self.copies[0].children(), self.net.children(), strict=True):
            for name in ("weight", "bias") if isinstance(layer, nn.Linear) else ():
                with torch.no_grad():
                    getattr(mine, name).mul_(0.9).add_(getattr(layer, name), alpha=0.1)


class AveragedLater(Averaged):
    hook = "on_train_start"


def averaged(pipeline: dict[str, Any] | None, kind: type[Averaged]) -> Any:
    module, run = kind(), trainer(pipeline)
    run.fit(module, loader(24), loader(seed=4))
    (net,) = module.copies
    return {name: value.detach() for name, value in net.named_parameters() if type(value) is nn.Parameter}


@pytest.mark.parametrize("kind", [Averaged, AveragedLater])
def test_a_copy_of_the_layers_averages_the_weights_of_its_stage(ranks: Ranks, kind: type[Averaged]) -> None:
    expected = averaged(None, kind)
    seen = set()
    for found in ranks(2)(averaged, {"stages": 2, "num_microbatches": 2}, kind):
        seen |= set(found)
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name])
    assert seen == set(expected)


class MadeInAStep(Regression):
    """A teacher made in the first step, and values kept in some batches, as the number of the step decides."""

    def __init__(self) -> None:
        super().__init__()
        self.target: Any = None
        self.kept: dict[str, Any] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.target is None:
            self.target = copy.deepcopy(self.net)
        h = batch[0]
        for number, layer in enumerate(self.net):
            h = layer(h)
            if number == 3 and [False, True, False, False, False, False][self.global_step]:
                self.kept["hidden"] = h.detach().mean()
                self.last = h.detach()
        with torch.no_grad():
            aim = self.target(batch[0])
        return nn.functional.mse_loss(h, batch[1]) + 0.1 * (h - aim).pow(2).mean()


def made_in_a_step(pipeline: dict[str, Any] | None) -> dict[str, Any]:
    module, run = MadeInAStep(), trainer(pipeline)
    run.fit(module, loader(24))
    tensors = {**module.state_dict(), "kept": module.kept["hidden"], "last": module.last}
    return {name: tensor.detach().tolist() for name, tensor in tensors.items()}


def test_what_a_step_makes_is_whole_on_every_rank_after_the_run(ranks: Ranks) -> None:
    expected = made_in_a_step(None)
    for found in ranks(2)(made_in_a_step, {"stages": 2, "num_microbatches": 1}):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-10, msg=name)
