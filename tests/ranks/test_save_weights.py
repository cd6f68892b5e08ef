"""`strategy.save_weights`: shards of each rank with an index, which other tools read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_pipeline.errors import CheckpointError
from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, loader, trainer, weights

Ranks = Callable[[int], Pool]


class Tuned(pl.LightningModule):
    """A Hugging Face model, tied weights included."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.model = GPT2LMHeadModel.from_pretrained(folder)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.model(input_ids=batch, labels=batch).loss
        assert isinstance(loss, Tensor)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def tokens() -> DataLoader[Any]:
    return DataLoader(torch.randint(0, 50, (4, 6), generator=torch.Generator().manual_seed(1)), batch_size=4)  # type: ignore[arg-type]


def pretrained(folder: Path) -> None:
    torch.manual_seed(0)
    config = GPT2Config(n_layer=4, n_embd=16, n_head=2, vocab_size=50, n_positions=8, resid_pdrop=0.0,
                        embd_pdrop=0.0, attn_pdrop=0.0)  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(folder)


def tune(source: str, target: str, gather: str, stages: int) -> dict[str, Tensor]:
    module = Tuned(source)
    run = trainer({"stages": stages, "num_microbatches": 2, "gather_weights": gather}, max_epochs=1)
    run.fit(module, tokens())
    run.strategy.save_weights(target, prefix="model.", max_shard_bytes=8192)  # type: ignore[attr-defined]
    return {name: value for name, value in weights(module).items() if not value.is_meta}


@pytest.mark.parametrize(("gather", "stages"), [("none", 4), ("all", 2)])
def test_a_hugging_face_folder_comes_back_as_one(
    ranks: Ranks, tmp_path: Path, gather: str, stages: int
) -> None:
    pretrained(tmp_path / "source")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text((tmp_path / "source" / "config.json").read_text())
    found = ranks(stages)(tune, str(tmp_path / "source"), str(tmp_path / "out"), gather, stages)
    read = Tuned(str(tmp_path / "out"))
    trained = {name: value for held in found for name, value in held.items()}
    assert trained.keys() == weights(read).keys()
    for name, value in weights(read).items():
        assert torch.equal(value, trained[name]), name
    before = weights(Tuned(str(tmp_path / "source")))
    assert not any(torch.equal(before[name], value) for name, value in trained.items() if value.dim() > 1)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    assert files == sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "out" / file, "pt") as shard:
            assert name in shard.keys()  # noqa: SIM118


class SavesInARun(Regression):
    folder = ""

    def on_train_end(self) -> None:
        self.trainer.strategy.save_weights(self.folder)  # type: ignore[attr-defined]


def save_in_a_run(folder: str, pipeline: dict[str, Any]) -> dict[str, Tensor]:
    module = SavesInARun()
    module.folder = folder
    trainer(pipeline, max_epochs=1).fit(module, loader(), loader(seed=4))
    return weights(module)


@pytest.mark.parametrize("pipeline", [
    {"stages": 2, "num_microbatches": 2}, {"stages": 1, "num_microbatches": 2, "data_parallel_size": 2},
    {"stages": 1, "data_parallel_size": 2},
], ids=str)  # fmt: skip
def test_weights_are_saved_in_a_run(ranks: Ranks, tmp_path: Path, pipeline: dict[str, Any]) -> None:
    trained = ranks(2)(save_in_a_run, str(tmp_path / "out"), pipeline)[0]
    found: dict[str, Tensor] = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        with safe_open(path, "pt") as shard:
            found.update({name: shard.get_tensor(name) for name in shard.keys()})  # noqa: SIM118
    assert {name: torch.equal(found[name], value) for name, value in trained.items()} == dict.fromkeys(
        trained, True
    )


def refused(folder: str, prefix: str) -> str:
    module = Regression()
    run = trainer({"stages": 2, "num_microbatches": 2}, max_epochs=1)
    run.fit(module, loader(), loader(seed=4))
    with pytest.raises(CheckpointError) as caught:
        run.strategy.save_weights(folder, prefix=prefix)  # type: ignore[attr-defined]
    return str(caught.value)


def test_weights_that_lie_there_are_kept_and_a_prefix_of_nothing_is_named(
    ranks: Ranks, tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").write_text("other")
    for text in ranks(2)(refused, str(tmp_path), ""):
        assert "holds weights already" in text
    assert (tmp_path / "model.safetensors").read_text() == "other"
    for text in ranks(2)(refused, str(tmp_path / "new"), "modle."):
        assert "no weight's name begins with prefix='modle.'" in text
    assert not (tmp_path / "new").exists()
