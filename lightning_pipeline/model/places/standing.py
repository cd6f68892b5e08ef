"""What stands around a step: what of it has changed, and how it is put back.

Nothing is put in the way of the user's code: what stands there is compared by identity, before and after.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from operator import is_
from typing import Any, NamedTuple

import torch
from numpy import ndarray
from torch import Tensor, nn

from lightning_pipeline._torch import DisableTorchFunction, set_version
from lightning_pipeline.model.places.owners import (
    MISSING,
    ArrayOwner,
    Flags,
    GradMode,
    Guard,
    ListOwner,
    Memory,
    Numbers,
    Owner,
    Place,
    Replayed,
    owners_of,
)
from lightning_pipeline.model.tensors import (
    HAVE_NOTHING_INSIDE,
    is_array,
    is_placeholder,
    items_of,
    objects_below,
    refill,
    set_values,
    version_of,
)

_OURS = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "forward")
_OF_ALL_MODULES = frozenset(vars(nn.Module()))
_CONTAINERS = (list, dict, set, tuple, deque)
_PLAIN_CONTAINERS = frozenset({list, dict, OrderedDict, set, deque})
_HOLD_NOTHING = frozenset({bool, int, float, str, type(None), Tensor, nn.Parameter})
_DEEP, _LONG, _FEW, _MOST = 8, 1000, 100, 20_000
_SMALL = 1 << 16  # elements of a tensor that is kept though the trace saw nobody write into it


class _Seen:
    """The entries of an owner at the last look, and whether arrays in them are looked at."""

    def __init__(self, owner: Owner, *, arrays: bool = True) -> None:
        self.owner, self.entries, self._looks_at_arrays = owner, dict(owner.read()), arrays
        self._held: list[tuple[Any, tuple[Any, list[Any]]]] = []
        self._arrays: list[tuple[Any, ArrayOwner, bytes]] = []
        for key, value in self.entries.items():
            self._note(key, value)

    def _note(self, key: Any, value: Any) -> None:
        """Note the containers and arrays in an entry."""
        kind = type(value)
        if kind in _HOLD_NOTHING or not self.owner.watches(key):
            return
        if kind in _PLAIN_CONTAINERS and not value:  # a module has a dozen for its hooks
            self._held.append((key, (value, [])))
            return
        number = 0
        for held, contents in _containers(value, arrays=self._looks_at_arrays):
            if isinstance(held, ndarray):
                owner = ArrayOwner(held, self.owner.place(key), None if held is value else number)
                self._arrays.append((key, owner, contents[0]))
                number += 1
            else:
                self._held.append((key, (held, contents)))

    def _written(self) -> list[Place]:
        """Arrays that have other values than at the last look."""
        found = []
        for index, (key, owner, before) in enumerate(self._arrays):
            array = owner.array
            if (now := array.tobytes()) != before:
                self._arrays[index] = key, owner, now
                found.append(owner.place(""))
        return found

    def look(self) -> list[Place]:
        """Those that are not as they were; from now on they are."""
        written = self._written() if self._arrays else []
        now, old = self.owner.read(), self.entries
        inside = [key for key, one in self._held if (one[0] or one[1]) and _is_changed(one)]
        if not inside and len(now) == len(old) and all(map(is_, now.values(), old.values())):
            return written
        others = (key for key in {**old, **now} if now.get(key, MISSING) is not old.get(key, MISSING))
        changed = dict.fromkeys([*inside, *others])
        self._held = [pair for pair in self._held if pair[0] not in changed]
        self._arrays = [one for one in self._arrays if one[0] not in changed]
        for key in changed:
            self._note(key, now.get(key, MISSING))
        self.entries = dict(now)
        return [*written, *(self.owner.place(key) for key in changed if self.owner.watches(key))]


class Surroundings:
    """Everything around a step that it may change, and what has changed since the last look.

    Args:
        root: The LightningModule.
        others: Beside it, such as the entries of a data module.
    """

    def __init__(self, root: nn.Module, others: Iterable[Owner] = ()) -> None:
        owners = [*_owners(root), GradMode(), Flags(root), Memory(root), *others]
        self._seen = [_Seen(owner) for owner in owners if not isinstance(owner, Numbers)]

    @classmethod
    def of_attributes(
        cls, modules: Iterable[tuple[str, nn.Module]], but: Iterable[str] = _OURS,
        beside: Iterable[Owner] = (), *, arrays: bool = True,
    ) -> "Surroundings":  # fmt: skip
        """Of some modules, by name, and of nothing below them; some names are not looked at."""
        made = cls.__new__(cls)
        own = (Owner(vars(module), f"{name}." if name else "", but) for name, module in modules)
        made._seen = [_Seen(owner, arrays=arrays) for owner in (*own, *beside)]
        return made

    def iterators(self) -> list[Place]:
        """Places of iterators from which a step may take."""
        return [
            place
            for seen in self._seen
            for key, value in seen.entries.items()
            if seen.owner.watches(key)
            for place in _iterators(seen.owner.place(key), value)
        ]

    def standing(self) -> Iterator[tuple[Place, Any]]:
        """What stood at the last look, with its place."""
        for seen in self._seen:
            for key, value in seen.entries.items():
                if seen.owner.watches(key):
                    yield seen.owner.place(key), value

    def look(self) -> list[Place]:
        """Places that are not as they were at the last look."""
        with DisableTorchFunction():  # none of the step's is among them
            return [place for seen in self._seen for place in seen.look()]


def _iterators(place: Place, value: Any, depth: int = 2) -> Iterator[Place]:
    """The place, where an iterator stands in it, and those in its dictionaries and lists."""
    kind = type(value)
    if hasattr(kind, "__next__") and not hasattr(kind, "fileno"):
        yield place
    elif kind in (dict, list) and 0 < len(value) <= _FEW and depth:
        owner = Owner(value, f"{place.label}.") if kind is dict else ListOwner(value, f"{place.label}.")
        for key, item in items_of(value):
            yield from _iterators(owner.place(key), item, depth - 1)


def _owners(root: nn.Module) -> Iterator[Owner]:
    entries = []
    for prefix, module in root.named_modules():
        label = f"{prefix}." if prefix else ""
        yield Owner(vars(module), label, _OURS)
        yield Owner(module._buffers, label)
        entries.append((label, {k: v for k, v in vars(module).items() if k not in _OF_ALL_MODULES}))
    for path, thing in objects_below(entries):
        yield from owners_of(thing, f"{path}.")


def _containers(value: Any, *, arrays: bool = True) -> Iterator[tuple[Any, list[Any]]]:
    """Every container and array below, up to a number, and what is in it. Objects have their own owners."""
    pending, seen, left_to_see = [(value, _DEEP)], set(), _MOST
    while pending and left_to_see > 0:
        held, left = pending.pop()
        if isinstance(held, ndarray):
            if arrays and is_array(held) and id(held) not in seen:
                seen.add(id(held))
                yield held, [held.tobytes()]
            continue
        if not isinstance(held, _CONTAINERS) or isinstance(held, Guard) or id(held) in seen or not left:
            continue
        seen.add(id(held))
        if not isinstance(held, tuple):
            yield held, _contents(held)
        if 0 < len(held) <= _LONG:
            left_to_see -= len(held)
            pending.extend((i, left - 1) for _, i in items_of(held) if type(i) not in _HOLD_NOTHING)


def _contents(held: Any) -> list[Any]:
    """What is in a container or array, to be compared; of a long one how many items."""
    if isinstance(held, ndarray):
        return [held.tobytes()]
    if len(held) > _LONG:
        return [len(held)]
    return [*dict.keys(held), *dict.values(held)] if isinstance(held, dict) else list(held)


def _is_changed(pair: tuple[Any, list[Any]]) -> bool:
    """Whether other objects or numbers are in it than `_contents` gave."""
    held, before = pair
    if isinstance(held, ndarray):
        return before != _contents(held)
    if len(held) > _LONG:
        return before != [len(held)]
    now = _contents(held)
    if isinstance(held, set):  # one that was emptied and filled again may have its items in another order
        return set(map(id, now)) != set(map(id, before))
    return len(now) != len(before) or not all(map(is_, now, before))


class Kept(NamedTuple):
    """A value as it stood, with what was in it.

    Attributes:
        value: The object.
        inner: The containers and arrays in it, each with a shallow copy.
        tensors: Tensors in it with a copy of their values, where those are kept.
        taken: How much has been taken of an iterator.
        beside: The same as `tensors` of a small tensor whose values are not asked for: it may be written
            in place where the trace saw another object.
    """

    value: Any
    inner: list[tuple[Any, Any]]
    tensors: list[tuple[Tensor, Tensor, int]]
    taken: int = 0
    beside: tuple[tuple[Tensor, Tensor, int], ...] = ()

    @classmethod
    def of(cls, value: Any, *, deep: bool = False, arrays: bool = True) -> "Kept":
        """Keep a value.

        Args:
            value: What stands somewhere.
            deep: Whether the values of a tensor are kept too.
            arrays: Whether those of arrays and small tensors are.
        """
        if type(value) in HAVE_NOTHING_INSIDE:
            return cls(value, [], [])
        inner = [(held, held.copy()) for held, _ in _containers(value, arrays=arrays)]
        if not arrays:
            return cls(value, inner, [])
        tensors, beside = list[tuple[Tensor, Tensor, int]](), tuple[tuple[Tensor, Tensor, int], ...]()
        if isinstance(value, Tensor) and not is_placeholder(value) and not value.is_meta:
            if deep:
                tensors.append((value, value.detach().clone(), version_of(value)))
            elif value.layout is torch.strided and value.numel() <= _SMALL and not value.is_inference():
                beside = ((value, value.detach().clone(), value._version),)
        return cls(value, inner, tensors, value.at if isinstance(value, Replayed) else 0, beside)

    @property
    def is_written(self) -> bool:
        """Whether a tensor that was not to be changed in place has other values now."""
        return any(
            tensor._version != version and not torch.equal(tensor, saved)
            for tensor, saved, version in self.beside
        )

    def items(self) -> set[int]:
        """Identities of what stood in the containers, but for containers that have changed since."""
        changed = self.changed
        return {id(item) for _, saved in self._without_arrays() for _, item in items_of(saved)} - changed

    def _without_arrays(self) -> Iterator[tuple[Any, Any]]:
        return ((held, saved) for held, saved in self.inner if not isinstance(held, ndarray))

    def before(self) -> Any:
        """A container as it was, with others in the place of those in it that have changed since."""
        changed, kept = self.changed, {id(held): saved for held, saved in self.inner}

        def as_it_was(value: Any) -> Any:
            if id(value) not in changed:
                return value
            copy = kept[id(value)].copy()
            if isinstance(copy, dict | list | deque):
                for key, item in list(items_of(copy)):
                    copy[key] = as_it_was(item)
            return copy

        return as_it_was(self.value) if id(self.value) in changed else kept.get(id(self.value), self.value)

    @property
    def changed(self) -> set[int]:
        """Identities of the value and of containers and arrays in it, as far as they have changed."""
        changed = {id(held) for held, saved in self.inner if _is_changed((held, _contents(saved)))}
        while more := {
            id(held)
            for held, saved in self._without_arrays()
            if id(held) not in changed and any(id(item) in changed for _, item in items_of(saved))
        }:
            changed |= more
        return changed

    def give_back(self, place: Place) -> None:
        """Let the place be as it was."""
        if place.get() is not self.value:
            place.put(self.value)
        if isinstance(self.value, Replayed):
            self.value.at = self.taken
        for held, saved in self.inner:
            if _is_changed((held, _contents(saved))):
                refill(held, saved)
        for tensor, saved, version in (*self.tensors, *(self.beside if self.is_written else ())):
            set_values(tensor, saved)
            # A micro-batch before may have it in its graph, with this number.
            if version_of(tensor) != version:
                set_version(tensor, version)

    def add_to(self, place: Place, before: "Kept") -> None:
        """Let a place that has changed since have what came between a look before and this one, too.

        Args:
            place: Whose value this was.
            before: What stood there at the look before.
        """
        place.put(_with(before.value, self.value, place.get()))
        kept = {id(held): saved for held, saved in before.inner}
        for held, saved in self.inner:
            if id(held) in kept:
                _add_to(held, kept[id(held)], saved)


class Standing:
    """Everything that some owners have, to be put back.

    Args:
        owners: Whose.
    """

    def __init__(self, owners: Iterable[Owner]) -> None:
        self._kept = [
            (owner, {key: Kept.of(value) for key, value in owner.read().items() if owner.keeps(key)})
            for owner in owners
            if not isinstance(owner, Numbers)
        ]

    def restore(self) -> None:
        """Put it back."""
        for owner, kept in self._kept:
            now = dict(owner.read())
            for key in [key for key in now if key not in kept and owner.keeps(key)]:
                owner.write(key, MISSING)
            for key, value in kept.items():
                if type(value.value) not in HAVE_NOTHING_INSIDE or now.get(key, MISSING) is not value.value:
                    value.give_back(owner.place(key))


def _with(before: Any, after: Any, now: Any) -> Any:
    """A number with what was added to it between two looks, what came where nothing was, or what is there."""
    if all(type(one) in (int, float) for one in (before, after, now)):
        return now + (after - before)
    return after if now is MISSING else now


def _add_to(held: Any, before: Any, after: Any) -> None:
    """Add to a container what came into it between two looks."""
    if isinstance(held, dict):
        for key, value in after.items():
            if key not in before:
                held[key] = value
            elif key in held:
                held[key] = _with(before[key], value, held[key])
    elif isinstance(held, set):
        set.update(held, after - before)
    elif isinstance(held, list | deque):
        old, later = list(before), list(after)
        if len(later) >= len(old) and all(map(is_, later, old)):
            held.extend(later[len(old) :])
