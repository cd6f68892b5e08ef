"""What PipelineStrategy is measured against: torch's own 1F1B, and 1F1B written by hand with isend and irecv.

Both get the GPT of examples/gpt.py already cut into modules, which is the work that the strategy saves.
"""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from gpt import GPT


def cut_by_hand(model: GPT, stage: int, num_stages: int) -> nn.Module:
    """The layers of one stage, in equal shares, as a module from hidden state to hidden state."""
    layers = len(model.blocks)
    begin, end = stage * layers // num_stages, (stage + 1) * layers // num_stages
    first, last = stage == 0, stage == num_stages - 1
    return HandCutStage(model, range(begin, end), first=first, last=last)


class HandCutStage(nn.Module):
    """Some of a GPT's layers, with its embeddings on the first stage and its head on the last."""

    def __init__(self, model: GPT, layers: range, *, first: bool, last: bool) -> None:
        super().__init__()
        self.token_embedding = model.token_embedding if first else None
        self.position_embedding = model.position_embedding if first else None
        self.blocks = nn.ModuleList(model.blocks[layer] for layer in layers)
        self.norm = model.norm if last else None
        self.head = model.head if last else None

    def forward(self, hidden: Tensor) -> Tensor:
        """Tokens into the first stage, logits out of the last, (batch, time, width) in between."""
        if self.token_embedding is not None and self.position_embedding is not None:
            positions = torch.arange(hidden.shape[1], device=hidden.device)
            hidden = self.token_embedding(hidden) + self.position_embedding(positions)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden if self.norm is None or self.head is None else self.head(self.norm(hidden))


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean loss per byte."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Stopwatch:
    """Wall and CPU seconds of this rank between start and stop, ranks lined up at both ends."""

    def start(self) -> None:
        """Line up and begin."""
        dist.barrier()
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def stop(self) -> tuple[float, float]:
        """Wall seconds until all ranks are here, and this rank's own CPU seconds."""
        cpu = time.process_time() - self._cpu
        dist.barrier()
        return time.perf_counter() - self._wall, cpu


class TorchLoop:
    """1F1B by `torch.distributed.pipelining`."""

    name = "torch"

    def __init__(self, model: GPT, num_microbatches: int) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        module = cut_by_hand(model, self.rank, self.size)
        stage = PipelineStage(module, self.rank, self.size, torch.device("cpu"))
        self.schedule = Schedule1F1B(stage, num_microbatches, loss_fn=cross_entropy)
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)

    def step(self, batch: Tensor) -> None:
        """Forward and backward of all micro-batches, and the optimizer."""
        self.optimizer.zero_grad()
        if self.rank == 0:
            self.schedule.step(batch[:, :-1].contiguous())
        elif self.rank == self.size - 1:
            losses: list[Tensor] = []
            self.schedule.step(target=batch[:, 1:].contiguous(), losses=losses)
        else:
            self.schedule.step()
        self.optimizer.step()


class HandLoop:
    """1F1B in as little code as it takes, for fixed shapes and one tensor per cut."""

    name = "by hand"

    def __init__(self, model: GPT, num_microbatches: int) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.num_microbatches, self.width = num_microbatches, model.token_embedding.embedding_dim
        self.module = cut_by_hand(model, self.rank, self.size)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-4)

    def step(self, batch: Tensor) -> None:
        """Forward and backward of all micro-batches, and the optimizer."""
        self.optimizer.zero_grad()
        self.parts = batch.tensor_split(self.num_microbatches)
        self.alive: dict[int, tuple[Tensor, Tensor]] = {}
        self.sent: list[tuple[dist.Work | None, Tensor]] = []
        activations = self._received_ahead(self.rank - 1) if self.rank else iter(self.parts)
        gradients = self._received_ahead(self.rank + 1) if self.rank < self.size - 1 else None
        ahead = min(self.size - 1 - self.rank, self.num_microbatches)
        for index in range(self.num_microbatches + ahead):
            if index < self.num_microbatches:
                self._forward(index, next(activations))
            if index >= ahead:
                self._backward(index - ahead, next(gradients) if gradients is not None else None)
        for work, _ in self.sent:
            if work is not None:
                work.wait()
        self.optimizer.step()

    def _received_ahead(self, source: int) -> Iterator[Tensor]:
        """Messages from a neighbour; the next one is always being received already."""
        rows, time_steps = self.parts[0].shape[0], self.parts[0].shape[1] - 1

        def post() -> tuple[Tensor, dist.Work | None]:
            buffer = torch.empty(rows, time_steps, self.width)
            return buffer, dist.irecv(buffer, source)

        buffer, work = post()
        for index in range(self.num_microbatches):
            current, waited = buffer, work
            if index + 1 < self.num_microbatches:
                buffer, work = post()
            assert waited is not None
            waited.wait()
            yield current

    def _send(self, tensor: Tensor, target: int) -> None:
        self.sent.append((dist.isend(tensor, target), tensor))

    def _forward(self, index: int, incoming: Tensor) -> None:
        tokens = incoming[:, :-1] if self.rank == 0 else incoming.requires_grad_()
        output = self.module(tokens)
        if self.rank < self.size - 1:
            self._send(output.detach(), self.rank + 1)
        else:
            output = cross_entropy(output, self.parts[index][:, 1:]) / self.num_microbatches
        self.alive[index] = (incoming, output)

    def _backward(self, index: int, gradient: Tensor | None) -> None:
        incoming, output = self.alive.pop(index)
        output.backward(gradient)
        if self.rank:
            assert incoming.grad is not None
            self._send(incoming.grad, self.rank - 1)


def measure_loop(
    make: Callable[[GPT, int], TorchLoop | HandLoop],
    model: GPT,
    batches: Tensor,
    num_microbatches: int,
    warm_up: int,
) -> tuple[float, float]:
    """Wall and CPU seconds of the steps after `warm_up` of them."""
    loop, watch = make(model, num_microbatches), Stopwatch()
    for index, batch in enumerate(batches):
        if index == warm_up:
            watch.start()
        loop.step(batch)
    return watch.stop()
