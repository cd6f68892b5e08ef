"""The arguments of `PipelineStrategy`, once they are checked."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch

from lightning_pipeline.schedules import Schedule
from lightning_pipeline.settings.choices import Copying


@dataclass(frozen=True)
class Settings:
    """Checked arguments of `PipelineStrategy`; its documentation describes them."""

    stages: int | Literal["auto"]
    num_microbatches: int | Literal["auto"]
    schedule: Schedule
    partition: str | list[str]
    units: list[str] | None
    data_parallel_size: int | Literal["auto"]
    data: str
    transport: str
    process_group_backend: str | None
    init_timeout: timedelta
    step_timeout: timedelta
    integrity: str
    trust_checkpoint: bool
    async_save: bool
    checkpoint_timeout: timedelta
    hook_timeout: timedelta = timedelta(seconds=1800)
    resume: str | None = None
    save_distributed_checkpoint: bool | None = None
    start_method: str = "popen"
    loss_weighting: str = "auto"
    gather_weights: str = "auto"
    on_nonfinite: str = "ignore"
    loss_over_batch: bool = False
    whole_steps: bool = False

    def trains_whole(self, *, automatic: bool) -> bool:
        """Whether every rank runs `training_step` whole, and each backward when it is asked for.

        Args:
            automatic: The module's `automatic_optimization`.
        """
        return self.whole_steps or not automatic

    def edge_backend(self, device: torch.device, backend: str) -> str | None:
        """The backend that moves tensors from device to device; None where they go through host memory.

        Args:
            device: Where tensors live.
            backend: Of the collectives.
        """
        if self.transport == "auto":
            return backend if device.type == "cuda" and backend == "nccl" else None
        if self.transport != "nccl":
            return None
        return "nccl" if self.process_group_backend in (None, "gloo") else self.process_group_backend

    def copies(self, device: torch.device) -> Copying:
        """Whether processes of one machine copy tensors between their memories, by CUDA's IPC.

        Args:
            device: Where tensors live.

        Returns:
            "never", "only", or "faster": where that works and is not slower than the backend.
        """
        if self.transport == "auto" and device.type == "cuda":
            return "faster"
        return "only" if self.transport == "ipc" else "never"
