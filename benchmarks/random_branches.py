"""Run random steps in which numbers of the batch decide; each has to equal one device or be refused.

    python benchmarks/random_branches.py --programs 200

What a program is and what is compared stands in `tests/branch_programs.py`. Seeds that differ are printed
with their program; the exit status is 1 where one does without a word. "warned" ones differ with a warning,
and "needless" ones are equal and were warned of.
"""

import collections
import logging
import sys
import time
import warnings
from pathlib import Path

import torch
from jsonargparse import auto_cli

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.branch_programs import outcome_of, random_branches
from tests.pool import Pool


def main(programs: int = 200, first: int = 0, ranks: int = 1) -> None:
    """Run programs and print a count of what happened.

    Args:
        programs: How many.
        first: Seed of the first.
        ranks: One, or two that hold a stage each.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    begin, counts = time.perf_counter(), collections.Counter[str]()
    pool = Pool(ranks) if ranks > 1 else None
    for seed in range(first, first + programs):
        program = random_branches(seed)
        end = outcome_of(program, pool)
        kind = end.partition(":")[0]
        counts[kind] += 1
        if kind not in ("equal", "refused", "no reference"):
            print(f"seed {seed}: {end[:300]}\n    {program}", flush=True)
    if pool is not None:
        pool.close()
    took = time.perf_counter() - begin
    print(f"{first} to {first + programs - 1} in {took:.0f} s, torch {torch.__version__}: {dict(counts)}")
    raise SystemExit(bool(counts["wrong"]))


if __name__ == "__main__":
    auto_cli(main)
