"""Fit random agents that learn from what they play; each fit over stages has to be one device's.

    python benchmarks/random_streams.py --cases 150

What a case is and what is compared stands in `tests/random_streams.py`. A seed that differs is printed with
its case, and the exit status is 1.
"""

import logging
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

import torch
from jsonargparse import auto_cli

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.pool import Pool
from tests.random_streams import Case, drawn, run
from tests.ranks.lightning_cases import assert_same


def outcome_of(case: Case, pool: Pool | None) -> str:
    """Run a case: "equal", "refused: ...", "wrong: ...", or "no reference: ..."."""
    expected = run(case, None)
    if isinstance(expected, str):
        return f"no reference: {expected}"
    pipeline = {"stages": 1 if pool is None else 2, "num_microbatches": 2}
    found = run(case, pipeline) if pool is None else pool(run, case, pipeline, group=False)[0]
    if isinstance(found, str):
        return f"refused: {found}"
    try:
        assert_same(found, expected, 1e-9)
    except AssertionError as error:
        return f"wrong: {error}"
    return "equal"


def main(cases: int = 150, first: int = 0, ranks: int = 1) -> None:
    """Run cases and print a count of what happened.

    Args:
        cases: How many.
        first: Seed of the first.
        ranks: One, or two that hold a stage each.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    begin, counts, pool = time.perf_counter(), Counter[str](), Pool(ranks) if ranks > 1 else None
    for seed in range(first, first + cases):
        end = outcome_of(drawn(seed), pool)
        kind = end.partition(":")[0]
        counts[kind] += 1
        if kind != "equal":
            print(f"seed {seed}: {end[:300]}\n    {drawn(seed)}", flush=True)
    if pool is not None:
        pool.close()
    took = time.perf_counter() - begin
    print(f"{first} to {first + cases - 1} in {took:.0f} s, torch {torch.__version__}: {dict(counts)}")
    raise SystemExit(bool(counts["wrong"]))


if __name__ == "__main__":
    auto_cli(main)
