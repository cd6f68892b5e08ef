"""What reviewers of the hooks at a run's ends have found: writers, strangers and data modules' states."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor, nn

from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, assert_same, loader, trainer, weights

Ranks = Callable[[int], Pool]
TWO = {"stages": 2, "num_microbatches": 2}


class Gathers(BasePredictionWriter):
    """As for DDP, where each rank has predictions of its own."""

    def write_on_epoch_end(self, *args: Any) -> None:
        dist.all_gather_object([None] * dist.get_world_size(), args[2])


def predict_gathering() -> None:
    run = trainer(TWO, callbacks=[Gathers("epoch")])
    run.predict(Regression(), loader())


def test_a_prediction_writer_that_waits_for_other_ranks_is_refused(ranks: Ranks) -> None:
    for outcome in ranks(2).outcomes(predict_gathering, timeout=60):
        assert "calls torch.distributed.all_gather_object for all ranks" in str(outcome.error)


class Idle(Regression):
    """The optimizer has a number that no step reads."""

    def configure_optimizers(self) -> Any:
        self.other = [nn.Parameter(torch.ones(2, dtype=torch.float64))]
        return torch.optim.SGD([*self.parameters(), *self.other], lr=0.1)


def fit_idle(pipeline: dict[str, Any] | None) -> Any:
    gathered = pipeline and {**pipeline, "gather_weights": "all"}
    module, run = Idle(), trainer(gathered, max_epochs=1)
    run.fit(module, loader())
    return {**weights(module), "other": module.other[0].detach()}, {}


def test_a_parameter_beside_the_module_without_gradients_is_left_alone(ranks: Ranks) -> None:
    expected = fit_idle(None)
    for found in ranks(2)(fit_idle, TWO):
        assert_same(found, expected)


class Data(pl.LightningDataModule):
    """Its state says which data it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.seed = 3
        self.loaded: list[int] = []

    def train_dataloader(self) -> Any:
        return loader(seed=self.seed)

    def val_dataloader(self) -> Any:
        return loader(seed=self.seed)

    def state_dict(self) -> dict[str, Any]:
        return {"seed": 7}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seed = state["seed"]
        self.loaded.append(self.seed)


class Edits(Regression):
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["Data"]["seed"] = 11


def fit_edited(pipeline: dict[str, Any] | None, folder: str) -> Any:
    first = trainer(pipeline, max_epochs=1)
    first.fit(Edits(), datamodule=Data())
    first.save_checkpoint(f"{folder}/one.ckpt")
    data = Data()
    run = trainer(pipeline, max_epochs=2)
    run.fit(Edits(), datamodule=data, ckpt_path=f"{folder}/one.ckpt", weights_only=False)
    return data.loaded[-1]


@pytest.mark.parametrize("one_file", [False, True])
def test_a_data_module_loads_its_state_as_on_load_checkpoint_has_edited_it(
    ranks: Ranks, tmp_path: Path, one_file: bool
) -> None:
    given = {**TWO, "save_distributed_checkpoint": not one_file}
    assert fit_edited(None, str(tmp_path / "plain")) == 11
    assert ranks(2)(fit_edited, given, str(tmp_path / "two")) == [11, 11]


def validate_weights(pipeline: dict[str, Any] | None, file: str) -> Any:
    data, run = Data(), trainer(pipeline)
    run.validate(Regression(), datamodule=data, ckpt_path=file, weights_only=False, verbose=False)
    return data.loaded, {name: float(value) for name, value in run.callback_metrics.items()}


def test_a_file_with_weights_only_has_no_state_of_a_data_module(ranks: Ranks, tmp_path: Path) -> None:
    module = Regression()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.5)
    states: dict[str, Tensor] = module.state_dict()
    torch.save(states, tmp_path / "weights.pt")
    run = trainer(None)
    run.validate(module, datamodule=Data(), verbose=False)
    expected = {name: float(value) for name, value in run.callback_metrics.items()}
    for loaded, found in ranks(2)(validate_weights, TWO, str(tmp_path / "weights.pt")):
        assert loaded == []
        assert found == pytest.approx(expected, rel=1e-10)


class Copies(pl.Callback):
    """As Lightning's own test of restored callbacks does it."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.copies = copy.deepcopy(trainer.callbacks)


def fit_copying() -> int:
    keeps = Copies()
    trainer(TWO, max_epochs=1, callbacks=[keeps]).fit(Regression(), loader())
    return len(keeps.copies)


def test_a_hook_may_copy_the_callbacks(ranks: Ranks) -> None:
    assert min(ranks(2)(fit_copying)) > 0
