"""The modules that `gpu.py` trains, and what it compares of a run."""

import copy
import inspect
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_pipeline import PipelineStrategy

TOKENS, WIDTH, VOCABULARY, SAMPLES = 16, 32, 64, 32


class Language(LightningModule):
    """Predicts the next token by the loss of a model's own, or by cross-entropy of its output."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model, self.name = model, name

    def loss(self, tokens: Tensor) -> Tensor:
        """Of a batch of token numbers, (samples, tokens)."""
        if self.name in ("gpt2", "llama"):
            loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
            return loss
        logits = self.model(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Log the loss."""
        loss = self.loss(batch[0])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Log the loss."""
        self.log("val_loss", self.loss(batch[0]))

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Log the loss."""
        self.log("test_loss", self.loss(batch[0]))

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """The loss."""
        return self.loss(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW; it takes no steps along gradients that are zero but for rounding, as of a key's bias.

        In bfloat16 that rounding is some 1e-6; with an eps of 1e-5 the bias went far enough to tell nothing.
        """
        return torch.optim.AdamW(self.parameters(), 1e-3, eps=1e-3)


class Layers(nn.Module):
    """Residual layers on embeddings, with batch norm, dropout or recomputation on request."""

    def __init__(self, *, batch_norm: bool = False, dropout: float = 0.0, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        middle: nn.Module = nn.BatchNorm1d(TOKENS - 1) if batch_norm else nn.Dropout(dropout)
        layers = (nn.Linear(WIDTH, WIDTH), middle, nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList(copy.deepcopy(nn.Sequential(*layers)) for _ in range(6))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of (samples, tokens) as (samples, tokens, vocabulary)."""
        hidden = self.embedding(tokens)
        for block in self.blocks:
            more = checkpoint(block, hidden, use_reentrant=False) if self.recompute else block(hidden)
            hidden = hidden + more
        logits: Tensor = self.head(hidden)
        return logits


KINDS: dict[str, dict[str, Any]] = {
    "layers": {},
    "batch norm": {"batch_norm": True},
    "dropout": {"dropout": 0.5},
    "recomputed": {"dropout": 0.5, "recompute": True},
}
DRAWS = ("dropout", "recomputed", "gpt2 with dropout")
"""These are compared with one stage that is given the same micro-batches, for those are what draws."""


def make(name: str) -> Language:
    """The module of a case, the same in every process."""
    seed_everything(1, verbose=False)
    if name in KINDS:
        return Language(Layers(**KINDS[name]), name)
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    if name.startswith("gpt2"):
        share = 0.1 if name == "gpt2 with dropout" else 0.0
        config = GPT2Config(
            vocab_size=VOCABULARY, n_positions=TOKENS, n_embd=WIDTH, n_layer=6, n_head=2, resid_pdrop=share,
            embd_pdrop=share, attn_pdrop=share, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        model = GPT2LMHeadModel(config)
        if share:
            model.gradient_checkpointing_enable()
        return Language(model, "gpt2")
    llama = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=6,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=TOKENS, bos_token_id=0,
        eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return Language(LlamaForCausalLM(llama), name)


def batches(trainer: Trainer) -> DataLoader[Any]:
    """The data of every case: batches of 8 over all replicas together, in order.

    Lightning shuffles what replicas train on.
    """
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(VOCABULARY, (SAMPLES, TOKENS), generator=generator)
    data = TensorDataset(tokens)
    own: Any = getattr(trainer.strategy, "distributed_sampler_kwargs", {"num_replicas": 1, "rank": 0})
    sampler: Any = DistributedSampler(data, shuffle=False, **own)
    return DataLoader(data, batch_size=8 // own["num_replicas"], sampler=sampler)


def trainer_of(case: dict[str, Any], folder: Path, **options: Any) -> Trainer:
    """With bar, logger and checkpoints, as users have it."""
    plugins = []
    precision = case["precision"]
    if precision == "16-mixed" and case["device"] == "cpu":  # Lightning would take bfloat16 there
        plugins, precision = [MixedPrecision("16-mixed", "cpu")], None
    strategy: Any = "auto"
    if case["pipeline"]:
        strategy = PipelineStrategy(**case["pipeline"])
    return Trainer(
        accelerator=case["device"], devices=1, num_nodes=case["ranks"], precision=precision, plugins=plugins,
        strategy=strategy, default_root_dir=folder, log_every_n_steps=1, **options,
    )  # fmt: skip


def run_case(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What is compared: weights, metrics and predictions, on the CPU."""
    first = trainer_of(case, folder, max_epochs=1)
    data = batches(first)
    first.fit(make(case["model"]), data, data)
    path = folder / "saved.ckpt"
    first.save_checkpoint(path)
    module, run = make(case["model"]), trainer_of(case, folder, max_epochs=2)
    whole = {"weights_only": False} if "weights_only" in inspect.signature(run.fit).parameters else {}
    run.fit(module, data, data, ckpt_path=path, **whole)
    metrics = {name: float(value) for name, value in run.callback_metrics.items()}
    metrics |= {name: float(value) for name, value in run.test(module, data, verbose=False)[0].items()}
    predicted = [one.float().cpu() for one in run.predict(module, data) or [] if one is not None]
    weights = {name: tensor.detach().float().cpu() for name, tensor in module.state_dict().items()}
    return {"weights": weights, "metrics": metrics, "predicted": predicted, "rank": run.global_rank}
