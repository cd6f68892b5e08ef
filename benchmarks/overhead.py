"""What the executor costs: stages without work, and stages that sleep, against torch and a loop by hand.

    torchrun --nproc-per-node 2 benchmarks/overhead.py
    torchrun --nproc-per-node 4 benchmarks/overhead.py --forward_ms 10 --backward_ms 20 --rounds 5

All sides run the same stage (one multiplication, and the sleep) under 1F1B in the same processes, in turns,
in another order each round. Medians over the rounds; wall seconds are those of the slowest rank.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from jsonargparse import auto_cli
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from lightning_pipeline.executor.executor import Executor
from lightning_pipeline.ranks.groups import Groups
from lightning_pipeline.schedules import get_schedule
from lightning_pipeline.wire.stage import Values


class Sleep(torch.autograd.Function):
    """Takes a while in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        """Hand the input on."""
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Sleep, and hand the gradient on."""
        time.sleep(ctx.seconds)
        return gradient, None


class Work(nn.Module):
    """What a stage does: one multiplication, and sleep."""

    def __init__(self, forward_seconds: float, backward_seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.forward_seconds, self.backward_seconds = forward_seconds, backward_seconds

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by the weight."""
        if self.forward_seconds:
            time.sleep(self.forward_seconds)
        if self.backward_seconds:
            x = Sleep.apply(x, self.backward_seconds)
        return x * self.weight


class Side(Protocol):
    """One way to run the pipeline."""

    def step(self) -> None:
        """Forward and backward of all micro-batches."""


class WorkStage:
    """A stage of our runtime that runs a module."""

    def __init__(self, module: Work, index: int, size: int, parts: Sequence[Tensor]) -> None:
        self.module, self.index, self.last, self.parts = module, index, index == size - 1, parts
        self.held: dict[int, tuple[Tensor, Tensor]] = {}

    def forward(self, microbatch: int, incoming: Values | None) -> Values | None:
        """Run the module on what came in."""
        x = self.parts[microbatch] if incoming is None else incoming.tensors[0]
        output = self.module(x)
        if self.last:
            output = output.sum()
        self.held[microbatch] = (x, output)
        return None if self.last else Values([output])

    def backward(
        self, microbatch: int, gradients: Sequence[Tensor | None] | None
    ) -> list[Tensor | None] | None:
        """Run autograd on what the module made."""
        x, output = self.held.pop(microbatch)
        torch.autograd.backward([output], None if gradients is None else list(gradients))
        return [x.grad] if self.index else None


class Ours:
    """This package's executor."""

    def __init__(self, module: Work, parts: Sequence[Tensor]) -> None:
        self.plan = get_schedule("1F1B").plan(dist.get_world_size(), len(parts))
        self.groups = Groups(self.plan)
        rank = self.groups.rank
        stage: Any = WorkStage(module, rank, self.plan.num_stages, parts)
        self.executor = Executor({rank: stage}, self.groups)
        self.signatures = [tuple(part.shape) for part in parts]

    def step(self) -> None:
        """Run the plan."""
        self.executor.run(self.plan, self.signatures)


class Torch:
    """`torch.distributed.pipelining`."""

    def __init__(self, module: Work, parts: Sequence[Tensor]) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        stage = PipelineStage(module, self.rank, self.size, torch.device("cpu"))
        self.batch = torch.cat(list(parts))
        self.schedule = Schedule1F1B(stage, len(parts), loss_fn=lambda output, target: output.sum())

    def step(self) -> None:
        """Run its schedule."""
        if self.rank == 0:
            self.schedule.step(self.batch)
        elif self.rank == self.size - 1:
            self.schedule.step(target=self.batch, losses=[])
        else:
            self.schedule.step()


class ByHand:
    """1F1B with isend and irecv, each receive posted one ahead, for one shape."""

    def __init__(self, module: Work, parts: Sequence[Tensor]) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.module, self.parts = module, parts

    def step(self) -> None:
        """Warm-up, steady state, cool-down."""
        self.held: dict[int, tuple[Tensor, Tensor]] = {}
        self.sent: list[tuple[dist.Work | None, Tensor]] = []
        count = len(self.parts)
        values = self._received_ahead(self.rank - 1) if self.rank else iter(self.parts)
        gradients = self._received_ahead(self.rank + 1) if self.rank < self.size - 1 else None
        ahead = min(self.size - 1 - self.rank, count)
        for index in range(count + ahead):
            if index < count:
                self._forward(index, next(values))
            if index >= ahead:
                self._backward(index - ahead, None if gradients is None else next(gradients))
        for work, _ in self.sent:
            assert work is not None
            work.wait()

    def _received_ahead(self, source: int) -> Iterator[Tensor]:
        def post() -> tuple[Tensor, Any]:
            buffer = torch.empty_like(self.parts[0])
            return buffer, dist.irecv(buffer, source)

        buffer, work = post()
        for index in range(len(self.parts)):
            current, waited = buffer, work
            waited.wait()
            if index + 1 < len(self.parts):
                buffer, work = post()
            yield current

    def _forward(self, index: int, x: Tensor) -> None:
        if self.rank:
            x.requires_grad_()
        output = self.module(x)
        if self.rank < self.size - 1:
            data = output.detach()
            self.sent.append((dist.isend(data, self.rank + 1), data))
        else:
            output = output.sum()
        self.held[index] = (x, output)

    def _backward(self, index: int, gradient: Tensor | None) -> None:
        x, output = self.held.pop(index)
        torch.autograd.backward([output], None if gradient is None else [gradient])
        if self.rank:
            assert x.grad is not None
            self.sent.append((dist.isend(x.grad, self.rank - 1), x.grad))


def timed(side: Side, steps: int) -> tuple[float, float]:
    """Wall seconds per step of the slowest rank, CPU seconds per step of all ranks."""
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        side.step()
    used = torch.tensor(time.process_time() - cpu)
    taken = torch.tensor(time.perf_counter() - wall)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    dist.all_reduce(used)
    return float(taken) / steps, float(used) / steps


def main(
    rounds: int = 15,
    steps: int = 5,
    num_microbatches: int = 32,
    elements: int = 1024,
    forward_ms: float = 0.0,
    backward_ms: float = 0.0,
) -> None:
    """Measure and print a table.

    Args:
        rounds: How often each side has its turn.
        steps: Steps per turn; without work few are needed.
        num_microbatches: Micro-batches per step.
        elements: Floats that cross each cut.
        forward_ms: Sleep of a stage in each forward.
        backward_ms: Sleep of a stage in each backward.
    """
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    parts = [torch.ones(1, elements) for _ in range(num_microbatches)]
    makers: list[Callable[..., Side]] = [Ours, Torch, ByHand]
    sides = [make(Work(forward_ms / 1e3, backward_ms / 1e3), parts) for make in makers]
    for side in sides * 2:
        side.step()
    results: list[list[tuple[float, float]]] = [[] for _ in sides]
    for index in range(rounds):
        for turn in range(len(sides)):
            which = (index + turn) % len(sides)
            results[which].append(timed(sides[which], steps))
    if dist.get_rank() == 0:
        sleeps = f"sleep {forward_ms:g} and {backward_ms:g} ms"
        print(
            f"{dist.get_world_size()} ranks, {num_microbatches} micro-batches, {elements} floats, {sleeps},"
        )
        print(f"torch {torch.__version__}, median of {rounds} rounds of {steps} steps")
        for name, seconds in zip(("executor", "torch", "by hand"), results, strict=True):
            wall, cpu = (statistics.median(column) * 1e3 for column in zip(*seconds, strict=True))
            action = wall / (2 * num_microbatches) * 1e3
            print(f"{name:9s} {wall:8.2f} ms per step {action:8.1f} us per action {cpu:8.2f} CPU ms")
    sides[0].groups.close()  # type: ignore[attr-defined]
    dist.destroy_process_group()


if __name__ == "__main__":
    auto_cli(main)
