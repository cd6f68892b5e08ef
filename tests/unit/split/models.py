"""Modules that a pipeline must run as they are."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.unit.split.pipe import Module

VOCABULARY = 50


class Perceptron(Module):
    """nn.Sequential, the plainest case."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(4):
            layers += [nn.Linear(8, 8), nn.Tanh()]
        self.net = nn.Sequential(*layers, nn.Linear(8, 3))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.mse_loss(self.net(x), y)
        self.log("loss", loss)
        return loss


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.norm(self.conv(x)))


class ResidualNetwork(Module):
    """A CNN with BatchNorm; its running statistics must be those of one process."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.blocks = nn.Sequential(*[Residual(4) for _ in range(4)])
        self.head = nn.Linear(4, 3)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        h = self.blocks(F.relu(self.stem(batch["image"])))
        logits = self.head(h.mean((2, 3)))
        loss = F.cross_entropy(logits, batch["label"])
        self.log("loss", loss)
        self.log("accuracy", (logits.argmax(1) == batch["label"]).double().mean())
        return {"loss": loss, "logits": logits}


class UNet(Module):
    """Skip connections from the first stages to the last."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(c, 4, 3, padding=1) for c in (1, 4, 4)])
        self.middle = nn.Conv2d(4, 4, 3, padding=1)
        self.up = nn.ModuleList([nn.Conv2d(8, 4, 3, padding=1) for _ in range(3)])
        self.out = nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for layer in self.down:
            x = F.relu(layer(x))
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = F.relu(self.middle(x))
        for layer in self.up:
            x = F.interpolate(x, scale_factor=2)
            x = F.relu(layer(torch.cat([x, skips.pop()], 1)))
        return self.out(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss


class HuggingFace(Module):
    """Any transformers model that computes its own loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.log("loss", loss)
        return loss


def hugging_face(name: str) -> HuggingFace:
    """A small model from a config; no dropout, so that one process draws nothing."""
    import transformers as hf

    small: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    attention: dict[str, Any] = {"num_hidden_layers": 3, "num_attention_heads": 2, "hidden_size": 16}
    if name == "gpt2":
        config = hf.GPT2Config(
            n_embd=16, n_layer=3, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **small
        )
        return HuggingFace(hf.GPT2LMHeadModel(config))
    if name == "llama":
        return HuggingFace(hf.LlamaForCausalLM(hf.LlamaConfig(**attention, intermediate_size=32, **small)))
    if name == "bert":
        quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 3}
        config = hf.BertConfig(**attention, intermediate_size=32, **small, **quiet)
        return HuggingFace(hf.BertForSequenceClassification(config))
    if name == "bert-tokens":
        quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        config = hf.BertConfig(**attention, intermediate_size=32, **small, **quiet)
        return HuggingFace(hf.BertForMaskedLM(config))
    config = hf.T5Config(
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        dropout_rate=0,
        decoder_start_token_id=0,
        **small,
    )
    return HuggingFace(hf.T5ForConditionalGeneration(config))


def module_and_batch(name: str, size: int = 10) -> tuple[Module, Any]:
    """A module by name, seeded, and a batch of `size` samples for it."""
    torch.manual_seed(7)
    if name == "perceptron":
        return Perceptron(), (torch.randn(size, 8), torch.randn(size, 3))
    if name == "residual":
        return ResidualNetwork(), {"image": torch.randn(size, 3, 8, 8), "label": torch.randint(0, 3, (size,))}
    if name == "unet":
        return UNet(), (torch.randn(size, 1, 8, 8), torch.randn(size, 1, 8, 8))
    tokens = torch.randint(3, VOCABULARY, (size, 6))
    mask = torch.ones(size, 6, dtype=torch.long)
    mask[0, 4:] = 0
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": tokens}
    if name == "bert":
        batch["labels"] = torch.randint(0, 3, (size,))
    return hugging_face(name), batch
