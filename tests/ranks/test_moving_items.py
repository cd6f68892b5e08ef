"""Lists and deques of which a step writes another item in each batch, or that are full."""

import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.pool import Pool
from tests.ranks.lightning_cases import trainer, weights

Ranks = Callable[[int], Pool]


class Keeps(pl.LightningModule):
    """Keeps something of each batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
        self.double()
        self.kept = self.begun()

    def begun(self) -> Any:
        return [0.0] * 6

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        output = self.net(batch[0])
        loss, extra = F.cross_entropy(output, batch[1]), self.global_step / 4 * output.pow(2).mean()
        hits = int((output.argmax(1) == batch[1]).sum())
        return self.keep(loss, extra, hits, batch_idx) * loss + extra

    def keep(self, loss: Tensor, extra: Tensor, hits: int, batch_idx: int) -> float:
        self.kept[batch_idx] = loss.item()
        return 1.0

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        made = torch.Generator().manual_seed(1)
        x = torch.randn(36, 4, generator=made, dtype=torch.float64)
        return DataLoader(TensorDataset(x, torch.randint(3, (36,), generator=made)), batch_size=6)


class OfTasks(Keeps):
    """Weights losses by a moving average for each task."""

    def begun(self) -> Any:
        return [1.0, 1.0]

    def keep(self, loss: Tensor, extra: Tensor, hits: int, batch_idx: int) -> float:
        task = batch_idx % 2
        weight = 2 * self.kept[task] / sum(self.kept)
        self.kept[task] = 0.5 * self.kept[task] + 0.5 * loss.item()
        self.log(f"of {task}", self.kept[task])
        return weight


class FromTheEnd(Keeps):
    def keep(self, loss: Tensor, extra: Tensor, hits: int, batch_idx: int) -> float:
        self.kept[-1 - batch_idx] = hits
        return 1.0


class AtTheLeft(Keeps):
    def begun(self) -> Any:
        return deque([0.0] * 3, maxlen=3)

    def keep(self, loss: Tensor, extra: Tensor, hits: int, batch_idx: int) -> float:
        self.kept.appendleft(loss.item())
        return 1.0


class Annealed(Keeps):
    """Of a term that is 0 at first, and read by the step."""

    def begun(self) -> Any:
        return deque(maxlen=3)

    def keep(self, loss: Tensor, extra: Tensor, hits: int, batch_idx: int) -> float:
        weight = 1 / (1 + sum(self.kept) / 3)
        self.kept.append(extra.item())
        return weight


class Window(Keeps):
    """Of small numbers, which are the same objects."""

    def begun(self) -> Any:
        return deque(maxlen=3)

    def keep(self, loss: Tensor, extra: Tensor, hits: int, batch_idx: int) -> float:
        self.kept.append(hits)
        self.log("window", float(sum(self.kept)))
        return 1.0


KINDS = {k.__name__: k for k in (OfTasks, FromTheEnd, AtTheLeft, Window, Keeps, Annealed)}


def fitted(
    pipeline: dict[str, Any] | None, kind: str
) -> tuple[list[float], dict[str, float], dict[str, Tensor]]:
    module, run = KINDS[kind](), trainer(pipeline, max_epochs=2)
    with warnings.catch_warnings():  # sums of small numbers fit no rule; they are taken from the batch as one
        warnings.filterwarnings("ignore", "training_step works out")
        run.fit(module)
    return list(module.kept), {k: float(v) for k, v in run.logged_metrics.items()}, weights(module)


@pytest.mark.parametrize("kind", KINDS)
def test_items_of_all_batches_are_there(ranks: Ranks, kind: str) -> None:
    kept, logged, expected = fitted(None, kind)
    found = [fitted({"stages": 1, "num_microbatches": 2}, kind)]
    found += ranks(2)(fitted, {"stages": 2, "num_microbatches": 3}, kind, group=False)
    for own, own_logged, own_weights in found:
        assert own == pytest.approx(kept, rel=1e-9)
        assert own_logged == pytest.approx(logged, rel=1e-6)
        torch.testing.assert_close(own_weights, expected, rtol=1e-9, atol=1e-9)
