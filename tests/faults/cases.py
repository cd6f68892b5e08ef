"""A small fit in which something goes wrong on one rank, at one point."""

import ctypes
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_pipeline import PipelineStrategy
from tests.pool import Outcome, Pool
from tests.ranks.lightning_cases import Regression, loader

Ranks = Callable[[int], Pool]
WHOLE = pytest.mark.whole  # `make test-rest` and the benchmark run the whole matrix, `make test` a part of it
SETTINGS: dict[str, Any] = {"step_timeout": 4, "checkpoint_timeout": 6, "init_timeout": 20}
BOUND = 4 + 2.0  # seconds from a fault to the end of all ranks by a time-out: step_timeout + 2
SOON = 3.0  # seconds from a fault to the end without a time-out


def whole(*values: Any) -> Any:
    """A case that the benchmark runs."""
    return pytest.param(*values, marks=WHOLE)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def fail() -> None:
    raise ValueError("boom-17")


def end_data() -> None:
    raise StopIteration("boom-17")


def sleep() -> None:
    time.sleep(60)


def leave() -> None:
    os._exit(0)


def abort() -> None:
    os.kill(os.getpid(), signal.SIGABRT)


def quit_it() -> None:
    sys.exit(0)


def terminate_twice() -> None:
    terminate()
    terminate()


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def hold() -> None:
    """Python's lock, for ten seconds."""
    ctypes.PyDLL(None).sleep(10)


FAULTS = {
    one.__name__: one
    for one in (
        stop, kill, terminate, fail, end_data, sleep, leave, abort, quit_it, terminate_twice, interrupt, hold
    )
}  # fmt: skip
VISITS: Counter[str] = Counter()  # not in the module, whose attributes belong to its step
EVERY = -1  # instead of a rank


def say_when() -> None:
    """The fault happens now; for `after_fault`."""
    os.write(1, f"fault at {time.monotonic()}\n".encode())


def after_fault(outcome: Outcome, outcomes: Sequence[Outcome]) -> float:
    """Seconds from the fault of a run to a rank's end; of a fault that was met several times the last.

    Args:
        outcome: Of the rank.
        outcomes: Of all ranks: the one that was hit says when.
    """
    moments = [float(moment) for one in outcomes for moment in re.findall(r"fault at ([\d.]+)\n", one.output)]
    assert moments, "no rank has met the fault"
    return outcome.ended - max(moments)


HOOKS = (
    "setup", "configure_optimizers", "on_fit_start", "on_train_start", "on_train_epoch_start",
    "on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end", "on_validation_start",
    "on_validation_batch_start", "on_validation_end", "on_save_checkpoint", "on_train_epoch_end",
    "on_train_end", "on_fit_end", "teardown", "train_dataloader",
)  # fmt: skip


class Faulty(Regression):
    """Meets a fault at a point, on one rank: a hook, the second time where it has one, or a forward."""

    def __init__(self, fault: str, point: str, rank: int, at: int | None = None) -> None:
        super().__init__()
        self.fault, self.point, self.rank, self.at = fault, point, rank, at
        VISITS.clear()

    def here(self, point: str, visit: int = 1) -> None:
        VISITS[point] += 1
        visit = self.at or visit
        again = self.fault == "fail"  # setting up tries some hooks first
        here = point == self.point and self.rank in (EVERY, self.trainer.global_rank)
        if here and (VISITS[point] == visit or (again and VISITS[point] > visit)):
            say_when()
            FAULTS[self.fault]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.net[0](batch[0])
        self.here("preamble", 6)
        return (self.net[1:](hidden) - batch[1]).square().mean()

    def train_dataloader(self) -> Any:
        self.here("train_dataloader")
        return loader(32)

    def val_dataloader(self) -> Any:
        return loader(16, seed=4)


def _with(hook: str) -> Callable[..., Any]:
    def run(self: Faulty, *args: Any, **kwargs: Any) -> Any:
        self.here(hook)
        return getattr(super(Faulty, self), hook)(*args, **kwargs)

    return run


for _hook in HOOKS:
    if _hook != "train_dataloader":
        setattr(Faulty, _hook, _with(_hook))


class Meets(nn.Linear):
    """A unit that tells when it runs forwards and backwards."""

    def forward(self, input: Tensor) -> Tensor:
        out = super().forward(input)
        for tell in RUNNING:
            tell("forward")
            if out.requires_grad:
                out.register_hook(partial(tell_of_backward, tell))
        return out


def tell_of_backward(tell: Callable[[str], None], gradient: Tensor) -> None:
    tell("backward")


RUNNING: list[Callable[[str], None]] = []


class InUnits(Faulty):
    """Meets its fault in the units of the rank that it hits, in the second batch of an epoch."""

    def __init__(self, fault: str, point: str, rank: int) -> None:
        super().__init__(fault, point, rank)
        for index in (0, 2, 6):  # on three stages one each, if cut before the second and the last
            old = self.net[index]
            self.net[index] = Meets(old.in_features, old.out_features).double()
        RUNNING[:] = [self.in_unit]

    def in_unit(self, what: str) -> None:
        run = self.trainer
        if run.training and run.global_step == 1:
            self.here(what)
        elif run.validating and what == "forward":
            self.here("validation")


def in_units(fault: str, point: str, rank: int, folder: str) -> None:
    fit(InUnits(fault, point, rank), folder, 3, strategy={"partition": ["net.2", "net.6"]})


class SlowOnException(pl.Callback):
    def on_exception(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_rank == 1:
            time.sleep(8)


def fit(
    module: pl.LightningModule,
    folder: str,
    stages: int,
    *callbacks: Any,
    strategy: Any = None,
    **options: Any,
) -> pl.Trainer:
    saver = ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1, save_on_exception=True)
    given: dict[str, Any] = {"max_epochs": 2, **options}
    trainer = pl.Trainer(
        accelerator="cpu", devices=stages, logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[*callbacks, saver], default_root_dir=folder,
        strategy=PipelineStrategy(stages, num_microbatches=4, **{**SETTINGS, **(strategy or {})}), **given,
    )  # fmt: skip
    trainer.fit(module)
    return trainer


def faulty(fault: str, point: str, rank: int, folder: str, stages: int = 2, slow: bool = False) -> None:
    callbacks = [SlowOnException()] if slow else []
    fit(Faulty(fault, point, rank), folder, stages, *callbacks)


def outcomes_of(ranks: Ranks, function: Any, *args: Any, size: int = 2, without: Any = ()) -> list[Outcome]:
    """How each rank ended, with rank 0 as host of the store, as under Lightning's launcher."""
    return ranks(size).outcomes(
        function, *args, timeout=16, group=False, rank0_store=True, dies=True, without=without
    )
