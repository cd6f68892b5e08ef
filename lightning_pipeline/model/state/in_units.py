"""What units keep of their own: counters, lists, running means that a unit's forward changes.

Such a unit is on one rank. There every micro-batch begins with what stood when the batch began, and the
results are put together by rules, as those of code between units are. Then ranks tell each other what came
out, so that hooks find it in the whole module.
"""

import inspect
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn

from lightning_pipeline.model.places import MISSING, Effect, Guard, Owner, Place, Surroundings, metrics_of
from lightning_pipeline.model.rules import CHAINED, Rows, Rule, unmerged, usual
from lightning_pipeline.model.state.elsewhere import AttributeGuards, SetByUnit, set_by_unit
from lightning_pipeline.model.state.sent import Sent, left_in, put_in, size_of, travels
from lightning_pipeline.model.state.step_state import StepState
from lightning_pipeline.model.tensors import is_placeholder, put_back, tensors_held, version_of
from lightning_pipeline.model.trace import Trace, Unit

_OF_ALL_MODULES = frozenset(vars(nn.Module()))
_ROUNDS = 2  # batches of a step after which ranks tell each other in any case: a trace may show more by then
_MOST = 1 << 16  # bytes that ranks tell each other after each batch
_FEW = 64  # tensors and numbers in them
_LONG = 1000  # items of a container that is looked into


class Told(NamedTuple):
    """What a rank tells the others of its units.

    Attributes:
        values: By label; None: too large to be told after each batch, or nothing that travels.
        apart: What its forward has changed once for each micro-batch, with the line of the forward.
    """

    values: dict[str, Sent | None]
    apart: dict[str, str]


class InUnits:
    """Follows what the units of this rank keep, and what others tell of theirs.

    Args:
        root: The LightningModule.
        units: Of it; more may come.
        stage_of: The stage of each.
        here: Stages of this rank.
        guards: What stands for attributes of other stages.
        device: Of the run.
    """

    def __init__(
        self, root: nn.Module, units: Sequence[Unit], stage_of: Sequence[int], here: Collection[int],
        guards: AttributeGuards, device: torch.device,
    ) -> None:  # fmt: skip
        self._root, self._units, self._stage_of, self._here = root, units, stage_of, here
        self._guards, self._device = guards, device
        self._metrics = {id(vars(part)) for metric in metrics_of(root) for part in metric.modules()}
        self._rules: dict[str, dict[str, Rule | None]] = {}
        self._rows: dict[str, dict[str, Rows]] = {}
        self._own: dict[str, tuple[int, Place]] = {}  # by label
        self._theirs: dict[str, Place] = {}
        self._apart: dict[str, str] = {}
        self._rounds: dict[str, int] = {}
        self._around: Surroundings | None = None
        self._some = self._several = False
        self._step, self._between = "", set[tuple[int, Any]]()

    # ---- rules

    def tried(self, trace: Trace) -> list[tuple[int, Place]]:
        """What units change for which a rule is wanted; the number of each unit first.

        Args:
            trace: Of a step.
        """
        left_out = trace.carried(filled=True)
        return [
            (unit, place)
            for unit, place in trace.unit_attributes
            if place.identity not in left_out and self._is_kept(unit, place)
        ]

    def is_here(self, unit: int) -> bool:
        """Whether this rank has a unit."""
        return self._stage_of[unit] in self._here

    def _is_kept(self, unit: int, place: Place) -> bool:
        """Whether it is an attribute of the unit or of an object in it, and no state that has a graph."""
        if type(place.owner) is not Owner or place.owner.identity in self._metrics:
            return False
        parts = list(self._units[unit].module.modules())
        if any(place.owner.identity == id(part._buffers) for part in parts):
            return False
        inside = any(place.owner.identity == id(vars(part)) for part in parts)
        if inside and place.key in _OF_ALL_MODULES:
            return False
        value = place.get()  # `weight` of `weight_norm` is worked out from parameters in each forward
        if isinstance(value, Tensor) and (value.requires_grad or is_placeholder(value)):
            return False
        return inside or place.label.startswith(f"{self._units[unit].name}.")

    def know(self, trace: Trace, rules: Mapping[str, Rule | None], rows: Mapping[str, Rows]) -> None:
        """Use these rules from now on.

        Args:
            trace: Of the step.
            rules: By label; where none fits micro-batches follow each other.
            rows: Those of them that all ranks know.
        """
        wrong = [label for label, rule in rules.items() if rule in (unmerged, usual)]  # or random
        self._rules[trace.step] = {**rules, **dict.fromkeys(wrong, CHAINED)}
        self._rows[trace.step] = dict(rows)
        for unit, place in trace.unit_attributes:
            if place.label in wrong and self.is_here(unit):
                self._apart[place.label] = self._line(unit)

    def rows(self, step: str) -> dict[str, Rows]:
        """Those by which values have the samples of the batch in a dimension; alike on all ranks."""
        return self._rows.get(step, {})

    def forget(self, step: str) -> None:
        """Its rules are to be found anew."""
        self._rules.pop(step, None)
        self._rows.pop(step, None)

    def _line(self, unit: int) -> str:
        forward = inspect.unwrap(type(self._units[unit].module).forward)
        code = getattr(forward, "__code__", None)
        place = f" [{code.co_filename.rpartition('/')[2]}:{code.co_firstlineno}]" if code is not None else ""
        return f"forward of {type(self._units[unit].module).__name__}{place}"

    # ---- a batch

    def begin(self, trace: Trace) -> None:
        """A batch begins: what hooks have changed since is none of the units' doing."""
        own = self.tried(trace) + [
            (u, p) for u, p in trace.unit_attributes if p.label in self.rows(trace.step)
        ]
        self._own |= {place.label: (unit, place) for unit, place in own if self.is_here(unit)}
        self._theirs |= {place.label: place for unit, place in own if not self.is_here(unit)}
        self._guards.install(self._set_elsewhere(trace), SetByUnit)
        self._step, self._between = trace.step, {effect.place.identity for effect in trace.effects}
        self._look()

    def _set_elsewhere(self, trace: Trace) -> list[Place]:
        """Attributes of units of other ranks that the forward of the unit sets; tensors are followed."""
        return [
            place
            for unit, place in trace.unit_attributes
            if not self.is_here(unit)
            and not str(place.key).startswith("_")
            and type(place.get()) in (bool, int, float, str)
        ]

    def state(
        self, trace: Trace, stage: int, sizes: Sequence[int], but: Collection[int] = ()
    ) -> StepState | None:
        """For one batch: what units of a stage keep; None where they keep nothing.

        Args:
            trace: Of the step.
            stage: Of this rank.
            sizes: Samples of each micro-batch.
            but: Units that run once for the whole batch.
        """
        self._several = len(sizes) > 1
        rules = self._rules.get(trace.step, {})
        effects = [
            Effect(place)
            for label, (unit, place) in self._own.items()
            if label in rules and self._stage_of[unit] == stage and unit not in but
            if place.identity not in self._between
        ]
        if not effects or len(sizes) == 1:
            return None
        return StepState(effects, dict(rules), sizes, is_last=True, step=trace.step, in_unit=True)

    def settle(self, states: Sequence[StepState | None]) -> None:
        """After a batch, once its states are settled: what else have units changed?"""
        rules = self._rules.setdefault(self._step, {})
        for label in [label for state in states if state is not None for label in state.unfit]:
            self._apart[label] = self._line(self._own[label][0])
        for unit, place in self._look():
            if place.identity in self._between:
                continue
            self._own.setdefault(place.label, (unit, place))
            if place.label not in rules and self._several:
                rules[place.label] = usual
                self._apart[place.label] = self._line(unit)

    @contextmanager
    def around(self, unit: int) -> Iterator[None]:
        """A unit of this rank runs that is of no batch here, such as one called by message: what it changes.

        Args:
            unit: Which.
        """
        before = self._surroundings([(unit, self._units[unit])])
        yield
        for number, place in self._changed(before, [(unit, self._units[unit])]):
            self._own.setdefault(place.label, (number, place))

    def _look(self) -> list[tuple[int, Place]]:
        """What units of this rank have changed since the last look."""
        numbered = [(number, unit) for number, unit in enumerate(self._units) if self.is_here(number)]
        if self._around is None:
            self._around = self._surroundings(numbered)
        return self._changed(self._around, numbered)

    @staticmethod
    def _surroundings(numbered: Sequence[tuple[int, Unit]]) -> Surroundings:
        named = [pair for _, unit in numbered for pair in unit.module.named_modules(prefix=unit.name)]
        return Surroundings.of_attributes(named, _OF_ALL_MODULES, arrays=False)

    def _changed(self, around: Surroundings, numbered: Sequence[tuple[int, Unit]]) -> list[tuple[int, Place]]:
        changed = around.look()
        if not changed:
            return []
        owners = {id(vars(part)): number for number, unit in numbered for part in unit.module.modules()}
        found = [(owners[place.owner.identity], place) for place in changed if place.owner.identity in owners]
        return [(unit, place) for unit, place in found if self._is_kept(unit, place)]

    def changed(self) -> None:
        """The module has others."""
        self._around = None

    # ---- what ranks tell each other

    def tells(self, step: str) -> bool:
        """After a batch: whether ranks tell each other; alike on all of them."""
        self._rounds[step] = self._rounds.get(step, 0) + 1
        return self._some or self._rounds[step] <= _ROUNDS

    def told(self, largest: int | None = None, *, after_batch: bool = False) -> Told:
        """What this rank tells.

        Args:
            largest: Bytes that it may have together; None: any number.
            after_batch: Whether it is little, and said again with every batch.
        """
        places = [place for _, place in self._own.values() if not isinstance(place.get(), Guard)]
        apart, self._apart = self._apart, {}
        if after_batch:
            small = [place for place in places if _is_little(place.get())]
            sent, _ = left_in(small, _MOST)
        else:
            sent, _ = left_in(places, largest)
        return Told({place.label: sent.get(place.label) for place in places}, apart)

    def take(self, told: Sequence[Told]) -> dict[str, str]:
        """Have what other ranks told.

        Args:
            told: By each rank, this one too.

        Returns:
            Of `Told.apart` what was not told before.
        """
        values = {label: sent for one in told for label, sent in one.values.items() if label not in self._own}
        self._some |= any(one.values for one in told)
        places = [place for label in values if (place := self._place(label)) is not None]
        known = [place for place in places if values[place.label] is not None]
        self._guards.release(known)
        put_in(
            known,
            {place.label: sent for place in known if (sent := values[place.label]) is not None},
            self._device,
        )
        for place in places:
            if values[place.label] is None:
                self._guards.install([place], set_by_unit(place.get()))
        return {label: line for one in told for label, line in one.apart.items()}

    def take_last(self, told: Sequence[Told]) -> None:
        """When the run has ended: have what came, on the CPU; what did not is as it stands here.

        Args:
            told: By ranks, this one too.
        """
        sent = {
            n: one
            for rank in told
            for n, one in rank.values.items()
            if one is not None and n not in self._own
        }
        places = [place for label in sent if (place := self._place(label)) is not None]
        put_in(places, sent, torch.device("cpu"))

    def _place(self, label: str) -> Place | None:
        """Where it stands on this rank; None where nothing has that name."""
        if label not in self._theirs:
            path, _, key = label.rpartition(".")
            try:
                module = self._root.get_submodule(path)
            except AttributeError:
                return None
            self._theirs[label] = Owner(vars(module), f"{path}.").place(key)
        place = self._theirs[label]
        return None if is_placeholder(place.get()) else place


def _is_little(value: Any) -> bool:
    if value is MISSING:
        return True
    if isinstance(value, list | tuple | dict | set | deque) and len(value) > _FEW:
        return False
    return travels(value) and sum(1 for _ in _leaves(value)) <= _FEW and size_of(value) <= _MOST


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple | set | deque):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


@contextmanager
def values_kept(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, units may run once more than on one device: tensors and arrays that they hold are put back.

    Args:
        modules: The units. Their attributes, parameters and buffers are not looked after.
    """
    held = [
        value
        for module in modules
        for part in module.modules()
        for name, value in vars(part).items()
        if name not in _OF_ALL_MODULES
    ]
    tensors = [
        (one, one.detach().clone(), version_of(one))
        for value in held
        for one in tensors_held(value, most=_LONG)
        if not is_placeholder(one)
    ]
    arrays = [(one, one.copy()) for value in held for one in _arrays(value)]
    try:
        yield
    finally:
        for tensor, saved, version in tensors:
            put_back(tensor, saved, version)
        for array, before in arrays:
            array[...] = before


def _arrays(value: Any) -> Iterator[Any]:
    if isinstance(value, numpy.ndarray):
        yield value
    elif isinstance(value, dict | list | tuple | deque) and len(value) <= _LONG:
        for item in list(value.values()) if isinstance(value, dict) else list(value):
            yield from _arrays(item)
