"""An agent that plays, and learns from what it has played: its loaders draw from what the module holds."""

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import lightning.pytorch as pl
import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.ranks.wrong_cases import WIDTH, Layer

Drawn = tuple[Tensor, Tensor]
KINDS = ["numpy", "python", "torch", "world", "tensor", "array", "list", "count"]


class Experiences(IterableDataset[Drawn]):
    """Of a function that plays them."""

    def __init__(self, play: Callable[[], Iterable[Drawn]]) -> None:
        self._play = play

    def __iter__(self) -> Iterator[Drawn]:
        return iter(self._play())


class Drawing(Dataset[Drawn]):
    """As many as it is asked for, each drawn when it is."""

    def __init__(self, draw: Callable[[], Drawn]) -> None:
        self._draw = draw

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> Drawn:
        return self._draw()


class World:
    """What an agent plays in."""

    def __init__(self) -> None:
        self.rng = numpy.random.RandomState(3)


def by_place(number: float) -> Drawn:
    waves = torch.cos(torch.arange(WIDTH, dtype=torch.float64) * number)
    return waves, waves.flip(0)


class Agent(pl.LightningModule):
    """Plays, and learns from what it has played."""

    def __init__(self, kind: str, hook: str = "", *, mapped: bool = False, validates: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.hook, self.mapped, self.validates = kind, hook, mapped, validates
        self.layers = nn.Sequential(*(Layer() for _ in range(4))).double()
        self.numpy, self.python = numpy.random.default_rng(3), random.Random(3)
        self.torch, self.world = torch.Generator().manual_seed(3), World()
        self.list, self.count, self.buffered = list[int](), 0, deque[Drawn](maxlen=40)
        self.tensor, self.array = torch.zeros(2, dtype=torch.float64), numpy.zeros(2)
        self.seen = list[float]()

    def number(self) -> float:
        """Goes by what was drawn before."""
        if self.kind == "tensor":
            self.tensor.mul_(0.9).add_(torch.arange(2.0))
        elif self.kind == "array":
            self.array += 1
        elif self.kind == "list":
            self.list.append(len(self.list))
        elif self.kind == "count":
            self.count += 1
        found: dict[str, Callable[[], float]] = {
            "numpy": lambda: float(self.numpy.standard_normal()),
            "python": self.python.random,
            "torch": lambda: float(torch.randn((), generator=self.torch)),
            "world": lambda: float(self.world.rng.randn()),
            "tensor": lambda: float(self.tensor.sum()),
            "array": lambda: float(self.array.sum()),
            "list": lambda: float(sum(self.list[-3:])),
            "count": lambda: float(self.count),
        }
        return found.get(self.kind, lambda: float(self.world.rng.randint(9)))()

    def draw(self) -> Drawn:
        """An experience."""
        if self.kind == "buffer":
            return self.buffered[int(self.world.rng.randint(len(self.buffered)))]
        return by_place(self.number())

    def play(self, times: int) -> None:
        """Fill the buffer."""
        self.buffered.extend(by_place(float(self.world.rng.randn())) for _ in range(times))

    def experiences(self) -> Iterator[Drawn]:
        """Of an epoch."""
        if self.kind == "buffer" and not self.buffered:
            self.play(8)
        for _ in range(22):
            yield self.draw()

    def on_hook(self, name: str) -> None:
        """Draw and play in the hook that was asked for."""
        if self.hook == name:
            self.seen.append(self.number())
            self.play(20)

    def on_fit_start(self) -> None:
        self.on_hook("fit start")

    def on_train_epoch_start(self) -> None:
        self.on_hook("epoch start")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.on_hook("batch start")

    def data(self) -> Any:
        """Of an epoch, as it is loaded."""
        return DataLoader(Drawing(self.draw) if self.mapped else Experiences(self.experiences), batch_size=8)

    def train_dataloader(self) -> Any:
        return self.data()

    def val_dataloader(self) -> Any:
        return self.data() if self.validates else []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.mse_loss(self.layers(batch[0]), batch[1])
        self.log("loss", loss)
        self.log("sum", batch[0].sum())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", F.mse_loss(self.layers(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)
