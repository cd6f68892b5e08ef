"""Several stages of one rank share one module: what a step sets, it sets once."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_pipeline.errors import SplitError
from lightning_pipeline.model.state.elsewhere import AttributeGuards
from lightning_pipeline.model.trace import Trace, metrics_of, stub_metrics


class Isolation:
    """For the replays of all stages of a rank but its last one.

    Args:
        root: The LightningModule.
        no_value: Makes what a metric returns where it is not updated.
    """

    def __init__(self, root: nn.Module, no_value: Callable[[], Any]) -> None:
        self._metrics, self._no_value = metrics_of(root), no_value
        self._guards = AttributeGuards(root)
        self._attributes: list[tuple[Any, str]] = []

    def begin(self, trace: Trace) -> None:
        """Take on a kind of step.

        Raises:
            SplitError: It sets something before the model that each stage would set once more.
        """
        plain = [
            (m, n) for m, n in trace.early_attributes if not isinstance(vars(m).get(n), list | dict | deque)
        ]
        names = [name for _, name in plain] + trace.written_states
        if names:
            raise SplitError(
                f"{trace.step} changes {', '.join(map(repr, names))} outside the units, and with several "
                "stages on a rank would do so once for each: use stages_per_rank=1, or change it in a hook "
                "such as on_train_batch_end"
            )
        self._attributes = [*trace.attributes, *trace.early_attributes]

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """One replay, of which metrics and attributes see nothing."""
        with stub_metrics(self._metrics, lambda value: None, self._no_value):
            self._guards.install(self._attributes)
            try:
                yield
            finally:
                self._guards.remove()
