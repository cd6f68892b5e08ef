"""Run random steps through random cuts; each has to equal its reference or be refused by one of our errors.

    python benchmarks/random_steps.py --programs 2000

What a program is and what it is compared with stands in `tests/unit/split/programs.py`. A seed that fails is
printed with its program, and the exit status is 1.
"""

import collections
import math
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from jsonargparse import auto_cli

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.unit.split.programs import BY_VALUE, outcome_of, random_program
from tests.unit.split.wide_programs import (
    whole_outcome_of,
    whole_program,
    wide_outcome_of,
    wide_program,
)

KINDS: dict[str, Any] = {
    "steps": (random_program, outcome_of),
    "values": (partial(random_program, more=2 * BY_VALUE), outcome_of),
    "wide": (wide_program, wide_outcome_of),
    "whole": (whole_program, whole_outcome_of),
}


def main(
    programs: int = 2000, first: int = 0, kind: Literal["steps", "values", "wide", "whole"] = "steps",
    seconds: float = math.inf,
) -> None:  # fmt: skip
    """Run programs and print a count of what happened.

    Args:
        programs: How many.
        first: Seed of the first.
        kind: "values" has code that units' values steer; "wide" has hooks, effects, loops and batches of
            several sizes; "whole" compares with the whole batch, for losses that are divided by something.
        seconds: Begin no program after this time.
    """
    run_all(kind, *KINDS[kind], range(first, first + programs), seconds)


def run_all(
    kind: str, make: Callable[[int], Any], run: Callable[[Any], str], seeds: range, seconds: float
) -> None:
    """Run a program for each seed, print those that fail, and a count.

    Args:
        kind: What they are, for the count.
        make: Makes a program of a seed.
        run: Runs one, and says how it ended: a word, and a colon before more of them.
        seeds: All of them.
        seconds: Begin no program after this time.

    Raises:
        SystemExit: One is wrong, or ends with an error that is none of ours.
    """
    torch.set_num_threads(1)
    begin, counts = time.perf_counter(), collections.Counter[str]()
    for seed in seeds:
        try:
            end = run(make(seed)).partition(":")[0]
        except AssertionError as error:
            end = "WRONG"
            print(f"seed {seed}: wrong: {str(error).splitlines()[0]}; {make(seed)}", flush=True)
        except Exception as error:
            end = "CRASHED"
            last = traceback.extract_tb(error.__traceback__)[-1]
            print(
                f"seed {seed}: {type(error).__name__}: {str(error)[:200]} at {last.filename}:{last.lineno}; "
                f"{make(seed)}",
                flush=True,
            )
        counts[end] += 1
        if time.perf_counter() - begin > seconds:
            break
    took = time.perf_counter() - begin
    print(f"{kind} {seeds.start} to {seed} in {took:.0f} s, torch {torch.__version__}: {dict(counts)}")
    if counts["WRONG"] or counts["CRASHED"]:
        raise SystemExit(1)


if __name__ == "__main__":
    auto_cli(main)
