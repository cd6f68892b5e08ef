"""Code between units, as it runs on one stage: random calls, hooks and placeholders in it, and a second run.

The second is that of a backward, in regions of activation checkpointing, with units in them or without.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from lightning_pipeline._torch import (
    DynamicOutputShapeException,
    current_dispatch_mode,
    current_function_mode,
    disable_current_modes,
    pop_function_mode,
    push_function_mode,
    top_saved_hooks,
)
from lightning_pipeline.errors import PlaceholderError, SplitError
from lightning_pipeline.model.cut import ValueKey
from lightning_pipeline.model.loss import Recipes
from lightning_pipeline.model.mixing import Functions
from lightning_pipeline.model.random import RANDOM_FUNCTIONS, MicrobatchSeeds, States, generators_in
from lightning_pipeline.model.replay.unwritten import Unwritten
from lightning_pipeline.model.replay.view import Returned, StageView
from lightning_pipeline.model.tensors import (
    GRADIENT,
    Given,
    Opaque,
    Structure,
    Taint,
    TensorSpec,
    are_unlike,
    by_shape_alone,
    data_set_without_values,
    flatten,
    is_placeholder,
    leaves_in,
    map_tensors,
    read_of,
    takes_containers,
    tensors_in,
    unflatten,
    user_line,
    written_tensors,
)
from lightning_pipeline.model.trace import BackwardHooks, Watch, has_backward_hooks, makes_guard

Around = Given | Watch
Follow = Callable[[Any, Any, Any, Callable[[Any, Any, Any], Any]], Any]
_LONE = Structure("tensor", 0)
_OF_WEIGHTS = (
    ". Weights that it is made of are found when the model is cut, in the first batch: let the step read "
    "them in every batch, times 0 where they do not count (`loss + factor * penalty`)"
)
_OF_GRADIENTS = (
    "; gradients that a step reads (`p.grad`) are here of this stage's weights alone: read them in "
    "on_before_optimizer_step or on_before_zero_grad, where norms are those of all stages"
)
_DEVICE: Any = Tensor.device.__get__  # a placeholder answers without a call
_NOTED = RANDOM_FUNCTIONS | {GRADIENT}
_SETS: Any = (Tensor.requires_grad, Tensor.grad)
_STANDING = frozenset({
    Tensor.requires_grad_, Tensor.detach_, Tensor.retain_grad, Tensor.register_hook, Tensor.share_memory_,
    *(one.__set__ for one in _SETS),
})  # fmt: skip
"""Functions that change what a tensor is to gradients, and none of its values: each run calls them itself."""
_INDEXING = frozenset({Tensor.__getitem__, Tensor.__setitem__})
_READS = ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero")
_DRAWS_BY_VALUE = frozenset(
    {"aten::poisson", "aten::binomial", "aten::_standard_gamma", "aten::_sample_dirichlet"}
)


class GlueRun:
    """One micro-batch on one stage: the forward, or what its backward runs again.

    Args:
        view: Of the stage.
        seeds: The random numbers of the micro-batch.
        returned: What units of earlier stages returned.
        received: The tensors among that which arrived here.

    Attributes:
        inside: Whether a unit runs.
        in_regions: Whether code ran under hooks on saved tensors, as activation checkpointing has them.
        draws: Whether code between units drew random numbers.
        described: On the last stage, how what units gave is put together.
        is_done: Whether the stage has no more to do: what code calls on its way out concerns nobody.
    """

    def __init__(
        self, view: StageView, seeds: MicrobatchSeeds, returned: Returned,
        received: dict[ValueKey, Tensor],
    ) -> None:  # fmt: skip
        self._view, self._seeds = view, seeds
        self._returned, self._received = returned, received
        self.inside = self.in_regions = self.draws = self.is_done = False
        self.is_last = view.is_last
        self._drawing = self._in_operation = False
        self._error: SplitError | None = None
        self._handed, self._partial = Unwritten(), Unwritten()
        self._copies = Unwritten()  # of what own units return
        self.taint = Taint(view.mode, self._poisoned_read)
        self._outer_hooks = top_saved_hooks()
        self.remembered = view.remembered
        self._put_off: list[Callable[[], Any]] = []  # hooks inside the unit that was called last
        self.described: dict[tuple[int, int], Structure] = {}
        self.microbatch = 0
        self.functions = _GlueFunctions(self)
        self.follow: Follow | None = None
        self.recipes: Recipes | None = None  # what values between units are made of
        self.mixing: Functions | None = None  # of a step that mixes samples
        self.on_unit: Callable[[int, int], None] = lambda unit, nth: None

    # ---- units

    def call(self, unit: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call of a unit."""
        if self.inside:
            return self._within(unit, args, kwargs)
        if self.mixing is not None:
            self.mixing.stands(self._view.module_of(unit))
            self.mixing.unit(unit, (args, kwargs), self._seeds)
        ours = current_function_mode() is self.functions and not (self.draws and self.in_region())
        if ours:  # out of the way, where no mode of the user's is above it, and no region may run again
            pop_function_mode()
        try:
            output = self._answer(unit, args, kwargs)
        finally:
            if ours:
                push_function_mode(self.functions)
        if self.mixing is not None:
            self.mixing.answered(output)
        if self.recipes is not None:
            self.recipes.answered(unit, output)
        if self._put_off:
            self._call_hooks(unit)
        return output

    def _within(self, unit: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A unit called by another is part of that, but where a gradient taken there runs a region again.

        Checkpointing puts the random state back, which tells.
        """
        forward = self._view.originals[unit]
        if not self._seeds.at_mark():
            return forward(*args, **kwargs)
        entered = self._seeds.enter(unit)
        try:
            return forward(*args, **kwargs)
        finally:
            self._seeds.leave(entered, [], again=unit in self._view.repeated)

    def in_region(self) -> bool:
        """Whether hooks on saved tensors stand here, as activation checkpointing has them."""
        hooks = top_saved_hooks()
        return hooks is not None and (self._outer_hooks is None or hooks[0] is not self._outer_hooks[0])

    def _call_hooks(self, unit: int) -> None:
        """Forward hooks inside a unit, which run as what they are: code between units."""
        hooks, self._put_off = self._put_off, []
        for hook in hooks:
            if hook() is not None:
                raise SplitError(
                    f"a forward hook inside unit {self._view.unit_name(unit)!r} returns a value now, and "
                    "none when the step was traced: what it changes would not reach the unit"
                )

    def _answer(self, unit: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    def _enter(self, unit: int) -> tuple[Callable[..., Any], Any]:
        """A unit of this stage is about to run: its forward, and what `_leave` wants.

        The caller calls the forward itself, so that a unit is no deeper in the stack than need be.
        """
        self._check_not_lost()
        entered = self._seeds.enter(unit)
        self.inside = True
        return self._view.originals[unit], entered

    def _hooks_of(self, unit: int) -> BackwardHooks | None:
        """The hooks on gradients that are to be around a unit, where there are some."""
        module = self._view.module_of(unit)
        return BackwardHooks(module) if has_backward_hooks(module) else None

    def _leave(self, unit: int, entered: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> States:
        """A unit has run: where it left generators that the user seeded."""
        given = generators_in(args, kwargs)
        again, host = unit in self._view.repeated, self._view.host_random
        return self._seeds.leave(entered, given, again=again, host=host)

    def _around(self, unit: int, nth: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Around | None:
        """What takes the outputs of this call apart, and puts them together."""
        ports = self._view.ports.get((unit, nth))
        if ports is not None:
            return self._view.watch(unit, ports, Given(args, kwargs))
        return Given(args, kwargs) if takes_containers(args, kwargs) else None

    def _put_together(self, tensors: list[Tensor], structure: Structure, around: Around | None) -> Any:
        """What a call hands out, with these tensors."""
        if around is None:
            return unflatten(tensors, structure)
        if isinstance(around, Watch):
            around.restart()  # what was seen is in the structure, with these tensors
            self._put_off = around.put_off(tensors, structure)
        return around.put_together(tensors, structure)

    def _hand_out(self, unit: int, nth: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a unit of an earlier stage returned: what arrived of it, and placeholders."""
        structure, specs, states = self._returned[unit, nth]
        tensors = [self._received_or_placeholder((unit, nth, leaf), spec) for leaf, spec in enumerate(specs)]
        given = generators_in(args, kwargs) if states else ()
        self._seeds.follow(states, given, again=unit in self._view.repeated)
        if structure == _LONE:
            return tensors[0]
        if len(tensors) != self._view.num_tensors.get((unit, nth), len(tensors)):
            self._refuse_other_tensors(unit, nth, len(tensors))
        if self.is_last:
            self._describe(unit, nth, structure)
        return self._put_together(tensors, structure, self._around(unit, nth, args, kwargs))

    def _refuse_other_tensors(self, unit: int, nth: int, found: int) -> NoReturn:
        raise SplitError(
            f"unit {self._view.unit_name(unit)!r} returns {found} tensors now, and "
            f"{self._view.num_tensors[unit, nth]} when {self._view.step} was traced, which stages send: let "
            "an argument of its forward choose (a flag, or None), by which stages tell such calls apart, and "
            "no attribute of its own; or return the same tensors in every batch [at "
            f"{user_line(self._view.root)}]"
        )

    def _describe(self, unit: int, nth: int, structure: Structure) -> None:
        """What a unit gave in this micro-batch, where the last stage may have to know it of the batch."""
        if structure == _LONE:
            return
        self.described[unit, nth] = structure
        step = self._view.current_step()
        rehearsed = step.rehearsed.get((unit, nth))
        if rehearsed is None or step.is_unlike:
            return
        if are_unlike(rehearsed, structure, step.sizes[self.microbatch] / sum(step.sizes)):
            step.is_unlike = True
            if step.follower is not None:
                step.follower.unlike()

    def _received_or_placeholder(self, key: ValueKey, spec: TensorSpec) -> Tensor:
        tensor = self._received.get(key)
        if tensor is None:
            tensor = self._view.placeholder(key, spec)
        elif key in self._view.mutated:
            tensor = tensor.clone()
        self._handed.add(tensor, None)
        if key in self._view.read_before:
            self._partial.add(tensor, None)
        return tensor

    def _check_not_lost(self) -> None:
        if self._seeds.lost():
            raise self._refuse(
                "random numbers are drawn from a generator that the step seeds itself, after a unit of a "
                "later stage that may draw from it too"
            )

    # ---- placeholders

    def _reads_value(self, reason: str) -> BaseException:
        """What to raise where a value is needed that is not here."""
        return self._refuse(reason)

    def placeholder_operation(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]
    ) -> Any:
        """Let glue compute shapes on placeholders; raise where a value would be needed."""
        if self.inside:
            raise self._refuse(
                "a unit of this stage reads a value of another stage that it was not sent: it did not read "
                "it where the step was traced, as if a flag or a random number chose what it is given "
                "(scheduled sampling). Keep both on one stage with PipelineStrategy(partition=[...]), or in "
                "one unit with units=[...], or let the first batch go the way that reads more; or "
                "whole_steps=True, which calls units where they are, one stage after the other"
            )
        if func._schema.name in _READS:
            raise self._reads_value("a value of another stage is used in control flow, or read as a number")
        for tensor in written_tensors(func, args, kwargs):
            self.remembered.writes(tensor)
            if not is_placeholder(tensor):
                self.taint.add(tensor)
        if makes_guard(func):
            self.remembered.goes_by_run()
        if self._in_operation:
            return run()
        if self._view.assumed.constants and (known := by_shape_alone(func, args)) is not args:
            return func(*known, **kwargs)
        if not self._drawing and torch.Tag.nondeterministic_seeded in func.tags:
            self.remembered.goes_by_run()
            self._draw_alike(func, args, kwargs)
        self._in_operation = True
        try:
            return run()
        except DynamicOutputShapeException as error:
            raise self._of_unknown_size(error) from None
        finally:
            self._in_operation = False

    def _of_unknown_size(self, error: DynamicOutputShapeException) -> BaseException:
        """What to raise where values that are not here say how large something is."""
        return self._reads_value("a value of another stage says how many there are of something")

    def _draw_alike(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Draw as many numbers as the stage that has the values does, so that later draws agree."""
        if func._schema.name in _DRAWS_BY_VALUE:
            raise self._refuse(
                f"{func._schema.name.removeprefix('aten::')} of a value of another stage draws from a "
                "generator that the step seeds itself, and how many numbers it draws depends on the value"
            )

        def real(tensor: Tensor) -> Tensor:
            made = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
            )
            return made.fill_(0.5 if tensor.is_floating_point() else 1)

        with disable_current_modes(), torch.no_grad():
            func(*map_tensors(real, args), **map_tensors(real, kwargs))

    def guard(self) -> None:
        """After a placeholder was written into a real tensor: look at every operation from now on."""
        if not self.taint.enter():
            raise self._refuse("a value of another stage is written into a tensor of this one, under a mode")

    def _poisoned_read(self) -> Exception | None:
        if not self.inside:
            return None
        return self._refuse("a unit of this stage reads a tensor that holds a value of another stage")

    def check_real(self, value: Any, what: str) -> None:
        """Raise where a placeholder is about to leave the step."""
        for opaque in leaves_in(value, Opaque):
            opaque.refused()
        if any(is_placeholder(t) for t in tensors_in(value)) or self.taint.holds(value):
            raise self._refuse(f"{what} holds a value of another stage that was not sent here", _OF_WEIGHTS)

    def _refuse(self, reason: str, more: str = "") -> PlaceholderError:
        view = self._view
        more = _OF_GRADIENTS if view.current_step().trace.reads_gradients else more
        error = PlaceholderError(f"{reason}{more} (stage {view.index}) [at {user_line(view.root)}]")
        self._error = self._error or error
        return error

    # ---- functions between units

    def note_gradient_read(self) -> None:
        """Code between units reads `.grad` of a weight."""
        step = self._view.current_step()
        step.trace.reads_gradients = True
        step.gradient_read()

    def hooked(self, tensor: Tensor) -> Tensor | None:
        """Where a hook on a gradient goes: None where the tensor is the output of a unit of an earlier stage.

        What goes out of an own unit's stage is not the copy that the step writes into.
        """
        if tensor in self._handed:
            return None
        return self._copies.of(tensor) if tensor in self._copies else tensor

    def tried_hook(self, hook: Any) -> Any:
        """A hook on a gradient, as it is registered."""
        return hook

    def has_part_of_gradient(self, tensor: Tensor) -> bool:
        """Whether an earlier stage reads this tensor too, so that its gradient is whole only there."""
        return tensor in self._partial

    def at_mark(self) -> bool:
        """Whether the next random number is one of code between units."""
        return self._seeds.at_mark()

    def random(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A random call between units."""
        self.draws = True
        self._check_not_lost()
        before = self._seeds.drawing(kwargs.get("generator"))
        self._drawing = bool(before)
        try:
            return func(*args, **kwargs)
        finally:
            self._drawing = False
            self._seeds.drawn(before)

    def keeping(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[None]:
        """In a region of activation checkpointing, where a function meets placeholders: keep nothing of it.

        Its results have no gradient here. The region's recomputation, and the forward of another
        micro-batch, may find the results remembered, and would keep another number of tensors.
        """
        self.in_regions = True
        unknown = any(map(is_placeholder, tensors_in((args, kwargs))))
        return _nothing_kept() if unknown else nullcontext()


@contextmanager
def _nothing_kept() -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(saved_tensors_hooks(lambda tensor: None, _never))
        if current_dispatch_mode() is not None:
            stack.enter_context(disable_current_modes())
        yield


def _never(kept: Any) -> Tensor:
    raise AssertionError("a value of another stage has no backward here")


class _NoHandle:
    """What `register_hook` returns where the hook belongs to another stage."""

    def remove(self) -> None:
        """Nothing was registered."""


_REFLECTED = {Tensor.le: Tensor.ge, Tensor.lt: Tensor.gt}
"""Of `y >= h` Python asks `h` first for `h <= y` where its class is below `y`'s, as a placeholder's is."""


class _GlueFunctions(TorchFunctionMode):
    """Seeds each random call between units; leaves hooks on received values to the stage of the unit."""

    passes_layers_on = True

    def __init__(self, run: GlueRun) -> None:
        super().__init__()
        self._run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, run = kwargs or {}, self._run
        if (
            run.inside
        ):  # what a gradient runs again that a unit takes stands at a mark, and no unit's code does
            again = func in RANDOM_FUNCTIONS and run.at_mark()
            return run.random(func, args, kwargs) if again else func(*args, **kwargs)
        if data_set_without_values(func, args):
            if run.taint.unguarded:
                run.guard()
            return None
        if (read := read_of(func, args, kwargs)) is not None:
            return read
        if func is Tensor.register_hook:
            if (target := run.hooked(args[0])) is None:
                return _NoHandle()
            args = (target, *map(run.tried_hook, args[1:]))
        if func is Tensor.retain_grad and run.has_part_of_gradient(args[0]):
            return None
        if run.in_region():
            with run.keeping(args, kwargs):
                result = self._between(func, args, kwargs)
        else:
            result = self._between(func, args, kwargs)
        if run.taint.unguarded:
            run.guard()
        return result

    def _between(self, func: Any, args: Any, kwargs: Any) -> Any:
        mixing = self._run.mixing
        if self._run.is_done:  # such as the end of a `with torch.no_grad()` around the last unit
            return func(*args, **kwargs)
        if func in _REFLECTED and len(args) == 2 and all(isinstance(one, Tensor) for one in args):
            func, args = _REFLECTED[func], args[::-1]
        if mixing is None or func == _DEVICE or func in _STANDING:
            seen = self._run.follow is not None or func in _NOTED
            return (self._seen if seen else self._run.remembered.call)(func, args, kwargs)
        if func in _INDEXING and len(args) > 1:
            args = args[0], _with_numbers(args[1], self._bound), *args[2:]
        return mixing.call(func, args, kwargs, self._seen)

    def _bound(self, value: Tensor) -> Any:
        """A bound of a slice, which torch reads without a call that is seen."""
        assert self._run.mixing is not None
        return self._run.mixing.call(Tensor.__index__, (value,), {}, self._seen)

    def _seen(self, func: Any, args: Any, kwargs: Any, instead: Any = None) -> Any:
        if func in RANDOM_FUNCTIONS:
            return self._run.random(func, args, kwargs)
        if func == GRADIENT and isinstance(args[0], Parameter):
            self._run.note_gradient_read()
        answer = instead or self._run.remembered.call
        if self._run.follow is not None:
            return self._run.follow(func, args, kwargs, answer)
        return answer(func, args, kwargs)


def _with_numbers(index: Any, read: Callable[[Tensor], Any]) -> Any:
    """An index in which tensors that bound slices are numbers."""
    if isinstance(index, tuple):
        return tuple(_with_numbers(one, read) for one in index)
    if type(index) is not slice:
        return index
    bounds = (
        read(one) if isinstance(one, Tensor) and not is_placeholder(one) else one
        for one in (index.start, index.stop, index.step)
    )
    return slice(*bounds)


class Recomputation(GlueRun):
    """Answers code as the forward of the micro-batch did: the same draws, values and placeholders.

    Args:
        view: Of the stage.
        seeds: The random numbers of the micro-batch.
        returned: What units of earlier stages returned.
        received: The tensors among that which arrived here.
        places: For each unit that the step calls several times, where the random state stood at each call.
        watches: Whether there may be code between units that runs again.

    Attributes:
        reentrant: Whether regions were asked for with `use_reentrant=True`.
    """

    def __init__(
        self, view: StageView, seeds: MicrobatchSeeds, returned: Returned,
        received: dict[ValueKey, Tensor], places: dict[int, list[Any]], *, watches: bool,
    ) -> None:  # fmt: skip
        super().__init__(view, seeds, returned, received)
        self._places, self._watches = places, watches
        self.reentrant = False

    def running(self) -> AbstractContextManager[Any]:
        """For the length of the backward."""
        self._seeds.backward(self._view.index)
        stack = ExitStack()
        if self._watches:
            stack.enter_context(self.functions)
            stack.enter_context(self.taint)
        return stack

    def close(self) -> None:
        """Let go of all values. This object is part of a circle, which is collected some time later."""
        self._received = {}

    @property
    def watcher(self) -> "Recomputation | None":
        """Who sees operations on placeholders."""
        return self if self._watches else None

    def _answer(self, unit: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        view = self._view
        stage = view.stage_of[unit]
        if stage == view.index:
            return self._own(unit, args, kwargs)
        if stage < view.index and self._watches:
            output = self._hand_out(unit, self._nth(unit), args, kwargs)
            self._put_off.clear()  # they ran in the forward
            return output
        assert view.idle is not None, "a stage belongs to a split model"
        return view.idle.call(unit, args, kwargs)

    def _own(self, unit: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        changed = {(nth, leaf) for one, nth, leaf in self._view.mutated if one == unit}
        nth = self._nth(unit) if changed else 0
        hooks, (forward, entered) = self._hooks_of(unit), self._enter(unit)
        try:
            output = forward(*(args if hooks is None else hooks.before(args)), **kwargs)
            output = output if hooks is None else hooks.after(output)
        finally:
            self.inside = False
        self._leave(unit, entered, args, kwargs)
        if not changed:
            return output
        tensors, structure = flatten(output)
        return unflatten([t.clone() if (nth, i) in changed else t for i, t in enumerate(tensors)], structure)

    def _nth(self, unit: int) -> int:
        """Which call of the unit this is. Checkpointing puts the random state back, which tells."""
        if unit not in self._view.repeated or len(self._places[unit]) == 1:
            return 0
        found = [nth for nth, place in enumerate(self._places[unit]) if place == self._seeds.place()]
        if len(found) == 1:
            return found[0]
        raise SplitError(
            f"unit {self._view.unit_name(unit)!r} is called several times in a step and again by "
            "activation checkpointing, which did not put the random state back, so that the calls cannot be "
            "told apart: checkpoint with preserve_rng_state=True, or without seeding in the step [at "
            f"{user_line(self._view.root)}]"
        )
