"""A plugin that tells which tests and files take most CPU seconds, those of their ranks and processes included.

`python -m pytest -p tests.seconds tests/ranks`; not with `-n`, whose workers each have processes of their own.
"""

from collections import defaultdict
from collections.abc import Generator

import psutil
import pytest

MOST = 40  # lines of each table
_SECONDS: dict[str, float] = {}  # by test


def used() -> float:
    """CPU seconds of this process, of all that it has started, and of those among them that have ended."""
    here = psutil.Process()
    total = 0.0
    for process in [here, *here.children(recursive=True)]:
        try:
            total += sum(process.cpu_times()[:4])  # of itself and of its children that ended: user and system
        except psutil.NoSuchProcess:
            continue  # it is counted with its parent from now on
    return total


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    before = used()
    try:
        return (yield)
    finally:
        _SECONDS[item.nodeid] = used() - before


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    files: dict[str, float] = defaultdict(float)
    for test, seconds in _SECONDS.items():
        files[test.partition("::")[0]] += seconds
    terminalreporter.section(f"CPU seconds: {sum(files.values()):.0f}, of {len(_SECONDS)} tests")
    for table in (files, _SECONDS):
        for name, seconds in sorted(table.items(), key=lambda entry: -entry[1])[:MOST]:
            terminalreporter.line(f"{seconds:8.2f} {name}")
        terminalreporter.line("")
