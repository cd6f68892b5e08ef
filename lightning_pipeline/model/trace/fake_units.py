"""Run one unit without computing it: in fake-tensor mode, or really where that cannot be done."""

import logging
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_pipeline._torch import TorchDispatchMode, disable_current_modes
from lightning_pipeline.errors import SplitError
from lightning_pipeline.model.random import Generators, host_draws, random_state_kept, seed_torch
from lightning_pipeline.model.tensors import (
    Flops,
    Given,
    ObjectState,
    PlaceholderMode,
    TensorSpec,
    Work,
    alias,
    has_class_weights,
    is_placeholder,
    left_out_by,
    map_tensors,
    storage_key,
    tensors_in,
    user_line,
    version_of,
)
from lightning_pipeline.model.trace.checkpointing import ReentrantRegions
from lightning_pipeline.model.trace.glue import Glue
from lightning_pipeline.model.trace.ports import has_ports
from lightning_pipeline.model.trace.record import Call, Observation
from lightning_pipeline.model.trace.saved_activations import Regions, SavedActivations
from lightning_pipeline.registry import parameters_of

_log = logging.getLogger(__name__)


class FakeRun:
    """Runs units without values, for a trace."""

    def __init__(
        self, observed: Observation, glue: Glue, keeping: SavedActivations, regions: Regions
    ) -> None:
        self._observed, self._glue, self._keeping, self._regions = observed, glue, keeping, regions
        self._generators = Generators(observed.root.modules())
        self._stands = host_draws(self._generators)  # after the unit that was called last
        self.reentrant: ReentrantRegions | None = None  # between units

    def glue_draws(self) -> None:
        """Whether code between units has drawn from numpy or Python since, which may choose what it calls."""
        self._observed.trace.steered |= self._stands != host_draws(self._generators)

    def run(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], given: Given) -> Any:
        """The output of a unit with no values in it; what it costs is noted on `call`.

        Lists and dictionaries among the arguments, which `given` holds, are changed as the unit does it.
        """
        observed = self._observed
        self.glue_draws()
        entered = observed.seeds.enter(call.unit) if observed.seeds is not None else None
        try:
            known = self._like(call) if observed.seeds is not None and observed.watch is None else None
            if known is not None:
                return self._again(call, known, given)
            return self._run(call, args, kwargs, given)
        finally:
            if observed.seeds is not None and entered is not None:
                observed.seeds.leave(entered, [], again=True)
            self._stands = host_draws(self._generators)

    def _run(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], given: Given) -> Any:
        observed = self._observed
        args, kwargs = self._glue.without_poison((args, kwargs))
        copies = Given(args, kwargs)
        self._is_absent = self._has_no_weights(observed.patches.units[call.unit].module)
        draws = host_draws(self._generators)
        observed.inside = call
        try:
            if self.reentrant is not None and self.reentrant.open and torch.is_grad_enabled():
                self._check_grad_mode(call, args, kwargs)
            output = self._try_fake(call, args, kwargs)
        finally:
            observed.inside = None
        observed.trace.host_random |= draws != host_draws(self._generators)
        return given.carry_over(copies, output, lambda tensor: tensor)

    def _has_no_weights(self, module: nn.Module) -> bool:
        """Whether placeholders stand for those of a unit, because another stage holds it.

        What an earlier call has left in it, which is a placeholder too while the step is traced, is none.
        """
        for part in module.modules():
            held = [value for value in vars(part).values() if not self._comes_from_units(value)]
            if not self._observed.weightless:  # else they may be on no device yet
                held += [*part._parameters.values(), *part._buffers.values()]
            if any(map(is_placeholder, held)):
                return True
        return False

    def _comes_from_units(self, value: Any) -> bool:
        return is_placeholder(value) and any(t.kind == "value" for t in self._observed.tags.of(value))

    def _check_grad_mode(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """In a region of reentrant checkpointing: refuse a unit whose values depend on the grad mode.

        On one device it runs without gradients there, and once more with them. Its message to the next stage
        could not be both.
        """
        observed, forward = self._observed, self._observed.patches.originals[call.unit]
        objects = ObjectState((args, kwargs))
        try:
            with random_state_kept(self._generators), saved_tensors_hooks(_kept, _kept):
                if same_operations(forward, args, kwargs, observed.mode):
                    return
                if observed.weightless or self._is_absent:
                    return  # the trace of the whole module, with its weights, has looked
                observed.runs_really = True
                made_up = map_tensors(_made_up, (args, kwargs))
                same = same_values(forward, made_up[0], made_up[1], self._generators)
        except Exception as error:
            _log.debug("unit %d does not run apart: %s", call.unit, error)
            return
        finally:
            observed.runs_really = False
            objects.restore()
        if not same:
            raise SplitError(
                f"unit {observed.patches.units[call.unit].name!r} computes other values without gradients "
                "than with them, and is called in a region of checkpoint(..., use_reentrant=True), whose "
                "forward runs without and its recomputation with them: use checkpoint(..., "
                "use_reentrant=False), or checkpoint inside the unit's own forward [at "
                f"{user_line(observed.root)}]"
            )

    def _try_fake(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return self._fake(call, args, kwargs)
        except SplitError:
            raise
        except Exception as error:
            return self._run_really(call, args, kwargs, error)

    def _fake(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        original = self._observed.patches.originals[call.unit]
        objects, modules = (
            ObjectState((args, kwargs)),
            self._observed.patches.units[call.unit].module.modules(),
        )
        parameters = [(module._parameters, dict(module._parameters)) for module in modules]
        try:
            with self._observed.mode, self._keeping.in_unit(call):
                return original(*args, **kwargs)
        except SplitError:
            raise
        except Exception:
            objects.restore()
            if self._observed.watch is not None:
                self._observed.watch.restart()
            raise
        finally:  # `self.gate.to(self.dtype)` in a forward registers fake ones
            for registered, before in parameters:
                registered.update(before)

    def _run_really(self, call: Call, args: Any, kwargs: Any, cause: Exception) -> Any:
        """Operators without a shape rule, or code that looks at values: run this unit on made-up input."""
        unit = self._observed.patches.units[call.unit]
        given = Given(args, kwargs)
        call.by_values = not all(map(is_placeholder, tensors_in((args, kwargs))))
        if self._is_absent:
            return self._as_before(call, given, args, kwargs, cause)
        with ExitStack() as stack:
            if self._observed.stand_ins is not None and not stack.enter_context(
                self._observed.stand_ins.with_values(unit.module)
            ):
                raise SplitError(
                    f"unit {unit.name!r} cannot be traced on the meta device: {type(cause).__name__}: "
                    f"{cause}; build the module with its weights"
                ) from cause
            return self._on_made_up_input(call, given, args, kwargs, cause)

    def _on_made_up_input(self, call: Call, given: Given, args: Any, kwargs: Any, cause: Exception) -> Any:
        unit = self._observed.patches.units[call.unit]
        before = list(tensors_in((args, kwargs)))
        args, kwargs = map_tensors(self._new, (args, kwargs))
        made_up = list(tensors_in((args, kwargs)))
        versions, copies = list(map(version_of, made_up)), Given(args, kwargs)
        call.saved.clear()
        call.recomputed.clear()
        call.activation_bytes = 0
        counter = Flops()
        self._observed.runs_really = call.ran = True
        try:
            with counter, self._keeping.in_unit(call):
                output = self._observed.patches.originals[call.unit](*args, **kwargs)
        except Exception as error:
            raise SplitError(
                f"unit {unit.name!r} cannot be traced: {type(cause).__name__}: {cause}; nor does it run on "
                f"made-up input: {type(error).__name__}: {error}"
            ) from error
        finally:
            self._observed.runs_really = False
        if self._observed.costs:
            weighs = any(p.requires_grad for p in parameters_of(unit.module))
            call.flops = call.cost = counter.total
            call.work = [Work(call.flops, 0.0, weighs=weighs)]
        again = zip(before, made_up, versions, strict=True)
        self._observed.written_inside(call, [one for one, new, old in again if version_of(new) != old])
        likeness = _Likeness(self._observed.mode, zip(before, made_up, strict=True))
        return given.carry_over(copies, output, likeness.of)

    def _new(self, tensor: Tensor) -> Tensor:
        made_up = _made_up(tensor)
        if made_up is not tensor:
            self._observed.note_made([made_up])
        return made_up

    def _as_before(self, call: Call, given: Given, args: Any, kwargs: Any, cause: Exception) -> Any:
        """What the unit returned for inputs of these shapes, or of others, in a trace of the whole module."""
        known = self._seen(call) or self._in_other_sizes(call)
        if known is not None and not call.by_values:
            return self._again(call, known, given)
        unit = self._observed.patches.units[call.unit]
        try:
            with self._observed.mode.counting():
                return self._fake(call, args, kwargs)
        except SplitError:
            raise
        except Exception as error:
            _log.debug("unit %d does not run with real integers: %s", call.unit, error)
        if known is not None:
            return self._again(call, known, given)
        raise SplitError(
            f"unit {unit.name!r} cannot be traced on a stage that does not hold it: {cause}; where it is "
            "called with other shapes than when the module was whole, keep it and its neighbours whole "
            f"with units=[{unit.name.rpartition('.')[0] or unit.name!r}], or pad to one shape"
        ) from cause

    def _seen(self, call: Call) -> Call | None:
        calls = filter(self._fits_ports, self._observed.seen)
        return next((one for one in calls if (one.unit, one.inputs) == (call.unit, call.inputs)), None)

    def _fits_ports(self, known: Call) -> bool:
        """Whether what an earlier call gave away beside its output can be given away here."""
        watch = self._observed.watch
        return not has_ports(known.structure) or (watch is not None and watch.answers(known.structure))

    def _in_other_sizes(self, call: Call) -> Call | None:
        """What an earlier call returned, with the sizes of this one; None where that is not clear."""
        module = self._observed.patches.units[call.unit].module
        own = {size for weight in parameters_of(module) for size in weight.shape}
        for known in filter(self._fits_ports, self._observed.seen):
            if known.unit == call.unit:
                specs = known.resized(call.inputs, own)
                if specs is not None:
                    return replace(known, specs=specs)
        return None

    def _like(self, call: Call) -> Call | None:
        """A call in an earlier trace that does the same."""
        known = self._seen(call)
        is_alike = known is not None and known.closed and not known.by_values and known.asked == call.asked
        return known if is_alike else None

    def _again(self, call: Call, known: Call, given: Given) -> Any:
        """What an earlier call returned, with new placeholders."""
        call.flops, call.cost, call.work = known.flops, known.cost, known.work
        call.reads |= {tag for tag in known.reads if tag.kind == "state"}
        grad = torch.is_grad_enabled()
        specs = [spec._replace(requires_grad=spec.requires_grad and grad) for spec in known.specs]
        watch, tensors = self._observed.watch, list(map(self._observed.mode.make, specs))
        if watch is not None and has_ports(known.structure):
            return watch.put_together(tensors, known.structure)
        return given.put_together(tensors, known.structure)

    def count(
        self, call: Call, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Add one operation's work to a call."""
        if not self._observed.costs:
            return
        work = self._keeping.work_of(func, args, kwargs, result)
        if work.flops or work.num_bytes:
            call.work.append(work)
            self._regions.operation(call, work)
        call.flops += work.flops
        call.cost += work.cost
        left_out = left_out_by(func, args)
        if left_out is not None:
            if has_class_weights(func, args):
                name = self._observed.patches.units[call.unit].name
                self._observed.trace.weighted_inside[name] = user_line(self._observed.root)
            self._observed.trace.losses_inside.add((self._observed.patches.units[call.unit].name, left_out))
        self._keeping.operation_in_unit(call, func, args, result)

    def hand_out(self, tensor: Tensor, apart: bool) -> tuple[Tensor, TensorSpec]:
        """An output cut off from the unit's graph, as the next stage would get it, and its description.

        Args:
            tensor: The output.
            apart: Whether it gets memory of its own.
        """
        spec, leaf = TensorSpec.of(tensor), tensor.detach()
        if apart or not is_placeholder(tensor):
            leaf = self._observed.mode.like(leaf)
        if not spec.requires_grad:
            return leaf, spec
        with torch.enable_grad():
            return alias(leaf.requires_grad_()), spec

    def scalar(self) -> Tensor:
        """A number that is not known yet."""
        return self._observed.mode.make(TensorSpec((), (), torch.float32, self._observed.device.type, False))


class _Likeness:
    """Placeholders for what a unit has made of made-up values, in one memory where these are.

    Args:
        mode: Makes them.
        given: What the unit was called with, each with what was made up for it.
    """

    def __init__(self, mode: PlaceholderMode, given: Iterable[tuple[Tensor, Tensor]]) -> None:
        self._mode = mode
        self._memory = {storage_key(new): one for one, new in given if is_placeholder(one) and _fills(new)}

    def of(self, tensor: Tensor) -> Tensor:
        """That for a real tensor."""
        if tensor.layout is not torch.strided:
            return self._mode.like(tensor)
        base, key = self._memory.get(storage_key(tensor)), storage_key(tensor)
        if base is None:
            entries = (tensor.untyped_storage().nbytes() // tensor.element_size(),)
            whole = TensorSpec.of(tensor)._replace(shape=entries, stride=(1,), requires_grad=False)
            base = self._memory[key] = self._mode.like(tensor) if _fills(tensor) else self._mode.make(whole)
            if base.shape == tensor.shape:
                return base
        if base.dtype != tensor.dtype or not base.is_contiguous():
            return self._mode.like(tensor)
        return self._mode.part(base, tensor)


def _fills(tensor: Tensor) -> bool:
    """Whether all of its memory is in order of its entries."""
    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        return False
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def _kept(tensor: Tensor) -> Tensor:
    """In the place of the region's hooks, which would take what is saved here for the unit's.

    The tensor itself would close a circle: an output saved by its own graph.
    """
    return tensor.detach()


def _made_up(tensor: Tensor) -> Tensor:
    if not is_placeholder(tensor):
        return tensor
    options: dict[str, Any] = {"dtype": tensor.dtype, "device": tensor.device}
    if tensor.is_floating_point() or tensor.is_complex():
        made = torch.randn(tensor.shape, **options)
        if tensor.is_floating_point() and not tensor.dim():
            made = made.abs()  # a loss, of which code may ask whether it is positive
        with torch.enable_grad():
            return alias(made.requires_grad_()) if tensor.requires_grad else made
    return torch.zeros(tensor.shape, **options)


# Whether a unit asks if gradients are recorded: it then runs, or computes, something else without.

Forward = Callable[..., Any]


class _Named(TorchDispatchMode):
    """Notes which operations run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not any(returned.alias_info is not None for returned in func._schema.returns):  # no views
            self.names.append(func)
        return func(*args, **(kwargs or {}))


def same_operations(forward: Forward, args: Any, kwargs: Any, mode: PlaceholderMode) -> bool:
    """Whether a forward does the same with and without gradients, as far as shapes tell."""
    before = mode.watcher, mode.idle
    mode.watcher = mode.idle = None
    found = []
    try:
        for enabled in (False, True):
            named = _Named()
            with torch.set_grad_enabled(enabled), mode, named:
                forward(*args, **kwargs)
            found.append(named.names)
    finally:
        mode.watcher, mode.idle = before
    return found[0] == found[1]


def same_values(forward: Forward, args: Any, kwargs: Any, generators: Generators) -> bool:
    """Whether a forward returns the same with and without gradients.

    Args:
        forward: Of a unit.
        args: Its arguments, with values.
        kwargs: Its keyword arguments.
        generators: That it may draw from.
    """
    found = []
    for enabled in (False, True):
        with random_state_kept(generators), torch.set_grad_enabled(enabled), disable_current_modes():
            seed_torch(0)
            copies = map_tensors(_copied, (args, kwargs))
            found.append(list(tensors_in(forward(*copies[0], **copies[1]))))
    return len(found[0]) == len(found[1]) and all(map(_close, *found))


def _copied(tensor: Tensor) -> Tensor:
    copy = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return copy * 1 if copy.requires_grad and torch.is_grad_enabled() else copy


def _close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    tolerance = 1e-10 if one.dtype == torch.float64 else 1e-3
    return torch.allclose(one.detach(), other.detach(), rtol=tolerance, atol=tolerance, equal_nan=True)
