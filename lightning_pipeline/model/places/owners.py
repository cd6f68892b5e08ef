"""Where a step may leave something behind: attributes, entries of objects, flags, values of tensors."""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_pipeline._torch import DisableTorchFunction
from lightning_pipeline.model.tensors import (
    arguments_of,
    attributes_of,
    in_slots,
    is_array,
    slots_of,
    storage_key,
)
from lightning_pipeline.registry import named_parameters_of

MISSING: Any = type("Missing", (), {"__repr__": lambda self: "<not set>"})()


FILLED = (list, deque, dict, OrderedDict, defaultdict)
"""Containers of which it can be seen whether a step reads them, or only fills them."""


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

    def keeps(self, key: Any) -> bool:
        """Whether it is put back after runs of a step that one device does not make."""
        return self.watches(key)


class SlotsOwner(Owner):
    """The attributes that an object keeps in slots.

    Args:
        thing: The object.
        label: Begins the label of each.
    """

    def __init__(self, thing: object, label: str) -> None:
        super().__init__({}, label)
        self._thing = thing

    @property
    def identity(self) -> int:
        """Equal for two owners of the same object's."""
        return id(self._thing)

    def read(self) -> Mapping[Any, Any]:
        """Those that are set."""
        return in_slots(self._thing)

    def write(self, key: Any, value: Any) -> None:
        """Set one, or take it away; that of a frozen data class too."""
        if value is not MISSING:
            object.__setattr__(self._thing, key, value)
        elif hasattr(self._thing, key):
            object.__delattr__(self._thing, key)


class ArgumentsOwner(Owner):
    """What a `functools.partial` gives to its function.

    Args:
        made: It.
        label: Begins the label of each.
    """

    def __init__(self, made: "partial[Any]", label: str) -> None:
        super().__init__({}, label)
        self._made = made

    @property
    def identity(self) -> int:
        """Equal for two owners of the same one's."""
        return id(self._made)

    def read(self) -> Mapping[Any, Any]:
        """All of them, by position or name."""
        return arguments_of(self._made)

    def write(self, key: Any, value: Any) -> None:
        """Set one."""
        every = {**arguments_of(self._made), key: value}
        given = tuple(one for name, one in every.items() if isinstance(name, int))
        named = {name: one for name, one in every.items() if not isinstance(name, int)}
        made: Any = self._made
        made.__setstate__((made.func, given, named, vars(made)))


def owners_of(thing: object, label: str) -> Iterator[Owner]:
    """Of the attributes of an object of the user's.

    Args:
        thing: The object.
        label: Begins the label of each.
    """
    own = attributes_of(thing)
    if own is not None:
        yield Owner(own, label)
    if slots_of(thing):
        yield SlotsOwner(thing, label)
    if isinstance(thing, partial):
        yield ArgumentsOwner(thing, label)


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


class FileOwner(Owner):
    """The globals of a Python file, but for what Python itself keeps there, now or once it has warned."""

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
    """Which parameters require a gradient, by name: of those that stand there now."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__({}, "requires_grad of ")
        self._root, self._slots = root, dict[str, tuple[dict[str, Any], str]]()
        for path, _ in named_parameters_of(root):
            owner, _, key = path.rpartition(".")
            self._slots[path] = root.get_submodule(owner)._parameters, key

    @property
    def identity(self) -> int:
        """Equal for the flags of one module."""
        return hash((Flags, id(self._root)))

    def read(self) -> Mapping[Any, Any]:
        """All flags."""
        held = self._slots.items()
        found = ((name, slots[key]) for name, (slots, key) in held if key in slots)  # scripted: no `get`
        return {name: tensor.requires_grad for name, tensor in found if tensor is not None}

    def write(self, key: Any, value: Any) -> None:
        """Set one."""
        slots, name = self._slots[key]
        if (tensor := slots.get(name)) is not None:
            tensor.requires_grad_(value)


class Memory(Owner):
    """Where the values of parameters are, by name: `weight.data = ...` moves them."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__({}, "")
        self._root, self._tensors = root, dict(named_parameters_of(root))
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


class ArrayOwner(TensorOwner):
    """The values of a NumPy array, as a tensor that has its memory.

    Args:
        array: It.
        at: Where it stands, or what it stands in.
        number: Which of the arrays there; None: it stands there itself, as another one may later.
    """

    def __init__(self, array: Any, at: Place, number: int | None = None) -> None:
        self._at, self._number = at, number
        super().__init__(self._as_tensor(array), f"{at.label}[:]" + ("" if number is None else f" {number}"))

    @property
    def array(self) -> Any:
        """The array of the last look."""
        return self._array

    @property
    def identity(self) -> int:
        """Equal for two owners of what stands in one place."""
        return id(self._array) if self._number is not None else hash((ArrayOwner, self._at.identity))

    def read(self) -> Mapping[Any, Any]:
        """The tensor; nothing where no array stands there now."""
        now = self._array if self._number is not None else self._at.get()
        if not is_array(now):
            return {}
        if now is not self._array:
            self._tensor = self._as_tensor(now)
        return {"": self._tensor}

    def _as_tensor(self, array: Any) -> Tensor:
        self._array = array
        with DisableTorchFunction():
            return torch.from_numpy(array)

    def write(self, key: Any, value: Any) -> None:
        """Give it other values."""
        if self.read() and isinstance(value, Tensor):
            super().write(key, value)


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

    def __len__(self) -> int:
        return len(self.source)

    def __bool__(self) -> bool:
        return bool(self.source)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # `isinstance` finds the user's class
        return type(self.source) if "source" in vars(self) else Replayed

    @property
    def has_given(self) -> bool:
        """Whether something was taken."""
        return bool(self._given)

    def forget(self) -> None:
        """What has been taken will not be asked for again."""
        del self._given[: self.at]
        self.at = 0

    def rest(self) -> Any:
        """The iterator itself, or one that gives what it would give now."""
        self.forget()
        return chain(self._given, self.source) if self._given else self.source


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
        is_container: Whether a list, deque or dictionary stands there, which the step may only fill.
    """

    place: Place
    positions: set[int] = field(default_factory=set)
    from_units: bool = False
    deep: bool = False
    read_at: int | None = None
    retains: bool = False
    by_value: bool = False
    is_container: bool = False
