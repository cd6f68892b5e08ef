"""A lane repeats the few tests that fail, alone, and fails where one of them fails again."""

from pathlib import Path

import pytest

from tests.lanes import check_quiet, run_lane

PASSES_LATER = """
from pathlib import Path
def test_first_time_only():
    marker = Path(__file__).with_suffix('.ran')
    ran = marker.exists()
    marker.touch()
    assert ran
def test_fine():
    pass
"""
NEVER_PASSES = (
    "import pytest\n@pytest.mark.parametrize('n', range({count}))\ndef test_wrong(n):\n    assert False\n"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # seven runs of pytest, which need none
    return tmp_path


def lane(folder: Path, text: str) -> int:
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_lane_example.py").write_text(text)
    return run_lane(("-q",))


def test_a_test_that_passes_alone_lets_the_lane_pass(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert lane(folder, PASSES_LATER) == 0
    told = capfd.readouterr().out
    assert "passed 2 times alone; look at them" in told
    assert "test_lane_example.py::test_first_time_only" in told.splitlines()[-1]


@pytest.mark.parametrize(("count", "repeated"), [(1, True), (5, False)])
def test_a_test_that_fails_again_fails_the_lane(
    folder: Path, capfd: pytest.CaptureFixture[str], count: int, repeated: bool
) -> None:
    assert lane(folder, NEVER_PASSES.format(count=count)) == 1
    assert ("more, alone" in capfd.readouterr().out) is repeated


def measuring() -> None:
    """No test."""


def test_a_test_that_measures_time_in_a_file_that_the_second_lane_does_not_read_is_refused(
    request: pytest.FixtureRequest,
) -> None:
    here = pytest.Function.from_parent(request.node.parent, name="measuring", callobj=measuring)
    here.own_markers.append(pytest.mark.quiet.mark)
    with pytest.raises(pytest.UsageError, match="tests/unit/test_lanes.py"):
        check_quiet([here])
    check_quiet([request.node])
