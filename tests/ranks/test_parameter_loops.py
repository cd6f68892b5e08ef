"""Loops over the whole module's parameters around a step: global where they can be, an error elsewhere (R6)."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from lightning_pipeline import PipelineStrategy
from lightning_pipeline.errors import SplitError
from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, loader

Ranks = Callable[[int], Pool]


class ClipsByHand(Regression):
    """Torch's clipping and Lightning's `grad_norm` in a hook, as Lightning's documentation shows them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.net[4].weight = self.net[2].weight  # tied, over two stages

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append({name: float(value) for name, value in grad_norm(self, norm_type=2).items()})
        self.seen.append(float(clip_grad_norm_(self.parameters(), 0.05)))


class Averages(Regression):
    """A loop over pairs of parameters in a hook after the step."""

    def __init__(self) -> None:
        super().__init__()
        self.error_text = ""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        try:
            self.error_text = str(sum(float(p.norm()) for p in self.parameters()))
        except SplitError as error:
            self.error_text = str(error)

    def on_train_epoch_end(self) -> None:
        self.own = [name for name, _ in self.named_parameters()]


class Lists(pl.Callback):
    """A callback that looks at the parameters at an epoch's end."""

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.own = [name for name, _ in pl_module.named_parameters()]


def fit(
    cls: type[Regression], stages: int | None, *callbacks: pl.Callback
) -> tuple[Regression, dict[str, Tensor]]:
    module = cls()
    strategy: Any = PipelineStrategy(stages=stages, num_microbatches=4) if stages else "auto"
    trainer = pl.Trainer(
        accelerator="cpu", devices=stages or 1, strategy=strategy, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=list(callbacks),
    )  # fmt: skip
    trainer.fit(module, loader())
    return module, {name: value.detach().clone() for name, value in module.state_dict().items()}


def clip(stages: int | None) -> tuple[list[Any], dict[str, Tensor]]:
    module, weights = fit(ClipsByHand, stages)
    return module.seen, weights  # type: ignore[return-value]


def average(stages: int) -> tuple[str, list[str]]:
    callback = Lists()
    module, _ = fit(Averages, stages, callback)
    assert callback.own == module.own
    return module.error_text, module.own  # type: ignore[return-value]


@pytest.mark.parametrize("stages", [2, 3])
def test_clipping_and_norms_in_a_hook_are_those_of_the_whole_model(ranks: Ranks, stages: int) -> None:
    expected, weights = clip(None)
    for seen, found in ranks(stages)(clip, stages):
        assert [type(one) for one in seen] == [type(one) for one in expected]
        for mine, theirs in zip(seen, expected, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5)
        for name, value in weights.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9)


def test_other_loops_in_a_hook_raise_and_list_the_own_ones_later(ranks: Ranks) -> None:
    results = ranks(2)(average, 2)
    for text, _ in results:
        assert "parameters() of a module that is spread over stages" in text
        assert "test_parameter_loops.py" in text
    assert not set(results[0][1]) & set(results[1][1])
