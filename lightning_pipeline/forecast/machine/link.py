"""What a message between two ranks of this machine takes: two processes run a small pipeline.

As a program, `python -m lightning_pipeline.forecast.machine.link FOLDER RANK DEVICE` is one of the two.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pipeline.errors import PipelineError
from lightning_pipeline.executor import Executor
from lightning_pipeline.forecast.machine.assumptions import Handling
from lightning_pipeline.ranks import Groups
from lightning_pipeline.recording import Timeline
from lightning_pipeline.schedules import get_schedule
from lightning_pipeline.wire import Values

SIZES = (1 << 10, 4 << 20)  # bytes
MICROBATCHES = 6
RUNS = 10
_WARM_UP = 3
_WORK = 0.003  # seconds of an action: caches and cores are then as in a run, not as between two messages
_ROWS = 256
_LONGEST = 120  # seconds

_Run = list[tuple[str, int, int, int, int]]  # by action: kind, micro-batch, when it asked, started, ended


@dataclass(frozen=True)
class Link:
    """What messages between two ranks take.

    Attributes:
        latency: Seconds from the end of an action to the start of one of the other rank that waited for its
            message, beside its bytes; packing and unpacking are in it.
        bytes_per_s: What the bytes take.
        handling: The part of it in which ranks are busy.
    """

    latency: float
    bytes_per_s: float
    handling: Handling


def measure_link(device: str = "cpu") -> Link:
    """Time messages between two new processes on this machine, which work for a few milliseconds in between.

    Args:
        device: Kind of device that the tensors are on, such as `cuda`.

    Raises:
        PipelineError: A process failed or took more than two minutes.
    """
    with tempfile.TemporaryDirectory() as folder:
        _run_both(Path(folder), device)
        ends = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in (0, 1)]
    small, large = (_Seen.of(*of_size) for of_size in zip(*ends, strict=True))
    between = SIZES[1] - SIZES[0]
    return Link(
        small.hop,
        between / max(large.hop - small.hop, 1e-9),
        Handling(
            small.send, max(large.send - small.send, 0.0) / between,
            small.receive, max(large.receive - small.receive, 0.0) / between,
        ),
    )  # fmt: skip


class _Seen(NamedTuple):
    """Medians of seconds: from end to start, packing, unpacking."""

    hop: float
    send: float
    receive: float

    @classmethod
    def of(cls, first: Sequence[_Run], second: Sequence[_Run]) -> "_Seen":
        """Of all runs of both ranks, each a list of actions.

        An action that asked for its input before that was made waited for the message; for any other, the
        message was there.
        """
        hops: list[int] = []
        sends: list[int] = []
        receives: list[int] = []
        for runs in zip(first, second, strict=True):
            ended = {
                (rank, kind, microbatch): end for rank in (0, 1) for kind, microbatch, *_, end in runs[rank]
            }
            for rank, run in enumerate(runs):
                for position, (kind, microbatch, asked, started, _) in enumerate(run):
                    sent = ended[1 - rank, kind, microbatch]
                    if (kind == "F") == (rank == 1):  # it needs a message
                        waited = sent > asked
                        (hops if waited else receives).append(started - (sent if waited else asked))
                    elif position + 1 < len(run):  # it sends one
                        sends.append(run[position + 1][2] - run[position][4])
        return cls(*(median(found) / 1e9 if found else 0.0 for found in (hops, sends, receives)))


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
    """Works for some milliseconds as a layer does, and hands on a tensor of one size."""

    def __init__(self, index: int, num_bytes: int, device: torch.device) -> None:
        self.index, self._device = index, device
        self._tensor = torch.ones(num_bytes // 4, device=device)
        self._layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(96, 384), nn.GELU(), nn.Linear(384, 96)) for _ in range(4))
        ).to(device)
        self._input = torch.ones(_ROWS, 96, device=device)

    def _work(self) -> None:
        with torch.enable_grad():
            until = time.perf_counter() + _WORK
            while time.perf_counter() < until:
                self._layers(self._input).sum().backward()
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


def _exchange(device: torch.device, groups: Groups, num_bytes: int) -> list[_Run]:
    """This rank's actions, run by run."""
    executor = Executor(
        {groups.rank: _Stage(groups.rank, num_bytes, device)}, groups, device=device, timeline=Timeline()
    )
    plan, found = get_schedule("1F1B").plan(2, MICROBATCHES), []
    for _ in range(_WARM_UP + RUNS):
        executor.run(plan, [num_bytes] * MICROBATCHES)
        found.append(
            [
                (event.action.kind, event.action.microbatch, event.asked, event.started, event.ended)
                for event in executor.timeline
            ]
        )
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
