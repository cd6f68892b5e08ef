"""Where a replica stands in its training data and random numbers, so that a resumed run goes on there."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, IterableDataset

from lightning_pipeline import _lightning
from lightning_pipeline.data.draws import generators_of, random_states, set_random_states
from lightning_pipeline.data.loaders import inner
from lightning_pipeline.data.peekable import Peekable
from lightning_pipeline.patching import Undo, all_undone


class Position:
    """Notes the random states that an epoch's order of data was drawn from, and goes back to a batch of it.

    The order is drawn when the loader's iterator is made and when its first batch is asked for. Going back
    to the middle of an epoch draws it again from the same states, skips the batches that were seen (they are
    loaded again, so that what draws while loading draws the same), and then continues from the states of the
    moment of the save. Loaders with `state_dict` and `load_state_dict` are asked to go there themselves.

    Args:
        trainer: In `fit`, with its loaders set up.
        counts: Whether an epoch that Lightning forgets to begin after a resume is begun; see `_lightning`.
    """

    def __init__(self, trainer: Trainer, *, counts: bool = False) -> None:
        self._trainer, self._counts = trainer, counts
        self._created: Any = None
        self._started: Any = None
        self._is_new = False
        self._to_iterate: Any = None
        self._resumed = False
        self._saved: Mapping[str, Any] | None = None
        self._is_set = False
        self._loader_states: list[Any] = []  # the loop loads and forgets them before its first epoch
        self._warn_again: Callable[[], None] = lambda: None
        self._validates: bool | None = None  # what ends the epoch of the save
        self._unhold: Undo = lambda: None

    def prepared(self) -> None:
        """A loader of training was prepared: the loop makes its iterator next, which draws from here."""
        if self._resumed:
            self._set("now")
            self._loader_states = _lightning.loader_states_to_load(self._trainer.fit_loop)
        self._created = self._now()

    def install(self) -> Callable[[], None]:
        """Take part in the start of every epoch's loop over batches.

        Returns:
            Undoes it.
        """
        return all_undone(
            [
                _lightning.around_epoch_start(self._trainer, self._before, self._after),
                _lightning.before_fetch(self._trainer, self._fetch),
                lambda: self._warn_again(),
                lambda: self._unhold(),
            ]
        )

    # Saving

    def state(self) -> dict[str, Any]:
        """What `resume` takes. Plain data."""
        if self._resumed and self._saved is not None:
            return dict(self._saved)  # no batch came since
        return {
            "now": self._now(),
            "created": self._created,
            "started": self._started,
            "loader": _lightning.loader_states(self._trainer.fit_loop),
            "validates": _lightning.validates_next(self._trainer),
        }

    def _now(self) -> dict[str, Any]:
        return {"random": random_states(), "generators": [g.get_state() for g in self._generators()]}

    def _generators(self) -> list[torch.Generator]:
        """The loaders' own, in a fixed order."""
        found = {
            id(one): one
            for loader in self._loaders()
            for one in generators_of(_of_the_user(loader))
            if isinstance(one, torch.Generator)
        }
        return list(found.values())

    # Resuming

    def resume(self, saved: Mapping[str, Any] | None) -> None:
        """Go on from a checkpoint when the loop over batches starts.

        Args:
            saved: From `state`; `None` for a checkpoint that another strategy wrote.
        """
        self._resumed, self._saved, self._is_set = True, saved, False
        if saved is not None:
            self._warn_again = _lightning.silence_unresumable_loaders()

    def epoch_starts(self) -> None:
        """An epoch begins, after a resume: its hooks draw from the states of the save."""
        if self._resumed and not self._is_set:
            self._set("now")
            self._is_set = True

    def _set(self, moment: str) -> None:
        state = (self._saved or {}).get(moment)
        if state is None:
            return
        set_random_states(state["random"])
        for generator, value in zip(self._generators(), state["generators"], strict=False):
            generator.set_state(value)

    def _before(self, fetcher: Any, seen: int, makes_iterator: bool) -> None:
        if not self._resumed:
            if makes_iterator:
                self._created, self._to_iterate = self._now(), None
            return
        self._resumed, self._to_iterate = False, None
        self._warn_again()
        if seen and self._hand_over_to_loaders():
            self._set("now")
            iter(fetcher)
        elif seen:
            self._go_to(fetcher, seen)
        else:
            if not self._is_set:
                self._set("now")
            self._validates = (self._saved or {}).get("validates")
            if self._validates is not None and _lightning.ended_with_a_batch(self._trainer):
                self._unhold = _lightning.hold_passing(self._trainer)
            self._iterate_later(fetcher)
        self._saved = None

    def _iterate_later(self, fetcher: Any) -> None:
        """What ends the epoch of the save, such as its validation, draws before the next order is drawn."""
        if _lightning.fetches_ahead(fetcher):
            self._begin(fetcher)
        else:
            self._to_iterate = fetcher

    def _begin(self, fetcher: Any) -> None:
        self._unhold()
        if self._validates:
            _lightning.pass_validation(self._trainer)
        if self._counts:
            _lightning.begin_resumed_epoch(self._trainer)
        self._created = self._now()
        self._iterate(fetcher)

    def _after(self, seen: int) -> None:
        self._is_new = not seen

    def _fetch(self) -> None:
        """The loop turns to its loader."""
        fetcher, self._to_iterate = self._to_iterate, None
        if fetcher is not None:
            self._begin(fetcher)
        if self._is_new:
            self._is_new, self._started = False, self._now()

    def _hand_over_to_loaders(self) -> bool:
        loop = self._trainer.fit_loop
        own = (self._saved or {}).get("loader")
        states = own or _lightning.loader_states_to_load(loop) or self._loader_states
        if not states:
            return False
        for stream in self._streams():
            stream.forget()
        _lightning.load_loader_states(loop, states)
        return True

    def _go_to(self, fetcher: Any, seen: int) -> None:
        stands_at_start = any(map(_is_its_own_iterator, self._streams()))
        self._set("created")
        self._created = self._now()
        if not stands_at_start:
            iter(fetcher)  # draws the order of the begun epoch again
        self._set("started")
        self._started = self._now()
        for _ in range(seen):
            next(fetcher)
        fetcher.fetched -= seen  # Lightning adds them
        self._set("now")

    def _iterate(self, fetcher: Any) -> None:
        """Draw the order anew. A stream goes on where it stands: its items may come once only."""
        if not self._streams() and not any(map(_reads_a_stream, self._loaders())):
            iter(fetcher)

    def _loaders(self) -> list[Any]:
        combined = _lightning.combined_loader_of(self._trainer.fit_loop)
        return list(combined.flattened) if combined is not None else []

    def _streams(self) -> list[Peekable]:
        """Loaders that may give an item once only."""
        return [one for one in map(inner, self._loaders()) if type(one) is Peekable]


def _of_the_user(loader: Any) -> Any:
    loader = inner(loader)
    return loader.loader if type(loader) is Peekable else loader


def _reads_a_stream(loader: Any) -> bool:
    loader = inner(loader)
    return isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)


def _is_its_own_iterator(stream: Peekable) -> bool:
    return not isinstance(stream.loader, DataLoader) and iter(stream.loader) is stream.loader
