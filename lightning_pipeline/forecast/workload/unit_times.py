"""How long the stages of a module take on this machine: each is run as a rank would run it."""

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_pipeline.errors import ConfigurationError
from lightning_pipeline.forecast.machine import Assumptions
from lightning_pipeline.forecast.workload.beside import copies_beside
from lightning_pipeline.forecast.workload.times import StageTimes, hops_of
from lightning_pipeline.forecast.workload.workload import Workload
from lightning_pipeline.model.cut import Partition
from lightning_pipeline.model.random import Generators, random_state_kept
from lightning_pipeline.model.split import SplitModel
from lightning_pipeline.model.tensors import ModuleState
from lightning_pipeline.registry import named_parameters_of, parameters_of
from lightning_pipeline.wire import Values

MICROBATCHES = 2  # held at once in a round
PASSES = 3  # over all stages, so that a machine that is slower for a second is so for each of them
ROUNDS = 8  # in a pass
LEAST_ROUNDS = 3
_LONGEST_PASS = 0.5  # seconds of a stage, after which no round begins but the least
_LONGEST_WAIT = 0.02  # seconds; longer ones change nothing more
WARM_UP = 2  # rounds that pay for caches and first allocations

_SPLIT = "F of a split backward"
_KINDS = {
    "F": "forward",
    "B": "backward",
    _SPLIT: "forward_split",
    "I": "backward_input",
    "W": "backward_weight",
}

_SINKS: dict[str, Callable[..., None]] = dict.fromkeys(("log", "log_dict"), lambda *args, **kwargs: None)
Seconds = dict[tuple[int, str], list[float]]


class MeasuredWorkload(Workload):
    """A workload whose stages are timed. Parameters need values; gradients and buffers are put back.

    Args:
        root: As of `Workload`.
        args: Likewise.
        progress: Told what is done, how much of it, and of how much.
        others: Likewise of `Workload`.
    """

    def __init__(
        self,
        root: nn.Module,
        args: tuple[Any, ...],
        *,
        progress: Callable[[str, int, int], None] = lambda what, done, of: None,
        **others: Any,
    ) -> None:
        super().__init__(root, args, **others)
        self._progress = progress

    @property
    @override
    def measured_on(self) -> str:
        """The device of the times."""
        device = next(parameters_of(self.root)).device
        return torch.cuda.get_device_name(device) if device.type == "cuda" else "this machine's CPU"

    @override
    def times(self, num_stages: int, assumptions: Assumptions) -> StageTimes:
        """Medians of this machine and what they are of; the link is as in the assumptions."""
        if num_stages not in self._measured:
            self._measured[num_stages] = measure_stages(
                self.root, self.partition(num_stages), self.args, self.forward_context, self._progress
            )
        seconds = self._measured[num_stages]
        seen = {name: [seconds[stage, kind] for stage in range(num_stages)] for kind, name in _KINDS.items()}
        medians = {name: tuple(map(median, by_stage)) for name, by_stage in seen.items()}
        return StageTimes(**medians, **hops_of(self.stages(num_stages), assumptions), seen=seen)


def measure_stages(
    root: nn.Module,
    cut: Partition,
    args: tuple[Any, ...],
    forward_context: Callable[[], Any],
    progress: Callable[[str, int, int], None] = lambda what, done, of: None,
) -> Seconds:
    """Seconds of every F, B, I and W that was run, by stage, and of forwards before I and W.

    Args:
        root: The module that was traced, with its weights.
        cut: Where it is cut.
        args: Of `training_step` for one micro-batch, on the device of the module.
        forward_context: Makes the precision's context.
        progress: Told what is done, how much of it, and of how much.

    Raises:
        ConfigurationError: The step ends without a result for this micro-batch.
    """
    seconds: Seconds = defaultdict(list)
    values: Values | None = None
    with _left_alone(root):
        whole = {name: tensor.data for name, tensor in _states(root)}
        for done, stage in enumerate(PASSES * list(range(cut.num_stages))):
            progress(f"timing {cut.num_stages} stages", done, PASSES * cut.num_stages)
            split = SplitModel(root, cut, [stage], sinks=_SINKS, forward_context=forward_context)
            try:
                values = _Rounds(split, stage, args, values if stage else None, seconds).run(cut.num_stages)
            finally:
                split.restore(whole)
    return dict(seconds)


def _states(root: nn.Module) -> list[tuple[str, Tensor]]:
    return [
        *named_parameters_of(root, remove_duplicate=False),
        *root.named_buffers(remove_duplicate=False),
    ]


@contextmanager
def _left_alone(root: nn.Module) -> Iterator[None]:
    """Gradients, buffers, attributes and random states are as before afterwards."""
    saved = ModuleState(root)
    gradients = [(parameter, parameter.grad) for parameter in parameters_of(root)]
    try:
        with random_state_kept(Generators(root.modules())), torch.enable_grad():
            yield
    finally:
        saved.restore()
        for parameter, gradient in gradients:
            parameter.grad = gradient


class _Rounds:
    """A few micro-batches through one stage and back, again and again, each action timed."""

    def __init__(
        self,
        split: SplitModel,
        stage: int,
        args: tuple[Any, ...],
        incoming: Values | None,
        seconds: Seconds,
    ) -> None:
        self._split, self._stage, self._args, self._incoming = split, stage, args, incoming
        self._program = split.programs[stage]
        self._stage_seen = (stage, "F") in seconds
        self._pool, self._seconds = seconds, defaultdict[str, list[float]](list)
        self._on_gpu = any(parameter.is_cuda for parameter in parameters_of(split.root))
        self._synchronise: Callable[[], None] = torch.cuda.synchronize if self._on_gpu else lambda: None

    def run(self, ranks: int) -> Values | None:
        """Time all kinds of actions; what the stage sends to the next one.

        Args:
            ranks: That work at the same time; those that share a machine's cores slow each other down.
        """
        sent: Values | None = None
        for number in range(1 if self._stage_seen else WARM_UP):
            sent = self._both_rounds(number)
        copies = 0 if self._on_gpu else min(ranks, len(os.sched_getaffinity(0))) - 1
        with copies_beside(copies, lambda: self._both_rounds(0)):
            if copies:  # a fork's parent, too, writes to each page anew
                self._both_rounds(0)
            self._seconds.clear()
            until = time.perf_counter() + _LONGEST_PASS
            for number in range(ROUNDS):
                if number < LEAST_ROUNDS or time.perf_counter() < until:
                    sent = self._both_rounds(WARM_UP + number)
        for kind, times in self._seconds.items():
            self._pool[self._stage, kind] += times
        return _received(sent)

    def _both_rounds(self, number: int) -> Values | None:
        self._round(number, halves=False)
        return self._round(number, halves=True)

    def _round(self, number: int, *, halves: bool) -> Values | None:
        """All forwards, then all backwards, so that the second micro-batch meets warm caches as in a run."""
        self._split.begin(
            "training_step", [(self._args, {})] * MICROBATCHES, weights=[1 / MICROBATCHES] * MICROBATCHES,
            key=(0, number), split_backward=halves,
        )  # fmt: skip
        forward = _SPLIT if halves else "F"
        sent = [self._forward(forward, microbatch) for microbatch in range(MICROBATCHES)]
        for microbatch, values in enumerate(sent):
            self._backward(microbatch, _gradients(values), halves)
        losses = self._split.finish().losses
        if (sent[0] is not None and sent[0].empty) or None in losses:
            raise ConfigurationError(
                "training_step returns None for this batch, so there is nothing to measure"
            )
        return sent[0]

    def _forward(self, kind: str, microbatch: int) -> Values | None:
        received = _received(self._incoming)
        values: Values | None = self._timed(kind, lambda: self._program.forward(microbatch, received))
        return values

    def _backward(self, microbatch: int, gradients: list[Tensor | None] | None, halves: bool) -> None:
        if halves:
            self._timed("I", lambda: self._program.backward_input(microbatch, gradients))
            self._timed("W", lambda: self._program.backward_weight(microbatch))
        else:
            self._timed("B", lambda: self._program.backward(microbatch, gradients))

    def _wait(self, kind: str) -> None:
        """Idle as a rank does before an action that needs a message, which then takes 1.4 times as long."""
        before = self._seconds[kind]
        has_input = kind == "W" or (kind in ("F", _SPLIT) and self._stage == 0)
        if before and not has_input and not self._on_gpu:
            time.sleep(min(before[-1], _LONGEST_WAIT))

    def _timed(self, kind: str, action: Callable[[], Any]) -> Any:
        self._synchronise()
        self._wait(kind)
        begin = time.perf_counter()
        result = action()
        self._synchronise()
        self._seconds[kind].append(time.perf_counter() - begin)
        return result


def _received(values: Values | None) -> Values | None:
    """What the stage gets in a run: numbers of its own, as autograd leaves."""
    if values is None:
        return None
    tensors = [t.detach().clone().requires_grad_(t.requires_grad) for t in values.tensors]
    return Values(tensors, values.table, values.empty)


def _gradients(values: Values | None) -> list[Tensor | None] | None:
    """Any numbers will do for what comes back from the next stage."""
    if values is None:
        return None
    return [torch.randn_like(tensor) if tensor.requires_grad else None for tensor in values.tensors]
