"""Losses as Hugging Face's models compute them of flattened labels: nothing in them mixes samples."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_pipeline import PipelineStrategy

TOKENS, VOCABULARY = 16, 64


class Language(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        config = GPT2Config(
            vocab_size=VOCABULARY, n_positions=TOKENS, n_embd=16, n_layer=3, n_head=2, bos_token_id=0,
            eos_token_id=0,
        )  # fmt: skip
        self.model = GPT2LMHeadModel(config)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize("num_microbatches", [2, 4])
def test_labels_in_a_row_are_each_samples_own(
    tmp_path: Path, recwarn: pytest.WarningsRecorder, num_microbatches: int
) -> None:
    pl.seed_everything(1, verbose=False)
    data: Any = list(torch.randint(VOCABULARY, (16, TOKENS)))
    strategy = PipelineStrategy(
        stages=1, stages_per_rank=3, schedule="Interleaved1F1B", num_microbatches=num_microbatches
    )
    run = pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, default_root_dir=tmp_path, max_epochs=1)
    run.fit(Language(), DataLoader(data, batch_size=8))
    assert not [str(one.message) for one in recwarn if "mixes samples" in str(one.message)]
