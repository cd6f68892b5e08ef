"""A small GPT over bytes, and the text it learns: Python's own standard library. Plain Lightning.

Nothing here knows about pipelines. `train_gpt.py`, `gpt_cli.py` and the benchmarks use it.
"""

import sysconfig
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

VOCABULARY = 256  # every byte is a token


class Attention(nn.Module):
    """Causal self-attention with all heads in one projection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.project_in = nn.Linear(width, 3 * width)
        self.project_out = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Mix (batch, time, width) over time, looking back only."""
        batch, time, width = hidden.shape
        split = self.project_in(hidden).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.project_out(mixed.transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    """One layer: attention, then two linear layers, each added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """(batch, time, width) in and out."""
        hidden = hidden + self.attention(self.norm1(hidden))
        return hidden + self.narrow(functional.gelu(self.widen(self.norm2(hidden))))


class GPT(LightningModule):
    """A byte-level GPT.

    Args:
        layers: Number of blocks.
        width: Size of the hidden state.
        heads: Attention heads; divides `width`.
        block_size: The longest text, in bytes.
        tied: Whether the head shares the weight of the token embedding.
        learning_rate: The highest; it rises over the first twentieth of the steps, then falls.
        weight_decay: Of AdamW, on matrices.
    """

    def __init__(
        self,
        layers: int = 6,
        width: int = 96,
        heads: int = 4,
        block_size: int = 64,
        tied: bool = True,
        learning_rate: float = 6e-3,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate, self.weight_decay = learning_rate, weight_decay
        self.token_embedding = nn.Embedding(VOCABULARY, width)
        self.position_embedding = nn.Embedding(block_size, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.token_embedding.weight
        self.apply(_initialise)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, time, 256) of the byte after each of `tokens` (batch, time)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))

    def loss(self, batch: Tensor) -> Tensor:
        """Mean cross-entropy, in nats per byte, of `batch` (batch, time + 1)."""
        logits = self(batch[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """One step's loss."""
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Log the loss on text not trained on."""
        self.log("val_loss", self.loss(batch), prog_bar=True)

    def configure_optimizers(self) -> dict[str, Any]:
        """AdamW with a short warm-up and a cosine down."""
        optimizer = torch.optim.AdamW(
            self.parameters(), lr=self.learning_rate, betas=(0.9, 0.95), weight_decay=self.weight_decay
        )
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=self.learning_rate, total_steps=steps + 1, pct_start=0.05,
            div_factor=20, final_div_factor=0.5, cycle_momentum=False,
        )  # fmt: skip
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    @torch.no_grad()
    def generate(self, prompt: str, length: int, *, temperature: float = 0.8, seed: int = 0) -> str:
        """Continue `prompt` by `length` sampled bytes, on one device that has all the weights."""
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.tensor([list(prompt.encode())])
        block_size = self.position_embedding.num_embeddings
        for _ in range(length):
            logits = self(tokens[:, -block_size:])[:, -1] / temperature
            following = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            tokens = torch.cat([tokens, following], dim=1)
        return bytes(tokens[0].tolist()).decode(errors="replace")


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


class Windows(Dataset[Tensor]):
    """Consecutive windows of `length` bytes of a text."""

    def __init__(self, text: bytes, length: int) -> None:
        self.count, self.length = len(text) // length, length
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.length
        return self.bytes[start : start + self.length].long()


class StandardLibrary(LightningDataModule):
    """The sources of Python's standard library, every twentieth file kept for validation.

    Args:
        batch_size: Windows per batch.
        block_size: Bytes that the model sees of each window.
    """

    def __init__(self, batch_size: int = 16, block_size: int = 64) -> None:
        super().__init__()
        self.batch_size, self.block_size = batch_size, block_size

    def setup(self, stage: str | None = None) -> None:
        """Read the sources, in the order of their names."""
        root = Path(sysconfig.get_paths()["stdlib"])
        files = sorted([*root.glob("*.py"), *root.glob("[a-z]*/*.py")])
        files = [
            file for file in files if not {"test", "tests", "idlelib", "site-packages"} & set(file.parts)
        ]
        held_out = [file for index, file in enumerate(files) if index % 20 == 10]
        kept = [file for index, file in enumerate(files) if index % 20 != 10]
        self.train_windows = Windows(_read(kept), self.block_size + 1)
        self.val_windows = Windows(_read(held_out), self.block_size + 1)

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Windows in a new order each epoch."""
        return DataLoader(self.train_windows, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        """Windows of the files that are not trained on."""
        return DataLoader(self.val_windows, self.batch_size)


def _read(files: list[Path]) -> bytes:
    return b"\n\n".join(file.read_bytes() for file in files)
