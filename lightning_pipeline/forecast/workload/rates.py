"""How much of a run's work a second does, and how much of the devices it uses."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_pipeline.forecast.machine import Assumptions
from lightning_pipeline.forecast.workload.profile import StageProfile
from lightning_pipeline.forecast.workload.texts import days_text, number_text, operations_text

BACKWARD_OVER_FORWARD = 2.0
"""Operations of a backward over those of a forward, by which a model's operations are counted everywhere."""


@dataclass(frozen=True)
class Rates:
    """What devices do together.

    Attributes:
        samples_per_s: `None` where the batch does not tell.
        tokens_per_s: Of all devices; `None` where a batch holds no whole numbers by sample and position.
        tokens_per_s_per_device: The same, of one.
        tflops_per_device: Model operations, 10^12 a second: three forwards, what is computed again left out.
        mfu: That over the device's peak, 0 to 1; `None` without a known device.
    """

    samples_per_s: float | None
    tokens_per_s: float | None
    tokens_per_s_per_device: float | None
    tflops_per_device: float
    mfu: float | None

    def days(self, tokens: float) -> float | None:
        """Days to train on so many tokens; `None` where the batch has none."""
        return None if not self.tokens_per_s else tokens / self.tokens_per_s / 86400

    def text(self, tokens: float | None = None) -> str:
        """In one line.

        Args:
            tokens: To train on.
        """
        parts = []
        if self.samples_per_s is not None:
            parts.append(f"{number_text(self.samples_per_s)} samples/s")
        if self.tokens_per_s is not None and self.tokens_per_s_per_device is not None:
            each = number_text(self.tokens_per_s_per_device)
            parts.append(f"{number_text(self.tokens_per_s)} tokens/s, {each} a device")
        mfu = "" if self.mfu is None else f" (MFU {self.mfu:.1%})"
        parts.append(f"{operations_text(1e12 * self.tflops_per_device)}/s a device{mfu}")
        days = None if tokens is None else self.days(tokens)
        if days is not None and tokens is not None:
            parts.append(f"{days_text(86400 * days)} for {tokens:.3g} tokens")
        return "; ".join(parts)


def rates(
    stages: Sequence[StageProfile],
    step: float,
    devices: int,
    microbatches: int,
    assumptions: Assumptions,
    *,
    samples: int | None = None,
    tokens: int | None = None,
) -> Rates:
    """What a step of so many seconds amounts to.

    Args:
        stages: For one micro-batch.
        step: Seconds.
        devices: All of them.
        microbatches: Of all replicas.
        assumptions: For the device's peak.
        samples: Of the step.
        tokens: Of a micro-batch.
    """
    step = max(step, 1e-12)
    forward = sum(stage.flops for stage in stages)
    achieved = (1 + BACKWARD_OVER_FORWARD) * forward * microbatches / step / devices
    device = assumptions.device
    per_second = None if tokens is None else tokens * microbatches / step
    return Rates(
        None if samples is None else samples / step,
        per_second,
        None if per_second is None else per_second / devices,
        achieved / 1e12,
        None if device is None else achieved / device.flops(main_dtype(stages)),
    )


def main_dtype(stages: Sequence[StageProfile]) -> torch.dtype:
    """The type in which most operations are done."""
    counts: Counter[torch.dtype] = Counter()
    for stage in stages:
        for work in stage.forward:
            counts[work.dtype] += int(work.flops)
    return counts.most_common(1)[0][0] if counts else torch.float32


def tokens_of(batch: Any) -> int:
    """Integers in a batch by sample and position: a matrix, `input_ids`, or the first of a tuple; else 0."""
    if isinstance(batch, Mapping):
        batch = batch.get("input_ids")
    elif isinstance(batch, Sequence) and not isinstance(batch, str) and batch:
        batch = batch[0]
    if not isinstance(batch, Tensor) or batch.ndim != 2 or batch.is_floating_point() or batch.is_complex():
        return 0
    return batch.numel()
