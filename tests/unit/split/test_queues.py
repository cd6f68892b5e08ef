"""A queue that a step reads and then writes its samples to: micro-batches read it as the batch found it."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.unit.split.nets import WIDTH, Net, batch_of, seeded
from tests.unit.split.pipe import Outcome, alone, piped

LENGTH = 8


class Queue(Net):
    """MoCo's: keys in a buffer, and the place in it that the next ones are written at."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.randn(WIDTH, LENGTH, dtype=torch.float64))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def training_step(self, batch, batch_idx):
        h = self.body(self.emb(batch["x"]))
        loss = F.cross_entropy(h @ self.queue.clone(), (batch["y"][:, 0] > 0).long()) + self.loss(h, batch)
        self.put(F.normalize(h.detach(), dim=1))
        return loss

    def put(self, keys: Tensor) -> None:
        at, count = int(self.place), len(keys)
        self.queue[:, at : at + count] = keys.T
        self.place[0] = (at + count) % LENGTH


class GoesRound(Queue):
    """What does not fit at the end is written at the beginning."""

    def put(self, keys):
        self.queue[:, (torch.arange(len(keys)) + self.place) % LENGTH] = keys.T
        self.place[0] = (self.place[0] + len(keys)) % LENGTH


class LeavesOut(Queue):
    """What does not fit at the end is left out."""

    def put(self, keys):
        at, count = int(self.place), len(keys)
        if at + count >= LENGTH:
            self.queue[:, at:] = keys[: LENGTH - at].T
            self.place[0] = 0
        else:
            self.queue[:, at : at + count] = keys.T
            self.place[0] = at + count


class Pushed(Queue):
    """New keys push old ones out."""

    def put(self, keys):
        self.queue = torch.cat([keys.T, self.queue], 1)[:, :LENGTH]


class PushedFromOnes(Pushed):
    """Where all that stands there is alike, new rows look as if they pushed old ones out."""

    def __init__(self) -> None:
        super().__init__()
        self.queue.fill_(1)


class FromOnes(Queue):
    """Its first rows are written where those of a queue land that others push out."""

    def __init__(self) -> None:
        super().__init__()
        self.queue.fill_(1)


class Filled(GoesRound):
    """How much of it is filled, up to its length."""

    def __init__(self) -> None:
        super().__init__()
        self.filled = 0

    def put(self, keys):
        super().put(keys)
        self.filled = min(self.filled + len(keys), LENGTH)


class ByNumber(Queue):
    """The place is a number."""

    def __init__(self) -> None:
        super().__init__()
        self.at = 0

    def put(self, keys):
        self.queue[:, self.at : self.at + len(keys)] = keys.T
        self.at = (self.at + len(keys)) % LENGTH


class BothSigns(Queue):
    """Keys of a batch, and then as many more."""

    def put(self, keys):
        super().put(torch.cat([keys, -keys]))


class ReadsAfterwards(Queue):
    """It compares samples with those of the same batch."""

    def training_step(self, batch, batch_idx):
        h = self.body(self.emb(batch["x"]))
        self.put(F.normalize(h.detach(), dim=1))
        return F.cross_entropy(h @ self.queue.clone(), (batch["y"][:, 0] > 0).long()) + self.loss(h, batch)


class PushedBefore(ReadsAfterwards, Pushed):
    """The same of a queue whose old keys are pushed out."""


class ReadsWhereFull(Filled):
    """It reads what it has written only once the queue is full."""

    def training_step(self, batch, batch_idx):
        h = self.body(self.emb(batch["x"]))
        self.put(F.normalize(h.detach(), dim=1))
        return self.loss(h, batch) + (h @ self.queue.clone()).mean() * (self.filled // LENGTH)


class LargestPlace(LeavesOut):
    """A count that goes on from where the place is, beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.filled = 0

    def put(self, keys):
        self.filled = max(self.filled, min(int(self.place) + len(keys), LENGTH))
        super().put(keys)


class SaysThatItIsFull(Queue):
    """A flag of the whole batch's, which a micro-batch does not come to."""

    def __init__(self) -> None:
        super().__init__()
        self.is_full = False

    def put(self, keys):
        self.is_full = self.is_full or int(self.place) + len(keys) >= LENGTH
        super().put(keys)


class EverySecond(GoesRound):
    """A batch that writes nothing between those that do."""

    def training_step(self, batch, batch_idx):
        self.number = batch_idx
        return super().training_step(batch, batch_idx)

    def put(self, keys):
        if self.number % 2 == 0:
            super().put(keys)


def trained(kind: type[Queue], size: int, microbatches: int, steps: int = 4) -> tuple[Outcome, Outcome]:
    """On one device with the whole batch, and on two stages in micro-batches."""

    def each(module, step):
        return batch_of(size, seed=10 + step)

    one = alone(seeded(kind), batch_of(size), 1, steps=steps, each=each)
    return one, piped(
        seeded(kind), batch_of(size), 2, microbatches, steps=steps, each=each, follow=True, as_one=True
    )


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        (Queue, 4), (FromOnes, 4), (GoesRound, 6), (LeavesOut, 6), (LeavesOut, 4), (Pushed, 4),
        (PushedFromOnes, 6), (ByNumber, 4), (Filled, 6), (EverySecond, 6),
        (BothSigns, 4), (LargestPlace, 6), (SaysThatItIsFull, 4),
    ],
)  # fmt: skip
def test_a_queue_is_read_and_written_as_by_the_whole_batch(kind: type[Queue], size: int) -> None:
    one, found = trained(kind, size, 4)
    assert not found.splits[-1].doubts("training_step").states
    for name, gradient in one.gradients.items():
        torch.testing.assert_close(found.gradients[name], gradient, rtol=1e-10, atol=1e-12)
    last = dict(found.splits[-1].root.named_buffers())
    for name, buffer in one.buffers.items():
        torch.testing.assert_close(last[name], buffer, rtol=1e-10, atol=1e-12)
    for split in found.splits:
        assert int(split.root.place) == int(one.buffers["place"])
        for name in ("at", "filled"):
            assert getattr(split.root, name, None) == getattr(one.module, name, None)


@pytest.mark.parametrize("kind", [ReadsAfterwards, PushedBefore, ReadsWhereFull])
def test_a_queue_that_a_step_reads_after_it_wrote_is_warned_of(kind: type[Queue]) -> None:
    found = piped(seeded(kind), batch_of(6), 2, 2, as_one=True)
    assert found.splits[-1].doubts("training_step").states


class Bank(Net):
    """A memory of each sample, at a place that the batch names."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.randn(LENGTH, WIDTH, dtype=torch.float64))

    def training_step(self, batch, batch_idx):
        h, index = self.body(self.emb(batch["x"])), batch["index"]
        loss = self.loss(h, batch) + 0.1 * (h - self.bank[index]).pow(2).mean()
        self.put(index, h.detach())
        return loss

    def put(self, index: Tensor, rows: Tensor) -> None:
        self.bank[index] = rows


class Averaged(Bank):
    """The old row has a part in the new one."""

    def put(self, index, rows):
        self.bank[index] = F.normalize(0.9 * self.bank[index] + 0.1 * rows, dim=1)


class OneByOne(Bank):
    """Each sample finds what the one before has left."""

    def put(self, index, rows):
        for place, row in zip(index.tolist(), rows, strict=True):
            self.bank[place] = 0.5 * self.bank[place] + 0.5 * row


class Copied(Bank):
    """By a function of its own, into another tensor."""

    def put(self, index, rows):
        self.bank = self.bank.index_copy(0, index, rows)


class Added(Bank):
    """A sum, which is one whatever the places."""

    def put(self, index, rows):
        self.bank.index_add_(0, index, rows)


PLACES = ([0, 1, 2, 3], [4, 5, 6, 7], [1, 2, 1, 1], [3, 3, 3, 3], [0, 2, 4, 2])
"""Those of the first batches are others, so that what micro-batches write adds up there by chance."""


@pytest.mark.parametrize("kind", [Bank, Averaged, OneByOne, Copied, Added])
@pytest.mark.parametrize("microbatches", [2, 4])
def test_places_that_two_samples_of_a_batch_have_are_written_as_by_the_whole_batch(kind, microbatches):
    def each(module, step):
        return {**batch_of(4, seed=10 + step), "index": torch.tensor(PLACES[step])}

    first = each(None, 0)
    one = alone(seeded(kind), first, 1, steps=5, each=each)
    found = piped(
        seeded(kind), first, 2, microbatches, steps=5, each=each, follow=True, as_one=True
    )  # fmt: skip
    assert not found.splits[-1].doubts("training_step").states
    for name, gradient in one.gradients.items():
        torch.testing.assert_close(found.gradients[name], gradient, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.splits[-1].root.bank, one.module.bank, rtol=1e-10, atol=1e-12)
