"""The link between two ranks of this machine is measured, and a process that fails says why."""

import pytest

from lightning_pipeline.errors import PipelineError
from lightning_pipeline.forecast.machine.link import measure_link


def test_a_message_takes_longer_than_a_call_and_less_than_a_tenth_of_a_second() -> None:
    latency, link_bytes = measure_link()
    assert 1e-5 < latency < 0.1
    assert 1e7 < link_bytes < 1e12


def test_the_reason_of_a_process_is_told() -> None:
    with pytest.raises(PipelineError, match=r"the link was not measured: RuntimeError: .*abacus.* Give lat"):
        measure_link("abacus")
