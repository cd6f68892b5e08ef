"""Run random modules whose hooks read and change gradients; each has to be one device's run.

    python benchmarks/random_gradients.py --cases 100

What a case is stands in `tests/random_gradients.py`. A seed that is other than on one device is printed with
its case, and the exit status is 1; so is one that is refused, which counts apart.
"""

import sys
import time
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from jsonargparse import auto_cli

sys.path.insert(0, str(Path(__file__).parents[1]))

from lightning_pipeline.errors import PipelineError
from tests.pool import Pool, RankFailure
from tests.random_gradients import drawn, run
from tests.ranks.test_random_gradients import compare


def _outcome(seed: int, pool: Pool) -> str:
    """What became of a case: "equal", "no reference", or what is wrong."""
    try:
        expected = run(None, seed)
    except Exception:  # the case is not one that a device can train
        return "no reference"
    pipeline: dict[str, Any] = {"num_microbatches": 2}
    try:
        compare(run({**pipeline, "stages": 1}, seed), expected)
        for found in pool(run, {**pipeline, "stages": 2}, seed, group=False):
            compare(found, expected)
    except (RankFailure, PipelineError) as error:
        return f"refused: {str(error)[:600]}"
    except AssertionError as error:
        return f"other: {str(error)[:1500]}"
    return "equal"


def main(cases: int = 100, first: int = 0, seconds: float = 0) -> None:
    """Run cases and print a count of what happened.

    Args:
        cases: How many.
        first: Seed of the first.
        seconds: No case is begun after; 0: all are.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    begin, pool, counts = time.perf_counter(), Pool(2), dict[str, int]()
    for seed in range(first, first + cases):
        if seconds and time.perf_counter() - begin > seconds:
            break
        outcome = _outcome(seed, pool)
        kind = outcome.partition(":")[0]
        counts[kind] = counts.get(kind, 0) + 1
        if kind in ("refused", "other"):
            print(f"seed {seed}: {outcome}\n    {drawn(seed)}", flush=True)
        if kind == "refused":
            pool.close()
            pool = Pool(2)
    pool.close()
    print(
        f"cases from {first} in {time.perf_counter() - begin:.0f} s, torch {torch.__version__}, "
        f"lightning {lightning.__version__}: {counts}"
    )
    if "other" in counts:
        raise SystemExit(1)


if __name__ == "__main__":
    auto_cli(main)
