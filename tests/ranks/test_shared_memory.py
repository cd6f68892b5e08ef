"""Tensors of the module that are in one memory: a table and a row of it, rows in a list, a diagonal."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.pool import Pool
from tests.ranks.lightning_cases import TARGETS, Regression, loader, trainer

Ranks = Callable[[int], Pool]


class Shares(Regression):
    """Keeps a table, and what it writes and reads of that."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        table = torch.zeros(TARGETS, TARGETS, dtype=torch.float64)
        self.seen: list[float] = []
        if kind == "row":
            self.table, self.written = table, table[1]
            self.read = [self.table]
        elif kind == "table":
            self.written, self.row = table, table[1]
            self.read = [self.row]
        elif kind == "buffer":
            self.register_buffer("table", table)
            self.written = table.diagonal()
            self.read = [table]
        elif kind == "listed row":
            self.register_buffer("table", table)
            self.rows = {"first": table[0], "second": table[1]}
            self.read = [table]
        else:
            self.rows = list(table)
            self.read = [*self.rows]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        outputs = self.net(batch[0])
        rows = getattr(self, "rows", None)
        written = self.written if rows is None else rows["second"] if isinstance(rows, dict) else rows[0]
        written += outputs.detach().sum(0)
        if isinstance(rows, list):
            rows[1] += 1
        return nn.functional.mse_loss(outputs, batch[1])

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen += [float(one.sum()) for one in self.read]


def seen(pipeline: dict[str, Any] | None, kind: str) -> Tensor:
    module = Shares(kind)
    trainer(pipeline).fit(module, loader())
    return torch.tensor(module.seen)


@pytest.mark.parametrize("kind", ["row", "table", "buffer", "listed row", "rows"])
def test_what_is_written_in_one_is_seen_in_the_others(ranks: Ranks, kind: str) -> None:
    expected = seen(None, kind)
    found = [seen({"stages": 1, "num_microbatches": 2}, kind)]
    found += ranks(2)(seen, {"stages": 2, "num_microbatches": 2}, kind, group=False)
    for one in found:
        torch.testing.assert_close(one, expected, rtol=1e-6, atol=1e-9)
