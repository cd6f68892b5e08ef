"""What a step has told reaches every rank in one message, and its logs are made there."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_pipeline.ranks import Outlet


@dataclass(frozen=True)
class Entry:
    """One `self.log` call as every rank will make it.

    Attributes:
        name: The key.
        options: The other arguments, in the order of `LightningModule.log`.
        batch_size: What the user gave, summed over micro-batches; `None`: the batch's own.
        metric: Path of the logged torchmetrics object in the module, `None` for a plain value.
        dtype: Of the value; `None` for a metric that has none of the step's own.
    """

    name: str
    options: tuple[tuple[str, Any], ...]
    batch_size: int | None
    metric: str | None
    dtype: torch.dtype | None


@dataclass(frozen=True)
class Report:
    """What a step has to say to every rank.

    Attributes:
        entries: The calls to make; empty when nothing was logged.
        loss_dtype: Of the loss, `None` for a step without one.
        values: The loss first if there is one, then the values of the entries that have a dtype; float64.
        scales: Whether gradients are still to be multiplied with a number, which comes last in `values`.
    """

    entries: tuple[Entry, ...] = ()
    loss_dtype: torch.dtype | None = None
    values: Tensor | None = field(default=None, compare=False)
    scales: bool = False

    def scaling(self, factor: float) -> "Report":
        """The same, and gradients are to be multiplied with a number."""
        assert self.values is not None, "a step with gradients has a loss"
        return replace(self, values=torch.cat([self.values, self.values.new_tensor([factor])]), scales=True)

    def without_loss(self) -> "Report":
        """The same of a step that returns nothing."""
        if self.loss_dtype is None or self.values is None:
            return self
        return replace(self, loss_dtype=None, values=self.values[1:])

    @property
    def factor(self) -> Tensor | None:
        """What gradients are to be multiplied with; None: nothing."""
        return self.values[-1] if self.scales and self.values is not None else None

    @property
    def num_values(self) -> int:
        """Elements of `values`."""
        own = (self.loss_dtype is not None) + self.scales
        return own + sum(entry.dtype is not None for entry in self.entries)


class ReportChannel:
    """Carries reports from the last stage of a replica to its other ranks, one tensor a step.

    Names, options and dtypes travel only when they differ from the last report of the same kind.

    Args:
        outlet: From the last stage's rank to the others.
        device: Where values live.
        group: The ranks of the outlet, for tensors on `device`.
    """

    def __init__(self, outlet: Outlet, device: torch.device, group: dist.ProcessGroup) -> None:
        self._outlet, self._device, self._group = outlet, device, group
        self._known: dict[str, Report] = {}
        self.renamed = 0
        """How often names travelled."""
        self.numbers: Callable[[], int] | None = None
        """Gives a number of this rank that all others are to know at the end of a training step."""
        self.told: Callable[[Sequence[int]], None] = lambda numbers: None
        """Called with those of all ranks, by position in the group."""

    def share(self, kind: str, report: Report | None) -> Report:
        """Give every rank the report.

        Args:
            kind: Of step; each has its own names.
            report: On the last stage's rank; `None` elsewhere.
        """
        if self._outlet.group is None:
            assert report is not None, "a world of one rank holds the last stage"
            if self.numbers is not None and kind == "training_step":
                self.told([self.numbers()])
            return report
        known = self._known.get(kind, Report())
        changed = report is not None and report != known
        vector, changed = self._first_message(kind, known, report, changed)
        if changed:
            known = self._known[kind] = self._outlet.share(lambda: _without_values(report))
            self.renamed += 1
            vector = self._vector(known, report)
            self._broadcast(vector)
        return Report(known.entries, known.loss_dtype, vector[1:], known.scales)

    def _first_message(
        self, kind: str, known: Report, report: Report | None, changed: bool
    ) -> tuple[Tensor, bool]:
        vector = self._vector(known, None if changed else report)
        asks = self.numbers is not None and kind == "training_step"
        if self._device.type == "cpu":
            vector[0] = float(changed)
            vector = self._sum_with_numbers(vector) if asks else vector
            if not asks:
                self._broadcast(vector)
            return vector, bool(vector[0])
        # Reading the flag off the device would wait for it, so there it travels over the CPU group.
        changed = bool(self._outlet.share(lambda: changed))
        if asks:
            vector = self._sum_with_numbers(vector)
        elif not changed:
            self._broadcast(vector)
        return vector, changed

    def _sum_with_numbers(self, vector: Tensor) -> Tensor:
        """In place of the broadcast a sum, with a place for each rank: others than the last stage add 0."""
        assert self.numbers is not None, "there are numbers to tell"
        size, place = self._group.size(), self._group.rank()
        longer = torch.cat([vector, vector.new_zeros(size)])
        longer[len(vector) + place] = self.numbers()
        self._outlet.company.sum("the end of a step", longer, self._group)
        self.told([int(number) for number in longer[len(vector) :].tolist()])
        return longer[: len(vector)]

    def _vector(self, known: Report, report: Report | None) -> Tensor:
        vector = torch.zeros(1 + known.num_values, dtype=torch.float64, device=self._device)
        if report is not None and report.values is not None:
            vector[1:] = report.values
        return vector

    def _broadcast(self, vector: Tensor) -> None:
        self._outlet.company.broadcast("the end of a step", vector, self._outlet.source, self._group)


def _without_values(report: Report | None) -> Report:
    assert report is not None, "the source has the report"
    return replace(report, values=None)


def loss_of(report: Report) -> Tensor | None:
    """The mean loss that a report carries, in its own dtype."""
    if report.loss_dtype is None or report.values is None:
        return None
    return report.values[0].to(report.loss_dtype)


def replay(module: LightningModule, report: Report) -> None:
    """Make the recorded calls of `self.log`, as this rank's own.

    Args:
        module: The LightningModule.
        report: The same on every rank. Where the user gave no batch size, Lightning looks for it.
    """
    position = int(report.loss_dtype is not None)
    for entry in report.entries:
        value: Tensor | None = None
        if entry.dtype is not None:
            assert report.values is not None, "a report with dtypes has values"
            value = report.values[position].to(entry.dtype)
            position += 1
        logged: Any = value
        options = dict(entry.options)
        if entry.metric is not None:
            logged = module.get_submodule(entry.metric)
            logged._forward_cache = value
            options["metric_attribute"] = entry.metric
        type(module).log(module, entry.name, logged, batch_size=entry.batch_size, **options)
