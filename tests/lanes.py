"""Runs the suite as `make test` does: `python -m tests.lanes`; with `--rest` what that leaves out, with `--whole` all.

Two lanes: what measures time runs alone, after the rest, which two workers share file by file. Many tests start
processes that watch each other's clock, on machines that others use too. Where few tests fail, each of them runs
twice more, alone; where both runs pass, the lane counts as passed, and its last lines name the tests to look at.

The ranks of the first lane run in turns, where the system knows that policy: none is stopped because another wakes.
A rank that is stopped with a lock of gloo's in its hand has gloo's own thread spin until it goes on, which took a
seventh of the time.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

QUIET = (
    "tests/faults/test_start.py",
    "tests/faults/test_units.py",
    "tests/ranks/test_auto_in_a_run.py",
    "tests/ranks/test_bubble_monitor.py",
    "tests/ranks/test_late_faults.py",
    "tests/ranks/test_pipeline_timeline.py",
    "tests/ranks/test_plan.py",
    "tests/unit/checkpoint/test_background.py",
)
"""Files with tests that measure time: the others need not be imported for the second lane."""
WHICH = {"": "not whole", "--rest": "whole", "--whole": "whole or not whole"}
"""What to run, as tests/whole.py marks it."""
FEW = 4
TIMES = 2
TESTS_FAILED = 1  # pytest's exit code where tests ran and some of them failed


def main() -> int:
    """Run both lanes and return the exit code of the first that fails, or 0."""
    which = "".join(sys.argv[1:])
    if which:
        os.environ["WHOLE"] = "1"  # for tests.whole, in the processes that run the tests
    first = ("-n", "2", "--dist", "loadfile", "-m", f"not quiet and ({WHICH[which]})")
    quiet = ("-m", f"quiet and ({WHICH[which]})", *QUIET)
    with in_turns():
        codes = [run_lane(first)]
    codes.append(run_lane(quiet))
    return next((code for code in codes if code != 0), 0)


@contextmanager
def in_turns() -> Iterator[None]:
    """Inside, processes that are started use up their time before another one runs, as batches of work do."""
    if not hasattr(os, "SCHED_BATCH"):
        yield
        return
    before = os.sched_getscheduler(0), os.sched_getparam(0)
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        os.sched_setscheduler(0, *before)


def check_quiet(items: Sequence[pytest.Item]) -> None:
    """Refuse tests that measure time in files where the second lane does not look for them."""
    missed = {item.location[0] for item in items if item.get_closest_marker("quiet")} - {*QUIET}
    if missed:
        raise pytest.UsageError(
            f"with a test that is `quiet`, and not in QUIET of tests/lanes.py: {sorted(missed)}"
        )


def run_lane(arguments: Sequence[str]) -> int:
    """Run pytest with these arguments and, where at most `FEW` tests fail, each of them `TIMES` times alone."""
    with tempfile.TemporaryDirectory() as cache:
        code = _pytest("-o", f"cache_dir={cache}", *arguments)
        failed = _failed(Path(cache)) if code == TESTS_FAILED else []
    if not 0 < len(failed) <= FEW:
        return code
    _tell(f"{len(failed)} failed; each runs {TIMES} times more, alone", failed)
    if any([_pytest("-p", "no:cacheprovider", test) for test in failed for _ in range(TIMES)]):
        return code
    _tell(f"failed once and passed {TIMES} times alone; look at them", failed)
    return 0


def _pytest(*arguments: str) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", *arguments], check=False).returncode


def _failed(cache: Path) -> list[str]:
    return sorted(json.loads((cache / "v/cache/lastfailed").read_text()))


def _tell(what: str, tests: Sequence[str]) -> None:
    print(f"\n{what}:", *tests, sep="\n  ", flush=True)


if __name__ == "__main__":
    sys.exit(main())
