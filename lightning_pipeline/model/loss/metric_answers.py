"""Metrics that take nothing and answer with what stands for numbers, in the form that their answers have.

The form, such as a dictionary of several, is found by asking a copy once.
"""

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_pipeline._torch import DisableTorchFunction, disable_current_modes
from lightning_pipeline.model.loss.metric_objects import copy_of
from lightning_pipeline.model.random import random_state_kept
from lightning_pipeline.model.tensors import map_tensors, tensors_in
from lightning_pipeline.patching import patched
from lightning_pipeline.registry import parameters_of

_log = logging.getLogger(__name__)
_LARGEST = 1 << 20  # elements of what a copy is given, and of its states
Answer = Callable[[Metric | MetricCollection, int, str, Any], Any]
_forms: dict[int, tuple[ref[nn.Module], dict[str, Any]]] = {}
"""By identity: two metrics that are compared make a third one."""


class Answers:
    """Stands for the answers of one metric while it takes nothing.

    Args:
        metric: That is asked.
        scalar: Gives what stands for a number.
    """

    def __init__(self, metric: Metric | MetricCollection, scalar: Callable[[], Any]) -> None:
        self._metric, self._scalar = metric, scalar
        self._updated: tuple[Any, Any] | None = None

    def update(self, given: tuple[Any, Any]) -> None:
        """It has been given these arguments, of which nobody keeps the values."""
        if "compute" not in _forms_of(self._metric):
            with disable_current_modes(), DisableTorchFunction():
                self._updated = map_tensors(_shaped, given)

    def to(self, method: str, given: tuple[Any, Any]) -> Any:
        """What stands for what the method gives: numbers in the form that its answer has.

        Args:
            method: `forward` or `compute`.
            given: Its arguments.
        """
        forms = _forms_of(self._metric)
        with DisableTorchFunction():  # a run that is followed has no function for it, as steps have none
            if method not in forms:
                forms[method] = self._tried(method, given)
            return self._in_form(forms[method])

    def _in_form(self, form: Any) -> Any:
        if isinstance(form, Tensor):
            number = self._scalar()
            return number.expand(form.shape) if form.dim() else number
        if isinstance(form, dict):
            return {key: self._in_form(item) for key, item in form.items()}
        if type(form) in (list, tuple):
            return type(form)(map(self._in_form, form))
        if isinstance(self._metric, MetricCollection):
            return {str(name): self._scalar() for name in self._metric}
        return self._scalar()

    def _tried(self, method: str, given: tuple[Any, Any]) -> Any:
        """The answer of a copy to made-up values of these shapes; None where that cannot be asked."""
        metric = self._metric
        if any(True for _ in parameters_of(metric)) or _size_of_states(metric) > _LARGEST:
            return None
        with disable_current_modes(), torch.no_grad(), random_state_kept():
            draft = copy_of(metric)
            try:
                if method == "forward":
                    args, kwargs = self._made_up(map_tensors(_shaped, given))
                    found = draft(*args, **kwargs)
                else:
                    if self._updated is not None:
                        args, kwargs = self._made_up(self._updated)
                        draft.update(*args, **kwargs)
                    found = draft.compute()
                return map_tensors(lambda one: torch.empty(one.shape, device="meta"), found)
            except Exception as error:  # the metric's, for made-up values
                _log.debug("what %s gives cannot be tried: %s", type(metric).__name__, error)
                return None
            finally:
                draft.reset()  # others may have noted it, and would keep what it was given

    def _made_up(self, given: tuple[Any, Any]) -> tuple[Any, Any]:
        device = cast(torch.device, self._metric.device)

        def made(tensor: Tensor) -> Tensor:
            if tensor.numel() > _LARGEST:
                raise ValueError("too large to be made up")
            value = 0.5 if tensor.dtype.is_floating_point else 0
            return torch.full(tensor.shape, value, dtype=tensor.dtype, device=device)

        found: tuple[Any, Any] = map_tensors(made, given)
        return found


def _forms_of(metric: nn.Module) -> dict[str, Any]:
    """What is known of its answers, by the method."""
    known, key = _forms.get(id(metric)), id(metric)
    if known is None or known[0]() is not metric:
        known = _forms[key] = ref(metric, lambda _: _forms.pop(key, None)), {}
    return known[1]


def _shaped(tensor: Tensor) -> Tensor:
    """Nothing of it but its form."""
    return torch.empty(tuple(map(int, tensor.shape)), dtype=tensor.dtype, device="meta")


def _size_of_states(metric: nn.Module) -> int:
    """Elements of its states, and of those of metrics in it."""
    held = [vars(part).get(name) for part in metric.modules() for name in getattr(part, "_defaults", ())]
    return sum(one.numel() for one in tensors_in(held))


@contextmanager
def stub_metrics(
    metrics: Sequence[Metric | MetricCollection], on_value: Callable[[Any], None], scalar: Callable[[], Any],
    answer: Answer = lambda metric, nth, method, given: None,
    note: Callable[[Metric | MetricCollection, str, Any], None] = lambda metric, method, arguments: None,
) -> Iterator[None]:  # fmt: skip
    """Let metrics only tell what they were given.

    Args:
        metrics: The metrics.
        on_value: Told that.
        scalar: Gives what stands for each number that a call returns.
        answer: Given the metric, how many calls there were before, the method and its arguments, gives what
            is known to be the answer; None where that is not known.
        note: Told the metric, its method and what that was given.
    """
    with ExitStack() as stack:
        for metric in metrics:
            stack.enter_context(patched(metric, _stubs(metric, on_value, scalar, answer, note)))
        yield


def _stubs(
    metric: Metric | MetricCollection, on_value: Callable[[Any], None], scalar: Callable[[], Any],
    answer: Answer,
    note: Callable[[Metric | MetricCollection, str, Any], None],
) -> dict[str, Any]:  # fmt: skip
    answers, calls = Answers(metric, scalar), itertools.count()

    def result(method: str, *args: Any, **kwargs: Any) -> Any:
        on_value((args, kwargs))
        note(metric, method, (args, kwargs))
        known = answer(metric, next(calls), method, (args, kwargs))
        return answers.to(method, (args, kwargs)) if known is None else known

    def silent(method: str, *args: Any, **kwargs: Any) -> None:
        next(calls)
        on_value((args, kwargs))
        note(metric, method, (args, kwargs))
        if method == "update":
            answers.update((args, kwargs))

    gives = {name: partial(result, name) for name in ("forward", "compute")}
    return gives | {name: partial(silent, name) for name in ("update", "reset")}
