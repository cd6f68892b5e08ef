"""Which plain attributes a traced step reads, sets and fills outside the units."""

import sys
from collections import defaultdict, deque
from collections.abc import Set
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lightning_pipeline.errors import SplitError
from lightning_pipeline.model.tensors import user_line
from lightning_pipeline.model.trace.entries import EntryReads
from lightning_pipeline.model.trace.increments import How, how_changed
from lightning_pipeline.model.trace.watch import AttributeSnapshot, ReadWatch, holds_tensor, tensors_held

if TYPE_CHECKING:
    from lightning_pipeline.model.trace.record import Call
    from lightning_pipeline.model.trace.tracer import Tracer


class Sums:
    """What a step works out from its own last value, once for each micro-batch."""

    def __init__(self) -> None:
        self.doubtful: list[str] = []
        self._counters: list[tuple[Any, str]] = []
        self._floats: list[str] = []
        self._samples = False

    def add(self, holder: Any, name: str, value: Any, how: Set[How | None]) -> None:
        """Take in one attribute, as it is after the step."""
        scalar = isinstance(value, Tensor) and not value.dim()
        number = isinstance(value, int | float)
        floating = value.is_floating_point() if isinstance(value, Tensor) else isinstance(value, float)
        if how == {"constant"} and (number or (scalar and not floating)):
            self._counters.append((holder, name))
        elif how == {"samples"}:
            self._samples = True
        elif not how or ((number or scalar) and (floating or how != {"sum"})):
            (self._floats if how == {"sum"} else self.doubtful).append(name)

    def counted(self) -> tuple[list[tuple[Any, str]], list[str]]:
        """Counters that advance once per batch, and names of what may not be as on one device.

        Beside a sum of unknown kind a counter stays one of micro-batches: the two may be divided.
        """
        if not self._floats or self._samples:
            return self._counters, self.doubtful
        return [], [*self.doubtful, *self._floats, *(name for _, name in self._counters)]


class Attributes:
    """Watches them for a tracer.

    Args:
        tracer: Whose step it is.
        glue_modules: Modules that are in no unit.
    """

    def __init__(self, tracer: "Tracer", glue_modules: list[nn.Module]) -> None:
        self._tracer, self._modules = tracer, glue_modules
        self._glue = set(map(id, glue_modules))
        self._reads = ReadWatch(self._read, self._written)
        self._writes: dict[tuple[int, str], set[How | None]] = {}  # how glue sets attributes
        self._old_reads: dict[tuple[int, str], int] = {}  # attributes read as they were: before which call
        self._unit_reads: dict[tuple[int, str], str] = {}  # where glue read an attribute of a unit
        self._changed_by_units: set[tuple[int, str]] = set()

    def start(self) -> None:
        """The step begins."""
        for module in self._modules:
            own = vars(module)
            kinds = (dict, defaultdict)
            own.update(
                {n: EntryReads(d) for n, d in own.items() if type(d) in kinds and not n.startswith("_")}
            )
        self._buffers = [(module, dict(module._buffers)) for module in self._modules]
        self._before = self._at_first = AttributeSnapshot(self._modules, objects=True)
        for module in (*self._modules, *(unit.module for unit in self._tracer.patches.units)):
            self._reads.watch(module)

    def first_call(self) -> None:
        """The first unit is about to be called."""
        self._at_first = AttributeSnapshot(self._modules, objects=True)

    def stop(self) -> None:
        """Look no more."""
        self._reads.stop()

    def changed_by_unit(self, call: "Call", changed: list[tuple[nn.Module, str]]) -> None:
        """A unit set attributes of its modules: note who reads them outside it, before or after."""
        for module, name in changed:
            line = self._unit_reads.get((id(module), name))
            if line is not None:
                unit = self._tracer.patches.units[call.unit].name
                raise SplitError(
                    f"attribute {name!r} of unit {unit!r} is set by its forward and read at "
                    f"{line} before it is called; on another stage it would have an old value"
                )
            self._changed_by_units.add((id(module), name))
            self._reads.watch(module, {name})

    def _read(self, module: nn.Module, name: str) -> None:
        if self._tracer.inside is not None:
            return
        if id(module) in self._glue:
            if self._before.holds(module, name):
                self._old_reads.setdefault((id(module), name), len(self._tracer.trace.calls))
            return
        if (id(module), name) not in self._changed_by_units:
            if not name.startswith("_"):  # nn.Module's own
                self._unit_reads.setdefault((id(module), name), user_line())
            return
        if not holds_tensor(vars(module).get(name)):
            raise SplitError(
                f"attribute {name!r} is set by a unit's forward ({type(module).__name__}) and read outside "
                "it; on another stage it would have an old value. Return it from forward instead [at "
                f"{user_line(self._tracer.root)}]"
            )
        self._tracer.note_side_read(module, name)

    def _written(self, module: nn.Module, name: str) -> None:
        if self._tracer.inside is None and id(module) in self._glue:
            how = how_changed(sys._getframe(2), name)
            self._writes.setdefault((id(module), name), set()).add(how)

    def note(self) -> None:
        """Write what was seen into the trace."""
        trace = self._tracer.trace
        after_first_call = {(id(holder), name) for holder, name in self._at_first.changed()}
        changed = self._before.changed()
        self._note_kept(changed)
        for holder, name in changed:
            value = vars(holder).get(name)
            if holds_tensor(value):
                self._tracer.tail_read(list(tensors_held(value)))
            elif (id(holder), name) not in after_first_call:
                trace.early_attributes.append((holder, name))
                continue
            trace.attributes.append((holder, name))
            if not isinstance(value, list | dict | deque):
                self._check_old_read(holder, name)

    def note_late_states(self) -> None:
        """Which buffers and plain tensors the last stage alone has as they are after the step."""
        tracer, trace = self._tracer, self._tracer.trace
        names = {id(module): prefix for prefix, module in tracer.root.named_modules()}
        found = set(tracer.glue.written_states)
        for module, before in self._buffers:
            prefix = names[id(module)] + "." if names[id(module)] else ""
            unseen = set(before) if tracer.ended_early else set()
            found |= {
                prefix + name
                for name, buffer in module._buffers.items()
                if buffer is not None and (name in unseen or before.get(name) is not buffer)
            }
        owned = {name for name, _ in tracer.root.named_parameters(remove_duplicate=False)}
        trace.late_states = sorted(name for name in found - owned if name not in trace.state_units)

    def _note_kept(self, changed: list[tuple[Any, str]]) -> None:
        """What becomes of these over several micro-batches: set anew, counted, added up."""
        trace = self._tracer.trace
        sums = Sums()
        for holder, name in changed:
            value, how = vars(holder).get(name), self._writes.get((id(holder), name), set())
            if isinstance(value, EntryReads):
                self._note_entries(holder, name, value, sums)
            elif self._before.holds(holder, name):
                continue  # a container that is filled
            elif how and (id(holder), name) not in self._old_reads:
                trace.assigned.append((holder, name))
            else:
                sums.add(holder, name, value, how)
        for module in self._modules:
            for name, buffer in module._buffers.items():
                if (id(module), name) in self._writes and buffer is not None:
                    sums.add(module, name, buffer, self._writes[id(module), name])
        sums.doubtful += self._tracer.glue.overwritten
        trace.counters, trace.doubtful = sums.counted()

    def _note_entries(self, holder: Any, name: str, entries: EntryReads, sums: Sums) -> None:
        known = entries.original
        changed = {key for key, value in dict.items(entries) if known.get(key, self) is not value}
        pure = frozenset(changed - entries.read)
        if pure:
            self._tracer.trace.entries.append((holder, name, None if not entries.read else pure))
        for key in changed & entries.read:
            sums.add(holder, name, dict.__getitem__(entries, key), {"sum"})

    def _check_old_read(self, holder: Any, name: str) -> None:
        num_calls = len(self._tracer.trace.calls)
        if self._old_reads.get((id(holder), name), num_calls) < num_calls:
            raise SplitError(
                f"attribute {name!r} of {type(holder).__name__} is read by {self._tracer.trace.step} before "
                "the end of the model, and set after its beginning: some stages would read an old value. "
                "Update it in a hook such as on_train_batch_end instead"
            )
