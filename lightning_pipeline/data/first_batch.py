"""The batch that a module is traced with: looked at before the run, which sees the same data as ever."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_pipeline import _lightning
from lightning_pipeline.data.draws import random_states, random_states_kept, seeded, set_random_states
from lightning_pipeline.data.feed import Feed
from lightning_pipeline.data.loaders import needs_peeking
from lightning_pipeline.data.peekable import Undone
from lightning_pipeline.patching import Undo, all_undone, patch

_EARLY = (
    "PipelineStrategy reads the first batch of {} before the run begins, to cut the model: on_fit_start, "
    "on_train_epoch_start and the like come later. Data that they make are made in setup() or "
    "train_dataloader() instead, or the dataset gives samples of the same shapes before"
)


class CalledEarly(Protocol):
    """A hook that makes loaders, called before its time."""

    def called(self) -> None:
        """It has been."""

    def take_back(self) -> None:
        """Forget what it has noted itself: the loop has not come to it."""

    def note(self) -> None:
        """Let all be as it has left it."""

    def would_make_others(self) -> bool:
        """Whether what it may have read has changed since it was taken back."""


class EarlyLoaders:
    """Asks for loaders before the loops do, and hands them out when those come to it.

    The user's `train_dataloader()` and its like are called as often as on one device, and in its order. What
    they draw and note is put back, and is there when the loop asks: a `random_split` there, or in the loader
    of a sanity check, gives the parts that it gives on one device. Where something else was drawn in between,
    or attributes have changed that it may read, the hook is called again.

    Args:
        trainer: In the setup of a run.
        feed: Of the run; it decides which rank reads.
        equal_random_states: Gives all stages of a replica the same states; all ranks call.
        undone: Makes a context for hooks that a step's batch goes through; it takes back what they note.
        loops: Where those stand in a checkpoint that the run goes on from.
        noting: Looks at what a hook that comes next may read.
        reading: Makes a context in which loaders are read that the run reads again; what that changes in
            their data sets, samplers and functions is taken back.
        stream: The same for one that may not begin anew; see `Peekable`.

    Attributes:
        states: By step, the random states in which its first call begins.
    """

    def __init__(
        self,
        trainer: Trainer,
        feed: Feed,
        equal_random_states: Callable[[], None],
        undone: Callable[[str], AbstractContextManager[None]],
        loops: Mapping[str, Any],
        noting: Callable[[], "CalledEarly"],
        reading: Callable[[list[Any]], AbstractContextManager[None]],
        stream: Undone,
    ) -> None:
        self._trainer, self._feed, self._equal, self._undone = trainer, feed, equal_random_states, undone
        self._undo: list[Undo] = []
        self._loops, self._noting, self._called = loops, noting, list[CalledEarly]()
        self._are_noted = True
        self._reading, self._stream = reading, stream
        self.states: dict[str, tuple[Any, ...]] = {}
        self._asked: dict[TrainerFn, Any] = {}

    def first_arguments(self) -> tuple[str, tuple[Any, ...]] | None:
        """The step that this run will call first, and its arguments.

        Returns:
            Name and arguments; `None` when there is no data, so that nothing will run.
        """
        self._are_noted = True
        try:
            return self._look()
        finally:
            self._take_back()

    def _look(self) -> tuple[str, tuple[Any, ...]] | None:
        function = self._trainer.state.fn
        assert function is not None, "a Trainer that runs knows what"
        asked = self._asked = {one: self._request(one) for one in self._order(function)}
        candidates = [function]
        if function == TrainerFn.FITTING and self._trainer.enable_validation:
            candidates.append(TrainerFn.VALIDATING)  # the sanity check runs without training data, too
        for one in candidates:
            if not self._is_limited_to_none(one):
                loaders = asked[one] if one in asked else self._request(one)
                step = _lightning.STEPS[one]
                if one == TrainerFn.FITTING and self._is_refused(loaders):
                    continue
                try:
                    found = self._first(loaders, step)
                except Exception as error:
                    error.add_note(_EARLY.format(step))
                    raise
                if found is not None:
                    return step, self._step_arguments(step, loaders, found[0])
        return None

    def later_arguments(self, first: str) -> tuple[str, tuple[Any, ...]] | None:
        """Another step whose loaders the run asks for before its first step: that of the sanity check.

        Args:
            first: The step that will be called first.
        """
        step, loaders = _lightning.STEPS[TrainerFn.VALIDATING], self._asked.get(TrainerFn.VALIDATING)
        if loaders is None or first == step:
            return None
        with self._noted():
            found = self._first(loaders, step)
        return None if found is None else (step, self._step_arguments(step, loaders, found[0]))

    @contextmanager
    def shown(self) -> Iterator[None]:
        """While steps are traced, `trainer.train_dataloader` and its like are what the loops will have.

        `trainer.num_training_batches` and `estimated_stepping_batches` are, too.
        """
        undo = []
        for function, loaders in self._asked.items():
            loop = _lightning.loop_of(self._trainer, function)
            if loaders is not None and _lightning.combined_loader_of(loop) is None:
                combined = _lightning.as_combined(loaders, sequential=function != TrainerFn.FITTING)
                limit = _lightning.batch_limit(self._trainer, function)
                undo.append(_lightning.show_loaders(self._trainer, loop, combined, limit))
        try:
            with self._noted():
                yield
        finally:
            all_undone(undo)()

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Inside, what the hooks that were called have noted is there, as when the loops have asked them."""
        if self._are_noted:
            yield
            return
        self._are_noted = True
        for hook in self._called:
            hook.note()
        try:
            yield
        finally:
            self._take_back()

    def _take_back(self) -> None:
        self._are_noted = False
        for hook in reversed(self._called):
            hook.take_back()

    def _is_refused(self, loaders: Any) -> bool:
        """Training takes its loaders side by side only: the loop says so when it comes to them."""
        return _lightning.is_sequential(_lightning.as_combined(loaders, sequential=False))

    def _is_limited_to_none(self, function: TrainerFn) -> bool:
        return _lightning.batch_limit(self._trainer, function) == 0

    def _order(self, function: TrainerFn) -> list[TrainerFn]:
        """What this run asks for before its first step, in the order of one device."""
        order = [] if self._is_limited_to_none(function) else [function]
        checks = function == TrainerFn.FITTING and _lightning.will_sanity_check(self._trainer)
        return [TrainerFn.VALIDATING, *order] if checks else order

    def _request(self, function: TrainerFn) -> Any:
        """The loaders of a loop, as the user gave them."""
        loop = _lightning.loop_of(self._trainer, function)
        combined = _lightning.combined_loader_of(loop)
        if combined is not None:
            return combined
        source = _lightning.loader_source(loop)
        if not source.is_defined():
            return None
        before = random_states()
        fits = self._trainer.state.fn == TrainerFn.FITTING and _lightning.will_sanity_check(self._trainer)
        checks = fits and function == TrainerFn.VALIDATING
        sanity = _lightning.in_sanity_check(self._trainer) if checks else nullcontext()
        hook = self._noting()
        with sanity, _lightning.progress_shown(self._trainer, self._loops):
            loaders = _lightning.request_loaders(source)
            hook.called()
        self._called.append(hook)
        _lightning.explain_loaders(source, loaders, function)
        after = random_states()
        set_random_states(before)
        original = source.dataloader

        def dataloader() -> Any:
            undo()
            self._equal()
            self._undo.remove(undo)
            self._called.remove(hook)
            self._asked.pop(function, None)
            reads_others = self._feed.is_so_anywhere(hook.would_make_others())
            drew = random_states() != before
            if not self._feed.holds(loaders) and (reads_others or drew):
                return original()
            hook.note()
            if not drew:
                set_random_states(after)
            return loaders

        undo = patch(source, "dataloader", dataloader)
        self._undo.append(undo)
        return loaders

    def restore(self) -> None:
        """Let the loops ask for themselves."""
        undo, self._undo = self._undo, []
        all_undone(undo)()

    def _first(self, loaders: Any, step: str) -> tuple[Any] | None:
        combined = _lightning.as_combined(loaders, sequential=step != "training_step")
        one_by_one = _lightning.is_sequential(combined)
        again = [one for one in combined.flattened if not needs_peeking(one)]
        with random_states_kept(), torch.no_grad():  # from the states that the loops will find
            wanted = combined.flattened if one_by_one else [combined.iterables]
            with self._reading(again):
                firsts = (self._feed.first(one, self._stream) for one in wanted)
                found = next((one for one in firsts if one is not None), None)
            self.states[step] = self._feed.states_behind(wanted)
        if found is None:
            return None
        with seeded(0), torch.no_grad():
            return (self._moved(found[0], step),)

    def _moved(self, batch: Any, step: str) -> Any:
        """Through the user's transfer hooks, which note nothing of it."""
        trainer = self._trainer
        with self._undone(step), self._feed.looking(), self.shown():
            batch = _lightning.prepared_batch(trainer, batch)
            return trainer.strategy.batch_to_device(batch, dataloader_idx=0)

    def _step_arguments(self, step: str, loaders: Any, batch: Any) -> tuple[Any, ...]:
        """As the loops build them: the batch, its index and the loader's where the step takes them."""
        function = getattr(self._trainer.lightning_module, step)
        arguments: list[Any] = [batch]
        if _lightning.takes(function, "batch_idx", min_args=2):
            arguments.append(0)
        combined = _lightning.as_combined(loaders, sequential=step != "training_step")
        num_loaders = len(combined.flattened) if _lightning.is_sequential(combined) else 1
        if num_loaders > 1:
            arguments.append(0)
        _lightning.explain_signature(self._trainer, step, tuple(arguments), num_loaders)
        return tuple(arguments)
