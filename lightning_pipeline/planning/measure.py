"""How long the stages of a module take on this machine: each is run as a rank would run it."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeline.planning.assumptions import Assumptions
from lightning_pipeline.planning.times import StageTimes, hop_of
from lightning_pipeline.planning.workload import Workload
from lightning_pipeline.runtime.stage import Values
from lightning_pipeline.split import Partition, SplitModel
from lightning_pipeline.split.generators import Generators
from lightning_pipeline.split.state import ModuleState, random_state_kept

MICROBATCHES = 2  # held at once in a round
ROUNDS = 7
WARM_UP = 2  # rounds that pay for caches and first allocations


class MeasuredWorkload(Workload):
    """A workload whose stages are timed. Parameters need values; gradients and buffers are put back."""

    @property
    def measured_on(self) -> str:
        """The device of the times."""
        device = next(self.root.parameters()).device
        return torch.cuda.get_device_name(device) if device.type == "cuda" else "this machine's CPU"

    def times(self, num_stages: int, assumptions: Assumptions) -> StageTimes:
        """Medians of this machine; the link is assumed."""
        if num_stages not in self._times:
            seconds = measure_stages(self.root, self.partition(num_stages), self.args, self.forward_context)
            stages = range(num_stages)
            self._times[num_stages] = StageTimes(
                forward=tuple(seconds[stage, "F"] for stage in stages),
                backward=tuple(seconds[stage, "B"] for stage in stages),
                backward_input=tuple(seconds[stage, "I"] for stage in stages),
                backward_weight=tuple(seconds[stage, "W"] for stage in stages),
                send=hop_of(self.stages(num_stages), assumptions),
            )
        return self._times[num_stages]


def measure_stages(
    root: nn.Module, cut: Partition, args: tuple[Any, ...], forward_context: Callable[[], Any]
) -> dict[tuple[int, str], float]:
    """Median seconds of F, B, I and W of one micro-batch, by stage.

    Args:
        root: The module that was traced, with its weights.
        cut: Where it is cut.
        args: Of `training_step` for one micro-batch, on the device of the module.
        forward_context: Makes the precision's context.
    """
    sinks: dict[str, Callable[..., None]] = dict.fromkeys(("log", "log_dict"), lambda *args, **kwargs: None)
    seconds: dict[tuple[int, str], list[float]] = defaultdict(list)
    with _left_alone(root):
        split = SplitModel(
            root, cut, list(range(cut.num_stages)), sinks=sinks, forward_context=forward_context
        )
        try:
            for number in range(WARM_UP + ROUNDS):
                if number == WARM_UP:
                    seconds.clear()
                for halves in (False, True):
                    _Round(split, args, seconds, halves).run(number)
        finally:
            split.restore()
    return {key: median(times) for key, times in seconds.items()}


@contextmanager
def _left_alone(root: nn.Module) -> Iterator[None]:
    """Gradients, buffers, attributes and random states are as before afterwards."""
    saved = ModuleState(root)
    gradients = [(parameter, parameter.grad) for parameter in root.parameters()]
    try:
        with random_state_kept(Generators(root.modules())), torch.enable_grad():
            yield
    finally:
        saved.restore()
        for parameter, gradient in gradients:
            parameter.grad = gradient


class _Round:
    """A few micro-batches through all stages and back, each action timed."""

    def __init__(
        self,
        split: SplitModel,
        args: tuple[Any, ...],
        seconds: dict[tuple[int, str], list[float]],
        halves: bool,
    ) -> None:
        self._split, self._args, self._seconds, self._halves = split, args, seconds, halves
        self._stages = range(split.num_stages)
        devices = {parameter.device.type for parameter in split.root.parameters()}
        self._synchronise: Callable[[], None] = torch.cuda.synchronize if "cuda" in devices else lambda: None

    def run(self, number: int) -> None:
        """All forwards, then all backwards, so that the second micro-batch meets warm caches as in a run."""
        self._split.begin(
            "training_step", [(self._args, {})] * MICROBATCHES, weights=[1 / MICROBATCHES] * MICROBATCHES,
            key=(0, number), split_backward=self._halves,
        )  # fmt: skip
        sent = [self._forward(microbatch) for microbatch in range(MICROBATCHES)]
        for microbatch in range(MICROBATCHES):
            self._backward(microbatch, sent[microbatch])
        self._split.finish()

    def _forward(self, microbatch: int) -> list[Values | None]:
        values: Values | None = None
        sent = []
        for stage in self._stages:
            received = _received(values)
            program = self._split.stage(stage)
            values = self._timed(stage, "F", lambda: program.forward(microbatch, received))  # noqa: B023
            sent.append(values)
        return sent

    def _backward(self, microbatch: int, sent: Sequence[Values | None]) -> None:
        gradients: list[Tensor | None] | None = None
        for stage in reversed(self._stages):
            program, arrived = self._split.stage(stage), gradients
            if self._halves:
                gradients = self._timed(stage, "I", lambda: program.backward_input(microbatch, arrived))  # noqa: B023
                self._timed(stage, "W", lambda: program.backward_weight(microbatch))  # noqa: B023
            else:
                gradients = self._timed(stage, "B", lambda: program.backward(microbatch, arrived))  # noqa: B023

    def _timed(self, stage: int, kind: str, action: Callable[[], Any]) -> Any:
        self._synchronise()
        begin = time.perf_counter()
        result = action()
        self._synchronise()
        self._seconds[stage, kind].append(time.perf_counter() - begin)
        return result


def _received(values: Values | None) -> Values | None:
    """What the next stage gets: the same numbers as autograd leaves of its own."""
    if values is None:
        return None
    tensors = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in values.tensors]
    return Values(tensors, values.table, values.empty)
