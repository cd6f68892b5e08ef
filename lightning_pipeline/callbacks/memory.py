"""How much memory each stage takes, measured."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_pipeline.callbacks.measures import (
    PipelineRun,
    logged_every,
    peak_bytes,
    run_of,
    stage_names,
    table,
)

_GIB = 2.0**30


class StageMemoryMonitor(Callback):
    """Measures, per stage, parameters, gradients and the peak of memory.

    Logged under the same keys on every rank: `pipeline/stage_0/parameters`, a count, and
    `pipeline/stage_0/peak_memory_gib`, the allocator's peak on a GPU and the process' largest resident set on
    CPU, libraries and data included. A table closes `fit`.

    Args:
        every_n_steps: Batches between two measurements that are logged. Default: the Trainer's
            `log_every_n_steps`.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        self.every_n_steps = every_n_steps
        self._names: list[str] = []
        self._batches = 0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        run = run_of(trainer, self)
        self._batches = 0
        held = run.gather_from_pipeline([float(stage) for stage in run.stages_here])
        self._names = stage_names([[int(stage) for stage in stages] for stages in held])
        if run.root_device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(run.root_device)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._batches += 1
        if self._batches % (self.every_n_steps or logged_every(trainer)) or trainer.barebones:
            return
        run = run_of(trainer, self)
        for name, (count, _, peak) in zip(self._names, run.gather_from_pipeline(_measure(run)), strict=True):
            pl_module.log(f"pipeline/{name}/parameters", count, on_step=True, on_epoch=False, batch_size=1)
            pl_module.log(
                f"pipeline/{name}/peak_memory_gib", peak / _GIB, on_step=True, on_epoch=False, batch_size=1
            )

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        run = run_of(trainer, self)
        rows = [
            [name, f"{int(count):,}", f"{size / _GIB:.3f}", f"{peak / _GIB:.3f}"]
            for name, (count, size, peak) in zip(
                self._names, run.gather_from_pipeline(_measure(run)), strict=True
            )
        ]
        rank_zero_info("Memory\n" + table(["stage", "parameters", "parameters GiB", "peak GiB"], rows))


def _measure(run: PipelineRun) -> list[float]:
    count = size = 0
    for parameter in run.own_parameters():
        count += parameter.numel()
        size += parameter.numel() * parameter.element_size()
    return [float(count), float(size), float(peak_bytes(run.root_device))]
