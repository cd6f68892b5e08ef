"""Run random Trainers (flags, callbacks, data) on two stages; each has to be one device's run.

    python benchmarks/random_trainers.py --cases 100

What a case is and what is compared stands in `tests/random_trainers.py`. A seed that fails is printed with
its case, and the exit status is 1.
"""

import sys
import tempfile
import time
import warnings
from pathlib import Path

import lightning
import torch
from jsonargparse import auto_cli

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.pool import Pool, RankFailure
from tests.random_trainers import compare, drawn, run


def main(cases: int = 100, first: int = 0, seconds: float = 0) -> None:
    """Run cases and print a count of what happened.

    Args:
        cases: How many.
        first: Seed of the first.
        seconds: No case is begun after; 0: all are.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    begin, wrong, errors, pool = time.perf_counter(), 0, 0, Pool(2)
    done = 0
    for seed in range(first, first + cases):
        if seconds and time.perf_counter() - begin > seconds:
            break
        done += 1
        try:
            with tempfile.TemporaryDirectory() as folder:
                expected = run(None, seed, f"{folder}/one")
                errors += isinstance(expected, str)
                for found in pool(run, {"stages": 2, "num_microbatches": 2}, seed, f"{folder}/two"):
                    compare(found, expected)
        except (AssertionError, RankFailure) as error:
            wrong += 1
            print(f"seed {seed}: {str(error)[:1500]}\n    {drawn(seed)}", flush=True)
            if isinstance(error, RankFailure):
                pool.close()
                pool = Pool(2)
    pool.close()
    print(
        f"{done} cases from {first} in {time.perf_counter() - begin:.0f} s, torch {torch.__version__}, "
        f"lightning {lightning.__version__}: {wrong} other than on one device; {errors} end with an error "
        "of Lightning's there"
    )
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    auto_cli(main)
