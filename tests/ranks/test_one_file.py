"""One-file checkpoints of several stages, hyper-parameters with modules, and what else callers look for."""

import io
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO
from torch import Tensor, nn

from lightning_pipeline import PipelineStrategy, load_from_checkpoint
from lightning_pipeline.errors import CheckpointError
from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, loader, mlp, trainer, weights

Ranks = Callable[[int], Pool]
TWO = {"stages": 2, "num_microbatches": 1}
FILE = {**TWO, "save_distributed_checkpoint": False}


class Scheduled(Regression):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


def fit_saving(
    pipeline: dict[str, Any] | None, folder: str, epochs: int = 2, start: str | None = None
) -> Any:
    torch.manual_seed(5)
    module = Scheduled()
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1, save_last="link")
    run = trainer(pipeline, max_epochs=epochs, enable_checkpointing=True, callbacks=[saver])
    run.fit(module, loader(shuffle=True), ckpt_path=start, weights_only=False)
    return weights(module)


@pytest.mark.parametrize("in_background", [False, True])
def test_several_stages_write_the_file_that_one_device_writes(
    ranks: Ranks, tmp_path: Path, in_background: bool
) -> None:
    expected = fit_saving(None, str(tmp_path / "plain"))
    found = ranks(2)(fit_saving, {**FILE, "async_save": in_background}, str(tmp_path / "two"))
    torch.testing.assert_close(found[0], expected, rtol=1e-10, atol=1e-10)
    names = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == names
    for name in names:
        own, plain = (torch.load(tmp_path / kind / name, weights_only=False) for kind in ("two", "plain"))
        assert own.keys() - plain.keys() == {"lightning_pipeline"} and not plain.keys() - own.keys()
        assert list(own["state_dict"]) == list(plain["state_dict"])
        for key in ("state_dict", "optimizer_states", "lr_schedulers"):
            torch.testing.assert_close(own[key], plain[key], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(
        weights(Scheduled.load_from_checkpoint(tmp_path / "two" / "step=6.ckpt")),
        expected,
        rtol=1e-9,
        atol=1e-9,
    )


def test_a_one_file_checkpoint_of_two_stages_goes_on_in_mid_epoch(ranks: Ranks, tmp_path: Path) -> None:
    whole = ranks(2)(fit_saving, FILE, str(tmp_path / "first"), 3)
    start = str(tmp_path / "first" / "step=4.ckpt")
    for stages in (2, 3):
        resumed = ranks(stages)(fit_saving, {**FILE, "stages": stages}, str(tmp_path / str(stages)), 3, start)
        torch.testing.assert_close(resumed[0], whole[0], rtol=1e-10, atol=1e-10)


class Noting(TorchCheckpointIO):
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        super().save_checkpoint({**checkpoint, "noted": storage_options}, path)


def save_by_plugin(file: str) -> None:
    module, run = Regression(), trainer(FILE, plugins=[Noting()])
    run.fit(module, loader())
    run.save_checkpoint(file, storage_options={"mine": 1})


def test_a_checkpoint_plugin_writes_one_file_of_several_stages(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2)(save_by_plugin, str(tmp_path / "noted.ckpt"))
    assert torch.load(tmp_path / "noted.ckpt", weights_only=False)["noted"] == {"mine": 1}


class Reversed(TorchCheckpointIO):
    """A format of its own, that only it can read."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        content = io.BytesIO()
        torch.save(checkpoint, content)
        Path(path).write_bytes(content.getvalue()[::-1])

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: Any = None) -> Any:
        return torch.load(io.BytesIO(Path(path).read_bytes()[::-1]), weights_only=False)


def fit_with_plugin(pipeline: dict[str, Any] | None, folder: str, resumes: bool, wrapped: bool) -> Any:
    module = Scheduled()
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    plugin = AsyncCheckpointIO(Reversed()) if wrapped else Reversed()
    run = trainer(pipeline, max_epochs=3, enable_checkpointing=True, callbacks=[saver], plugins=[plugin])
    run.fit(module, loader(), ckpt_path=f"{folder}/step=4.ckpt" if resumes else None, weights_only=False)
    return weights(module)


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "async"])
def test_a_checkpoint_plugin_writes_and_reads_its_own_format(
    ranks: Ranks, tmp_path: Path, wrapped: bool
) -> None:
    whole = ranks(2)(fit_with_plugin, TWO, str(tmp_path), False, wrapped)
    assert (tmp_path / "step=4.ckpt").read_bytes()[-2:] == b"KP"  # the first bytes of a zip file, reversed
    resumed = ranks(2)(fit_with_plugin, TWO, str(tmp_path), True, wrapped)
    torch.testing.assert_close(resumed, whole, rtol=1e-10, atol=1e-10)


def resume_from_nothing(folder: str) -> str:
    with pytest.raises(FileNotFoundError) as told:
        trainer(TWO, max_epochs=1).fit(Scheduled(), loader(), ckpt_path=f"{folder}/random.ckpt")
    return f"{type(told.value).__name__}: {told.value}"


def test_a_checkpoint_that_is_not_there_is_the_error_of_one_device_on_all_ranks(
    ranks: Ranks, tmp_path: Path
) -> None:
    for told in ranks(2)(resume_from_nothing, str(tmp_path), group=False):
        assert told.startswith("CheckpointNotFoundError: ")
        assert f"Checkpoint file not found: {tmp_path}/random.ckpt" in told


class WithNet(pl.LightningModule):
    """As project templates are: the network and a half-made optimizer are hyper-parameters."""

    def __init__(self, net: nn.Module, optimizer: Any, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.net = net

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return self.hparams.optimizer(self.parameters())  # type: ignore[attr-defined]


def fit_with_net(pipeline: dict[str, Any] | None, file: str, after: bool = False) -> Any:
    torch.manual_seed(1)
    module = WithNet(mlp().double(), partial(torch.optim.SGD, lr=0.1))
    saver = ModelCheckpoint(Path(file).parent, filename=Path(file).stem, enable_version_counter=False)
    run = trainer(pipeline, max_epochs=1, enable_checkpointing=True, callbacks=[saver])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run.fit(module, loader(), ckpt_path=file if after else None)
    return weights(module), [str(warning.message) for warning in told]


@pytest.mark.parametrize("pipeline", [TWO, FILE], ids=["folder", "file"])
def test_modules_among_the_hyper_parameters_are_saved_as_on_one_device(
    ranks: Ranks, tmp_path: Path, pipeline: dict[str, Any]
) -> None:
    file = tmp_path / "two.ckpt"
    expected, _ = fit_with_net(None, str(tmp_path / "plain.ckpt"))
    ranks(2)(fit_with_net, pipeline, str(file))
    module = load_from_checkpoint(WithNet, file, trust_checkpoint=True, weights_only=False)
    torch.testing.assert_close(weights(module), expected, rtol=1e-10, atol=1e-10)
    saved: Any = module.hparams
    assert saved.lr == 0.1 and saved.optimizer.keywords == {"lr": 0.1}
    assert type(saved.net) is nn.Sequential and not [key for key in vars(saved.net[0]) if key == "forward"]


def test_what_is_no_plain_data_is_left_out_by_name_without_trust(ranks: Ranks, tmp_path: Path) -> None:
    file = str(tmp_path / "two.ckpt")
    ranks(2)(fit_with_net, TWO, file)
    _, told = ranks(2)(fit_with_net, TWO, file, True)[0]
    (text,) = [text for text in told if "left out" in text]
    assert "hyper_parameters['net']" in text and "hyper_parameters['optimizer']" in text and "trust" in text
    with pytest.warns(
        UserWarning, match=r"hyper_parameters\['net'\], hyper_parameters\['optimizer'\] was left"
    ):
        module = load_from_checkpoint(
            WithNet, file, net=mlp().double(), optimizer=partial(torch.optim.SGD, lr=0.1)
        )
    assert module.hparams["lr"] == 0.1


def test_a_folder_says_what_to_call(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks(2)(fit_saving, TWO, str(tmp_path))
    folder = tmp_path / "step=6.ckpt"
    with pytest.raises(
        CheckpointError, match=r"is a folder.*lightning_pipeline\.load_from_checkpoint\(cls, folder\)"
    ):
        Scheduled.load_from_checkpoint(folder)
    torch.testing.assert_close(weights(load_from_checkpoint(Scheduled, folder)), found[0])


def fit_again(folder: str) -> list[str]:
    saver = ModelCheckpoint(folder, save_last="link", every_n_train_steps=2)
    trainer(TWO, max_epochs=2, enable_checkpointing=True, callbacks=[saver]).fit(Regression(), loader())
    left = [key for key in vars(saver) if key in ("_link_checkpoint", "file_exists")]
    saver.dirpath = f"{folder}/again{torch.distributed.get_rank()}"
    trainer(None, max_epochs=1, enable_checkpointing=True, callbacks=[saver]).fit(Regression(), loader())
    return left


def test_a_callback_serves_a_trainer_without_the_strategy_afterwards(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2)(fit_again, str(tmp_path)) == [[], []]
    assert (tmp_path / "again0" / "last.ckpt").is_file()


def pickled_trainer() -> tuple[int, str]:
    run = trainer(TWO, max_epochs=1)
    run.fit(Regression(), loader())
    again = pickle.loads(pickle.dumps(run))
    assert isinstance(again.strategy, PipelineStrategy)
    return again.global_step, type(again.strategy.precision_plugin).__name__


def test_a_trainer_can_be_pickled_after_a_run(ranks: Ranks) -> None:
    assert ranks(2)(pickled_trainer) == [(3, "Precision")] * 2
