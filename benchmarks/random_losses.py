"""Run random losses and logs in micro-batches: one device's numbers, a warning or a refusal, each.

    python benchmarks/random_losses.py --programs 1000

What a program is and what is compared stands in `tests/random_losses.py`. A seed that gives another number in
silence is printed with its program, and the exit status is 1.
"""

import contextlib
import io
import logging
import math
import sys
from functools import partial
from pathlib import Path

from jsonargparse import auto_cli

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.random_steps import run_all
from tests.pool import Pool
from tests.random_losses import LossProgram, loss_outcome_of, loss_program, outcome_on


def main(
    programs: int = 1000, first: int = 0, ranks: int = 1, seconds: float = math.inf, whole_steps: bool = False
) -> None:  # fmt: skip
    """Run programs and print a count of what happened.

    Args:
        programs: How many.
        first: Seed of the first.
        ranks: Stages; one of them runs in this process.
        seconds: Begin no program after this time.
        whole_steps: Whether every one of several ranks runs the steps whole.
    """
    for name in ("lightning.pytorch", "torch._subclasses.fake_tensor", "lightning_pipeline"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with contextlib.ExitStack() as stack:
        run = loss_outcome_of
        if ranks > 1:
            pool = Pool(ranks)
            stack.callback(pool.close)
            run = partial(outcome_on, pool, ranks, whole_steps=whole_steps)
        run_all("losses", loss_program, partial(_silently, run), range(first, first + programs), seconds)


def _silently(run: object, program: LossProgram) -> str:
    """Lightning and the plan say on each fit the same."""
    assert callable(run), "it runs a program"
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return str(run(program))


if __name__ == "__main__":
    auto_cli(main)
