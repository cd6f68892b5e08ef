"""Random chains of save and resume: are they the uninterrupted run, bit by bit?

    python -m benchmarks.resume_chains --chains 20 --seed 1

A chain stops and resumes a shuffled run with validation, workers or accumulation at random batches, each link
with other ranks and another schedule; batches, losses and weights are compared. Two kinds are drawn. With
links of one rank beside others there is one micro-batch, for one rank trains on whole batches, and sums of
parts are rounded in another way. With several ranks in every link there are four, and dropout.
"""

import argparse
import json
import random
import shutil
import tempfile
from typing import Any

from torch import Tensor

from tests.faults.chains import LAST, Seen, compare, link
from tests.pool import Pool

SCHEDULES = (("1F1B", 1), ("GPipe", 1), ("ZBH1", 1), ("Interleaved1F1B", 2), ("ZBV", 2))


def draw_chain(draw: random.Random) -> tuple[dict[str, Any], list[dict[str, Any]], list[int]]:
    """What all links have in common, what each has, and where they stop."""
    with_one = draw.random() < 0.5
    accumulate = draw.choice((1, 1, 2))
    last = LAST // accumulate
    common = {
        "microbatches": 1 if with_one else 4, "dropout": 0.0 if with_one else draw.choice((0.0, 0.2)),
        "accumulate": accumulate, "workers": draw.random() < 0.3,
        "interval": draw.choice((2, 3, 1.0)), "every": draw.choice((1, 1, 2, 3, None)),
    }  # fmt: skip
    if common["every"] is None and isinstance(common["interval"], float):
        common["interval"] = 3  # batches of all epochs
    stops = [*sorted(draw.sample(range(1, last), draw.randrange(2, 5))), last]
    links = []
    for _ in stops:
        stages = draw.choice((1, 2, 3) if with_one else (2, 3))
        # six units: three ranks of two stages, and a plan of one micro-batch is no interleaved one
        schedule, per_rank = draw.choice(SCHEDULES[:3] if with_one or stages == 3 else SCHEDULES)
        if stages == 1:
            schedule, per_rank = "1F1B", 1
        links.append({"stages": stages, "schedule": schedule, "per_rank": per_rank})
    return common, links, stops


def one_chain(draw: random.Random, pools: dict[int, Pool]) -> dict[str, Any]:
    """Draw a chain and run it, and the run without a stop."""
    common, links, stops = draw_chain(draw)
    folders = [tempfile.mkdtemp(prefix="chain-") for _ in range(2)]
    plain = {"stages": 1 if common["microbatches"] == 1 else 2, "schedule": "1F1B", "per_rank": 1, **common}
    straight = pools[plain["stages"]](link, plain, folders[0], stops[-1], None, group=False)[0]
    seen: Seen = []
    weights: dict[str, Tensor] = {}
    for how, resume, stop in zip(links, [None, *stops[:-1]], stops, strict=True):
        pool = pools[how["stages"]]
        part, weights = pool(link, {**common, **how}, folders[1], stop, resume, group=False, timeout=60)[0]
        seen += part
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    names = [f"{how['stages']} {how['schedule']} to {stop}" for how, stop in zip(links, stops, strict=True)]
    return {**common, "links": names, "wrong": compare(straight, (seen, weights))}


def main() -> None:
    """Run what is asked for; a line of JSON each, and a sum."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chains", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    draw, pools = random.Random(options.seed), {size: Pool(size) for size in (1, 2, 3)}
    results = []
    for _ in range(options.chains):
        results.append(one_chain(draw, pools))
        print(json.dumps(results[-1]), flush=True)
    for pool in pools.values():
        pool.close()
    print(f"{sum(not one['wrong'] for one in results)} of {len(results)} right")


if __name__ == "__main__":
    main()
