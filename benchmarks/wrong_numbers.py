"""Every kind of code that once trained wrong numbers in silence, under four schedules: equal or refused.

    python benchmarks/wrong_numbers.py
    python benchmarks/wrong_numbers.py --only [A1,C] --ranks [2,3]

Each case of `tests/ranks/wrong_cases.py` is fitted for two epochs on several ranks of this machine, with 1
and 4 micro-batches, and compared with one device: weights, logs and what steps leave behind. Cases that draw
are compared with one stage and the same micro-batches, recomputation with the same run without it. The exit
status is 1 if any is wrong.
"""

import logging
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jsonargparse import auto_cli

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.pool import Pool
from tests.ranks.wrong_cases import CASES, difference, fitted

SCHEDULES: dict[str, dict[str, Any]] = {
    "1F1B": {}, "ZBH1": {}, "Interleaved1F1B": {"stages_per_rank": 2}, "ZBV": {},
}  # fmt: skip


def main(
    only: Sequence[str] = ("",), ranks: Sequence[int] = (2,), schedules: Sequence[str] = tuple(SCHEDULES)
) -> None:
    """Print a row for each case, schedule and number of micro-batches.

    Args:
        only: Names of cases begin with one of these.
        ranks: Numbers of ranks.
        schedules: Names of schedules.
    """
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    begin, wrong = time.perf_counter(), 0
    pools = {size: Pool(size) for size in ranks}
    expected: dict[Any, Any] = {}
    for name in [name for name in CASES if name.startswith(tuple(only))]:
        for size, pool in pools.items():
            ends = []
            for schedule in schedules:
                for number in (1, 4):
                    pipeline = {"stages": size, "num_microbatches": number, "schedule": schedule}
                    pipeline |= SCHEDULES[schedule]
                    end = _end(pool, name, pipeline, expected)
                    wrong += end.startswith(("wrong", "crashed"))
                    ends.append((f"{schedule} {number}", end))
            kinds = {end for _, end in ends}
            for what, end in ends if len(kinds) > 1 else [("all", ends[0][1])]:
                print(f"{name:14} {size} ranks  {what:20} {end[:300]}", flush=True)
    for pool in pools.values():
        pool.close()
    print(f"{time.perf_counter() - begin:.0f} s, torch {torch.__version__}: {wrong} wrong")
    raise SystemExit(bool(wrong))


def _end(pool: Pool, name: str, pipeline: dict[str, Any], expected: dict[Any, Any]) -> str:
    if hasattr(CASES[name], "again"):
        (reference, *_) = pool(fitted, name, pipeline, {"again": False})
    else:
        one_rank = {"stages": 1, "stages_per_rank": 2, "schedule": "Interleaved1F1B"}  # draws as pipelines do
        same = {"num_microbatches": pipeline["num_microbatches"]}
        alone = one_rank | same if CASES[name].draws else None
        key = name, str(alone)
        if key not in expected:
            expected[key] = fitted(name, alone)
        reference = expected[key]
    outcomes = pool.outcomes(fitted, name, pipeline)
    for outcome in outcomes:
        notes = " ".join(getattr(outcome.error, "__notes__", ()))
        if "split_batch" in notes:
            return f"refused: {outcome.error}: {notes}"
        if outcome.error is not None:
            return f"crashed: {type(outcome.error).__name__}: {outcome.error}"
    found = [outcome.value for outcome in outcomes]
    if any(isinstance(one, str) for one in found):
        return "refused: " + next(one for one in found if isinstance(one, str))
    wrong = [text for one in found if (text := difference(one, reference))]
    return f"wrong: {wrong[0]}" if wrong else "equal"


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
