"""What a message between two ranks of this machine takes: two processes run a small pipeline.

As a program, `python -m lightning_pipeline.planning.link FOLDER RANK DEVICE` is one of the two.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipeline.errors import PipelineError
from lightning_pipeline.executor import Executor
from lightning_pipeline.ranks import Groups
from lightning_pipeline.recording import Timeline
from lightning_pipeline.schedules import get_schedule
from lightning_pipeline.wire import Values

SIZES = (1 << 10, 4 << 20)  # bytes
RUNS = 40
_WARM_UP = 5
_WORK = 0.003  # seconds of an action: caches and cores are then as in a run, not as between two messages
_LONGEST = 120  # seconds


def measure_link(device: str = "cpu") -> tuple[float, float]:
    """Time messages between two new processes on this machine, each after a few milliseconds of work.

    Args:
        device: Kind of device that the tensors are on, such as `cuda`.

    Returns:
        Seconds that a message takes beside its bytes, and bytes per second. Packing and unpacking are in it.

    Raises:
        PipelineError: A process failed or took more than two minutes.
    """
    with tempfile.TemporaryDirectory() as folder:
        _run_both(Path(folder), device)
        ends = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in (0, 1)]
    small, large = (median(_hops(*of_size)) for of_size in zip(*ends, strict=True))
    return small, (SIZES[1] - SIZES[0]) / max(large - small, 1e-9)


def _hops(first: Sequence[Sequence[int]], second: Sequence[Sequence[int]]) -> list[float]:
    """Seconds from the end of an action to the start of the next rank's, there and back, run by run."""
    there = [b[0] - a[0] for a, b in zip(first, second, strict=True)]
    back = [a[1] - b[1] for a, b in zip(first, second, strict=True)]
    return [nanoseconds / 1e9 for nanoseconds in there + back]


def _run_both(folder: Path, device: str) -> None:
    with ExitStack() as stack:
        processes = []
        for rank in (0, 1):
            command = [sys.executable, "-m", __name__, str(folder), str(rank), device]
            process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        for process in processes:
            try:
                _, said = process.communicate(timeout=_LONGEST)
            except subprocess.TimeoutExpired:
                raise PipelineError(
                    f"the link was not measured: two processes on this machine exchanged nothing in "
                    f"{_LONGEST} s. Give latency and bytes per second instead"
                ) from None
            if process.returncode:
                reason = said.strip().splitlines()[-1] if said.strip() else f"exit code {process.returncode}"
                raise PipelineError(
                    f"the link was not measured: {reason}. Give latency and bytes per second instead"
                )


class _Stage:
    """Works for some milliseconds and hands on a tensor of one size."""

    def __init__(self, index: int, num_bytes: int, device: torch.device) -> None:
        self.index, self._device = index, device
        self._tensor = torch.ones(num_bytes // 4, device=device)
        self._square = torch.ones(256, 256, device=device)

    def _work(self) -> None:
        until = time.perf_counter() + _WORK
        while time.perf_counter() < until:
            self._square @ self._square
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def forward(self, microbatch: int, incoming: Values | None) -> Values | None:
        self._work()
        return Values([self._tensor.detach().requires_grad_()]) if incoming is None else None

    def backward(
        self, microbatch: int, gradients: Sequence[Tensor | None] | None
    ) -> list[Tensor | None] | None:
        self._work()
        return [self._tensor] if gradients is None else None

    def backward_input(
        self, microbatch: int, gradients: Sequence[Tensor | None] | None
    ) -> list[Tensor | None] | None:
        return self.backward(microbatch, gradients)

    def backward_weight(self, microbatch: int) -> None:
        self._work()


def _exchange(device: torch.device, groups: Groups, num_bytes: int) -> list[tuple[int, int]]:
    """For each run the end and the start, on rank 0, or the start and the end, on rank 1, of a round trip."""
    executor = Executor(
        {groups.rank: _Stage(groups.rank, num_bytes, device)}, groups, device=device, timeline=Timeline()
    )
    plan, found = get_schedule("1F1B").plan(2, 1), []
    for _ in range(_WARM_UP + RUNS):
        executor.run(plan, [num_bytes])
        forward, backward = executor.timeline
        inner = (forward.ended, backward.started), (forward.started, backward.ended)
        found.append(inner[groups.rank])
    return found[_WARM_UP:]


def _main(folder: str, rank: str, kind: str) -> None:
    torch.set_num_threads(1)
    number = int(rank)
    device = torch.device(kind)
    if kind == "cuda":
        device = torch.device("cuda", number % torch.cuda.device_count())
        torch.cuda.set_device(device)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group(
        "gloo", store=store, rank=number, world_size=2, timeout=timedelta(seconds=_LONGEST)
    )
    groups = Groups(get_schedule("1F1B").plan(2, 1))
    found = [_exchange(device, groups, size) for size in SIZES]
    Path(folder, f"{groups.rank}.json").write_text(json.dumps(found))
    groups.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(*sys.argv[1:])
