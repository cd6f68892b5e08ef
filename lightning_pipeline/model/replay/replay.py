"""Run the user's own step on one stage for one micro-batch: only the units of the stage do work."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import BackwardHook

from lightning_pipeline.data import batch_size_of, has_samples
from lightning_pipeline.errors import ConfigurationError, SplitError
from lightning_pipeline.model.cut import StageDone, ValueKey
from lightning_pipeline.model.random import MicrobatchSeeds, States
from lightning_pipeline.model.replay.between_units import Around, GlueRun, Recomputation
from lightning_pipeline.model.replay.gradient_hooks import TriedHook, TriedModuleHook, trying_functions
from lightning_pipeline.model.replay.view import Entry, StageView, Step
from lightning_pipeline.model.tensors import (
    alias,
    flatten,
    is_placeholder,
    tensors_in,
    user_line,
    version_of,
)
from lightning_pipeline.model.trace import Watch, has_backward_hooks
from lightning_pipeline.patching import patched
from lightning_pipeline.wire import Values


@dataclass(slots=True)
class Replayed:
    """What one replay leaves behind.

    Attributes:
        outgoing: What the next stage is sent; None on the last stage.
        result: What the step returned, on the last stage.
        leaves: For each received tensor the leaf that collects its gradient, None where it needs none.
        again: Answers what the backward runs again.
    """

    outgoing: Values | None
    result: Any
    leaves: list[Tensor | None]
    again: Recomputation | None = None


class Replay(GlueRun):
    """The forward of one micro-batch on one stage."""

    def __init__(
        self, view: StageView, microbatch: int, incoming: Values | None, seeds: MicrobatchSeeds
    ) -> None:
        returned = view.read_table(incoming.table if incoming is not None else ())
        super().__init__(view, seeds, returned, {})
        self.microbatch = microbatch
        self._counts = [0] * len(view.stage_of)
        self._own_left = len(view.own_calls)
        self._raw: dict[ValueKey, Tensor] = {}  # what goes out, as it was returned
        self._entries: list[Entry] = []
        self._places: dict[int, list[Any]] = {}  # of calls of units that are called several times
        self._going_on = False  # after the stage's last call, for the effects of the rest of the step
        self.replayed = Replayed(None, None, [])
        if incoming is not None:
            self._accept(incoming)

    def _accept(self, incoming: Values) -> None:
        for key, tensor in zip(self._view.incoming, incoming.tensors, strict=True):
            needs_grad = tensor.requires_grad and torch.is_grad_enabled()
            leaf = tensor if needs_grad else None
            self.replayed.leaves.append(leaf)
            self._received[key] = self._raw[key] = alias(tensor) if needs_grad else tensor

    # ---- running

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around the call of the step, which ends when this stage's part is done; then `replayed` is full."""
        grad_mode = torch.is_grad_enabled()
        try:
            with self.functions, self.taint:
                yield
        except StageDone as done:
            # From Python 3.12 on its traceback, this generator's frame and the one that resumed it are a
            # circle, which would hold all that the step computed until it is collected.
            done.__traceback__ = None
        except Exception as error:
            if not self._going_on:  # there the last stage runs on, and says what is wrong
                self._explain(error)
                raise
            self._error = None
        else:
            self._check_return(self.replayed.result)
        finally:
            torch.set_grad_enabled(grad_mode)
        if self._error is not None and not self._going_on:
            raise self._error
        self.replayed.outgoing = None if self._view.is_last else self._outgoing(self.replayed.result)

    def again(self) -> Recomputation:
        """What answers code that the backward runs again."""
        view = self._view
        regions = self.in_regions or view.checkpointed
        return Recomputation(
            view, self._seeds, self._returned, self._received if regions else {}, self._places,
            watches=regions or self.draws,
        )  # fmt: skip

    def given(self, keys: Collection[ValueKey]) -> dict[ValueKey, Tensor]:
        """Outputs of units that this stage has, as units returned them."""
        return {key: self._raw[key] for key in keys if key in self._raw}

    def close(self) -> None:
        """Let go of all values. This object is part of a circle, which is collected some time later."""
        self._received, self._raw = {}, {}
        self._copies.clear()
        self.replayed = Replayed(None, None, [])
        self.taint.close()

    def _explain(self, error: Exception) -> None:
        if self._error is not None and error is not self._error:
            raise self._error from error
        if self.is_done:
            raise SplitError(
                f"{self._view.step} raised {type(error).__name__} after stage {self._view.index} was "
                "done: a bare `except:` around the model's call swallowed what ends the step on this stage; "
                "catch Exception instead"
            ) from error

    def _check_return(self, result: Any) -> None:
        if self.is_done:
            raise SplitError(
                f"{self._view.step} went on after stage {self._view.index} was done: a bare `except:` "
                "around the model's call swallowed what ends the step on this stage; catch Exception instead"
            )
        if self._view.is_last:
            self.check_real(result, f"what {self._view.step} returns")
        elif result is None and not any(self._counts):
            return
        elif (self._view.has_later_calls and not self._going_on) or self._own_left:
            raise self._other_path(
                f"{self._view.step} ended on stage {self._view.index} before any unit of a later stage "
                f"was called, with {self._own_left} of the stage's own calls missing",
                line="",
            )

    def _outgoing(self, result: Any) -> Values:
        view = self._view
        if result is None and not any(self._counts) and (view.has_later_calls or view.own_calls):
            return Values([], (), empty=True)
        missing = [key for key in view.outgoing if key not in self._raw]
        if missing:
            unit, nth, _ = missing[0]
            raise self._other_path(
                f"unit {view.unit_name(unit)!r} (call {nth}) was not called on stage {view.index}, but "
                "a later stage needs its output",
                line="",
            )
        tensors = [self._raw[key] for key in view.outgoing]
        self.check_real(tensors, f"what stage {view.index} sends")
        return Values(tensors, view.write_table(self._entries))

    def tried_hook(self, hook: Any) -> Any:
        """The first hook of a line looks whether it does to a micro-batch what it would do to the batch."""
        view, line = self._view, user_line(self._view.root)
        step = view.current_step()
        if len(step.microbatches) == 1 or step.weights is None or line in view.hooks_tried:
            return hook
        return TriedHook(hook, self._samples(step), line, view.hooks_tried)

    @contextmanager
    def trying_hooks(self) -> Iterator[None]:
        """Inside, modules' hooks on gradients are tried likewise, wherever in a unit the module is.

        So are backwards that users write, in the first micro-batch of each way through the model.
        """
        view, step = self._view, self._view.current_step()
        if len(step.microbatches) == 1 or step.weights is None:
            yield
            return
        assert view.route is not None, "a micro-batch runs"
        way = step.name, view.route.trace.path
        functions: AbstractContextManager[None] = nullcontext()
        if way not in view.ways_tried:
            view.ways_tried.add(way)
            functions = trying_functions(self._samples(step), view.hooks_tried)
        with patched(nn.modules.module, {"BackwardHook": self._backward_hook}), functions:
            yield

    def _backward_hook(self, module: nn.Module, hooks: Sequence[Any], before: Sequence[Any]) -> BackwardHook:
        """What puts a module's hooks on gradients around its forward."""
        tried = ([self._tried_module_hook(module, hook) for hook in some] for some in (hooks, before))
        return BackwardHook(module, *tried)

    def _tried_module_hook(self, module: nn.Module, hook: Any) -> Any:
        view, key = self._view, f"{id(module)} {id(getattr(hook, '__code__', type(hook)))}"
        if key in view.hooks_tried:
            return hook
        return TriedModuleHook(hook, self._samples(view.current_step()), key, view.hooks_tried, view.root)

    def _samples(self, step: Step) -> int:
        """Of this micro-batch; 0 where that is not known."""
        args = step.microbatches[self.microbatch][0]
        try:
            return batch_size_of(args[0]) if args and has_samples(args[0]) else 0
        except ConfigurationError:  # a list of two dictionaries and two samples, which the batch is not
            return 0

    # ---- calls of units

    def _answer(self, unit: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nth, view = self._counts[unit], self._view
        self._counts[unit] = nth + 1
        if unit in view.repeated:
            self._places.setdefault(unit, []).append(self._seeds.place())
        stage = view.stage_of[unit]
        if stage < view.index:
            output = self._earlier(unit, nth, args, kwargs)
        elif stage > view.index:
            output = self._later(unit, nth, args, kwargs)
        else:
            self._expect(unit, nth)
            around = self._around(unit, nth, args, kwargs)
            if view.host_random:
                self._seeds.host_in_unit(unit, nth)
            with around if isinstance(around, Watch) else nullcontext():
                hooks, (forward, entered) = self._hooks_of(unit), self._enter(unit)
                try:
                    output = forward(*(args if hooks is None else hooks.before(args)), **kwargs)
                    output = output if hooks is None else hooks.after(output)
                finally:
                    self.inside = False
                states = self._leave(unit, entered, args, kwargs)
            output = self._record(unit, nth, output, around, states)
        if view.host_random and not self._seeds.host_is_users():
            self._seeds.host(unit, nth)
        self.on_unit(unit, nth)
        return output

    def _expect(self, unit: int, nth: int) -> None:
        """A unit of this stage is called."""
        if (unit, nth) not in self._view.own_calls:
            count = "is called" if not nth else f"is called {nth + 1} times"
            raise self._other_path(f"unit {self._view.unit_name(unit)!r} {count}")
        self._own_left -= 1

    def _record(self, unit: int, nth: int, output: Any, around: Around | None, states: States) -> Any:
        tensors, structure = flatten(output) if around is None else around.take_apart(output)
        view, specs, copied = self._view, [], False
        for leaf, tensor in enumerate(tensors):
            if is_placeholder(tensor):
                raise self._refuse(f"unit {view.unit_name(unit)!r} returns a value of another stage")
            key = (unit, nth, leaf)
            self._raw[key] = tensor
            specs.append(view.spec_of(key, tensor))
            if key in view.mutated:
                tensors[leaf], copied = tensor.clone(), True
                self._copies.add(tensors[leaf], tensor)
        self._entries.append((unit, nth, structure, tuple(specs), states))
        if self.is_last:
            self._describe(unit, nth, structure)
        if copied:
            output = self._put_together(tensors, structure, around)
        elif isinstance(around, Watch):
            self._put_off = around.put_off(tensors, structure)
        module = view.module_of(unit)
        if module._forward_hooks and not view.is_last and has_backward_hooks(module):
            self._unchanged_by_hooks(unit, module, output)
        return output

    def _unchanged_by_hooks(self, unit: int, module: nn.Module, returned: Any) -> None:
        """Hooks on gradients are below forward hooks here: refuse where it makes a difference."""
        versions = [version_of(tensor) for tensor in tensors_in(returned)]

        def look(module: nn.Module, args: Any, output: Any) -> None:
            handle.remove()
            if output is not returned or versions != [version_of(tensor) for tensor in tensors_in(returned)]:
                raise SplitError(
                    f"a forward hook of unit {self._view.unit_name(unit)!r} changes what the unit "
                    "returns, and hooks on gradients of the same module would see another gradient than on "
                    "one device: do the one in the module's forward, or put the other on a module inside it"
                )

        handle = module.register_forward_hook(look)

    def _earlier(self, unit: int, nth: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (unit, nth) not in self._returned:
            raise self._other_path(
                f"unit {self._view.unit_name(unit)!r} is called on stage {self._view.index} "
                f"(call {nth}), but was not on its own stage"
            )
        return self._hand_out(unit, nth, args, kwargs)

    def _later(self, unit: int, nth: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._own_left <= 0:
            if not self._view.goes_on:
                self.is_done = True
                raise StageDone
            self._going_on = True
        traced = self._view.traced_output(unit, nth, self.microbatch)
        if traced is None:
            raise self._other_path(
                f"unit {self._view.unit_name(unit)!r} is called (call {nth}), with {self._own_left} calls "
                f"of stage {self._view.index} before it missing"
            )
        if self._view.host_random and self._seeds.host_is_users() and not self._going_on:
            raise self._refuse(
                "numpy's or Python's random numbers are seeded in the step, and a unit of a later stage may "
                "draw from them before this stage goes on: seed a generator of your own, "
                "`numpy.random.default_rng(seed)`"
            )
        structure, specs = traced
        tensors = [self._view.placeholder((unit, nth, leaf), spec) for leaf, spec in enumerate(specs)]
        self._seeds.lose(again=unit in self._view.repeated)
        return self._put_together(tensors, structure, self._around(unit, nth, args, kwargs))

    def end_after_own(self, unit: int, nth: int) -> None:
        """After a call: end the step here if it was the stage's last, and no later stage's unit ends it."""
        if not self._own_left:
            self.is_done = not self._view.goes_on
            self._going_on = self._view.goes_on
            if self.is_done:
                raise StageDone

    def _reads_value(self, reason: str) -> BaseException:
        """After the stage's own part, what needs values is left to later stages."""
        if self._going_on:
            return StageDone()
        if self._own_left or self._view.is_last or self._view.goes_on:
            return super()._reads_value(reason)
        self.is_done = True
        return StageDone()

    def _other_path(self, what: str, line: str | None = None) -> SplitError:
        line = f" [at {user_line(self._view.root)}]" if line is None else line
        route = self._view.route
        if route is not None and route.trace.steered_at:
            works = list(self._view.current_step().trace.way_out)
            way_out = (
                f"PipelineStrategy(units={works}) keeps the module whole that chooses, as a trial has shown"
                if works
                else "put the choice into the forward of one module and keep that whole with "
                "PipelineStrategy(units=['<its name>'])"
            )
            return SplitError(
                f"{what}, which is not what {self._view.step} did when it was traced: a value computed by "
                f"the model steers the code at {route.trace.steered_at}. What is computed may follow from "
                f"it, and which units are called may not: {way_out}; or whole_steps=True, one stage after "
                f"the other{line}"
            )
        return SplitError(
            f"{what}, which is not what {self._view.step} did when it was traced: the path through the "
            "model varies by something that stages do not follow, such as shapes or the clock. Choose by "
            "an attribute, a drawn number or what is in the batch, or put the choice into the forward of one "
            f"module and keep that whole with PipelineStrategy(units=['<its name>']); or whole_steps=True, "
            f"one stage after the other{line}"
        )
