"""Does every model that trains on one device train over stages? Each tiny, all numbers compared.

    python -m benchmarks.zoo --records zoo.jsonl            # what is not in there yet; the table at the end
    python -m benchmarks.zoo --records zoo.jsonl --only llama
    python -m benchmarks.zoo --records zoo.jsonl --variant dropout --sample 60
    python -m benchmarks.zoo --records zoo.jsonl --workers 0 --page docs/models.md

Losses, every gradient and buffers of 2 and 3 stages against one process on the same micro-batches, in float64
where the model allows it. One line for each (model type, class).
"""

import gc
import json
import multiprocessing
import os
import re
import resource
import signal
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from jsonargparse import auto_cli
from torch import Tensor, nn

from benchmarks import torchvision_operators  # noqa: F401  # before Lightning, which imports torchvision
from benchmarks.zoo_compare import COMPILED, Arguments, Trained, alone, compared, has_drawn, short
from benchmarks.zoo_page import page_text, read, table, variants_text, write_page
from benchmarks.zoo_transformers import VARIANTS, builds, offers, pairs
from lightning_pipeline.model.tensors.structure import map_tensors

MOST_BYTES = 6 << 30  # that a process may hold: what takes more fails alone
PAIRS_A_PROCESS = 40  # what libraries keep of each adds up: at the bound everything fails
_FULL = 3  # how a process ends that is at the bound: the pair is run once more, in a fresh one
_AT_BOUND = re.compile(r"allocate memory|bad_alloc|MemoryError")

# ---- one pair


def run_pair(kind: str, name: str, counts: tuple[int, ...] = (2, 3), variant: str = "") -> dict[str, Any]:
    """What becomes of one architecture under one head, over so many stages."""
    record: dict[str, Any] = {"type": kind, "class": name} | ({"variant": variant} if variant else {})
    start = time.process_time()
    tried: list[str] = []
    try:
        module, batches, expected, draws = trains(kind, name, variant, tried)
    except Exception as error:
        return record | {"outcome": "not run", "why": short(error), "tried": tried}
    record["alone_s"] = round(time.process_time() - start, 2)
    held = 2 if variant == "dropout" else 1  # stages of the one rank that others are compared with
    compiles = variant if variant in COMPILED else ""
    return record | compared(module, batches, expected, draws, (2,) if compiles else counts, held, compiles)


def trains(
    kind: str, name: str, variant: str = "", tried: list[str] | None = None
) -> tuple[nn.Module, list[Arguments], tuple[list[Tensor], nn.Module], bool]:
    """The module and the first batches of its recipe with which one process trains, and whether it draws."""
    failed: list[Exception] = []
    tried = [] if tried is None else tried
    for make in builds(kind, name, variant):
        try:
            model, recipe = make()
        except Exception as error:
            failed.append(error)
            tried.append(_where(error))
            continue
        for attempt in recipe.attempts():
            for dtype in (torch.float64, torch.float32):
                module = Trained(model.to(dtype), every_output=variant == "hidden states")
                module.train(variant != "evaluation")
                try:
                    batches: list[Arguments] = [((_cast(batch, dtype), 0), {}) for batch in attempt()]
                    expected = alone(module, batches)
                    if not all(bool(loss.isfinite()) for loss in expected[0]):
                        raise ValueError("the loss is not finite")
                except Exception as error:
                    failed.append(error)
                    tried.append(_where(error))
                    if not _OF_TYPES.search(str(error)):
                        break
                else:
                    return module, batches, expected, has_drawn()
    raise next((error for error in failed if "requires the" in str(error)), failed[0])


_OF_TYPES = re.compile(r"dtype|scalar type|[Ff]loat|[Dd]ouble")


def _where(error: Exception) -> str:
    """An error, and the line of the model that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    of_model = [frame for frame in frames if "modeling_" in frame.filename] or frames
    return f"{short(error)[:200]} [{Path(of_model[-1].filename).name}:{of_model[-1].lineno}]"


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)


# ---- all of them


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise `TimeoutError` after so much CPU time."""

    def stop(number: int, frame: Any) -> None:
        raise TimeoutError(f"more than {seconds} s")

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)  # of CPU time: other work on the machine does not count
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _work(todo: list[tuple[str, str]], records: Path, now: Path, seconds: int, variant: str) -> None:
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    warnings.simplefilter("ignore")
    for index, (kind, name) in enumerate(todo):
        if index % 20 == 19:
            gc.collect()
        now.write_text(json.dumps([kind, name]))
        try:
            with limited(seconds):
                record = run_pair(kind, name, variant=variant)
            if index and _AT_BOUND.search(record.get("why", "")):
                os._exit(_FULL)  # what runs after it in this process may fail for that alone
        except MemoryError:
            os._exit(_FULL)
        except RuntimeError as error:
            if not _AT_BOUND.search(str(error)):
                raise
            os._exit(_FULL)
        except TimeoutError as error:
            record = {"type": kind, "class": name, "variant": variant, "outcome": "slow", "why": str(error)}
        if "more than" in record.get("why", "") and record["why"].startswith("TimeoutError"):
            record["outcome"] = "slow"
        _append(records, record)
    now.unlink(missing_ok=True)


def _append(records: Path, record: dict[str, Any]) -> None:
    with records.open("a") as file:
        file.write(json.dumps(record) + "\n")


def _to_do(
    records: Path, only: str, again: tuple[str, ...], variant: str, sample: int
) -> list[tuple[str, str]]:
    """Pairs that are not recorded under this variant, types of which none is recorded first."""
    known = read(records, variant)
    asked = [pair for pair in pairs() if only in "/".join(pair)]
    if variant:  # the first head of each type that is equal without it
        plain = read(records)
        asked = [pair for pair in asked if plain.get(pair, {}).get("outcome") == "equal"]
        asked = [
            p
            for p in {kind: (kind, name) for kind, name in reversed(asked)}.values()
            if offers(p[0], variant)
        ]
    if sample:
        asked = asked[:: max(len(asked) // sample, 1)][:sample]
    todo = [pair for pair in asked if pair not in known or known[pair]["outcome"] in again]
    seen = Counter(kind for kind, _ in known)
    nth: dict[tuple[str, str], int] = {}
    for pair in todo:
        nth[pair] = seen[pair[0]]
        seen[pair[0]] += 1
    return sorted(todo, key=lambda pair: nth[pair])


def sweep(records: Path, todo: list[tuple[str, str]], workers: int, seconds: int, variant: str) -> None:
    """Run pairs in processes that are started again where one dies; each takes the next few that are left."""
    left = [todo[first : first + PAIRS_A_PROCESS] for first in range(0, len(todo), PAIRS_A_PROCESS)]
    running: dict[int, tuple[Any, list[tuple[str, str]]]] = {}
    alone: set[tuple[str, str]] = set()  # begin a process of their own
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__spec__.name])  # imported once
    while left or running:
        for index in range(workers):
            now = records.with_suffix(f".now{index}")
            if index in running:
                process, share = running[index]
                process.join(timeout=0.1)
                if process.is_alive():
                    continue
                del running[index]
                rest = _rest(process.exitcode, now, share, alone, records, variant)
                if rest:
                    left.insert(0, rest)
            if left:
                share = left.pop(0)
                now.unlink(missing_ok=True)
                process = context.Process(target=_work, args=(share, records, now, seconds, variant))
                process.start()
                running[index] = process, share


def _rest(
    code: int,
    now: Path,
    share: list[tuple[str, str]],
    alone: set[tuple[str, str]],
    records: Path,
    variant: str,
) -> list[tuple[str, str]]:
    """Pairs that a process has left, which ended with this code at the pair that `now` names."""
    pair = tuple(json.loads(now.read_text())) if now.exists() else None
    if not code or pair is None:
        return []
    place = share.index(pair)
    if code == _FULL and pair not in alone:
        alone.add(pair)
        return share[place:]
    died = {"type": pair[0], "class": pair[1], "variant": variant, "outcome": "died", "why": f"exit {code}"}
    _append(records, died)
    return share[place + 1 :]


def main(
    records: Path = Path("zoo.jsonl"), only: str = "", again: list[str] | None = None, workers: int = 1,
    seconds: int = 90, limit: int = 0, page: Path | None = None, variant: str = "", sample: int = 0,
    listed: Path | None = None,
) -> None:  # fmt: skip
    """Run what is not recorded yet and print the table.

    Args:
        records: One line for each pair; what is in there is not run again.
        only: Part of `type/class`.
        again: Outcomes that are run again.
        workers: Processes. 0: only print.
        seconds: Longest CPU time for a pair.
        limit: Largest number of pairs. 0: all.
        page: Is given the table, between two marks.
        variant: Another way to run what is equal: "dropout", "checkpointing", "router losses", "hidden
            states", "eager", "sdpa", "evaluation", "compiled units" or "compiled module".
        sample: Number of pairs, evenly taken from all. 0: all.
        listed: A file with one `type/class` a line: only these, in this order.
    """
    assert variant in ("", *VARIANTS), f"variant is one of {VARIANTS}"
    if workers:
        todo = _to_do(records, only, tuple(again or ()), variant, sample)
        if listed is not None:
            order = [tuple(line.split("/")) for line in listed.read_text().split()]
            todo = [pair for pair in order if pair in set(todo)]
        sweep(records, todo[: limit or None], workers, seconds, variant)
    print(table(read(records, variant)))
    if page is not None:
        write_page(page, page_text(read(records), len(pairs())) + variants_text(records, VARIANTS))


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
