"""How long each stage worked and waited, measured."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_pipeline.callbacks.measures import logged_every, run_of, stage_names, table
from lightning_pipeline.runtime.timeline import Timeline


@dataclass
class _Times:
    """Seconds of one rank, summed over steps."""

    step: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    waiting: float = 0.0
    steps: int = 0

    def add(self, timeline: Timeline) -> None:
        self.step += (timeline.finished - timeline.began) / 1e9
        for event in timeline:
            seconds = (event.ended - event.started) / 1e9
            if event.action.kind == "F":
                self.forward += seconds
            else:
                self.backward += seconds
        self.waiting += timeline.waiting_seconds
        self.steps += 1

    def values(self) -> list[float]:
        return [self.step, self.forward, self.backward, self.waiting, float(self.steps)]


class BubbleMonitor(Callback):
    """Measures, per stage, the time in forward and backward and the time that is neither.

    Logged under the same keys on every rank: `pipeline/bubble_fraction`, the share of all rank-time in
    which a rank ran neither forward nor backward; `pipeline/step_time_s`, the schedule's makespan; and per
    stage `pipeline/stage_0/forward_s`, `backward_s` and `idle_s`: means per step over the steps since the
    last time. The schedule alone is measured: loading, optimizer and hooks are outside. A table closes
    `fit`.

    The clock is the processor's. On a GPU it sees when work was started, not when it ended.

    Args:
        every_n_steps: Batches between two measurements that are logged. Default: the Trainer's
            `log_every_n_steps`.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        self.every_n_steps = every_n_steps
        self._since, self._total = _Times(), _Times()
        self._names: list[str] = []

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        run = run_of(trainer, self)
        self._since, self._total = _Times(), _Times()
        held = run.gather_from_pipeline([float(stage) for stage in run.stages_here])
        self._names = stage_names([[int(stage) for stage in stages] for stages in held])

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        run = run_of(trainer, self)
        self._since.add(run.timeline)
        self._total.add(run.timeline)
        every = self.every_n_steps or logged_every(trainer)
        if self._since.steps < every:
            return
        measured = _measure(run.gather_from_pipeline(self._since.values()), self._names)
        self._since = _Times()
        if not trainer.barebones:
            for key, value in measured.items():
                pl_module.log(f"pipeline/{key}", value, on_step=True, on_epoch=False, batch_size=1)
            pl_module.log("bubble", measured["bubble_fraction"], prog_bar=True, logger=False, batch_size=1)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        per_rank = run_of(trainer, self).gather_from_pipeline(self._total.values())
        if self._total.steps:
            rank_zero_info(_summary(per_rank, self._names))


def _measure(per_rank: Sequence[Sequence[float]], names: Sequence[str]) -> dict[str, float]:
    makespan = max(step for step, *_ in per_rank)
    steps = max(1.0, per_rank[0][4])
    busy = sum(forward + backward for _, forward, backward, *_ in per_rank)
    measured = {
        "bubble_fraction": 1 - busy / (len(per_rank) * makespan) if makespan else 0.0,
        "step_time_s": makespan / steps,
    }
    for name, (_, forward, backward, _, _) in zip(names, per_rank, strict=True):
        measured[f"{name}/forward_s"] = forward / steps
        measured[f"{name}/backward_s"] = backward / steps
        measured[f"{name}/idle_s"] = (makespan - forward - backward) / steps
    return measured


def _summary(per_rank: Sequence[Sequence[float]], names: Sequence[str]) -> str:
    measured = _measure(per_rank, names)
    step = measured["step_time_s"]
    rows = []
    for name in names:
        forward, backward = measured[f"{name}/forward_s"], measured[f"{name}/backward_s"]
        idle = measured[f"{name}/idle_s"]
        share = idle / step if step else 0.0
        rows.append([name, *(f"{1e3 * t:.2f}" for t in (forward, backward, idle)), f"{100 * share:.1f} %"])
    text = table(["stage", "forward ms", "backward ms", "idle ms", "idle"], rows)
    return (
        f"Pipeline, mean of {int(per_rank[0][4])} steps of {1e3 * step:.2f} ms, "
        f"bubble {100 * measured['bubble_fraction']:.1f} %\n{text}"
    )
