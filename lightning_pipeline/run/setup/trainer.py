"""What the first batches may touch of a Trainer and its module, and is put back."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger, Logger

from lightning_pipeline import _lightning
from lightning_pipeline._torch import disable_current_modes
from lightning_pipeline.data import loader_parts, set_state, state_of
from lightning_pipeline.hooks import objects_beside
from lightning_pipeline.model.places import MISSING, Kept, Numbers, Place, Surroundings, owners_of
from lightning_pipeline.model.random import is_generator
from lightning_pipeline.model.tensors import ModuleState, WritesUndone, objects_below
from lightning_pipeline.ranks import Outlet
from lightning_pipeline.run.setup.hook_state import HookState

_OF_LIGHTNING = frozenset(vars(LightningModule()))
_OF_THE_RUN = ("training", "forward", "trainer", "_parameters", "_buffers", "_modules")


@contextmanager
def as_the_loop_will(trainer: Trainer, step: str, *, moving: bool = False) -> Iterator[None]:
    """Inside, the module is as when the loop calls the step, and loggers are given nothing.

    At the end all is as before.

    Args:
        trainer: In its setup.
        step: To be traced.
        moving: Whether its batch is on its way to the device.
    """
    attributes = dict(vars(trainer))
    modes = [(part, part.training) for part in trainer.lightning_module.modules()]
    if step != "training_step":
        trainer.lightning_module.eval()
    try:
        with _lightning.at_first_batch(trainer, step, moving=moving), loggers_set_aside(trainer):
            yield
    finally:
        for part, mode in modes:
            part.training = mode
        vars(trainer).clear()
        vars(trainer).update(attributes)


@contextmanager
def hooks_undone(trainer: Trainer, step: str) -> Iterator[None]:
    """Inside, what the user's transfer hooks note in the module or data module is forgotten at the end.

    Args:
        trainer: Whose first batch is looked at before the run.
        step: That the batch is for.
    """
    data: Any = getattr(trainer, "datamodule", None)
    state = ModuleState(trainer.lightning_module)
    reached = HookState(trainer.lightning_module, *(() if data is None else (data,)))
    try:
        with as_the_loop_will(trainer, step, moving=True):
            yield
    finally:
        reached.restore()
        state.restore()


class LoaderHook:
    """What a hook that makes loaders may read: attributes of the module, the data module and callbacks.

    It is called before `on_fit_start`, `configure_optimizers` and a checkpoint have changed them.

    Args:
        trainer: Whose hook is called next.
    """

    def __init__(self, trainer: Trainer) -> None:
        module = trainer.lightning_module
        held = {name: value for name, value in vars(module).items() if name not in _OF_THE_RUN}
        below = [o for path, one in objects_below([("", held)]) for o in owners_of(one, f"{path}.")]
        beside = [owner for owner in objects_beside(trainer) if not isinstance(owner, Numbers)]
        around = [*below, *beside]
        self._around = Surroundings.of_attributes([("", module)], _OF_THE_RUN, around, arrays=False)
        standing = list(self._around.standing())
        self._before = {place.identity: Kept.of(value, arrays=False) for place, value in standing}
        drawing = {id(value): value for _, value in standing if is_generator(value)}
        self._generators = [(one, state_of(one)) for one in drawing.values()]
        self._noted, self._trainer = list[tuple[Place, Kept, Kept]](), trainer
        self._drawn, self._changed = list[bytes](), set[tuple[int, Any]]()
        self._progress = (0, 0)

    def called(self) -> None:
        """It has been, and what has changed is its own."""
        for place in self._around.look():
            before = self._before.get(place.identity, Kept.of(MISSING))
            self._noted.append((place, before, Kept.of(place.get(), arrays=False)))
        self._drawn = [state_of(one) for one, _ in self._generators]
        self._progress = self._trainer.current_epoch, self._trainer.global_step

    def take_back(self) -> None:
        """Forget what it has noted itself, and what it has drawn.

        What a stream has drawn since, of which the run is given what was read of it, is drawn.
        """
        for place, before, _ in self._noted:
            before.give_back(place)
        for number, (generator, state) in enumerate(self._generators):
            now = state_of(generator)
            if now == self._drawn[number]:
                set_state(generator, state)
            else:
                self._generators[number], self._drawn[number] = (generator, now), now
        self._around.look()

    def note(self) -> None:
        """Let all be as it has left it; what has changed since it was taken back has its changes added."""
        changed = {place.identity for place in self._around.look()} | self._changed
        for place, before, after in self._noted:
            if place.identity in changed:
                after.add_to(place, before)
            else:
                after.give_back(place)
        for (generator, undrawn), drawn in zip(self._generators, self._drawn, strict=True):
            if state_of(generator) == undrawn:
                set_state(generator, drawn)

    def would_make_others(self) -> bool:
        """Whether what it may have read has changed since it was called and taken back."""
        places = self._around.look()
        self._changed = {place.identity for place in places}
        draws_others = any(state_of(one) != before for one, before in self._generators)
        progress = self._trainer.current_epoch, self._trainer.global_step
        return any(map(_is_read, places)) or draws_others or progress != self._progress


def _is_read(place: Place) -> bool:
    """Methods are put into modules and callbacks by the run itself, and are no values."""
    is_own = place.key not in _OF_LIGHTNING and not str(place.key).startswith("__")
    return is_own and not isinstance(place.get(), FunctionType | MethodType | partial)


@contextmanager
def loaders_undone(loaders: Sequence[Any]) -> Iterator[None]:
    """Inside, what reading loaders changes in data sets, samplers and what collates is forgotten at the end.

    Args:
        loaders: That are read again by the run. Where there are none, nothing is forgotten: of a stream the
            run is given what was read of it, and what comes then.
    """
    if not loaders:
        yield
        return
    parts = [part for loader in loaders for part in loader_parts(loader)]
    state = HookState(*parts, of_data=True)
    with _restored(state, lambda: state.can_be_restored):
        yield


@contextmanager
def stream_undone(loader: Any) -> Iterator[Callable[[], bool]]:
    """Inside, a stream is read that may begin anew: what that changes is put back at the end.

    Args:
        loader: Of the stream.

    Yields:
        Tells whether all that reading may have changed can be put back. Where it cannot, all is left.
    """
    state = HookState(*(loader_parts(loader) or [loader]), of_data=True)
    with disable_current_modes():  # which would put back what this leaves, and what it has put back
        if not state.is_whole:
            state.restore()  # the iterators that it has put copies of in their places
            yield lambda: False
            return
        with _restored(state, lambda: state.is_whole):
            yield lambda: state.is_whole


@contextmanager
def _restored(state: HookState, can_be: Callable[[], bool]) -> Iterator[None]:
    writes = WritesUndone()
    try:
        with writes:
            yield
    finally:
        if can_be():
            writes.restore()
            state.restore()
        else:
            state.leave()


def seed_of_run(from_rank_zero: Outlet) -> int:
    """The seed that all ranks draw from in steps: rank 0's."""
    return int(from_rank_zero.share(torch.initial_seed)) % 2**63


def beside_module(trainer: Trainer) -> list[Any]:
    """What a step can reach and change beside the module: data module, optimizers' groups, schedulers."""
    data = getattr(trainer, "datamodule", None)
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    groups = [optimizer.param_groups for optimizer in trainer.optimizers]
    return [*([] if data is None else [data]), *groups, *schedulers]


@contextmanager
def loggers_set_aside(trainer: Trainer) -> Iterator[None]:
    """Inside, what a step gives to `self.logger` is dropped. What it asks of it is answered."""
    loggers = trainer.loggers
    trainer.loggers = [_Aside(one) for one in loggers]
    try:
        yield
    finally:
        trainer.loggers = loggers


class _Aside(DummyLogger):
    """Stands for a logger, and takes what is given to it nowhere.

    Args:
        real: That it stands for.
    """

    def __init__(self, real: Logger) -> None:
        super().__init__()
        self._real = real

    @property  # type: ignore[misc]  # the base's may be set
    def __class__(self) -> Any:
        """So that `isinstance` says what it says of the real one."""
        return self._real.__class__  # which may stand for another itself

    @property
    def name(self) -> Any:
        """Of the real one, as are the others."""
        return self._real.name

    @property
    def version(self) -> Any:
        """A number or text."""
        return self._real.version

    @property
    def save_dir(self) -> str | None:
        """Where it saves."""
        return self._real.save_dir

    @property
    def log_dir(self) -> Any:
        """TensorBoard's and the one of csv files have it."""
        return getattr(self._real, "log_dir", None)

    @property
    def root_dir(self) -> Any:
        """As `log_dir`."""
        return getattr(self._real, "root_dir", None)
