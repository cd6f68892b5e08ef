"""What a traced step leaves behind: which places it changes, where in the step, and what that depends on."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeline.model.places import (
    FILLED,
    ArrayOwner,
    Effect,
    Memory,
    Owner,
    Place,
    Replayed,
    Surroundings,
    TensorOwner,
)
from lightning_pipeline.model.tensors import (
    Looked,
    holds_tensor,
    is_placeholder,
    know_shared,
    storage_key,
    tensors_held,
)
from lightning_pipeline.model.trace.glue import Glue
from lightning_pipeline.model.trace.ports import PortSpec
from lightning_pipeline.model.trace.record import Observation
from lightning_pipeline.registry import named_parameters_of

_MOST_CARRIED = 1000  # items of a container in which a step may carry tensors from batch to batch


class EffectsSeen:
    """Looks around for what a step changes, before and after each call of a unit.

    Args:
        observed: The step.
        glue: Tells what is written between units.
        others: What the step may change beside the module.

    Attributes:
        made_where_held: After `note`, weights that are written after units, and of no value of theirs.
    """

    def __init__(self, observed: Observation, glue: Glue, others: Sequence[Owner]) -> None:
        self._observed, self._glue, self._others = observed, glue, others
        self._found: dict[tuple[int, Any], Effect] = {}
        self._by_units: dict[tuple[int, Any], tuple[int, Place]] = {}
        self._iterators: list[tuple[Place, Replayed, int]] = []
        self._made: list[Replayed] = []  # of these, those that did not stand there before
        self._numbers = {id(vars(module)): number for number, module in enumerate(observed.root.modules())}
        self._unknown = False  # what comes now may depend on values of units without a trace of it
        self._stood: dict[int, tuple[int, Any]] = {}  # tensors at the start: the place of each, by id
        self._read: dict[tuple[int, Any], int] = {}
        self._standing: dict[tuple[int, Any], Place] = {}
        self._read_between: set[tuple[int, Any]] = set()
        self._doubted: set[str] = set()  # weights that got other memory where values of units were known
        self._weights: set[str] = set()
        self.made_where_held: set[str] = set()
        self._held: dict[int, list[Place]] = {}  # tensors that no module has as its own, by their memory

    def start(self) -> None:
        """The step begins."""
        self._around = Surroundings(self._observed.root, self._others)
        self._iterators, self._made = [], []
        for place in self._around.iterators():
            value = place.get()
            replayed = value if isinstance(value, Replayed) else Replayed(value)
            if replayed is not value:
                self._made.append(replayed)
            replayed.on_next = self._next_taken
            place.put(replayed)
            self._iterators.append((place, replayed, replayed.at))
        self._around.look()
        self._buffers = dict(self._observed.root.named_buffers())
        self._stood, self._held, self._standing = {}, {}, {}
        known = list[Tensor]()
        stood = {}  # looked at before it is watched: to ask a tensor for its layout is to read it
        looked: Looked = {}
        for place, value in self._around.standing():
            for number, tensor in enumerate(tensors_held(value, most=_MOST_CARRIED, looked=looked)):
                stood[id(tensor)] = place.identity
                self._standing[place.identity] = place
                if not is_placeholder(tensor) and not tensor.is_meta and tensor.layout is torch.strided:
                    known += [tensor] if tensor._base is None else [tensor, tensor._base]
                    held = TensorOwner(tensor, f"{place.label} {number}").place("")
                    self._held.setdefault(storage_key(tensor), []).append(held)
        know_shared(known)
        self._stood = stood

    def tensor_written(self, tensor: Tensor, *, computed: bool) -> bool:
        """A tensor is about to be written in place, which is no state of a module.

        Args:
            tensor: It, or a view of it.
            computed: Whether what is written comes from units.

        Returns:
            Whether it stood somewhere when the step began.
        """
        position = len(self._observed.trace.calls)
        places = self._held.get(storage_key(tensor), [])
        for place in _covering(places):
            effect = self._found.setdefault(place.identity, Effect(place, deep=True))
            effect.positions.add(position)
            effect.from_units |= computed or position > 0 or self._unknown
        return bool(places)

    def tensors_used(self, tensors: Iterable[Tensor]) -> None:
        """A function is called with these: note which of them stood somewhere when the step began."""
        for tensor in tensors:
            place = self._stood.get(id(tensor))
            if place is not None:
                self._read.setdefault(place, len(self._observed.trace.calls))
                if self._observed.inside is None:
                    self._read_between.add(place)

    def _next_taken(self, replayed: Replayed) -> None:
        """Something was taken from an iterator."""
        place = next((place for place, found, _ in self._iterators if found is replayed), None)
        if place is not None:
            effect = self._found.setdefault(place.identity, Effect(place))
            effect.positions.add(len(self._observed.trace.calls))
            effect.from_units |= self._unknown

    def close(self) -> None:
        """Let iterators stand where they did, and let go of what stood around: it may be a placeholder."""
        self._around = Surroundings(nn.Module())
        self._stood.clear()
        self._held.clear()
        self._standing.clear()
        for place, replayed, begin in self._iterators:
            replayed.on_next = None
            replayed.at = begin
            is_object = replayed in self._made and hasattr(replayed.source, "__dict__")
            if is_object and place.identity not in self._found and place.get() is replayed:
                place.put(replayed.source)  # loops may take from it, and ask for an iterator again

    def iterators_taken(self) -> list[tuple[Place, Replayed]]:
        """Those from which something was taken: it has to be given again."""
        return [(place, held) for place, held, _ in self._iterators if place.identity in self._found]

    def look(self) -> None:
        """Note what the code between units has changed since."""
        position = len(self._observed.trace.calls)
        for place in self._around.look():
            is_array = isinstance(place.owner, ArrayOwner)
            effect = self._found.setdefault(place.identity, Effect(place, deep=is_array))
            effect.positions.add(position)
            effect.from_units |= self._unknown or (is_array and position > 0)

    def look_at_unit(self, unit: int, ports: PortSpec | None = None) -> None:
        """Note what the forward of a unit has changed since; what its ports fill stands on every stage."""
        filled = {way.place for way in ports.ways if way.filled} if ports is not None else set()
        for place in self._around.look():
            number = self._numbers.get(place.owner.identity, -1)
            if (number, place.key) in filled:
                effect = self._found.setdefault(place.identity, Effect(place, from_units=True))
                effect.positions.add(len(self._observed.trace.calls))
                continue
            self._by_units.setdefault(place.identity, (unit, place))
            if number >= 0 and holds_tensor(place.get()) and not self._observed.in_glue(place.get()):
                self._observed.trace.side_writes.add((number, place.key))

    def values_read(self) -> None:
        """A value of a unit is read as a number: what is done from now on may depend on it."""
        if not self._unknown:
            self.look()
            self._unknown = True

    def note(self) -> None:
        """Write what was seen into the trace, after the step."""
        trace, observed = self._observed.trace, self._observed
        states = {name: _state_place(observed.root, name) for name in self._written()}
        self._doubted = {
            e.place.key for e in self._found.values() if type(e.place.owner) is Memory and e.from_units
        }
        self._positions = {
            effect.place.key if type(effect.place.owner) is Memory else effect.place.label: effect.positions
            for effect in self._found.values()
        }
        trace.is_shared = not self._found.keys().isdisjoint(self._by_units)
        for place in states.values():
            self._found.pop(place.identity, None)
        for effect in self._found.values():
            number = self._numbers.get(effect.place.owner.identity, -1)
            if type(effect.place.owner) is not Memory and (number, effect.place.key) not in trace.transient:
                self._take(effect)
        self._weights = {name for name, _ in named_parameters_of(observed.root, remove_duplicate=False)}
        for name, place in states.items():
            self._take(self._state_effect(name, place))
        read = [self._standing[key] for key in self._read if key in self._read_between]
        trace.tensors_read = [place for place in read if place.label not in self._buffers]
        trace.unit_attributes = [
            (unit, place) for key, (unit, place) in self._by_units.items() if key not in self._found
        ]
        trace.unit_shapes = {
            place.label: [tuple(tensor.shape) for tensor in tensors_held(place.get(), most=_MOST_CARRIED)]
            for _, place in trace.unit_attributes
        }
        trace.unit_numbers = {
            place.label: value
            for _, place in trace.unit_attributes
            if type(value := place.get()) in (bool, int, float, str)
        }
        own = self._weights
        unseen = set(self._buffers) if observed.ended_early else set()
        late = unseen | {
            effect.place.label
            for effect in trace.effects
            if effect.deep and effect.from_units and not isinstance(effect.place.owner, TensorOwner)
        }
        trace.late_states = sorted(n for n in late - own if n not in trace.state_units)

    def rewritten(self, units: Collection[int]) -> bool:
        """Whether a weight of these is written after a call of its unit through which gradients flow.

        Args:
            units: Their numbers.
        """
        trace = self._observed.trace
        written = {
            trace.state_units[effect.place.label]: max(effect.positions)
            for effect in trace.effects
            if effect.deep and effect.place.label in trace.state_units
        }
        return any(
            written.get(call.unit, 0) > call.index and any(spec.requires_grad for spec in call.specs)
            for call in trace.calls
            if call.unit in units
        )

    def _take(self, effect: Effect) -> None:
        value = effect.place.get()
        tensors = list(tensors_held(value))
        if not effect.deep and any(map(self._comes_from_units, tensors)):
            effect.from_units = True
            effect.retains = any(tensor.retains_grad for tensor in tensors)
        if effect.from_units:
            self._observed.tail_read(tensors)
        else:  # every stage does it by itself: all of them, or those that have the weight
            tags = self._observed.tags.union(tensors)
            trace, label = self._observed.trace, effect.place.label
            names = {tag.name for tag in tags if tag.kind == "state"}
            made = effect.deep and (label in self._weights or label in trace.state_units)
            (trace.made_of.setdefault(label, set()) if made else trace.everywhere).update(names - {label})
        effect.read_at = self._read.get(effect.place.identity)
        effect.is_container = type(value) in FILLED
        self._observed.trace.effects.append(effect)

    def _written(self) -> set[str]:
        """Parameters, buffers and plain tensors that are written or moved."""
        observed = self._observed
        moved = {e.place.key for e in self._found.values() if type(e.place.owner) is Memory}
        self._glue.moved |= moved
        rebound = {e.place.label for e in self._found.values() if e.place.label in self._buffers}
        unseen = set(self._buffers) - set(observed.trace.state_units) if observed.ended_early else set()
        return set(self._glue.all_written) | moved | rebound | unseen

    def _state_effect(self, name: str, place: Place) -> Effect:
        glue = self._glue
        positions = glue.write_positions.get(name, set()) | self._positions.get(name, set())
        late = name in glue.written_states or any(position > 0 for position in positions)
        late |= self._observed.ended_early
        if late and name in self._weights and not self._may_be_computed(name, place):
            late = False  # each stage that has a weight can make of it what no unit has part in
            self.made_where_held.add(name)
        return Effect(place, positions or {0}, from_units=late, deep=True)

    def _may_be_computed(self, name: str, place: Place) -> bool:
        unseen = self._observed.ended_early or name in self._doubted
        return unseen or name in self._glue.computed or self._is_computed(place.get())

    def _comes_from_units(self, tensor: Tensor) -> bool:
        observed = self._observed
        tags = observed.tags.of(tensor)
        if self._is_computed(tensor) or any(
            tag.kind == "state" and tag.name in observed.trace.state_units for tag in tags
        ):
            return True
        return is_placeholder(tensor) and not observed.weightless and not tags

    def _is_computed(self, tensor: Tensor) -> bool:
        tags = self._observed.tags.of(tensor)
        return any(tag.kind in ("value", "effect") for tag in tags) or self._observed.is_poisoned(tensor)


def _covering(places: list[Place]) -> list[Place]:
    """Of places of tensors that have the same memory, one that has all of it; else all of them."""
    for place in places:
        tensor = place.get()
        for one in (tensor, tensor._base):
            if one is None or storage_key(one) != storage_key(tensor):  # `.data = ...` has moved one of them
                continue
            if one.numel() * one.element_size() >= tensor.untyped_storage().nbytes():
                return [place if one is tensor else TensorOwner(one, place.owner.label).place("")]
    return places


def _state_place(root: nn.Module, name: str) -> Place:
    path, _, own = name.rpartition(".")
    module = root.get_submodule(path)
    label = f"{path}." if path else ""
    for entries in (module._buffers, module._parameters):
        if own in entries:
            return Owner(entries, label).place(own)
    return Owner(vars(module), label).place(own)
