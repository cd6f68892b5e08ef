"""What PipelineStrategy is told about checkpoints holds in a run; state of callbacks and data comes back."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_pipeline.checkpoint.folder.manifest import read_manifest
from lightning_pipeline.errors import CheckpointCorruptError, UnsafeCheckpointError
from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, loader, trainer

Ranks = Callable[[int], Pool]


@dataclass
class Note:
    """A class that no checkpoint reader knows."""

    text: str


@dataclass
class Counts(Callback):
    """How many batches it saw, over all runs; and, if asked to, an object."""

    note: Note | None = None
    batches: int = 0
    restored: list[dict[str, Any]] = field(default_factory=list)

    def on_train_batch_end(self, *args: Any) -> None:
        self.batches += 1

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches, **({"note": self.note} if self.note else {})}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.restored.append(state_dict)
        self.batches = state_dict["batches"]


class Data(LightningDataModule):
    """Counts its epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs = 0

    def train_dataloader(self) -> Any:
        self.epochs += 1
        return loader(16)

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epochs = 100 * state_dict["epochs"]


def fit_with(
    folder: str, epochs: int, path: str | None, strategy: dict[str, Any], noted: bool = False
) -> tuple[Counts, int, list[str]]:
    counts, data = Counts(Note("kept") if noted else None), Data()
    saver = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    run = trainer(
        {"stages": 2, **strategy}, max_epochs=epochs, enable_checkpointing=True, callbacks=[counts, saver]
    )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run.fit(Regression(), datamodule=data, ckpt_path=path)
    texts = [str(warning.message) for warning in told]
    return counts, data.epochs, [text for text in texts if "trust_checkpoint" in text]


def test_state_of_callbacks_and_data_comes_back_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2)(fit_with, str(tmp_path), 1, None, {})
    path = str(tmp_path / "epoch=0.ckpt")
    for stages in (2, 3):
        found = ranks(stages)(fit_with, str(tmp_path / str(stages)), 2, path, {"stages": stages})
        for counts, epochs, told in found:
            assert counts.restored == [{"batches": 2}]
            assert counts.batches == 4
            assert epochs == 101 and not told  # the loader was made once, by the state that had been loaded


def refused(folder: str, path: str, strategy: dict[str, Any]) -> str:
    with pytest.raises((CheckpointCorruptError, UnsafeCheckpointError)) as caught:
        fit_with(folder, 2, path, strategy)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_objects_are_read_back_with_trust_and_left_out_by_name_without(ranks: Ranks, tmp_path: Path) -> None:
    trusting = {"trust_checkpoint": True}
    (_, _, told), _ = ranks(2)(fit_with, str(tmp_path / "warned"), 1, None, {}, True)
    assert len(told) == 1 and told[0].startswith("'callbacks' in the checkpoint holds objects")
    for _, _, silent in ranks(2)(fit_with, str(tmp_path), 1, None, trusting, True):
        assert silent == []
    path = str(tmp_path / "epoch=0.ckpt")
    (counts, epochs, told), _ = ranks(2)(fit_with, str(tmp_path), 2, path, {})
    assert counts.restored == [] and epochs == 101
    assert sum("callbacks['Counts'] was left out" in text for text in told) == 1
    for counts, _, _ in ranks(2)(fit_with, str(tmp_path), 2, path, trusting):
        assert counts.restored == [{"batches": 2, "note": Note("kept")}]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("integrity", ["crc32", "off"])
def test_checksums_are_those_that_were_asked_for(ranks: Ranks, tmp_path: Path, integrity: str) -> None:
    strategy = {"integrity": integrity}
    ranks(2)(fit_with, str(tmp_path), 1, None, strategy)
    path = tmp_path / "epoch=0.ckpt"
    manifest = read_manifest(path)
    assert manifest.integrity == integrity
    assert {len(entry["checksum"] or "") for entry in manifest.files.values()} == {
        {"crc32": 8, "off": 0}[integrity]
    }
    shard = path / "__1_0.distcp"
    whole = shard.read_bytes()
    if integrity == "off":  # sizes only
        shard.write_bytes(whole[:-1])
    else:
        flip(shard)
    for text in ranks(2)(refused, str(tmp_path), str(path), strategy):
        assert text.startswith("CheckpointCorruptError") and "__1_0.distcp" in text
    shard.write_bytes(whole)
    ranks(2)(fit_with, str(tmp_path), 2, str(path), {"integrity": "sha256"})
