"""What messages take is told apart; a process that fails says why. `test_command` has one that does not."""

import sys
from pathlib import Path

import pytest

from lightning_pipeline.errors import PipelineError
from lightning_pipeline.forecast.machine.link import _Seen, measure_link


def test_the_reason_of_a_process_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fails = tmp_path / "fails"  # in the place of Python, which takes seconds to have torch
    fails.write_text("#!/bin/sh\necho Traceback >&2\necho 'RuntimeError: no such device: '$5 >&2\nexit 1\n")
    fails.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(fails))
    with pytest.raises(
        PipelineError, match=r"was not measured: RuntimeError: no such device: abacus. Give lat"
    ):
        measure_link("abacus")


@pytest.mark.whole
def test_the_reason_of_a_process_that_has_torch_is_told() -> None:
    with pytest.raises(PipelineError, match=r"the link was not measured: RuntimeError: .*abacus.* Give lat"):
        measure_link("abacus")


def test_a_message_that_was_there_costs_its_unpacking_and_one_waited_for_its_whole_way() -> None:
    first = [  # kind, micro-batch, asked, started, ended
        ("F", 0, 0, 0, 100), ("F", 1, 130, 130, 200), ("B", 0, 230, 390, 400), ("B", 1, 405, 600, 700),
    ]  # fmt: skip
    second = [
        ("F", 0, 0, 180, 280),
        ("B", 0, 285, 285, 310),
        ("F", 1, 350, 370, 450),
        ("B", 1, 451, 451, 520),
    ]
    seen = _Seen.of([first], [second])
    assert seen.hop == pytest.approx(80e-9)  # 80 each for F0, B0 and B1
    assert seen.send == pytest.approx(30e-9)  # 30, 30 and 40 after F0, F1 and B0
    assert seen.receive == pytest.approx(20e-9)  # F1 was there at 350
