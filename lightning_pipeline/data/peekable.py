"""The first item of an iterable, looked at before a run iterates it."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice, repeat
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from lightning_pipeline.data.draws import (
    generators_of,
    put_back,
    random_states,
    set_random_states,
    set_state,
    state_of,
)
from lightning_pipeline.data.fingerprint import fingerprint

_MOST_LOOKED_AT = 100


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


class _Ahead(NamedTuple):
    """What was taken of an iterable that may not give it again.

    Attributes:
        items: In their order; None but for the last of a look.
        rest: Gives what comes behind them.
        before: Where random states and generators stood.
        after: Where they were then.
        drew: Whether they moved for the first item, and not only for an iterator.
    """

    items: list[Any]
    rest: Iterator[Any]
    before: _Moment
    after: _Moment
    drew: bool


class Peekable:
    """An iterable whose first item can be looked at before it is iterated, without losing it.

    One that begins anew whenever it is iterated, as where its order is drawn then, is as it was after the
    look: the run iterates it as ever. That it does so shows by the same first item when it is asked twice. Of
    others this object gives the items that were taken, and what comes behind them. Where one has drawn for
    its first item, and the run iterates it from other random states, it is asked twice as well.

    Args:
        loader: Any iterable; one-shot iterators too. Other attributes are the loader's own.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
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
        start = _Moment.of(loader)
        items = iter(loader)
        begun = _Moment.of(loader)
        seen = something_of(partial(next, items) for _ in repeat(None))
        taken = _Moment.of(loader)
        drew = items is not loader and taken.drew_since(begun)
        # A DataLoader always draws a seed for its workers when it is iterated.
        begins_anew = not isinstance(loader, DataLoader) and (
            begun.drew_since(start) or begun.noted_since(start)
        )
        ahead = _Ahead(seen, items, start, taken, drew)
        self._ahead = self._repeated(ahead) if begins_anew else ahead
        self.keeps = self._ahead is not None
        self.behind = taken.states
        start.draw()
        return seen[-1]

    def _repeated(self, ahead: _Ahead) -> _Ahead | None:
        """Look again, from where the first look began; `None` where it gives the same, and is as before."""
        ahead.before.again(self.loader)
        items = iter(self.loader)
        second = _at_most(len(ahead.items), items)
        if [fingerprint(one) for one in second] == [fingerprint(one) for one in ahead.items]:
            ahead.before.again(self.loader)
            return None
        return _Ahead([*ahead.items, *second], items, ahead.before, _Moment.of(self.loader), drew=False)

    def forget(self) -> None:
        """Drop the items that were looked at: the loader was told to go on elsewhere."""
        self._ahead = self._first = None

    def __iter__(self) -> Iterator[Any]:
        # A generator: its body starts at the first `next`, after a `peek` that came behind `iter()`.
        ahead, now = self._ahead, _Moment.of(self.loader)
        self.forget()
        if ahead is not None and not now.drew_since(ahead.before):
            ahead.after.draw()  # what these items were drawn with is drawn now
        elif ahead is not None and ahead.drew:
            ahead = self._repeated(ahead)
            now.draw()
        rest = iter(self.loader) if ahead is None else ahead.rest
        yield from () if ahead is None else ahead.items
        # `yield from` would close a generator of the user's where an epoch takes only some of it, and ask for
        # an iterator again: a loader that is its own may begin anew.
        while True:
            try:
                item = next(rest)
            except StopIteration:
                return
            yield item

    def __len__(self) -> int:
        return len(self.loader)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # `isinstance` finds the user's class
        return type(self.loader) if "loader" in vars(self) else Peekable

    def __getattr__(self, name: str) -> Any:
        if name in ("loader", "keeps", "_first", "_ahead"):  # while being unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)


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


def _at_most(number: int, items: Iterator[Any]) -> list[Any]:
    found = []
    for _ in range(number):  # a loop over items would ask for an iterator again
        try:
            found.append(next(items))
        except StopIteration:
            break
    return found
