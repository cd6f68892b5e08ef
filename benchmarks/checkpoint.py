"""Time and memory of saving and loading a state over ranks, against plain DCP, and of a step meanwhile.

    python benchmarks/checkpoint.py --folder /a/disk --gib 1 --ranks 4 --rounds 3

Plain DCP is `torch.distributed.checkpoint.save` and `load`, into a new folder each time, synced as it does by
default. Memory is the rank's anonymous memory (`RssAnon`) at its highest, minus that before.
"""

import argparse
import json
import os
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp

from lightning_pipeline.checkpoint.background import Background
from lightning_pipeline.checkpoint.contents import as_bytes
from lightning_pipeline.checkpoint.load import Target, load_folder
from lightning_pipeline.checkpoint.ranks import Ranks
from lightning_pipeline.checkpoint.save import Part, write

TENSOR = 16 << 20  # bytes


def anonymous() -> int:
    """Anonymous memory of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) << 10
    return 0


@contextmanager
def measured(result: dict[str, list[float]], name: str) -> Iterator[None]:
    """Add the slowest rank's time, and the largest memory of any rank."""
    before = peak = anonymous()
    stop = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not stop.wait(0.005):
            peak = max(peak, anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    dist.barrier()
    started = time.perf_counter()
    yield
    seconds = torch.tensor([time.perf_counter() - started, float(peak - before)], dtype=torch.float64)
    stop.set()
    watcher.join()
    seconds[1] = max(peak, anonymous()) - before
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    result.setdefault(f"{name} s", []).append(float(seconds[0]))
    result.setdefault(f"{name} MiB", []).append(float(seconds[1]) / (1 << 20))


def state_of(rank: int, size: int) -> dict[str, torch.Tensor]:
    """Tensors of one rank."""
    torch.manual_seed(rank)
    return {f"r{rank}.w{index}": torch.randn(TENSOR // 4) for index in range(size // TENSOR)}


def save_and_load(folder: Path, state: dict[str, torch.Tensor], ranks: Ranks, rounds: int) -> dict[str, Any]:
    """Every way, in turn and each round from another one on, so that all see the same disk."""
    result: dict[str, list[float]] = {}
    empty = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    target = Target(empty, [], {}, strict=True, trust=False, checksums=True)
    kinds = ("plain", "off", "crc32", "sha256")
    for number in range(rounds):
        for kind in (*kinds[number % 4 :], *kinds[: number % 4]):
            path = folder / f"{kind}.ckpt"
            if dist.get_rank() == 0:
                shutil.rmtree(path, ignore_errors=True)
                os.sync()
            dist.barrier()
            with measured(result, f"save {kind}"):
                if kind == "plain":
                    dcp.save({"model": state}, checkpoint_id=path)
                else:
                    about = {"step": 1, "epoch": 0}
                    write(
                        Part({"model": dict(state)}, dist.get_rank(), {}, as_bytes({}), about),
                        path,
                        ranks,
                        kind,
                    )
            with measured(result, f"load {kind}"):
                if kind == "plain":
                    dcp.load({"model": empty}, checkpoint_id=path)
                else:
                    load_folder(path, target, ranks)
            assert all(torch.equal(empty[name], tensor) for name, tensor in state.items())
    return {name: statistics.median(values) for name, values in result.items()}


def step_of() -> Callable[[], None]:
    """A step of training with an all-reduce at its end, as stages wait for each other."""
    layer = torch.nn.Linear(512, 512)
    batch = torch.randn(64, 512)

    def step() -> None:
        for _ in range(20):
            layer(batch).square().mean().backward()
        dist.all_reduce(layer.weight.grad)
        layer.zero_grad()

    return step


def steps_during_a_save(folder: Path, state: dict[str, torch.Tensor], ranks: Ranks) -> dict[str, float]:
    """The median step with nothing else going on, and while a save does."""
    step, background = step_of(), Background()

    def timed() -> float:
        started = time.perf_counter()
        step()
        return time.perf_counter() - started

    for _ in range(10):
        timed()
    quiet = statistics.median(timed() for _ in range(60))
    part = Part({"model": dict(state)}, dist.get_rank(), {}, as_bytes({}), {"step": 1, "epoch": 0})
    started = time.perf_counter()
    staged = part.staged()
    stall = time.perf_counter() - started
    background.start(lambda pace: write(staged, folder / "async.ckpt", ranks, "sha256", pace))
    going = torch.ones(1)
    busy: list[float] = []
    while going.item():
        busy.append(timed())
        going[0] = float(background._busy)
        dist.all_reduce(going, dist.ReduceOp.MAX)
    background.wait()
    return {"step quiet s": quiet, "step during save s": statistics.median(busy), "staging s": stall,
            "steps during save": len(busy)}  # fmt: skip


def run(rank: int, options: argparse.Namespace, port: int) -> None:
    """One rank."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, options.ranks, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.ranks)
    timeout = timedelta(seconds=600)
    ranks = Ranks(dist.new_group(backend="gloo", timeout=timeout), store, rank, timeout)
    folder = Path(options.folder) / "benchmark-checkpoint"
    folder.mkdir(parents=True, exist_ok=True)
    state = state_of(rank, int(options.gib * (1 << 30)) // options.ranks)
    result = save_and_load(folder, state, ranks, options.rounds)
    result.update(steps_during_a_save(folder, state, ranks))
    for way in ("save", "load"):
        for kind in ("off", "crc32", "sha256"):
            result[f"{way} {kind} / plain"] = result[f"{way} {kind} s"] / result[f"{way} plain s"]
    result["step during save / quiet"] = result["step during save s"] / result["step quiet s"]
    dist.barrier()
    if rank == 0:
        print(json.dumps({name: round(value, 4) for name, value in sorted(result.items())}, indent=1))
        shutil.rmtree(folder)
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", default=".", help="on the disk to measure")
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(run, (options, port), nprocs=options.ranks)


if __name__ == "__main__":
    main()
