"""Agents that learn from what they play, at random: each fit over stages has to be one device's.

A case is a kind of state that experiences are drawn from, a loader that draws them, a hook that draws or plays too,
and flags of the Trainer. `tests/ranks/test_streams_of_modules.py` runs a few, `benchmarks/random_streams.py` as many as
asked.
"""

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.agents import KINDS, Agent, Drawing, Drawn, Experiences, by_place
from tests.ranks.lightning_cases import trainer, weights

LOADERS = ("method", "method", "counting", "plain", "mapped", "shuffled", "closure", "stored")
HOOKS = ("", "", "setup", "fit start", "epoch start", "batch start", "batch end", "epoch end")


class Case(NamedTuple):
    """A fit as data.

    Attributes:
        kind: Of the state that experiences are drawn from.
        hook: That draws or plays, too.
        loader: How they are loaded.
        validates: Whether they are validated on, too.
        second: Another loader beside it: none, one in order, one that is shuffled.
        options: Of the Trainer.
    """

    kind: str
    hook: str
    loader: str
    validates: bool
    second: str
    options: dict[str, Any]


def drawn(seed: int) -> Case:
    """One of infinitely many, always the same for a seed.

    A generator that goes on for ever is read where no hook draws before it: what it has run cannot be put back.
    """
    choose = random.Random(seed)
    kind, hook, loader = (choose.choice(one) for one in ((*KINDS, "buffer"), HOOKS, LOADERS))
    validates, second = choose.random() < 0.3, choose.choice(("", "", "", "in order", "shuffled"))
    options = {
        "max_epochs": choose.choice((1, 2, 3)),
        "limit_train_batches": choose.choice((1.0, 1.0, 2, 3)),
        "reload_dataloaders_every_n_epochs": choose.choice((0, 0, 1)),
        "num_sanity_val_steps": choose.choice((0, 2)),
        "accumulate_grad_batches": choose.choice((1, 1, 2)),
    }
    if loader == "stored":
        hook, validates = "", False
        options["limit_train_batches"] = 3
    return Case(kind, hook, loader, validates, second, options)


class Counting(IterableDataset[Drawn]):
    """Counts what it has given."""

    def __init__(self, agent: Agent) -> None:
        self._agent, self.given = agent, 0

    def __iter__(self) -> Iterator[Drawn]:
        for one in self._agent.experiences():
            self.given += 1
            yield one


class Plain:
    """Batches without a DataLoader."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(len(self)):
            x, y = zip(*(self._agent.draw() for _ in range(7)), strict=True)
            yield torch.stack(x), torch.stack(y)

    def __len__(self) -> int:
        return 3


class Player(Agent):
    """Runs a case."""

    def __init__(self, case: Case) -> None:
        super().__init__(case.kind, case.hook, validates=case.validates)
        self.case, self.forever = case, self._go_on()
        self.play(3)

    def _go_on(self) -> Iterator[Drawn]:
        while True:
            yield from self.experiences()

    def data(self) -> Any:
        """As the case loads it."""
        kind = self.case.loader
        if kind == "plain":
            return Plain(self)
        made = {
            "method": lambda: Experiences(self.experiences),
            "counting": lambda: Counting(self),
            "closure": lambda: Experiences(lambda: (self.draw() for _ in range(22))),
            "stored": lambda: Experiences(lambda: self.forever),
        }
        data = made.get(kind, lambda: Drawing(self.draw))()
        return DataLoader(data, batch_size=8, shuffle=kind == "shuffled" or None)

    def train_dataloader(self) -> Any:
        if not self.case.second:
            return self.data()
        x, y = (torch.stack(one) for one in zip(*map(by_place, range(22)), strict=True))
        second = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=self.case.second == "shuffled")
        return {"played": self.data(), "second": second}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch["played"] if self.case.second else batch, batch_idx)

    def setup(self, stage: str) -> None:
        self.on_hook("setup")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.on_hook("batch end")

    def on_train_epoch_end(self) -> None:
        self.on_hook("epoch end")


def run(case: Case, pipeline: dict[str, Any] | None) -> tuple[dict[str, Tensor], dict[str, float]] | str:
    """Fit it: weights, and what was logged and seen; or the text of an error.

    Args:
        case: It.
        pipeline: Arguments of the strategy; None is one device.
    """
    torch.manual_seed(5)
    numpy.random.seed(5)
    random.seed(5)
    module = Player(case)
    fitting = trainer(pipeline, enable_progress_bar=False, enable_model_summary=False, **case.options)
    try:
        fitting.fit(module)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    logs = {name: float(value) for name, value in fitting.callback_metrics.items()}
    return weights(module), logs | {f"seen {n}": one for n, one in enumerate(module.seen)}
