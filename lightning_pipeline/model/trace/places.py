"""Where a step may leave something behind: attributes, entries of objects, flags; and which of them changed.

Nothing is put in the way of the user's code: what stands there is compared by identity, before and after.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_pipeline._torch import DisableTorchFunction, set_version
from lightning_pipeline.model.tensors import (
    is_placeholder,
    items_of,
    objects_below,
    refill,
    storage_key,
    version_of,
)

MISSING: Any = type("Missing", (), {"__repr__": lambda self: "<not set>"})()
_OURS = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "forward")
_OF_ALL_MODULES = frozenset(vars(nn.Module()))
_CONTAINERS = (list, dict, set, tuple, deque)
_PLAIN_CONTAINERS = frozenset({list, dict, OrderedDict, set, deque})
_HOLD_NOTHING = frozenset({bool, int, float, str, type(None), Tensor, nn.Parameter})
_DEEP, _LONG, _FEW, _MOST = 3, 1000, 100, 20_000
_SMALL = 1 << 16  # elements of a tensor that is kept though the trace saw nobody write into it


class Guard:
    """Base of what stands in the place of a value of another stage. Nobody looks into it."""


class Place(NamedTuple):
    """One attribute, entry or flag.

    Attributes:
        owner: What has it.
        key: Its name there.
        label: What to call it, the same on every rank, such as `layers.0.scale`.
    """

    owner: "Owner"
    key: Any
    label: str

    @property
    def identity(self) -> tuple[int, Any]:
        """Equal for two places that are the same."""
        return self.owner.identity, self.key

    def get(self) -> Any:
        """What stands there; `MISSING` where nothing does."""
        return self.owner.read().get(self.key, MISSING)

    def put(self, value: Any) -> None:
        """Let it stand there; `MISSING` takes away what does."""
        self.owner.write(self.key, value)


class Owner:
    """Has entries by name: the attributes of a module or object.

    Args:
        entries: Where they are.
        label: Begins the label of each.
        but: Names that are not looked at.
    """

    def __init__(self, entries: dict[Any, Any], label: str, but: Iterable[str] = ()) -> None:
        self._entries, self.label, self._but = entries, label, frozenset(but)

    @property
    def identity(self) -> int:
        """Equal for two owners of the same entries, while these live."""
        return id(self._entries)

    def read(self) -> Mapping[Any, Any]:
        """All entries."""
        return self._entries

    def write(self, key: Any, value: Any) -> None:
        """Set one, or take it away."""
        if value is MISSING:
            self._entries.pop(key, None)
        else:
            self._entries[key] = value

    def place(self, key: Any) -> Place:
        """That entry."""
        return Place(self, key, f"{self.label}{key}")

    def watches(self, key: Any) -> bool:
        """Whether a change of it counts."""
        return key not in self._but


class Numbers(Owner):
    """Entries that a step may decide by, which are not looked at for changes.

    Args:
        find: Gives them.
        label: Begins the label of each.
        readers: Properties by which code reads them, each a class and a name.
    """

    def __init__(
        self, find: Callable[[], dict[Any, Any]], label: str, readers: Sequence[tuple[type, str]] = ()
    ) -> None:
        super().__init__({}, label)
        self._find, self.readers = find, readers

    def read(self) -> Mapping[Any, Any]:
        """Those that are numbers."""
        return {key: value for key, value in self._find().items() if isinstance(value, int | float)}

    def write(self, key: Any, value: Any) -> None:
        """Set one."""
        self._find()[key] = value

    def watches(self, key: Any) -> bool:
        """Whether a change of it counts."""
        return False


class ListOwner(Owner):
    """The items of a list."""

    def __init__(self, items: list[Any], label: str) -> None:
        super().__init__({}, label)
        self._items = items

    @property
    def identity(self) -> int:
        """Equal for two owners of one list."""
        return id(self._items)

    def read(self) -> Mapping[Any, Any]:
        """All items, by position."""
        return dict(enumerate(self._items))

    def write(self, key: Any, value: Any) -> None:
        """Set one."""
        self._items[key] = value


class ClassOwner(Owner):
    """The attributes of a class."""

    def __init__(self, cls: type, label: str) -> None:
        super().__init__({}, label)
        self._cls = cls

    @property
    def identity(self) -> int:
        """Equal for two owners of one class."""
        return id(self._cls)

    def read(self) -> Mapping[Any, Any]:
        """All entries."""
        return vars(self._cls)

    def write(self, key: Any, value: Any) -> None:
        """Set one, or take it away."""
        if value is MISSING:
            delattr(self._cls, key)
        else:
            setattr(self._cls, key, value)

    def watches(self, key: Any) -> bool:
        """Whether a change of it counts."""
        return not str(key).startswith("__")


class FoundOwner(Owner):
    """The entries of a dictionary that may be another one later, such as a group of an optimizer.

    Args:
        find: Gives it.
        label: Begins the label of each entry.
        but: Names that are not looked at.
    """

    def __init__(self, find: Callable[[], dict[Any, Any]], label: str, but: Iterable[str] = ()) -> None:
        super().__init__({}, label, but)
        self._find = find

    @property
    def identity(self) -> int:
        """Equal for two owners with one label."""
        return hash(self.label)

    def read(self) -> Mapping[Any, Any]:
        """All entries."""
        return self._find()

    def write(self, key: Any, value: Any) -> None:
        """Set one, or take it away."""
        if value is MISSING:
            self._find().pop(key, None)
        else:
            self._find()[key] = value


class Flags(Owner):
    """Which parameters require a gradient, by name."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__({}, "requires_grad of ")
        self._root, self._tensors = root, dict(root.named_parameters())

    @property
    def identity(self) -> int:
        """Equal for the flags of one module."""
        return hash((Flags, id(self._root)))

    def read(self) -> Mapping[Any, Any]:
        """All flags."""
        return {name: tensor.requires_grad for name, tensor in self._tensors.items()}

    def write(self, key: Any, value: Any) -> None:
        """Set one."""
        self._tensors[key].requires_grad_(value)


class Memory(Owner):
    """Where the values of parameters are, by name: `weight.data = ...` moves them."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__({}, "")
        self._root, self._tensors = root, dict(root.named_parameters())
        self._held = [
            tensor.untyped_storage() for tensor in self._tensors.values()
        ]  # no number is used twice
        self._numbers: dict[int, int] = {}  # the same object for the same number

    @property
    def identity(self) -> int:
        """Equal for the memory of one module."""
        return hash((Memory, id(self._root)))

    def read(self) -> Mapping[Any, Any]:
        """The number of each memory."""
        keys = {name: storage_key(tensor) for name, tensor in self._tensors.items()}
        return {name: self._numbers.setdefault(key, key) for name, key in keys.items()}


class TensorOwner(Owner):
    """The values of a tensor that stands in a container or object, where a step may write them in place.

    Args:
        tensor: It.
        label: Of the place.
    """

    def __init__(self, tensor: Tensor, label: str) -> None:
        super().__init__({}, label)
        self._tensor = tensor

    @property
    def identity(self) -> int:
        """Equal for two owners of one tensor's values."""
        return id(self._tensor)

    def read(self) -> Mapping[Any, Any]:
        """The tensor."""
        return {"": self._tensor}

    def write(self, key: Any, value: Any) -> None:
        """Give it other values."""
        with torch.no_grad():
            self._tensor.copy_(value)


class GradMode(Owner):
    """Whether gradients are recorded, as `torch.set_grad_enabled` leaves it."""

    def __init__(self) -> None:
        super().__init__({}, "")

    @property
    def identity(self) -> int:
        """There is one."""
        return hash(GradMode)

    def read(self) -> Mapping[Any, Any]:
        """The one mode."""
        return {"torch.is_grad_enabled()": torch.is_grad_enabled()}

    def write(self, key: Any, value: Any) -> None:
        """Set it."""
        torch.set_grad_enabled(value)


class _Seen:
    """The entries of an owner at the last look."""

    def __init__(self, owner: Owner) -> None:
        self.owner, self.entries = owner, dict(owner.read())
        self._held = [pair for key, value in self.entries.items() for pair in self._containers(key, value)]

    def _containers(self, key: Any, value: Any) -> Iterable[tuple[Any, tuple[Any, list[Any]]]]:
        kind = type(value)
        if kind in _HOLD_NOTHING or not self.owner.watches(key):
            return ()
        if kind in _PLAIN_CONTAINERS and not value:  # a module has a dozen for its hooks
            return ((key, (value, [])),)
        return ((key, one) for one in _containers(value))

    def look(self) -> list[Place]:
        """Those that are not as they were; from now on they are."""
        now, old = self.owner.read(), self.entries
        inside = [key for key, one in self._held if (one[0] or one[1]) and _is_changed(one)]
        if not inside and len(now) == len(old) and all(map(is_, now.values(), old.values())):
            return []
        others = (key for key in {**old, **now} if now.get(key, MISSING) is not old.get(key, MISSING))
        changed = dict.fromkeys([*inside, *others])
        self._held = [pair for pair in self._held if pair[0] not in changed]
        self._held += [pair for key in changed for pair in self._containers(key, now.get(key, MISSING))]
        self.entries = dict(now)
        return [self.owner.place(key) for key in changed if self.owner.watches(key)]


def _containers(value: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Every container below, up to a number, and what is in it; objects have owners of their own."""
    pending, seen, left_to_see = [(value, _DEEP)], set(), _MOST
    while pending and left_to_see > 0:
        held, left = pending.pop()
        if not isinstance(held, _CONTAINERS) or isinstance(held, Guard) or id(held) in seen or not left:
            continue
        seen.add(id(held))
        if not isinstance(held, tuple):
            yield held, _contents(held)
        if 0 < len(held) <= _LONG:
            left_to_see -= len(held)
            pending.extend((i, left - 1) for _, i in items_of(held) if type(i) not in _HOLD_NOTHING)


def _contents(held: Any) -> list[Any]:
    if len(held) > _LONG:
        return [len(held)]
    return [*dict.keys(held), *dict.values(held)] if isinstance(held, dict) else list(held)


def _is_changed(pair: tuple[Any, list[Any]]) -> bool:
    held, before = pair
    if len(held) > _LONG:
        return before != [len(held)]
    now = _contents(held)
    return len(now) != len(before) or not all(map(is_, now, before))


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
        beside: Iterable[Owner] = (),
    ) -> "Surroundings":  # fmt: skip
        """Of some modules, by name, and of nothing below them; some names are not looked at."""
        made = cls.__new__(cls)
        own = (Owner(vars(module), f"{name}." if name else "", but) for name, module in modules)
        made._seen = [_Seen(owner) for owner in (*own, *beside)]
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
        yield Owner(vars(thing), f"{path}.")


class Replayed:
    """Stands for an iterator: what it gives is kept, so that a step can take it again.

    Args:
        source: The iterator.
        on_next: Told when something is taken.
    """

    def __init__(self, source: Any, on_next: Callable[["Replayed"], None] | None = None) -> None:
        self.source, self.on_next = source, on_next
        self.at = 0
        self._given: list[Any] = []

    def __iter__(self) -> "Replayed":
        return self

    def __next__(self) -> Any:
        if self.on_next is not None:
            self.on_next(self)
        if self.at == len(self._given):
            self._given.append(next(self.source))
        self.at += 1
        return self._given[self.at - 1]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "source":
            raise AttributeError(name)
        return getattr(self.source, name)

    def forget(self) -> None:
        """What has been taken will not be asked for again."""
        del self._given[: self.at]
        self.at = 0

    def rest(self) -> Any:
        """The iterator itself, or one that gives what it would give now."""
        self.forget()
        return chain(self._given, self.source) if self._given else self.source


class Kept(NamedTuple):
    """A value as it stood, with what was in it.

    Attributes:
        value: The object.
        inner: The containers in it, each with a shallow copy.
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
    def of(cls, value: Any, *, deep: bool = False) -> "Kept":
        """Keep a value.

        Args:
            value: What stands somewhere.
            deep: Whether the values of a tensor are kept too.
        """
        inner = [(held, held.copy()) for held, _ in _containers(value)]
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
        changed = self._changed()
        return {id(item) for _, saved in self.inner for _, item in items_of(saved)} - changed

    def before(self) -> Any:
        """A container as it was, with others in the place of those in it that have changed since."""
        changed, kept = self._changed(), {id(held): saved for held, saved in self.inner}

        def as_it_was(value: Any) -> Any:
            if id(value) not in changed:
                return value
            copy = kept[id(value)].copy()
            if isinstance(copy, dict | list | deque):
                for key, item in list(items_of(copy)):
                    copy[key] = as_it_was(item)
            return copy

        return as_it_was(self.value) if id(self.value) in changed else kept.get(id(self.value), self.value)

    def _changed(self) -> set[int]:
        changed = {id(held) for held, saved in self.inner if _is_changed((held, _contents(saved)))}
        while more := {
            id(held)
            for held, saved in self.inner
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
            tensor.data = saved.clone()
            # A micro-batch before may have it in its graph, with this number.
            if version_of(tensor) != version:
                set_version(tensor, version)


class Standing:
    """Everything that some owners have, to be put back.

    Args:
        owners: Whose.
    """

    def __init__(self, owners: Iterable[Owner]) -> None:
        self._kept = [
            (owner, {key: Kept.of(value) for key, value in owner.read().items() if owner.watches(key)})
            for owner in owners
            if not isinstance(owner, Numbers)
        ]

    def restore(self) -> None:
        """Put it back."""
        for owner, kept in self._kept:
            for key in [key for key in owner.read() if owner.watches(key) and key not in kept]:
                owner.write(key, MISSING)
            for key, value in kept.items():
                value.give_back(owner.place(key))


@dataclass(slots=True)
class Effect:
    """One place that the code between units changes.

    Attributes:
        place: Which.
        positions: How many calls of units had been made before each change.
        from_units: Whether it depends on what units return, so that the last stage alone has it.
        deep: Whether the values of the tensor there are written, too.
        read_at: How many calls of units had been made when a tensor that stood there was first read; None:
            none was.
        retains: Whether the step asks for gradients of tensors there, by `retain_grad`.
        by_value: Whether a value that units compute decides if it is changed.
    """

    place: Place
    positions: set[int] = field(default_factory=set)
    from_units: bool = False
    deep: bool = False
    read_at: int | None = None
    retains: bool = False
    by_value: bool = False
