"""Momentum encoders with a queue of keys and its pointer, as they are published."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.unit.split.nets import WIDTH, Block, assert_works, batch_of, seeded
from tests.unit.split.pipe import Module, alone, assert_same, piped


class Contrast(nn.Module):
    """A query encoder, a key encoder that is its average, and a queue of keys."""

    def __init__(self, entries: int, columns: bool) -> None:
        super().__init__()
        self.encoder_q = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(3)))
        self.encoder_k = copy.deepcopy(self.encoder_q).requires_grad_(False)
        self.entries, self.columns = entries, columns
        shape = (WIDTH, entries) if columns else (entries, WIDTH)
        self.register_buffer("queue", F.normalize(torch.randn(shape), dim=0 if columns else 1))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def follow(self) -> None:
        for query, key in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
            key.data = key.data * 0.9 + query.data * 0.1

    @torch.no_grad()
    def enqueue(self, keys: Tensor) -> None:
        rows, ptr = keys.shape[0], int(self.queue_ptr)
        assert self.entries % rows == 0
        if self.columns:
            self.queue[:, ptr : ptr + rows] = keys.T
        else:
            self.queue[ptr : ptr + rows] = keys
        ptr = (ptr + rows) % self.entries
        self.queue_ptr[0] = ptr

    def forward(self, im_q: Tensor, im_k: Tensor) -> tuple[Tensor, Tensor]:
        q = F.normalize(self.encoder_q(im_q), dim=1)
        with torch.no_grad():
            self.follow()
            k = F.normalize(self.encoder_k(im_k), dim=1)
        positive = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
        queue = self.queue.clone().detach()
        negative = q @ (queue if self.columns else queue.T)
        logits = torch.cat([positive, negative], dim=1) / 0.2
        labels = torch.zeros(logits.shape[0], dtype=torch.long)
        self.enqueue(k)
        return logits, labels


class MoCo(Module):
    columns = True

    def __init__(self) -> None:
        super().__init__()
        self.net = Contrast(8, self.columns)

    def training_step(self, batch, batch_idx):
        logits, labels = self.net(batch["x"], batch["x"] + 0.1)
        return F.cross_entropy(logits, labels)


class MoCoByRows(MoCo):
    columns = False


class InPlace(Contrast):
    """Its average is written in place: the first batch, whose weights are alike, leaves what was there."""

    @torch.no_grad()
    def follow(self) -> None:
        for query, key in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
            key.mul_(0.9).add_(query, alpha=0.1)


class MoCoInPlace(MoCo):
    def __init__(self) -> None:
        super().__init__()
        self.net = InPlace(32, True)


def optimized(root: Any, number: int) -> Any:
    """The next batch, after a step of an optimizer."""
    with torch.no_grad():
        for name, parameter in root.named_parameters():
            if number and "encoder_q" in name:
                parameter.add_(0.01)
    return batch_of(8, seed=number)


def test_an_average_that_is_written_in_place_follows_each_micro_batch():
    module = seeded(MoCoInPlace)
    expected = alone(module, None, steps=3, each=optimized)
    for ranks in (None, [[0, 2], [1, 3]]):
        stages = 2 if ranks is None else 4
        found = piped(module, batch_of(8), stages=stages, ranks=ranks, steps=3, each=optimized)
        assert_same(found, expected)


@pytest.mark.parametrize("kind", [MoCo, MoCoByRows])
def test_a_momentum_encoder_with_a_queue_of_keys_and_its_pointer_works(kind):
    assert_works(kind, batch=batch_of(8), cuts=[2], steps=3, num_microbatches=2)


def test_a_momentum_encoder_works_with_two_stages_on_a_rank():
    module, options = seeded(MoCo), {"steps": 3, "num_microbatches": 2}
    found = piped(module, batch_of(8), stages=4, ranks=[[0, 2], [1, 3]], **options)
    assert_same(found, alone(module, batch_of(8), **options))
