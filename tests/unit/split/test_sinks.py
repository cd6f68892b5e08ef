"""What stands in the place of the standard output while a step is run to see what it does."""

import io
import sys
import warnings
from contextlib import redirect_stdout

import numpy
import pytest
from torch import nn

from lightning_pipeline.model.trace.sinks import printed_once


def test_an_output_that_drops_what_is_written_is_a_file_as_the_real_one() -> None:
    raw = io.BytesIO()
    real = io.TextIOWrapper(raw, encoding="latin-1", errors="replace")
    with redirect_stdout(real), printed_once(nn.Module()):
        print("dropped")
        assert (sys.stdout.encoding, sys.stdout.errors) == ("latin-1", "replace")
        assert sys.stdout.buffer is real.buffer
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    real.flush()
    assert raw.getvalue() == b"" and real.line_buffering


def test_what_numpy_warns_of_is_dropped_and_what_it_raises_is_raised() -> None:
    with warnings.catch_warnings(), printed_once(nn.Module()):
        warnings.simplefilter("error")
        assert numpy.isnan(numpy.zeros(1) / 0.0).all()
    with numpy.errstate(invalid="raise"), printed_once(nn.Module()), pytest.raises(FloatingPointError):
        numpy.zeros(1) / 0.0
