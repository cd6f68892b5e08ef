"""The first item of an iterable, looked at before a run iterates it."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import islice, repeat
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_pipeline.data.draws import (
    generators_of,
    holders_of,
    put_back,
    random_states,
    set_random_states,
    set_state,
    state_of,
)
from lightning_pipeline.data.fingerprint import fingerprint

Undone = Callable[[Any], AbstractContextManager[Callable[[], bool]]]
"""Makes a context in which a loader is read. What that changes in its data, and in what these draw from, is
put back at its end where all of it is known; the context gives a function that tells whether it is."""
_MOST_LOOKED_AT = 100
_READ_BEFORE = (
    "a hook has set {} of a data set that is a stream, of which PipelineStrategy has read the first batch "
    "before the run, to cut the model; it does not begin anew when it is iterated again, so that this batch "
    "is as if that were not set: set it in setup() or train_dataloader()"
)


class _Moment(NamedTuple):
    """What an iterable's order may come from: random states, its own generators, and its attributes."""

    states: tuple[Any, ...]
    generators: list[tuple[Any, bytes]]
    noted: dict[str, Any]

    @classmethod
    def of(cls, loader: Any) -> "_Moment":
        own = {} if isinstance(loader, DataLoader) else dict(getattr(loader, "__dict__", {}))
        return cls(random_states(), [(one, state_of(one)) for one in generators_of(loader)], own)

    def drew_since(self, before: "_Moment") -> bool:
        return self.states != before.states or [state for _, state in self.generators] != [
            state for _, state in before.generators
        ]

    def noted_since(self, before: "_Moment") -> bool:
        return self.noted.keys() != before.noted.keys() or any(
            value is not before.noted[name] for name, value in self.noted.items()
        )

    def draw(self) -> None:
        """From now on draw as from then on."""
        set_random_states(self.states)
        for generator, state in self.generators:
            set_state(generator, state)

    def again(self, loader: Any) -> None:
        """Put all of it back."""
        self.draw()
        if not isinstance(loader, DataLoader) and hasattr(loader, "__dict__"):
            put_back(loader.__dict__, self.noted)


class _Attributes:
    """Those of a DataLoader's data, samplers and what collates, as they stand.

    Args:
        loader: Any; of one that is no DataLoader there are none, it notes them itself.
    """

    def __init__(self, loader: Any) -> None:
        holders = [one for one in holders_of(loader) if one is not loader]
        self._held = [
            (vars(one), {name: (value, _copied(value)) for name, value in vars(one).items()})
            for one in (holders if isinstance(loader, DataLoader) else ())
        ]

    def changed(self) -> list[tuple[dict[str, Any], str]]:
        """What stands otherwise now."""
        return [
            (own, name)
            for own, before in self._held
            for name in {**before, **own}
            if name not in own or name not in before or not _is_same(own[name], *before[name])
        ]

    def put_back(self, places: Iterable[tuple[dict[str, Any], str]]) -> None:
        """Let these stand as they stood."""
        held = {id(own): before for own, before in self._held}
        for own, name in places:
            if name not in held[id(own)]:
                own.pop(name, None)
                continue
            own[name], values = held[id(own)][name]
            if values is not None:
                own[name].copy_(values)


_NO_ATTRIBUTES = _Attributes(None)


def _copied(value: Any) -> Tensor | None:
    """Of a small tensor, such as the epoch that workers share."""
    return value.detach().clone() if isinstance(value, Tensor) and value.numel() == 1 else None


def _is_same(now: Any, value: Any, values: Tensor | None) -> bool:
    return now is value and (values is None or torch.equal(now, values))


def _forget_workers(loader: Any) -> None:
    """Workers that persist have the data as it was when they began."""
    if isinstance(loader, DataLoader):
        loader._iterator = None


class _Ahead(NamedTuple):
    """What was taken of an iterable that may not give it again.

    Attributes:
        items: In their order; None but for the last of a look.
        rest: Gives what comes behind them.
        before: Where random states and generators stood.
        begun: Where they were when there was an iterator.
        after: Where they were then.
        at_once: Whether an iterator goes by what stands when it is made, and not when it is first asked.
        drew: Whether they moved for the first item, and not only for an iterator.
        start: Attributes before the look.
        looked: And after it.
    """

    items: list[Any]
    rest: Iterator[Any]
    before: _Moment
    begun: _Moment
    after: _Moment
    at_once: bool
    drew: bool
    start: _Attributes
    looked: _Attributes


def _drawn_from(ahead: _Ahead) -> None:
    ahead.before.draw()


def _nothing_undone() -> AbstractContextManager[Callable[[], bool]]:
    return nullcontext(lambda: False)


class Peekable:
    """An iterable whose first item can be looked at before it is iterated, without losing it.

    One that begins anew whenever it is iterated, as where its order is drawn then, is as it was after the
    look: the run iterates it as ever. That it does so shows by the same first item when it is asked twice. Of
    others this object gives the items that were taken, and what comes behind them. Where one has drawn for
    its first item, and the run iterates it from other random states, it is asked twice as well. So is one
    that may change what it comes from, such as experiences that a module has played.

    Args:
        loader: Any iterable; one-shot iterators too. Other attributes are the loader's own.
        undone: Puts back what reading it changes.
    """

    def __init__(self, loader: Any, undone: Undone) -> None:
        self.loader, self._undone = loader, undone
        self.keeps = True
        """Whether the run must iterate this object for the loader, for it holds items of it."""
        self._first: tuple[Any] | None = None
        self._ahead: _Ahead | None = None
        self.behind: tuple[Any, ...] | None = None
        """The random states behind the first item, once it was looked at."""

    def peek(self) -> Any:
        """The first item of the next iteration that is not None. Random states are as before.

        Raises:
            StopIteration: There is none.
        """
        if self._first is None:
            self._first = (self._look(),)
        return self._first[0]

    def _look(self) -> Any:
        loader = self.loader
        start, attributes = _Moment.of(loader), _Attributes(loader)
        with self._undoing() as can_be_undone:
            items = iter(loader)
            begun = _Moment.of(loader)
            seen = something_of(partial(next, items) for _ in repeat(None))
            taken = _Moment.of(loader)
            is_undone = can_be_undone()
        drew = items is not loader and taken.drew_since(begun)
        # A DataLoader always draws a seed for its workers when it is iterated.
        begins_anew = not isinstance(loader, DataLoader) and (
            begun.drew_since(start) or begun.noted_since(start)
        )
        start.draw()
        _draw_seed(loader)
        at_once = _has_workers(loader) or (begun.drew_since(_Moment.of(loader)) and not begins_anew)
        ahead = _Ahead(seen, items, start, begun, taken, at_once, drew, attributes, _Attributes(loader))
        self._ahead = ahead
        if is_undone or begins_anew:
            self._ahead = self._repeated(ahead, is_undone=is_undone)
        self.keeps = self._ahead is not None
        self.behind = taken.states
        start.draw()
        return seen[-1]

    def _undoing(self) -> AbstractContextManager[Callable[[], bool]]:
        """What reading changes is put back, where this process reads and there is an iterator apart."""
        stays = _has_workers(self.loader) or isinstance(self.loader, Iterator)
        return _nothing_undone() if stays else self._undone(self.loader)

    def _repeated(self, ahead: _Ahead, *, is_undone: bool = False) -> _Ahead | None:
        """Look again, from where the first look began.

        Args:
            ahead: What was taken.
            is_undone: Whether what this has changed is put back already, beside random states.

        Returns:
            What came both times; `None` where it was the same, and all is as it was before.
        """
        back, undoing = self._back, _nothing_undone
        if is_undone:
            back, undoing = _drawn_from, self._undoing
        back(ahead)
        with undoing():
            items = iter(self.loader)
            second = _at_most(len(ahead.items), items)
            now = _Moment.of(self.loader)
        if [fingerprint(one) for one in second] == [fingerprint(one) for one in ahead.items]:
            back(ahead)
            return None
        return ahead._replace(
            items=[*ahead.items, *second], rest=items, begun=now, after=now, at_once=False, drew=False,
            looked=_Attributes(self.loader),
        )  # fmt: skip

    def _back(self, ahead: _Ahead) -> None:
        """Random states, and what the loader and its data note, are as before the look."""
        _forget_workers(self.loader)
        ahead.before.again(self.loader)
        ahead.start.put_back(ahead.start.changed())

    def _set_by_hooks(self) -> tuple[list[tuple[dict[str, Any], str]], _Attributes]:
        """What hooks have set of the data since the look, and how all of it stands."""
        places = [] if self._ahead is None else self._ahead.looked.changed()
        return places, _Attributes(self.loader) if places else _NO_ATTRIBUTES

    def _anew(
        self, ahead: _Ahead, places: list[tuple[dict[str, Any], str]], hooks: _Attributes
    ) -> _Ahead | None:  # fmt: skip
        """Let the data stand as hooks have set it: None where it begins anew when it is iterated again.

        It is as it was before the look then, but for what they have set. Of what goes on from where it was,
        such as a stream that is read once, there are the items that were taken, with a warning.
        """
        more = self._repeated(ahead)
        hooks.put_back(places)
        if more is not None:
            rank_zero_warn(_READ_BEFORE.format(", ".join(sorted({repr(name) for _, name in places}))))
        return more

    def _taken_up(self, *, drawn: bool, as_looked: bool) -> Iterator[Any]:
        """The items of the run's iterator.

        Args:
            drawn: Whether what an iterator draws when it is made is drawn.
            as_looked: Whether random states are those of the look.
        """
        ahead, (places, hooks), now = self._ahead, self._set_by_hooks(), _Moment.of(self.loader)
        assert ahead is not None, "items were taken"
        self.forget()
        more: _Ahead | None = ahead
        if places:
            more = self._anew(ahead, places, hooks)
        elif not as_looked and (ahead.drew or (ahead.at_once and not drawn)):
            more = self._repeated(ahead)
        now.draw()
        if more is None:
            rest = iter(self.loader)  # workers have the data as it is now
            if drawn:
                now.draw()
            return _going_on([], rest)
        if as_looked:
            ahead.after.draw()  # what these items were drawn with is drawn now
        elif not drawn:
            _draw_seed(self.loader)
        return _going_on(more.items, more.rest)

    def forget(self) -> None:
        """Drop the items that were looked at: the loader was told to go on elsewhere."""
        self._ahead = self._first = None

    def __iter__(self) -> Iterator[Any]:
        """What making an iterator draws is drawn now, and the rest when its first item is asked for."""
        ahead = self._ahead
        if ahead is None:
            return iter(self.loader)
        as_looked = not _Moment.of(self.loader).drew_since(ahead.before)
        if _has_workers(self.loader) or (ahead.at_once and not as_looked):
            return self._taken_up(drawn=False, as_looked=as_looked)
        if as_looked:
            ahead.begun.draw()
        else:
            _draw_seed(self.loader)
        return self._items(ahead.begun if as_looked else None)

    def _items(self, begun: _Moment | None) -> Iterator[Any]:
        if self._ahead is None:  # the loader was told to go on elsewhere
            yield from _going_on([], iter(self.loader))
            return
        as_looked = begun is not None and not _Moment.of(self.loader).drew_since(begun)
        yield from self._taken_up(drawn=True, as_looked=as_looked)

    def __len__(self) -> int:
        return len(self.loader)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # `isinstance` finds the user's class
        return type(self.loader) if "loader" in vars(self) else Peekable

    def __getattr__(self, name: str) -> Any:
        if name in ("loader", "keeps", "_first", "_ahead"):  # while being unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)


def _has_workers(loader: Any) -> bool:
    return bool(getattr(loader, "num_workers", 0))


def _draw_seed(loader: Any) -> None:
    """What an iterator of a DataLoader draws, for its workers, whether it has any or not."""
    if isinstance(loader, DataLoader):
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)


def something_of(items: Iterable[Callable[[], Any]]) -> list[Any]:
    """Items up to the first that is not None, which Lightning's training passes over; made when asked.

    Raises:
        StopIteration: There are none.
    """
    found: list[Any] = []
    try:
        for make in islice(items, _MOST_LOOKED_AT):
            found.append(make())
            if found[-1] is not None:
                break
    except StopIteration:
        pass
    if not found:
        raise StopIteration
    return found


def _going_on(items: list[Any], rest: Iterator[Any]) -> Iterator[Any]:
    """Items, and what comes behind them.

    `yield from` would close a generator of the user's where an epoch takes only some of it, and ask for an
    iterator again: a loader that is its own may begin anew.
    """
    yield from items
    while True:
        try:
            item = next(rest)
        except StopIteration:
            return
        yield item


def _at_most(number: int, items: Iterator[Any]) -> list[Any]:
    found = []
    for _ in range(number):  # a loop over items would ask for an iterator again
        try:
            found.append(next(items))
        except StopIteration:
            break
    return found
