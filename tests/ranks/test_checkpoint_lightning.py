"""Checkpoints as Lightning's own parts ask for them, and to and from runs on one device."""

import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import nn

from lightning_pipeline import PipelineStrategy
from lightning_pipeline.__main__ import main
from lightning_pipeline.checkpoint.consolidate import verify
from lightning_pipeline.checkpoint.folder import faults
from lightning_pipeline.errors import CheckpointError, CheckpointWriteError, ConfigurationError
from tests.pool import Pool
from tests.ranks.checkpoint_cases import (
    Noisy,
    fit_and_save,
    fit_resumed,
    loader,
    names_in,
    trainer,
)
from tests.ranks.lightning_cases import Regression, weights

Ranks = Callable[[int], Pool]
TWO = {"stages": 2, "num_microbatches": 1}


class Plain(Noisy):
    """Without what a pipeline and one device draw differently."""

    def __init__(self) -> None:
        super().__init__()
        self.net[4] = nn.Identity()


def fit_plain(pipeline: dict[str, Any] | None, epochs: int, path: str | None, folder: str) -> Any:
    module = Plain()
    saver = ModelCheckpoint(folder, filename=f"after{epochs}")
    run = trainer(pipeline, max_epochs=epochs, enable_checkpointing=True, callbacks=[saver])
    run.fit(module, loader(40, batch_size=4), ckpt_path=path)
    return weights(module)


class Counts(Callback):
    """Has a state, and looks at all there is as soon as a fit begins."""

    def __init__(self) -> None:
        self.batches, self.seen = 0, [0.0]

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches += 1

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.seen = [float(self.batches), float(pl_module.net[0].weight.sum()), float(pl_module.ticks)]

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batches = state_dict["batches"]


class Ticks(Regression):
    """A buffer that the checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ticks", torch.zeros((), dtype=torch.float64))

    def on_train_batch_end(self, *_: Any) -> None:
        self.ticks += 1


def fit_counted(pipeline: dict[str, Any] | None, folder: str) -> tuple[list[float], int]:
    """Resume with a timer that is over: nothing is to be trained."""
    pipeline = pipeline and {**pipeline, "save_distributed_checkpoint": False}
    timer = Timer(duration=timedelta(hours=1))
    run = trainer(pipeline, max_epochs=1, callbacks=[timer, Counts()])
    run.fit(Ticks(), loader(40, batch_size=4))
    path = f"{folder}/counted.ckpt"
    run.save_checkpoint(path)
    counts = Counts()
    run = trainer(pipeline, max_epochs=3, callbacks=[Timer(duration=timedelta(microseconds=1)), counts])
    run.fit(Ticks(), loader(40, batch_size=4), ckpt_path=path)
    return counts.seen, run.global_step


def test_what_was_loaded_is_there_when_a_fit_begins(ranks: Ranks, tmp_path: Path) -> None:
    expected, steps = fit_counted(None, str(tmp_path / "one"))
    assert expected[0] == expected[2] == steps == 10
    for seen, trained in ranks(2)(fit_counted, TWO, str(tmp_path / "two")):
        assert seen == pytest.approx(expected)
        assert trained == steps


def test_a_run_goes_from_one_device_to_stages_and_back(ranks: Ranks, tmp_path: Path) -> None:
    expected = fit_plain(None, 3, None, str(tmp_path / "straight"))
    fit_plain(None, 1, None, str(tmp_path))
    ranks(2)(fit_plain, TWO, 2, str(tmp_path / "after1.ckpt"), str(tmp_path))
    main(["checkpoint", "consolidate", str(tmp_path / "after2.ckpt"), str(tmp_path / "back.ckpt")])
    found = fit_plain(None, 3, str(tmp_path / "back.ckpt"), str(tmp_path))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9)
    module = Plain.load_from_checkpoint(tmp_path / "back.ckpt")
    assert module.hparams["width"] == 8
    assert module.net[5].weight is module.net[3].weight
    assert not [name for name in names_in(tmp_path) if not name.endswith(".ckpt") and name != "straight"]


def test_lightning_and_safetensors_read_the_weights(ranks: Ranks, tmp_path: Path) -> None:
    from lightning.fabric.utilities.load import _load_distributed_checkpoint
    from safetensors.torch import load_file

    trained = ranks(2)(fit_and_save, TWO, str(tmp_path), 5, 5)[0]["weights"]
    folder = tmp_path / "step=5.ckpt"
    read = _load_distributed_checkpoint(folder)["model"]
    main(["checkpoint", "consolidate", str(folder), str(tmp_path / "w.safetensors"), "--to=safetensors"])
    tensors = load_file(tmp_path / "w.safetensors")
    assert "net.5.weight" not in tensors  # tied: under its first name
    for name, value in trained.items():
        assert torch.equal(read[name], value)
        assert name == "net.5.weight" or torch.equal(tensors[name], value)


def fit_with(folder: str, options: dict[str, Any], **strategy: Any) -> Any:
    saver = ModelCheckpoint(folder, **options)
    run = trainer({**TWO, **strategy}, max_epochs=3, enable_checkpointing=True, callbacks=[saver])
    run.fit(Regression2(), loader(16, batch_size=8))
    return saver.best_model_path, saver.last_model_path


class Regression2(Regression):
    def __init__(self) -> None:
        super().__init__()
        del self.error

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...


@pytest.mark.parametrize("background", [False, True], ids=["", "async"])
@pytest.mark.parametrize(("options", "names"), [
    ({"save_top_k": 1}, ["epoch=2-step=6.ckpt"]),
    ({"monitor": "twice", "save_top_k": 2, "save_last": True}, None),
    ({"save_last": "link", "every_n_train_steps": 2}, ["epoch=2-step=6.ckpt", "last.ckpt"]),
    ({"save_last": True, "save_top_k": 0, "save_weights_only": True}, ["last.ckpt"]),
], ids=str)  # fmt: skip
def test_model_checkpoint_keeps_what_it_should(
    ranks: Ranks, tmp_path: Path, options: dict[str, Any], names: list[str] | None, background: bool
) -> None:
    ranks(2)(fit_in_background if background else fit_with, str(tmp_path), options)
    found = names_in(tmp_path)
    assert found == names if names else len(found) == 3
    for path in tmp_path.iterdir():
        verify(path)
    if "last.ckpt" in found:
        assert verify(tmp_path / "last.ckpt").step == 6


def fit_in_background(folder: str, options: dict[str, Any]) -> Any:
    return fit_with(folder, options, async_save=True)


def resume_last(folder: str) -> int:
    saver = ModelCheckpoint(folder, save_last="link")
    run = trainer(TWO, max_epochs=4, enable_checkpointing=True, callbacks=[saver])
    module = Regression2()
    seen: list[int] = []
    module.on_train_start = lambda: seen.append(run.global_step)  # type: ignore[method-assign]
    run.fit(module, loader(16, batch_size=8), ckpt_path="last")
    return seen[0]


def test_last_is_found_through_its_link(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2)(fit_with, str(tmp_path), {"save_last": "link"})
    assert (tmp_path / "last.ckpt").is_symlink()
    assert ranks(2)(resume_last, str(tmp_path)) == [6, 6]


def fail_in_background(folder: str) -> tuple[str, int]:
    run = trainer(
        {**TWO, "async_save": True}, max_epochs=3, enable_checkpointing=True,
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=2)],
    )  # fmt: skip

    def hook(name: str) -> None:
        if name == "save.shard.after" and run.global_rank == 1:
            raise OSError("the disk is gone")

    with faults.injected(hook), pytest.raises(Exception, match="the disk is gone") as caught:
        run.fit(Regression2(), loader(16, batch_size=8))
    return type(caught.value).__name__, run.global_step


def test_a_failure_in_the_background_is_raised(ranks: Ranks, tmp_path: Path) -> None:
    for kind, step in ranks(2)(fail_in_background, str(tmp_path)):
        assert kind in ("CheckpointWriteError", "StageFailedError")
        assert 2 <= step <= 6
    assert names_in(tmp_path) == []


def count_steps_during_a_save(folder: str) -> int:
    run = trainer(
        {**TWO, "async_save": True}, max_epochs=1, enable_checkpointing=True,
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=2, save_on_train_epoch_end=False)],
    )  # fmt: skip
    went_on: list[int] = []

    def hook(name: str) -> None:
        if name == "save.shard.before":
            deadline = time.monotonic() + 10
            while run.global_step < 4 and time.monotonic() < deadline:
                time.sleep(0.005)
            went_on.append(run.global_step)

    with faults.injected(hook):
        run.fit(Regression2(), loader(40, batch_size=8), ckpt_path=None)
    return went_on[0]


def test_training_goes_on_during_a_save(ranks: Ranks, tmp_path: Path) -> None:
    assert all(step >= 3 for step in ranks(2)(count_steps_during_a_save, str(tmp_path)))


def test_what_cannot_work_is_refused_with_a_reason() -> None:
    with pytest.raises(ConfigurationError, match="AsyncCheckpointIO writes one file.*async_save=True"):
        trainer({**TWO, "save_distributed_checkpoint": True}, plugins=[AsyncCheckpointIO()])
    with pytest.raises(ConfigurationError, match=r"(?s)4 problems.*integrity='md5'.*checkpoint_timeout=0"):
        PipelineStrategy(2, integrity="md5", trust_checkpoint=1, async_save="yes", checkpoint_timeout=0)  # type: ignore[arg-type]
    assert issubclass(CheckpointWriteError, CheckpointError)


def save_remotely() -> str:
    run = trainer(TWO, max_epochs=1)
    run.fit(Regression2(), loader(8))
    with pytest.raises(CheckpointError) as caught:
        run.save_checkpoint("memory://somewhere/a.ckpt")
    return str(caught.value)


def test_remote_paths_are_refused(ranks: Ranks) -> None:
    assert all("is remote" in text for text in ranks(2)(save_remotely))


def save_with_options(folder: str) -> str:
    run = trainer(TWO, max_epochs=1)
    run.fit(Regression2(), loader(8))
    with pytest.raises(CheckpointError) as caught:
        run.save_checkpoint(f"{folder}/a.ckpt", storage_options={"key": "value"})
    return str(caught.value)


def test_storage_options_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    for text in ranks(2)(save_with_options, str(tmp_path)):
        assert text.startswith("storage_options reach only one-file checkpoints") and "leave them out" in text
    assert names_in(tmp_path) == []


def resume_elsewhere(path: str, folder: str) -> list[str]:
    saver = ModelCheckpoint(folder)
    run = trainer(TWO, max_epochs=2, enable_checkpointing=True, callbacks=[saver])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run.fit(Plain(), loader(8, batch_size=4), ckpt_path=path)
    return [text for warning in told if "dirpath has changed" in (text := str(warning.message))]


def test_a_resume_that_saves_elsewhere_is_warned_of_once(ranks: Ranks, tmp_path: Path) -> None:
    fit_plain(None, 1, None, str(tmp_path / "first"))
    told = ranks(2)(resume_elsewhere, str(tmp_path / "first" / "after1.ckpt"), str(tmp_path / "second"))
    assert [len(texts) for texts in told] == [1, 0]


class FailsLate(Regression2):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 3 and self.trainer.global_rank == 1:
            raise ValueError("all of a sudden")


def fail_saving(folder: str) -> list[str]:
    saver = ModelCheckpoint(folder, every_n_train_steps=2, save_on_exception=True)
    run = trainer(TWO, max_epochs=3, enable_checkpointing=True, callbacks=[saver])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with pytest.raises(Exception, match="all of a sudden"):
            run.fit(FailsLate(), loader(16, batch_size=8))
    return [str(warning.message) for warning in told]


def test_an_exception_of_one_rank_saves_nothing_and_says_so(ranks: Ranks, tmp_path: Path) -> None:
    first, _ = ranks(2)(fail_saving, str(tmp_path))
    assert any("was not saved: the run was interrupted" in text for text in first)
    assert names_in(tmp_path) == ["epoch=0-step=2.ckpt"]
    assert verify(tmp_path / "epoch=0-step=2.ckpt").step == 2


def test_a_folder_without_manifest_is_no_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2)(fit_and_save, TWO, str(tmp_path), 5, 5)
    (tmp_path / "step=5.ckpt" / "manifest.json").unlink()
    with pytest.raises(AssertionError, match=r"CheckpointCorruptError.*has no manifest\.json"):
        ranks(2)(fit_resumed, TWO, str(tmp_path / "step=5.ckpt"), 6)
