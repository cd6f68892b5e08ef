"""What a rank does around the schedule of a batch, told by Lightning's hooks."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer

from lightning_pipeline.measure.pipeline_run import PipelineRun
from lightning_pipeline.measure.shares import Around
from lightning_pipeline.recording import Mark


class BatchClock:
    """Notes when the parts of a batch begin and end. A callback passes its hooks on.

    A batch begins where the one before ended. After a validation, or at the start of an epoch, it begins
    when its own fetch does: what lies between belongs to no batch.

    Args:
        run: The strategy.
        trainer: Whose fetches and optimizer steps are watched until `detach`.
    """

    def __init__(self, run: PipelineRun, trainer: Trainer) -> None:
        self._timeline = run.timeline
        self._begin: Mark | None = None
        self._fetch: Mark | None = None
        self._ready: Mark | None = None
        self._closing: Mark | None = None
        self._stepped: Mark | None = None
        self._reduced: Mark | None = None
        self.reduced: Mark | None = None
        """When the gradients of the last batch were averaged."""
        self._undo: list[Callable[[], None]] = [run.before_fetch(trainer, self._fetches)]
        for optimizer in trainer.optimizers:
            self._undo.append(optimizer.register_step_post_hook(self._steps).remove)

    def detach(self) -> None:
        """Watch no longer."""
        while self._undo:
            self._undo.pop()()

    def _fetches(self) -> None:
        if self._fetch is None:
            self._fetch = self._timeline.mark()
        if self._begin is None:
            self._begin = self._fetch

    def _steps(self, *_: Any) -> None:
        self._stepped = self._timeline.mark()

    def pause(self) -> None:
        """What comes now belongs to no batch."""
        self._begin = self._fetch = None

    def ready(self) -> None:
        """The batch is on the device."""
        self._ready = self._timeline.mark()
        self._fetch = self._fetch or self._ready
        self._begin = self._begin or self._ready

    def close(self) -> None:
        """The schedule is over; gradients and optimizer are next."""
        self._closing = self._closing or self._timeline.mark()

    def gradients_done(self) -> None:
        """The gradients are in place; where no optimizer steps, that is all."""
        self._stepped = self._reduced = self._timeline.mark()

    def end(self) -> list[Mark]:
        """The batch is over; gives marks that `read` understands."""
        end = self._timeline.mark()
        marks = [
            self._begin, self._fetch, self._ready, self._closing or end, self._stepped or end, end
        ]  # fmt: skip
        self._begin = end
        self.reduced = self._reduced
        self._fetch = self._ready = self._closing = self._stepped = self._reduced = None
        return marks

    def spans(self, marks: list[Mark], reduced: Mark | None) -> list[tuple[str, int, int]]:
        """What lay around the schedule of a batch: data, reduction and optimizer.

        Args:
            marks: From `end`.
            reduced: `reduced` after that.
        """
        around = self.read(marks)
        done = around.closing if reduced is None else self._timeline.read([reduced])[0]
        found = [
            ("data", around.fetch, around.ready),
            ("reduction", around.closing, done),
            ("optimizer", done, around.stepped),
        ]
        return [(kind, begin, end) for kind, begin, end in found if end > begin]

    def read(self, marks: list[Mark]) -> Around:
        """The times of a batch."""
        return Around(*self._timeline.read(marks))
