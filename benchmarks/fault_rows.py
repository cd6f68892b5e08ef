"""The whole fault matrix: every row's tests, with how long the slowest took.

    python -m benchmarks.fault_rows
    python -m benchmarks.fault_rows F04 B1

A test's seconds count the start of its processes, where the test before it has used up those that were
there; the first one starts the server that they are forked from too.
"""

import sys
from collections import defaultdict

import pytest

from tests.faults.rows import ROWS


class Seen:
    """Outcomes and seconds of every test, by its name without parameters."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.outcomes: dict[str, list[str]] = defaultdict(list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A phase of a test has ended."""
        name = report.nodeid.partition("[")[0]
        if report.when == "call":
            self.seconds[name].append(report.duration)
        if report.when == "call" or not report.passed:
            self.outcomes[name].append(report.outcome)


def main() -> None:
    """Run the rows that are asked for, or all; a table in Markdown."""
    rows = {name: ROWS[name] for name in sys.argv[1:] or ROWS}
    seen = Seen()
    tests = dict.fromkeys(test for row in rows.values() for test in row.tests)
    code = pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:warnings", *tests], plugins=[seen])
    print(
        "\n| row | what goes wrong | what comes of it | cases | passed | slowest |\n|---|---|---|---|---|---|"
    )
    for name, row in rows.items():
        outcomes = [outcome for test in row.tests for outcome in seen.outcomes[test]]
        seconds = [second for test in row.tests for second in seen.seconds[test]]
        print(
            f"| {name} | {row.what} | {row.expected} | {len(outcomes)} | {outcomes.count('passed')} | "
            f"{max(seconds, default=0):.1f} s |"
        )
    sys.exit(code)


if __name__ == "__main__":
    main()
