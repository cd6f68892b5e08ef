"""What runs inside a rank of a pool: take a job, become a rank of a fresh group, report how it ended."""

import faulthandler
import gc
import os
import pickle
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Job:
    """What every rank of one run is told."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    environment: dict[str, str]
    folder: str
    group: bool
    dies: bool


def serve(rank: int, connection: Connection, log_path: str) -> None:
    """The whole life of a rank: take a job, run it, report, until the pool hangs up."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background has it ignored
    _redirect(log_path)
    torch.set_num_threads(1)
    gc.freeze()
    connection.send_bytes(b"ready")
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        os.ftruncate(1, 0)
        connection.send_bytes(_attempt(rank, message))


def _redirect(log_path: str) -> None:
    log = os.open(log_path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(file=sys.stderr)
    faulthandler.register(signal.SIGUSR2, file=sys.stderr, all_threads=True)


def _attempt(rank: int, message: bytes) -> bytes:
    """Run one job; the answer is (value, error, traceback, time of the end), pickled."""
    dies = False
    try:
        job: Job = pickle.loads(message)
        dies = job.dies
        value = _run_job(rank, job)
        return pickle.dumps((value, None, "", time.monotonic()))
    except Exception as error:
        text, ended = traceback.format_exc(), time.monotonic()
        if dies:
            print(text, file=sys.stderr, flush=True)
            os._exit(1)
        return pickle.dumps((None, _portable(error), text, ended))


def _portable(error: Exception) -> Exception:
    try:
        copy = pickle.loads(pickle.dumps(error))
        return error if type(copy) is type(error) else RuntimeError(f"{type(error).__name__}: {error}")
    except Exception:  # an exception class is free to be unpicklable in any way
        return RuntimeError(f"{type(error).__name__}: {error}")


def _run_job(rank: int, job: Job) -> Any:
    environment = dict(os.environ)
    os.environ.update(job.environment, **_rank_environment(rank))
    os.chdir(job.folder)
    random.seed(0)
    torch.manual_seed(0)
    _set_lightning_rank(rank)
    if job.group:
        _join_group(rank, int(os.environ["WORLD_SIZE"]))
    value = job.function(*job.args)
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    _forget_settings()
    return value


def _rank_environment(rank: int) -> dict[str, str]:
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "ROLE_RANK": str(rank)}


def _set_lightning_rank(rank: int) -> None:
    # Lightning reads RANK once, at import, which here is before the rank has one.
    from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    fabric_rank.rank = rank_zero_only.rank = rank


def _join_group(rank: int, size: int) -> None:
    """Make the group, and go on only when every rank has it.

    A rank whose function ends its process at once would otherwise do so while a slower peer still connects to
    it, and the peer would report that instead of what its own function does. The store outlives the ranks.
    """
    store = _group_store()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    store.set(f"joined {rank}", "")
    store.wait([f"joined {peer}" for peer in range(size)])


def _group_store() -> dist.Store:
    """A store for the group of the pool, so that MASTER_PORT stays untouched for a Trainer's own."""
    host, port = os.environ["POOL_STORE"].split(":")
    return dist.PrefixStore("pool", dist.TCPStore(host, int(port), is_master=False))


def _forget_settings() -> None:
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(1)
    for _ in range(3):  # what finalizers let go of, such as groups and threads, is garbage of the next
        gc.collect()
    gc.freeze()  # what a job has imported, such as transformers, is not looked at again in each later one
