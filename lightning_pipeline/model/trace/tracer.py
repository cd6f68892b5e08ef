"""The mechanism of the trace: who answers unit calls, and how dependence is followed through glue."""

import sys
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from typing import Any

from torch import Tensor, nn

from lightning_pipeline.errors import SplitError
from lightning_pipeline.model.loss import stub_metrics
from lightning_pipeline.model.places import metrics_of, others_refused
from lightning_pipeline.model.tensors import (
    Given,
    OpaqueError,
    PlaceholderMode,
    StandIns,
    Tag,
    describe,
    is_changed,
    is_placeholder,
    memory_of,
    operands_of,
    selective_checkpoints,
    storage_key,
    tensors_in,
    written_tensors,
)
from lightning_pipeline.model.trace.checkpointing import AutogradFunctions, reentrant_checkpoint_replaced
from lightning_pipeline.model.trace.effects import EffectsSeen
from lightning_pipeline.model.trace.fake_units import FakeRun
from lightning_pipeline.model.trace.glue import Glue, GlueFunctions, GlueOperations
from lightning_pipeline.model.trace.patches import UnitPatches
from lightning_pipeline.model.trace.ports import Porting, PortPlace, PortSpec, Watch, candidates, transient
from lightning_pipeline.model.trace.record import (
    Call,
    ContextFactory,
    Look,
    Observation,
    Trace,
    in_function_transform,
    inputs_of,
    refuse,
    step_function,
)
from lightning_pipeline.model.trace.saved_activations import Regions, SavedActivations
from lightning_pipeline.model.trace.sinks import stub_sinks

_MOST_CALLS = 200  # of a unit, where a value may say whether there is one more


class Tracer:
    """One run of a step under observation."""

    def __init__(
        self,
        root: nn.Module,
        step: str,
        patches: UnitPatches,
        mode: PlaceholderMode,
        look: Look,
        stand_ins: StandIns | None = None,
        porting: Porting | None = None,
    ) -> None:
        self.observed = observed = Observation(root, step, patches, mode, look, stand_ins)
        self.root, self.patches, self.trace, self.tags = root, patches, observed.trace, observed.tags
        self._porting, self._modules = porting, list(root.modules())
        self._filled: dict[PortPlace, list[Any]] = {}  # containers that units fill, and what was in them
        self._counts = [0] * len(patches.units)
        self._depth = 0  # of operations inside operations
        self._regions: dict[int, tuple[Any, list[int]]] = {}
        self._sinks = look.sinks
        self.regions = Regions()
        self.functions = AutogradFunctions(lambda: observed.inside)
        self.keeping = SavedActivations(observed, self.regions)
        self.glue = Glue(observed, self.keeping)
        self.effects = EffectsSeen(observed, self.glue, look.others)
        observed.values_read = self.effects.values_read
        observed.tensors_used = self.effects.tensors_used
        observed.tensor_written = self.effects.tensor_written
        self._fake = FakeRun(observed, self.glue, self.keeping, self.regions)
        self._name_states()

    # ---- set-up

    def _name_states(self) -> None:
        holders = {id(m): n for n, unit in enumerate(self.patches.units) for m in unit.module.modules()}
        states = list[tuple[str, Tensor]]()
        for prefix, module in self.root.named_modules():
            for name, tensor in [*module._parameters.items(), *module._buffers.items(), *_plain(module)]:
                if tensor is None:
                    continue
                full = f"{prefix}.{name}" if prefix else name
                if memory_of(tensor).nbytes() or tensor.is_meta or is_placeholder(tensor):
                    states.append((full, tensor))
                if id(module) in holders:
                    self.trace.state_units.setdefault(full, holders[id(module)])
        self._know_names(states)

    def _know_names(self, states: list[tuple[str, Tensor]]) -> None:
        """Of memory that several have: the name of the first, or of the largest where that is no weight."""
        known, named = self.observed.states, dict[int, Tensor]()
        for name, tensor in states:
            before = named.get(key := storage_key(tensor))
            if before is None or (not isinstance(before, nn.Parameter) and before.numel() < tensor.numel()):
                known[key], named[key] = name, tensor
        for _, tensor in states:
            self.tags.add(tensor, frozenset({Tag("state", name=known[storage_key(tensor)])}))

    def close(self) -> None:
        """Take every observer away, whatever happened."""
        self.effects.close()
        self.observed.mode.watcher = None
        self.patches.runner = None
        self.glue.close()
        self.observed.mirrors.clear()
        self.observed.watch = None  # graphs keep what notes what they save: a circle, if that held outputs

    # ---- the run

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], forward_context: ContextFactory) -> Trace:
        """Call the step and return what was seen."""
        observed = self.observed
        function = step_function(self.root, self.trace.step)
        for tensor in tensors_in((args, kwargs)):
            observed.batch.add(tensor, frozenset({Tag("batch")}))
        self.glue.mixing.begin((args, kwargs))
        with ExitStack() as stack, reentrant_checkpoint_replaced(lambda: False) as self._fake.reentrant:
            stack.enter_context(stub_sinks(self.root, self._sinks, self.observed.told))
            metrics = metrics_of(self.root)
            stack.enter_context(stub_metrics(metrics, self.observed.told, self._fake.scalar))
            stack.enter_context(others_refused(self.root, metrics))
            self.patches.runner, observed.mode.watcher = self, self
            stack.enter_context(forward_context())
            stack.enter_context(GlueFunctions(observed, self.glue, (args, kwargs)))
            stack.enter_context(GlueOperations(observed, self.keeping, self.glue))
            stack.enter_context(self.keeping.in_glue())
            stack.enter_context(self.regions.watched(self.keeping.dropped))
            stack.enter_context(selective_checkpoints(self.keeping.kept_by_policy))
            stack.enter_context(self.functions.watched())
            self.effects.start()
            self._call_step(function, args, kwargs)
            self.trace.asked, self.trace.compares = self.glue.guesses.asked, self.glue.guesses.compares
            self._fake.glue_draws()
            self.effects.look()
        self.trace.transient = transient(self._modules, self._filled)
        self.effects.note()
        self._check_written_states()
        self._close_regions()
        self.glue.check_hooks()
        self.observed.check_changed()
        return self.trace

    def _call_step(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            result = function(*args, **kwargs)
        except OpaqueError as error:  # the module that returns it may be the last one
            self._end_early(error)
        except SplitError:
            raise
        except Exception as error:
            self._end_early(error)
        else:
            self.observed.tail_read(result)
            self.trace.returned = list(result) if isinstance(result, Mapping) else []
            self.trace.returns = type(result)
            self.trace.result |= self.tags.union(tensors_in(result)) | self.keeping.take_waiting()
            if self.glue.unknown_line:
                self._everything_alive()

    def _end_early(self, error: Exception) -> None:
        used = {call.unit for call in self.trace.calls} | self._units_used_by_weight()
        missing = [unit.name for number, unit in enumerate(self.patches.units) if number not in used]
        if missing and isinstance(error, OpaqueError):
            raise error
        if missing:
            raise UndecidedError(
                f"{self.trace.step} cannot be traced: {type(error).__name__}: {error} [at "
                f"{_error_line(error)}]; it was raised before {missing[0]!r} was called. {_hint(error)}",
                asked=self.glue.guesses.asked, counts_apart=self.trace.counts_apart,
            ) from error  # fmt: skip
        self.effects.values_read()
        self.trace.ended_early = self.observed.ended_early = True
        self._everything_alive()

    def _units_used_by_weight(self) -> set[int]:
        """Units that need no call: what was called reads their weights, such as learned queries."""
        read = {tag.name for call in self.trace.calls for tag in call.reads if tag.kind == "state"}
        return {unit for name, unit in self.trace.state_units.items() if name in read}

    def _everything_alive(self) -> None:
        values = self.observed.values
        alive = (tensor for made in self.observed.made if (tensor := made()) is not None)
        self.trace.tail.update(tag for tag, value in values.items() if value() is not None)
        kept = self.tags.union(alive)
        self.trace.tail.update(tag for tag in kept if tag in values)  # what is made of them
        if self.trace.ended_early:  # whatever stands somewhere may be read yet
            self.trace.tail.update(filter(is_changed, kept))
        self.trace.result |= self.trace.tail

    # ---- calls of units

    @property
    def inside(self) -> Call | None:
        """The call of a unit that runs."""
        return self.observed.inside

    def call(self, unit: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call of a unit: run it in fake-tensor mode and hand out its outputs as fresh values."""
        if self.observed.inside is not None:  # a unit that is called by another is part of that
            return self.patches.originals[unit](*args, **kwargs)
        self._before_call(unit)
        self.effects.look()
        call = Call(len(self.trace.calls), unit, self._counts[unit])
        self._counts[unit] += 1
        self.trace.calls.append(call)
        self._note_region(call)
        self.functions.note(unit)
        inputs = list(tensors_in((args, kwargs)))
        call.reads |= self.tags.union(inputs) | self.keeping.take_waiting() | self.glue.steering
        given = Given(args, kwargs)
        self.glue.mixing.reaches_unit(inputs)
        call.inputs = inputs_of(inputs)
        call.asked, arguments = describe((args, kwargs), []), set(call.reads)
        self.observed.watch = self._watch(unit, given)
        with self.observed.watch or nullcontext():
            output = self._fake.run(call, args, kwargs, given)
        call.closed = all(tag in arguments or tag.kind == "state" for tag in call.reads)
        if self.observed.watch is None:
            self.effects.look_at_unit(unit)
            tensors, call.structure = given.take_apart(output)
        else:
            self.trace.ports[unit, call.nth] = self.observed.watch.narrow()
            self._filled = self.observed.watch.held_before() | self._filled
            tensors, call.structure = self.observed.watch.take_apart(output)
        apart = self.observed.shared.apart(inputs, tensors)
        values = [self._value(call, *one) for one in zip(range(len(tensors)), tensors, apart, strict=True)]
        self.observed.shared.called(call.index, inputs, tensors, values)
        if self.observed.watch is None:
            return given.put_together(values, call.structure)
        return self._through_ports(call, self.observed.watch, values)

    def _watch(self, unit: int, given: Given) -> Watch | None:
        if self._porting is None or unit not in self._porting.units:
            return None
        module = self.patches.units[unit].module
        ways = candidates(self._modules, module, self.observed.glue_modules, self._porting.places)
        return Watch(self._modules, module, PortSpec(ways, self._porting.hooks), given)

    def _through_ports(self, call: Call, watch: Watch, values: list[Tensor]) -> Any:
        """The output of a call, after the hooks inside the unit have seen what they are to see."""
        result = watch.put_together(values, call.structure)
        self.effects.look_at_unit(call.unit, self.trace.ports[call.unit, call.nth])
        watch.restart()
        changed = set(self.trace.mutated)
        for hook in watch.put_off(values, call.structure):
            if hook() is not None or self.trace.mutated != changed:
                raise refuse(
                    f"a forward hook inside unit {self._name(call.unit)} changes what the unit computes, and "
                    "one beside it keeps values for later",
                    self.root,
                )
        return result

    def _before_call(self, unit: int) -> None:
        self._check_way(unit)
        if in_function_transform():
            raise refuse(
                f"unit {self._name(unit)} is called under torch.func (vmap, grad, ...), which cannot be "
                "split",
                self.root,
            )

    def _check_way(self, unit: int) -> None:
        """Code that values of units steer may call others, or go on calling these."""
        done, expected = len(self.trace.calls), self.observed.expected
        self.trace.steered_at, self.trace.divided_at = self.glue.unknown_line, self.glue.divided_line
        if expected is not None and expected[done : done + 1] != (unit,):
            raise OtherWayError(self.glue.divided_line)
        if self.glue.unknown_line and self._counts[unit] >= _MOST_CALLS:
            raise SplitError(
                f"a value computed by the model steers the code at {self.glue.unknown_line}, and unit "
                f"{self._name(unit)} is called again and again: put the loop into the forward of one module "
                "and keep that whole with PipelineStrategy(units=['<its name>'])"
            )

    def _value(self, call: Call, leaf: int, tensor: Tensor, apart: bool) -> Tensor:
        handed, spec = self._fake.hand_out(tensor, apart)
        call.specs.append(spec)
        tag = Tag("value", call.index, leaf)
        outer = frozenset(t for t in self.tags.of(handed) if t != Tag("effect", call.index))
        self.tags.replace(handed, outer | {tag})
        self.observed.handed.add(handed, frozenset({tag}))
        self.observed.values[tag] = weakref.ref(handed)
        self.trace.handed[call.index, leaf] = self.keeping.number_of(handed)
        self.observed.made.append(weakref.ref(handed))
        return handed

    def _name(self, unit: int) -> str:
        return repr(self.patches.units[unit].name)

    # ---- operations inside units

    def placeholder_operation(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]
    ) -> Any:
        """See every operation on a placeholder; inside a unit, note what it reads from elsewhere."""
        call = self.observed.inside
        if call is None:
            return run()
        own = frozenset({Tag("effect", call.index)})
        operands = list(operands_of(args, kwargs))
        call.reads |= self.tags.union(operands) - own
        if not self._depth:
            self.glue.written_in_unit(func, args, kwargs)
        self._depth += 1
        try:
            result = run()
        finally:
            self._depth -= 1
        for tensor in written_tensors(func, args, kwargs):
            origin = self.observed.origin(tensor)
            self.observed.note_batch(origin)
            if self._is_outside(origin, call):
                self.observed.written_inside(call, [tensor])
        self._note_results(func, operands, list(operands_of((result,))), own)
        if not self._depth:  # else a part of an operation that fake tensors take apart to learn its shape
            self._fake.count(call, func, args, kwargs, result)
        return result

    def _note_results(
        self, func: Any, operands: list[Tensor], results: list[Tensor], own: frozenset[Tag]
    ) -> None:
        self.observed.made.extend(
            weakref.ref(t) for t in results if not any(t is operand for operand in operands)
        )
        if any(returned.alias_info is not None for returned in func._schema.returns):
            for tensor in results:  # the view of a real tensor has a stand-in for its memory
                if operands and not is_placeholder(operands[0]):
                    self.observed.mirrors.setdefault(storage_key(tensor), (tensor, operands[0]))
            return
        for tensor in results:
            if not self.tags.of(tensor):
                self.tags.add(tensor, own)

    def _is_outside(self, tensor: Tensor, call: Call) -> bool:
        name = self.observed.states.get(storage_key(tensor))
        if name is not None:
            return self.trace.state_units.get(name) != call.unit
        return Tag("effect", call.index) not in self.tags.of(tensor)

    # ---- reads at the end, attributes, hooks, checkpoint segments

    def _check_written_states(self) -> None:
        self.trace.written_states = self.glue.all_written
        for name in sorted(
            self.glue.written_states.keys() - self.effects.made_where_held
        ):  # alike on all ranks
            readers = [call for call in self.trace.calls if Tag("state", name=name) in call.reads]
            if self.trace.step == "training_step" and readers:
                units = frozenset(call.unit for call in readers)
                last = frozenset({self.trace.calls[-1].unit})
                self.trace.together.append(
                    (units | last, f"{name!r} is written by {self.trace.step} between units")
                )
            self.trace.tail.add(Tag("state", name=name))
            self.trace.tail |= self.tags.of(self.glue.written_states[name])

    def _note_region(self, call: Call) -> None:
        frame = sys._getframe(2)
        while frame is not None:
            if frame.f_code.co_filename.endswith("torch/utils/checkpoint.py"):
                self._regions.setdefault(id(frame), (frame, []))[1].append(call.unit)
            frame = frame.f_back  # type: ignore[assignment]

    def _close_regions(self) -> None:
        self.trace.checkpointed = bool(self._regions)
        for _, members in self._regions.values():
            reason = "they are in one segment of activation checkpointing"
            if self.effects.rewritten(members):  # what follows them in the segment is computed again on these
                members.append(self.trace.calls[-1].unit)
                reason = "weights of a checkpointed segment are written after it"
            if len(set(members)) > 1:
                self.trace.together.append((frozenset(members), reason))
        self._regions.clear()
        for name, units in self.functions.found:  # its backward is where its output is used: at the end
            units |= {self.trace.calls[-1].unit}
            self.trace.together.append((units, f"autograd function {name} calls units in its forward"))


class OtherWayError(SplitError):
    """Another unit is called where values say so; holds the line that asks."""


class UndecidedError(SplitError):
    """The step ended early.

    Attributes:
        asked: Whether code had asked if something holds of values that are not known.
        counts_apart: Whether it had asked for those of them that differ.
    """

    def __init__(self, message: str, *, asked: bool, counts_apart: bool) -> None:
        super().__init__(message)
        self.asked, self.counts_apart = asked, counts_apart


def _plain(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Tensors that are neither parameters nor buffers, among them what stands for those of other stages."""
    return [(name, value) for name, value in vars(module).items() if isinstance(value, Tensor)]


def _hint(error: Exception) -> str:
    if isinstance(error, AttributeError) and isinstance(error.obj, nn.Module):
        return "What the step reads must be set in __init__, or in a hook that comes before it on every rank"
    return "Between units only shapes are known while the module is traced, not values"


def _error_line(error: BaseException) -> str:
    place = "code outside the module"
    trace = error.__traceback__
    while trace is not None:
        package = trace.tb_frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in ("torch", "lightning_pipeline", "lightning"):
            code = trace.tb_frame.f_code
            place = f"{code.co_filename.rsplit('/', 1)[-1]}:{trace.tb_lineno} in {code.co_name}"
        trace = trace.tb_next
    return place
