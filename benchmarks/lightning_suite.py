"""Runs Lightning's own tests with `stages=1` in every Trainer that names no strategy, and prints a table.

    git clone --depth 1 --branch 2.6.5 https://github.com/Lightning-AI/pytorch-lightning
    pip install pytest-timeout cloudpickle scikit-learn pandas
    python benchmarks/lightning_suite.py pytorch-lightning/tests --out results

Every test runs with the strategy first; those that fail run again without it. A test counts when a Trainer
in it was given the strategy and it passes without. `--parts` chooses folders, `--list` prints what fails
from results that are there already. This file is also the pytest plugin that does so (`-p lightning_suite`).

With `--stages 2` two processes run each test in step, as ranks of a pipeline, and `BoringModel.layer` is made
of two (lightning_lockstep.py). Left out of the count, and listed, are tests of a module with one layer, what
is refused by design, what asks for one process, and a test's own affair (lightning_excluded.py).
"""

import argparse
import inspect
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from lightning_excluded import excluded
from lightning_lockstep import LAYERS, RESULTS, TIMEOUT, run_pairs, store_of_now

PARTS = (
    "loops", "core", "callbacks", "tuner", "checkpointing", "trainer", "models", "loggers", "profilers",
    "utilities", "accelerators", "overrides",
)  # fmt: skip
NOT_HERE = (
    "not spawn and not fork and not ddp and not fsdp and not deepspeed and not spike_detection_integration"
)
"""Tests of other strategies; the last starts processes of its own."""
STAGES = "LIGHTNING_SUITE_STAGES"

# ---- the plugin

_given: list[str] = []
_failed_in: list[str] = []
"""Where the test of now has failed first: a complaint about what it left behind comes on top."""


def pytest_configure(config: Any) -> None:
    """Give the strategy to Trainers, or only note which would get it."""
    config.addinivalue_line("markers", "flaky: Lightning's, of a plugin that need not be there")
    if RESULTS in os.environ:
        _watch(int(os.environ[STAGES]))


def _watch(stages: int) -> None:
    from lightning.pytorch import Trainer

    from lightning_pipeline import PipelineStrategy

    original = Trainer.__init__
    signature = inspect.signature(inspect.unwrap(original))

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            given = signature.bind_partial(self, *args, **kwargs).arguments
        except TypeError:  # a test of wrong arguments: in Lightning's words
            return original(self, *args, **kwargs)
        plain = (
            given.get("strategy", "auto") == "auto"
            and given.get("accelerator", "auto") in ("auto", "cpu")
            and given.get("devices", "auto") in ("auto", 1, "1", [0])
            and given.get("num_nodes", 1) == 1
        )
        _given.append("given" if plain else "other")
        if plain and stages == 1:
            kwargs["strategy"] = PipelineStrategy(stages=1)
        elif plain and stages:
            os.environ.update({**store_of_now(), **os.environ})
            wait = int(os.environ[TIMEOUT]) / 3
            waits = dict.fromkeys(
                ("init_timeout", "step_timeout", "hook_timeout", "checkpoint_timeout"), wait
            )
            strategy = PipelineStrategy(  # tests read checkpoints with torch.load
                stages=stages, save_distributed_checkpoint=False, **waits
            )  # type: ignore[arg-type]
            kwargs |= {"accelerator": "cpu", "devices": stages, "strategy": strategy}
        original(self, *args, **kwargs)

    init.__wrapped__ = inspect.unwrap(original)  # type: ignore[attr-defined]
    Trainer.__init__ = init  # type: ignore[method-assign]


def pytest_runtest_setup(item: Any) -> None:
    """Forget the Trainers of the test before."""
    _given.clear()
    _failed_in.clear()


def pytest_runtest_logreport(report: Any) -> None:
    """Write down how a test ended."""
    if RESULTS not in os.environ or (report.when != "call" and (report.passed or _failed_in)):
        return
    _failed_in.extend([report.when] if report.failed else [])
    line = {
        "test": report.nodeid, "outcome": report.outcome, "trainers": sorted(set(_given)),
        "reason": _reason(report) if report.failed else "",
    }  # fmt: skip
    with Path(os.environ[RESULTS]).open("a") as file:
        file.write(json.dumps(line) + "\n")


def _reason(report: Any) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return re.sub(r"\s+", " ", crash.message if crash is not None else str(report.longrepr)[-300:])[:300]


# ---- the command


def run(
    tests: Path, part: str, results: list[Path], stages: int, only: list[str] | None, timeout: int,
    layers: int | None = None,
) -> None:  # fmt: skip
    """Run one folder's tests, or some of them, in a process for each file of results.

    Args:
        tests: The folder `tests` of Lightning.
        part: A folder in `tests_pytorch`.
        results: Files with a line of JSON for each test.
        stages: To give; 0 gives nothing.
        only: Names of tests; default: all of the folder.
        timeout: Seconds for one test.
        layers: Of `BoringModel`; default: as many as stages.
    """
    layers = layers or stages
    here = Path(__file__).resolve()
    path = os.pathsep.join([str(tests), str(here.parent), str(here.parent.parent)])
    own = {STAGES: str(stages), RESULTS: str(results[0]), TIMEOUT: str(timeout), "CUDA_VISIBLE_DEVICES": ""}
    if layers > 1:
        own[LAYERS] = str(layers)
    given = os.environ.get("PYTHONPATH")
    environment = {**os.environ, **own, "PYTHONPATH": os.pathsep.join(filter(None, [path, given]))}
    chosen = [f"tests_pytorch/{part}", "-k", NOT_HERE] if only is None else only
    command = [
        sys.executable, "-m", "pytest", f"--rootdir={tests}", "-p", "lightning_suite", "-p",
        "lightning_lockstep", "-q", "--tb=short", "-p", "no:cacheprovider", f"--timeout={timeout}",
        "--disable-pytest-warnings", "--continue-on-collection-errors", *chosen,
    ]  # fmt: skip
    if len(results) > 1:
        run_pairs(command, tests, environment, results)
        return
    if only is None:
        results[0].unlink(missing_ok=True)
    log = results[0].with_suffix(".log").open("w")
    subprocess.run(command, cwd=tests, env=environment, stdout=log, stderr=log, check=False)


def read(results: Path) -> dict[str, dict[str, Any]]:
    """The last outcome of each test."""
    entries = map(json.loads, results.read_text().splitlines() if results.exists() else ())
    return {entry["test"]: entry for entry in entries}


def counted(given: dict[str, dict[str, Any]], plain: dict[str, dict[str, Any]]) -> tuple[int, dict[str, str]]:
    """How many tests count, and why some of them fail with the strategy.

    Args:
        given: Outcomes with the strategy.
        plain: Outcomes without, of those that failed.
    """
    own = {name: entry for name, entry in given.items() if entry["trainers"] == ["given"]}
    failed = {
        name: entry["reason"]
        for name, entry in own.items()
        if entry["outcome"] == "failed" and plain.get(name, {}).get("outcome", "passed") == "passed"
    }
    passed = sum(entry["outcome"] == "passed" for entry in own.values())
    return passed + len(failed), failed


def _failed(given: list[Path]) -> list[str]:
    """Of any rank, in their order."""
    found = [t for file in given for t, entry in read(file).items() if entry["outcome"] == "failed"]
    return list(dict.fromkeys(found))


def _apart(ranks: list[dict[str, dict[str, Any]]]) -> tuple[dict[str, str], dict[str, str]]:
    """Why tests failed: those that are left out, and the others."""
    failed = [{t: e["reason"] for t, e in rank.items() if e["outcome"] == "failed"} for rank in ranks]
    why = {test: reason for found in reversed(failed) for test, reason in found.items()}
    kinds = {t: excluded(t, reason, rank_0_passes=t not in failed[0]) for t, reason in why.items()}
    left_out = {test: f"{kind}: {why[test]}" for test, kind in kinds.items() if kind}
    return left_out, {test: reason for test, reason in why.items() if test not in left_out}


def measured(options: argparse.Namespace, part: str) -> list[tuple[int, dict[str, str]]]:
    """Run one folder as asked, and count for each rank."""
    tests, out, stages = options.tests.resolve(), options.out.resolve(), options.stages
    name = part.replace("/", "_") + (".lockstep" if stages > 1 else "")
    given = [out / f"{name}.given.jsonl"]
    if stages > 1:
        given = [out / f"{name}.rank{rank}.jsonl" for rank in range(stages)]
    plain = out / f"{name}.plain.jsonl"
    if options.failed and _failed(given):
        run(tests, part, given, stages, _failed(given), options.timeout)
    elif not (options.failed or options.list):
        run(tests, part, given, stages, None, options.timeout)
    asked = _failed(given) if stages == 1 else list(_apart([read(file) for file in given])[1])
    if asked and not options.list:
        plain.unlink(missing_ok=True)
        run(tests, part, [plain], 0, asked, options.timeout, layers=stages)
    return [counted(read(file), read(plain)) for file in given]


def show(rows: list[tuple[str, int, int]], reasons: dict[str, str]) -> None:
    """Print a table, and each test that fails under its reason."""
    rows = [*rows, ("all", sum(row[1] for row in rows), sum(row[2] for row in rows))]
    print(f"\n{'part':<20} {'without':>8} {'with':>8}")
    for part, count, passes in rows:
        print(f"{part:<20} {count:>8} {passes:>8}  {passes / max(1, count):.1%}")
    for why, number in Counter(reasons.values()).most_common():
        print(f"\n{number} x {why}")
        print("\n".join(f"    {test}" for test, reason in reasons.items() if reason == why))


def show_pairs(found: dict[str, list[tuple[int, dict[str, str]]]]) -> None:
    """The same for two ranks: without the tests that are not about two stages, which are listed."""
    first: list[tuple[str, int, int]] = []
    both: list[tuple[str, int, int]] = []
    left_out: dict[str, str] = {}
    reasons: dict[str, str] = {}
    for part, ranks in found.items():
        why = {test: reason for _, failed in reversed(ranks) for test, reason in failed.items()}
        on_0 = ranks[0][1]
        apart = {
            test: kind
            for test, reason in why.items()
            if (kind := excluded(test, reason, rank_0_passes=test not in on_0))
        }
        left_out |= {test: f"{kind}: {why[test]}" for test, kind in apart.items()}
        count = ranks[0][0] - len(apart)
        failed = [{test: text for test, text in fails.items() if test not in apart} for _, fails in ranks]
        reasons |= {
            test: f"rank {rank}: {t}" for rank, f in reversed([*enumerate(failed)]) for test, t in f.items()
        }
        first.append((part, count, count - len(failed[0])))
        both.append((part, count, count - len({test for fails in failed for test in fails})))
    print("\nrank 0")
    show(first, {})
    print("\nboth ranks")
    show(both, reasons)
    print(f"\n{len(left_out)} left out")
    for kind, number in Counter(text.split(": ")[0] for text in left_out.values()).most_common():
        print(f"\n{number} x {kind}")
        print("\n".join(f"    {t}\n        {w}" for t, w in left_out.items() if w.startswith(f"{kind}: ")))


def main() -> None:
    """Run what was asked for and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("tests", type=Path, help="the folder `tests` of Lightning's repository")
    parser.add_argument("--parts", nargs="+", default=list(PARTS))
    parser.add_argument("--out", type=Path, default=Path("lightning_suite_results"))
    parser.add_argument("--timeout", type=int, default=120)
    parser.add_argument("--stages", type=int, default=1, choices=(1, 2))
    parser.add_argument("--failed", action="store_true", help="run only what failed the last time")
    parser.add_argument("--list", action="store_true", help="run nothing")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[tuple[int, dict[str, str]]]] = {}
    for part in options.parts:
        found[part] = measured(options, part)
        for count, why in found[part]:
            print(f"{part}: {count - len(why)} of {count}", flush=True)
    if options.stages > 1:
        show_pairs(found)
        return
    reasons = {test: why for ranks in found.values() for test, why in ranks[0][1].items()}
    show([(part, ranks[0][0], ranks[0][0] - len(ranks[0][1])) for part, ranks in found.items()], reasons)


if __name__ == "__main__":
    main()
