"""Momentum encoders with a queue of keys and its pointer, as they are published."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.unit.split.nets import WIDTH, Block, batch_of, seeded
from tests.unit.split.pipe import Module, alone, piped


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


def test_an_average_that_is_written_in_place_is_that_of_the_batch():
    module = seeded(MoCoInPlace)
    for ranks in (None, [[0, 2], [1, 3]]):
        assert_queue_of_the_batch(module, stages=2 if ranks is None else 4, ranks=ranks, each=optimized)


def assert_queue_of_the_batch(module: Any, **options: Any) -> None:
    """Gradients, keys and the place of the next are those of the whole batch on one device."""
    one = alone(module, batch_of(8), 1, steps=3, each=options.get("each"))
    found = piped(module, batch_of(8), num_microbatches=2, steps=3, as_one=True, **options)
    last = dict(found.splits[-1].root.named_buffers())
    for name, gradient in one.gradients.items():
        if gradient is not None:
            torch.testing.assert_close(found.gradients[name], gradient, rtol=1e-10, atol=1e-12)
    for name, buffer in one.buffers.items():
        torch.testing.assert_close(last[name], buffer, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", [MoCo, MoCoByRows])
def test_a_momentum_encoder_with_a_queue_of_keys_and_its_pointer_works(kind):
    assert_queue_of_the_batch(seeded(kind), stages=2)


def test_a_momentum_encoder_works_with_two_stages_on_a_rank():
    assert_queue_of_the_batch(seeded(MoCo), stages=4, ranks=[[0, 2], [1, 3]])
