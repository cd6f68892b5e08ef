"""What a unit gives away beside its output, where code between the units reads it: ports of the call.

Three ways out are known: attributes that its forward sets (`self.aux = loss`), containers of modules that it
fills (`self.seen.append(x)`), and forward hooks on modules inside it. The tensors that leave become further
outputs of the call, which travel like any other. A hook is put off until the call is over and then runs as
what it is, code between units, on every stage, with what it would have seen.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_pipeline.model.tensors import (
    Given,
    Structure,
    contents_of,
    describe,
    holds_tensor,
    items_of,
    refill,
    unflatten,
)

_PORTED = "ported"
_CONTAINERS = (list, deque, dict)
PortPlace = tuple[int, str]  # a module, by its number in the tree, and the name of an attribute


class Way(NamedTuple):
    """A way out of a unit: an attribute that is set, or a container whose contents change."""

    place: PortPlace
    filled: bool


class PortSpec(NamedTuple):
    """The ways out of one call of a unit, and whether hooks inside it are one."""

    ways: tuple[Way, ...]
    hooks: bool


class Porting(NamedTuple):
    """What a trace is to look for: calls of which units, attributes inside them, and whether hooks."""

    units: frozenset[int]
    places: frozenset[PortPlace]
    hooks: bool


class _Seen(NamedTuple):
    """What a hook is to be called with: the module's number, the hook's position there, the arguments."""

    module: int
    position: int
    arguments: tuple[Any, ...]


class Watch:
    """One call of a unit with ports.

    Args:
        modules: All modules of the tree, in order.
        unit: The module that is called.
        spec: Its ports; while tracing, what may be one.
        given: The arguments of the call.
    """

    def __init__(self, modules: Sequence[nn.Module], unit: nn.Module, spec: PortSpec, given: Given) -> None:
        self._modules, self._ways, self._hooked, self._given = modules, spec.ways, spec.hooks, given
        self._numbers = {id(module): number for number, module in enumerate(modules)}
        self._unit = unit
        self._hooks: list[tuple[nn.Module, dict[int, Any]]] = []
        self._seen: list[_Seen] = []
        self._before: dict[PortPlace, tuple[Any, list[Any]]] = {}

    def __enter__(self) -> None:
        """The call begins."""
        for way in self._ways:
            held = self._value(way.place)
            self._before[way.place] = held, _items(held)
        if not self._hooked:
            return
        inner = [m for m in self._unit.modules() if m is not self._unit and m._forward_hooks]
        self._hooks = [(module, dict(module._forward_hooks)) for module in inner]
        for module, hooks in self._hooks:
            for position, key in enumerate(hooks):
                module._forward_hooks[key] = partial(self._note, position)

    def __exit__(self, *exception: object) -> None:
        """It is over."""
        for module, hooks in self._hooks:
            module._forward_hooks.update(hooks)

    def _note(self, position: int, module: nn.Module, *arguments: Any) -> None:
        self._seen.append(_Seen(self._numbers[id(module)], position, arguments))

    def restart(self) -> None:
        """The call is made once more, in another way."""
        self._seen.clear()

    def narrow(self) -> PortSpec:
        """After a traced call: the ways that it has used, which are its ports from now on."""
        found = []
        for way in self._ways:
            (before, old), now = self._before[way.place], self._value(way.place)
            if now is before and isinstance(now, _CONTAINERS):
                known = set(map(id, old))
                if any(id(item) not in known and holds_tensor(item) for item in _items(now)):
                    found.append(Way(way.place, filled=True))
            elif now is not before and holds_tensor(now):
                found.append(Way(way.place, filled=False))
        self._ways = tuple(found)
        return PortSpec(self._ways, bool(self._seen))

    def held_before(self) -> dict[PortPlace, list[Any]]:
        """What the containers that the call fills held before it."""
        return {way.place: self._before[way.place][1] for way in self._ways if way.filled}

    def _value(self, place: PortPlace) -> Any:
        return vars(self._modules[place[0]]).get(place[1])

    # ---- taking apart, putting together

    def take_apart(self, output: Any) -> tuple[list[Tensor], Structure]:
        """The tensors that leave the call, and what they belong to."""
        tensors, main = self._given.take_apart(output)
        known = self._given.places()
        parts = [main]
        for way in self._ways:
            value = self._value(way.place)
            if way.filled:
                parts.append(self._added(way.place, value, tensors))
            else:
                parts.append(Structure("set", way.place, (describe(value, tensors, known),)))
        for seen in self._seen:
            parts.append(Structure("hook", seen[:2], (describe(seen.arguments, tensors, known),)))
        return tensors, Structure(_PORTED, None, tuple(parts))

    def _added(self, place: PortPlace, value: Any, tensors: list[Tensor]) -> Structure:
        """What a container holds more than before the call; it may hold other old things on other stages."""
        known = set(map(id, self._before[place][1]))
        new = [(key, item) for key, item in items_of(value) if id(item) not in known]
        keys = tuple(key for key, _ in new) if isinstance(value, dict) else None
        return Structure("filled", (place, keys), tuple(describe(item, tensors) for _, item in new))

    def put_together(self, tensors: list[Any], structure: Structure) -> Any:
        """The output, with these tensors; attributes and containers are as the call leaves them."""
        main, *parts = structure.children
        for kind, payload, children in parts:
            if kind == "set":
                number, name = payload
                vars(self._modules[number])[name] = unflatten(tensors, children[0], self._given.things)
            elif kind == "filled":
                place, keys = payload
                self._fill(place, keys, [unflatten(tensors, child) for child in children])
        return self._given.put_together(tensors, main)

    def answers(self, structure: Structure) -> bool:
        """Whether `put_together` alone makes of it what a call leaves: no hook is to be called."""
        return all(part.kind != "hook" for part in structure.children)

    def _fill(self, place: PortPlace, keys: Any, items: list[Any]) -> None:
        held = self._value(place)
        if keys is None:
            old = self._before[place][1] if place in self._before else _items(held)
            refill(held, [*old, *items])
        else:
            refill(held, {**contents_of(held), **dict(zip(keys, items, strict=True))})

    def put_off(self, tensors: list[Any], structure: Structure) -> list[Callable[[], Any]]:
        """Calls of the hooks, to be made between units.

        Where the unit really ran they get the very objects that they would have got.
        """
        if self._seen:
            return [partial(self._call, s.module, s.position, s.arguments) for s in self._seen]
        places = [part for part in structure.children if part.kind == "hook"]
        return [
            partial(self._call, number, position, unflatten(tensors, children[0], self._given.things))
            for _, (number, position), children in places
        ]

    def _call(self, module: int, position: int, arguments: tuple[Any, ...]) -> Any:
        owner = self._modules[module]
        return list(owner._forward_hooks.values())[position](owner, *arguments)


def transient(modules: Sequence[nn.Module], first: dict[PortPlace, list[Any]]) -> frozenset[PortPlace]:
    """Of containers that units fill, those that hold at the end what they held before the first call.

    Args:
        modules: All modules of the tree, in order.
        first: What each held.
    """
    now = {(number, name): vars(modules[number]).get(name) for number, name in first}
    return frozenset(
        place for place, held in first.items() if list(map(id, held)) == list(map(id, _items(now[place])))
    )


def _items(container: Any) -> list[Any]:
    return [item for _, item in items_of(container)] if isinstance(container, _CONTAINERS) else []


def has_ports(structure: Structure) -> bool:
    """Whether it is that of a call with ports, which `Watch` alone puts together."""
    return structure.kind == _PORTED


class Transient:
    """Containers that a step leaves as it found them: what its end takes out again on the last stage.

    Args:
        modules: All modules of the tree, in order.
        places: Where they are.
    """

    def __init__(self, modules: Sequence[nn.Module], places: Iterable[PortPlace]) -> None:
        held = (vars(modules[number]).get(name) for number, name in places)
        self._contents = [(one, contents_of(one)) for one in held if isinstance(one, _CONTAINERS)]

    def restore(self) -> None:
        """Take out what was put in since."""
        for container, contents in self._contents:
            refill(container, contents)


def candidates(
    modules: Sequence[nn.Module], unit: nn.Module, glue: Iterable[nn.Module], places: Iterable[PortPlace]
) -> tuple[Way, ...]:
    """Where a unit may put tensors: attributes of its modules that are read, containers of the others.

    Args:
        modules: All modules of the tree, in order.
        unit: The unit.
        glue: Modules that are in no unit.
        places: Attributes of modules inside units that code between the units reads.
    """
    inner, outer = set(map(id, unit.modules())), set(map(id, glue))

    def found() -> Iterator[PortPlace]:
        for number, module in enumerate(modules):
            if id(module) in inner:
                yield from (place for place in places if place[0] == number)
            elif id(module) in outer:
                yield from ((number, name) for name, value in vars(module).items() if _may_fill(name, value))

    return tuple(Way(place, filled=False) for place in sorted(found()))


def _may_fill(name: str, value: Any) -> bool:
    return isinstance(value, _CONTAINERS) and not name.startswith("_")
