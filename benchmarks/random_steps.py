"""Run random steps through random cuts; each has to equal its reference or be refused by one of our errors.

    python benchmarks/random_steps.py --programs 2000

What a program is and what it is compared with stands in `tests/unit/split/programs.py`. A seed that fails is
printed with its program, and the exit status is 1.
"""

import collections
import sys
import time
import traceback
from pathlib import Path

import torch
from jsonargparse import auto_cli

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.unit.split.programs import outcome_of, random_program


def main(programs: int = 2000, first: int = 0) -> None:
    """Run programs and print a count of what happened.

    Args:
        programs: How many.
        first: Seed of the first.
    """
    torch.set_num_threads(1)
    begin, counts = time.perf_counter(), collections.Counter[str]()
    for seed in range(first, first + programs):
        try:
            kind = outcome_of(random_program(seed)).partition(":")[0]
        except AssertionError as error:
            kind = "WRONG"
            print(f"seed {seed}: wrong: {str(error).splitlines()[0]}; {random_program(seed)}", flush=True)
        except Exception as error:
            kind = "CRASHED"
            last = traceback.extract_tb(error.__traceback__)[-1]
            print(
                f"seed {seed}: {type(error).__name__}: {str(error)[:200]} at {last.filename}:{last.lineno}; "
                f"{random_program(seed)}",
                flush=True,
            )
        counts[kind] += 1
    seconds = time.perf_counter() - begin
    print(f"{programs} programs in {seconds:.0f} s, torch {torch.__version__}: {dict(counts)}")
    if counts["WRONG"] or counts["CRASHED"]:
        raise SystemExit(1)


if __name__ == "__main__":
    auto_cli(main)
