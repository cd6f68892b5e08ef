"""A process that was to measure the link and fails says why; `test_command` has one that does not fail."""

import pytest

from lightning_pipeline.errors import PipelineError
from lightning_pipeline.forecast.machine.link import measure_link


def test_the_reason_of_a_process_is_told() -> None:
    with pytest.raises(PipelineError, match=r"the link was not measured: RuntimeError: .*abacus.* Give lat"):
        measure_link("abacus")
