"""Does it run on this machine's GPU, are the numbers those of one device, and what does it cost?

    python benchmarks/gpu.py                    everything, in one call; several ranks share one GPU
    python benchmarks/gpu.py --device cpu       the matrix without a GPU, to try the script out

Each case is a run in processes of its own: fit with validation, a checkpoint and a resume from it, test and
predict. Weights, metrics and predictions are compared with a run of the same module by one device without
this package. Then runs in which a rank fails, and one of a model that one device cannot hold. The figures at
the end (synchronisation in a step, speed, messages, memory) need CUDA. The exit status is 0 where every case
and every bound holds.
"""

import faulthandler
import multiprocessing
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import jsonargparse
import torch
from gpu_cases import DRAWS, run_case
from gpu_costs import figures as figures_of
from gpu_costs import message
from gpu_faults import FAULTS, break_off, grow, judge

from lightning_pipeline.ranks import nccl_version

# How far apart the numbers may be: additions in another order, at each precision.
TOLERANCE = {"32-true": 1e-4, "bf16-mixed": 3e-2, "bf16-true": 6e-2, "16-mixed": 1e-2}
# Imported once, by a server that each process is forked from; importing them starts nothing on a device.
PRELOAD = [
    "lightning.pytorch",
    "lightning_pipeline",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
]
Case = Callable[..., "dict[str, Any] | str"]


def work(case: dict[str, Any], log: str, environment: dict[str, str]) -> None:
    """One process of a case: run it and leave what it found in a file."""
    out = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(out, descriptor)
    os.environ.update(environment)
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(case["seconds"] - 5)  # what a rank does that does not end
    folder = Path(case["folder"])
    kinds: dict[str, Callable[[], dict[str, Any]]] = {
        "figures": lambda: figures_of(folder),
        "message": message,
        "fault": lambda: break_off(case, folder),
        "grown": lambda: grow(case, folder),
    }
    found = kinds.get(case["name"], lambda: run_case(case, folder))()
    if environment["NODE_RANK"] == "0":
        torch.save(found, folder / "found.pt")


def start(case: dict[str, Any]) -> dict[str, Any] | str:
    """Run a case, each rank as a node of its own, so that several can share a GPU.

    Returns:
        What rank 0 found, or the last line of what went wrong.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": "0"}
    logs = [Path(case["folder"]) / f"rank{rank}.log" for rank in range(case["ranks"])]
    processes = [
        context.Process(target=work, args=(case, str(log), {**common, "NODE_RANK": str(rank)}))
        for rank, log in enumerate(logs)
    ]
    until = time.monotonic() + case["seconds"]
    for process in processes:
        process.start()
    for process in processes:
        process.join(max(1.0, until - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    if case["name"] == "fault":
        told = judge(case["fault"], Path(case["folder"]), case["ranks"])
        told = told or ("" if None not in codes else f"not all ranks ended: {codes}")
        return told or {"told by all ranks": [p.read_text()[:90] for p in Path(case["folder"]).glob("told*")]}
    if any(codes) or None in codes:
        failed = [log for log, code in zip(logs, codes, strict=True) if code]
        text = [line.strip() for log in failed or logs for line in log.read_text().splitlines()]
        late = f"no end within {case['seconds']:g} s"
        return next((line for line in reversed(text) if "Error" in line), late)
    found: dict[str, Any] = torch.load(Path(case["folder"]) / "found.pt", weights_only=True)
    return found


def farthest(found: Any, expected: Any) -> float:
    """The largest difference, relative to the largest number it is found in."""
    if isinstance(expected, dict):
        return max((farthest(found[name], value) for name, value in expected.items()), default=0.0)
    if isinstance(expected, list):
        assert len(found) == len(expected), "as many predictions as one device"
        return max((farthest(a, b) for a, b in zip(found, expected, strict=True)), default=0.0)
    a, b = torch.as_tensor(found).double(), torch.as_tensor(expected).double()
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-3)) if b.numel() else 0.0


def pipelines(device: str, num_microbatches: int) -> dict[str, tuple[int, dict[str, Any]]]:
    """Ranks and settings of each row, by its name."""
    common = {"num_microbatches": num_microbatches, "step_timeout": 60}
    host = {**common, "transport": "host", "process_group_backend": "gloo"}
    rows: dict[str, tuple[int, dict[str, Any]]] = {
        "1 rank x 4 stages": (
            1,
            {**common, "stages": 1, "stages_per_rank": 4, "schedule": "LoopedBFS"},
        ),
        "2 ranks, host": (2, {**host, "stages": 2}),
        "4 ranks, host, ZBH1": (4, {**host, "stages": 4, "schedule": "ZBH1"}),
    }
    if device == "cuda":
        ipc = {**common, "transport": "ipc", "process_group_backend": "gloo"}
        looped = {"stages_per_rank": 2, "schedule": "Interleaved1F1B"}
        rows["2 ranks, ipc"] = (2, {**ipc, "stages": 2})
        rows["2 ranks x 2 stages, ipc"] = (2, {**ipc, "stages": 2, **looped})
        rows["4 ranks, ipc, ZBV"] = (4, {**ipc, "stages": 4, "schedule": "ZBV"})
        if num_microbatches > 1:  # each replica has half of a batch
            rows["2 x 2 ranks, ipc"] = (4, {**ipc, "stages": 2, "data_parallel_size": 2})
        if nccl_version() >= (2, 30, 3):  # older ones refuse two ranks of one GPU
            nccl = {**common, "transport": "nccl"}
            rows["2 ranks, nccl"] = (2, {**nccl, "stages": 2})
            rows["2 ranks x 2 stages, nccl"] = (2, {**nccl, "stages": 2, **looped})
            rows["4 ranks, nccl, ZBV"] = (4, {**nccl, "stages": 4, "schedule": "ZBV"})
            rows["2 ranks, auto"] = (2, {**common, "stages": 2})
            if num_microbatches > 1:
                rows["2 x 2 ranks, nccl"] = (4, {**nccl, "stages": 2, "data_parallel_size": 2})
    return rows


def measure(
    device: Literal["cuda", "cpu"] = "cuda",
    models: tuple[str, ...] = (
        "layers", "batch norm", "dropout", "recomputed", "gpt2", "gpt2 with dropout", "llama",
    ),
    precisions: tuple[str, ...] = ("32-true", "bf16-mixed", "bf16-true", "16-mixed"),
    seconds: float = 120.0,
    rows: tuple[str, ...] = (),
    figures: bool = True,
    faults: bool = True,
    grown_gib: float = 8.0,
    at_once: int = 1,
    logs: Path | None = None,
) -> None:  # fmt: skip
    """Run everything and print a line per case.

    Args:
        device: Where.
        models: Rows of the matrix. With "batch norm" a batch is not cut: one device sees it whole.
        precisions: Columns.
        seconds: Longest time of a case.
        rows: Those of the matrix whose name has one of these words; default: all.
        figures: Whether to measure on CUDA what steps and messages cost.
        faults: Whether to let ranks fail.
        grown_gib: Memory that each rank may take of a GPU for a model of about twice as much;
            0: this case is left out.
        at_once: Cases of the matrix that run side by side.
        logs: A folder for what the ranks of cases printed that went wrong.
    """
    if device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here; --device cpu tries the script out")
        raise SystemExit(1)
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    nccl = ".".join(map(str, nccl_version())) if device == "cuda" else "none"
    print(f"{where}, torch {torch.__version__}, NCCL {nccl}", flush=True)
    with tempfile.TemporaryDirectory() as root:

        def case(name: str, title: str, **values: Any) -> dict[str, Any] | str:
            folder = tempfile.mkdtemp(dir=root)
            options = {"device": device, "folder": folder, "seconds": seconds, **values}
            found = start({"name": name, **options})
            if isinstance(found, str) and logs is not None:
                for log in Path(folder).glob("rank*.log"):
                    logs.mkdir(parents=True, exist_ok=True)
                    shutil.copy(log, logs / f"{title.replace(' ', '_')}.{log.name}")
            return found

        with ThreadPoolExecutor(at_once) as pool:
            columns = [
                pool.submit(_column, case, model, precision, device, rows)
                for model in models
                for precision in precisions
            ]
            failed = sum(column.result() for column in columns)
            if faults:
                failed += sum(pool.map(lambda row: _fault(case, *row), _faults(device)))
        if device == "cuda" and grown_gib:
            failed += _grown(case, grown_gib)
        if device == "cuda" and figures:
            for name, ranks in (("figures", 1), ("message", 2)):
                failed += _figures(case(name, name, ranks=ranks))
    print(f"{failed} cases failed")
    raise SystemExit(failed > 0)


def _column(case: Case, model: str, precision: str, device: str, rows: tuple[str, ...]) -> int:
    """A model at a precision, in all rows: how many of them went wrong."""
    count = 1 if model == "batch norm" else 4
    alone = {"stages": 1, "num_microbatches": count, "schedule": "GPipe"} if model in DRAWS else None
    title = f"{model} {precision}"
    expected = case("one", title, model=model, precision=precision, ranks=1, pipeline=alone)
    if isinstance(expected, str):
        print(f"{model:18} {precision:10} one device: {expected}", flush=True)
        return 1
    failed = 0
    for row, (ranks, pipeline) in pipelines(device, count).items():
        if model in DRAWS and "data_parallel_size" in pipeline:
            continue  # each replica draws its own
        if rows and not any(word in row for word in rows):
            continue
        found = case(row, f"{title} {row}", model=model, precision=precision, ranks=ranks, pipeline=pipeline)
        if isinstance(found, str):
            failed, text = failed + 1, found
        else:
            names = ("weights",) if "data_parallel_size" in pipeline else ("weights", "metrics", "predicted")
            parts = {part: farthest(found[part], expected[part]) for part in names}
            failed += max(parts.values()) > TOLERANCE[precision]
            text = ", ".join(f"{part} {value:.1e}" for part, value in parts.items())
        print(f"{model:18} {precision:10} {row:24} {text}", flush=True)
    return failed


def _faults(device: str) -> list[tuple[str, str, dict[str, Any]]]:
    rows = {name: row for name, row in pipelines(device, 4).items() if name.startswith("2 ranks, ")}
    return [(fault, name, pipeline) for fault in FAULTS for name, (_, pipeline) in rows.items()]


def _fault(case: Case, fault: str, row: str, pipeline: dict[str, Any]) -> int:
    options: dict[str, Any] = {"precision": "32-true", "ranks": 2, "pipeline": dict(pipeline)}
    found = case("fault", f"{fault} {row}", fault=fault, **options)
    print(f"{fault:18} {row:24} {found}", flush=True)
    return isinstance(found, str)


def _grown(case: Case, limit: float) -> int:
    """A model of about twice the limit, on one rank and on four."""
    width, count = 2048, max(2, round(limit * 2 * 2**30 / 16 / 12 / 2048**2))
    options: dict[str, Any] = {"limit_gib": limit, "layers": count, "width": width}
    alone = case("grown", "grown alone", ranks=1, pipeline=None, **options)
    pipeline = {"stages": 4, "num_microbatches": 4, "process_group_backend": "gloo", "transport": "ipc"}
    spread = case("grown", "grown", ranks=4, pipeline=pipeline, **options)
    print(f"{count} layers of width {width} within {limit} GiB on one rank: {alone}")
    print(f"{count} layers of width {width} within {limit} GiB on each of four: {spread}", flush=True)
    return isinstance(spread, str) + isinstance(alone, dict)


def _figures(found: dict[str, Any] | str) -> int:
    if isinstance(found, str):
        print(found)
        return 1
    print("\n".join(f"{what}: {value}" for what, value in found.items()), flush=True)
    return len(found["missed"])


if __name__ == "__main__":
    # jsonargparse before 4.41 has it under another name
    getattr(jsonargparse, "auto_cli", jsonargparse.CLI)(measure, as_positional=False)
