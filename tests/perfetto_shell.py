"""Perfetto's own trace processor looks at a trace, where its program is at hand."""

import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest


def shell() -> str | None:
    """The program: the `perfetto` package does not contain it, and would download it."""
    named = os.environ.get("TRACE_PROCESSOR_SHELL") or shutil.which("trace_processor_shell")
    kept = sorted(Path.home().glob(".local/share/perfetto/prebuilts/trace_processor_shell*"))
    return named or (str(kept[-1]) if kept else None)


needs_shell = pytest.mark.skipif(
    shell() is None, reason="no trace_processor_shell on PATH or in TRACE_PROCESSOR_SHELL"
)


class Seen(NamedTuple):
    """What it found: slices but those that wait, arrows by their slices' names, and names of errors."""

    slices: list[Any]
    arrows: Counter[tuple[str, str]]
    errors: list[str]


def look(path: Path) -> Seen:
    """Load a trace and ask for what is in it."""
    api = pytest.importorskip("perfetto.trace_processor")
    processor = api.TraceProcessor(trace=str(path), config=api.TraceProcessorConfig(bin_path=shell()))
    try:
        slices = processor.query(
            "select slice.name, ts, dur, thread.name as track, process.name as process from slice "
            "join thread_track on slice.track_id = thread_track.id join thread using (utid) "
            "join process using (upid) where slice.name != 'waiting'"
        )
        arrows = processor.query(
            "select a.name as source, b.name as target from flow "
            "join slice a on a.id = slice_out join slice b on b.id = slice_in"
        )
        errors = processor.query(
            "select name from stats where severity in ('error', 'data_loss') and value > 0"
        )
        return Seen(
            list(slices), Counter((row.source, row.target) for row in arrows), [row.name for row in errors]
        )
    finally:
        processor.close()
