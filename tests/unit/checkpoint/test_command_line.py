"""LightningCLI gives the module the hyper-parameters of `--ckpt_path`, be that a folder or a file."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pipeline.errors import CheckpointError

pytestmark = [
    pytest.mark.filterwarnings("ignore:LightningCLI's args parameter"),
    pytest.mark.filterwarnings(
        "ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning"
    ),  # Lightning's
]


class Scaled(LightningModule):
    """A module that is made otherwise by its hyper-parameters."""

    def __init__(self, width: int = 4, scale: float = 1.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.hparams.scale * self.net(batch).square().mean()

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx))

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.randn(16, 3, generator=torch.Generator().manual_seed(0)), batch_size=8)

    test_dataloader = train_dataloader

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


STRATEGY = [
    "--trainer.strategy=lightning_pipeline.PipelineStrategy", "--trainer.strategy.init_args.stages=1",
    "--trainer.strategy.init_args.save_distributed_checkpoint=true",
]  # fmt: skip
OPTIONS = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.logger=false"]


def commanded(subcommand: str, *args: str, whole: bool = False) -> LightningCLI:
    """A run of the command line; `whole` has the module's class named, as for several classes."""
    return LightningCLI(
        Scaled,
        subclass_mode_model=whole,
        save_config_callback=None,
        seed_everything_default=1,
        args=[subcommand, *OPTIONS, *args],
    )


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("strategy", [STRATEGY, []])
def test_what_a_run_was_given_is_given_to_its_test(tmp_path: Path, strategy: list[str], whole: bool) -> None:
    prefix = "--model.init_args" if whole else "--model"
    named = [f"--model={__name__}.Scaled"] if whole else []
    options = [*strategy, "--trainer.max_epochs=1", f"--trainer.default_root_dir={tmp_path}"]
    commanded("fit", *options, *named, f"{prefix}.width=6", f"{prefix}.scale=3", whole=whole)
    (path,) = tmp_path.rglob("*.ckpt")
    assert path.is_dir() == bool(strategy)
    options = [*options[:-2], f"--trainer.default_root_dir={tmp_path}", f"--ckpt_path={path}"]
    cli = commanded("test", *options, *named, whole=whole)
    assert (cli.model.hparams.width, cli.model.hparams.scale) == (6, 3.0)
    assert cli.config["test"]["ckpt_path"] == str(path)
    assert cli.trainer.ckpt_path == str(path)


def test_a_folder_that_is_no_checkpoint_is_left_to_the_run(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        commanded("test", *STRATEGY, f"--ckpt_path={tmp_path}")
