"""Run random modules that change what outlives their steps; each has to equal one device or be refused.

    python benchmarks/random_effects.py --programs 400

What a program is and what is compared stands in `tests/effect_programs.py`. Seeds that differ are printed
with their program; the exit status is 1 where one does without a word. "warned" ones differ with a warning.
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

from tests.effect_programs import outcomes_of, random_effects, run_whole
from tests.pool import Pool

_AT_ONCE = 10


def main(
    programs: int = 400, first: int = 0, ranks: int = 2, arrays: bool = False, whole_steps: bool = False
) -> None:  # fmt: skip
    """Run programs and print a count of what happened.

    Args:
        programs: How many.
        first: Seed of the first.
        ranks: Processes that hold the stages.
        arrays: Whether half of what they change are NumPy arrays.
        whole_steps: Whether every rank runs the steps whole.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    begin, counts, pool = time.perf_counter(), collections.Counter[str](), Pool(ranks)
    for start in range(first, first + programs, _AT_ONCE):
        seeds = range(start, min(start + _AT_ONCE, first + programs))
        made = [random_effects(seed, ranks, arrays=arrays) for seed in seeds]
        made = list(map(run_whole, made)) if whole_steps else made
        for seed, program, end in zip(seeds, made, outcomes_of(made, pool), strict=True):
            kind = end.partition(":")[0]
            counts[kind] += 1
            if kind != "equal":
                print(f"seed {seed}: {end[:600]}\n    {program}", flush=True)
    pool.close()
    took = time.perf_counter() - begin
    print(f"{first} to {first + programs - 1} in {took:.0f} s, torch {torch.__version__}: {dict(counts)}")
    raise SystemExit(bool(counts["wrong"]))


if __name__ == "__main__":
    auto_cli(main)
