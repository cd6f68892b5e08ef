"""When callbacks log: arguments that say nothing are refused."""

from collections.abc import Callable

import lightning.pytorch as pl
import pytest

from lightning_pipeline.callbacks import BubbleMonitor, PipelineTimeline, StageMemoryMonitor
from lightning_pipeline.errors import ConfigurationError


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: BubbleMonitor(0), "BubbleMonitor: every_n_steps=0 must be a whole number of at least 1"),
        (lambda: BubbleMonitor(-3, every_n_epochs=-1), "every_n_steps=-3 .*; every_n_epochs=-1 must be a"),
        (lambda: StageMemoryMonitor(2.5), "StageMemoryMonitor: every_n_steps=2.5 must be"),  # type: ignore[arg-type]
        (lambda: PipelineTimeline(5), r"PipelineTimeline: steps=5 must be a list of whole numbers from 0 on"),  # type: ignore[arg-type]
        (lambda: PipelineTimeline([-1], 0), r"steps=\[-1\] .*; every_n_steps=0 must be a whole number"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(make: Callable[[], pl.Callback], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        make()
