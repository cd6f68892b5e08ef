"""A run goes on from a checkpoint through the project's own code of loading: `load_state_dict` and its hooks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipeline.errors import CheckpointError
from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, assert_same, loader, mlp, trainer, weights

Ranks = Callable[[int], Pool]
TWO = {"stages": 2, "num_microbatches": 2}


class Counts(Regression):
    """Is told that it was loaded, and has half of the weights then."""

    loaded = 0

    def load_state_dict(self, state_dict: Any, *args: Any, **options: Any) -> Any:
        self.loaded += 1
        half = {name: value * 0.5 for name, value in state_dict.items()}
        return super().load_state_dict(half, *args, **options)


class OfOtherNames(Regression):
    """Reads checkpoints of `Regression`, whose network has another name."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.net = mlp().double(), nn.Identity()
        self.loaded = 0
        self.rename()

    def rename(self) -> None:
        self.register_load_state_dict_post_hook(lambda module, keys: self._count())

    def _count(self) -> None:
        self.loaded += 1

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.mse_loss(self.body(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def load_state_dict(self, state_dict: Any, *args: Any, **options: Any) -> Any:
        named = {name.replace("net.", "body."): value for name, value in state_dict.items()}
        return super().load_state_dict(named, *args, **options)


class OfOtherNamesByHook(OfOtherNames):
    load_state_dict = Regression.load_state_dict

    def rename(self) -> None:
        super().rename()
        self._register_load_state_dict_pre_hook(self._renamed)

    def _renamed(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in [name for name in state_dict if name.startswith("net.")]:
            state_dict[name.replace("net.", "body.")] = state_dict.pop(name)


class Doubles(nn.Linear):
    """Takes twice the weight that is stored, as layers that keep another form do."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(
            {**state_dict, f"{prefix}weight": 2 * state_dict[f"{prefix}weight"]}, prefix, *args
        )


class InLayers(Regression):
    loaded = 1

    def __init__(self) -> None:
        super().__init__()
        for place in (0, 4):
            made = Doubles(self.net[place].in_features, self.net[place].out_features).double()
            self.net[place] = made.requires_grad_()
            torch.manual_seed(place)
            nn.init.normal_(made.weight, std=0.1)
            nn.init.normal_(made.bias, std=0.1)


def saved(pipeline: dict[str, Any] | None, make: Callable[[], Regression], path: str) -> None:
    run = trainer(pipeline, max_epochs=1)
    run.fit(make(), loader(), loader(seed=4))
    run.save_checkpoint(path)


def resumed(pipeline: dict[str, Any] | None, make: Callable[[], Any], path: str) -> Any:
    module, run = make(), trainer(pipeline, max_epochs=2)
    run.fit(module, loader(), loader(seed=4), ckpt_path=path)
    logs = {name: float(value) for name, value in run.callback_metrics.items()}
    return weights(module), logs | {"loaded": module.loaded}


CASES = [
    (Counts, Counts, False),
    (Counts, Counts, True),
    (Regression, OfOtherNamesByHook, False),
    (Regression, OfOtherNames, False),
    (InLayers, InLayers, True),
]


@pytest.mark.parametrize(("first", "then", "is_folder"), CASES)
def test_code_that_loads_weights_has_its_say(
    ranks: Ranks, tmp_path: Path, first: Any, then: Any, is_folder: bool
) -> None:
    one = str(tmp_path / "one.ckpt")
    saved(None, first, one)
    expected = resumed(None, then, one)
    path = str(tmp_path / "stages.ckpt") if is_folder else one
    if is_folder:
        ranks(2)(saved, TWO, first, path)
    for found in ranks(2)(resumed, TWO, then, path):
        assert_same(found, expected)


class Forgets(OfOtherNames):
    def load_state_dict(self, state_dict: Any, *args: Any, **options: Any) -> Any:
        state_dict.pop("net.2.bias")
        return super().load_state_dict(state_dict, *args, **options)


def test_what_such_code_leaves_out_is_refused_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "one.ckpt")
    saved(None, Regression, path)
    for outcome in ranks(2).outcomes(resumed, TWO, Forgets, path):
        assert CheckpointError.__name__ in str(outcome) and "body.2.bias" in str(outcome)
