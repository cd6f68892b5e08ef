"""Run the user's own step on one stage for one micro-batch: only the units of the stage do work."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode, _push_mode

from lightning_pipeline.errors import PlaceholderError, SplitError
from lightning_pipeline.model.cut import ValueKey
from lightning_pipeline.model.replay.seeds import RANDOM_FUNCTIONS, MicrobatchSeeds
from lightning_pipeline.model.tensors import (
    Poison,
    Structure,
    TensorSpec,
    alias,
    flatten,
    is_placeholder,
    tensors_in,
    unflatten,
    user_line,
    written_tensors,
)
from lightning_pipeline.wire import Values

if TYPE_CHECKING:
    from lightning_pipeline.model.replay.stage import StageProgram

CallKey = tuple[int, int]
Entry = tuple[int, int, Structure, tuple[TensorSpec, ...]]
Table = tuple[Entry, ...]
_LONE = Structure("tensor", 0)


class StageDone(BaseException):
    """The stage's last unit has run and one of a later stage was called."""


@dataclass(slots=True)
class Replayed:
    """What one replay leaves behind.

    Attributes:
        outgoing: What the next stage is sent; None on the last stage.
        result: What the step returned, on the last stage.
        leaves: For each received tensor the leaf that collects its gradient, None where it needs none.
        handed: What each unit of an earlier stage handed out, for activation checkpointing.
    """

    outgoing: Values | None
    result: Any
    leaves: list[Tensor | None]
    handed: dict[int, Any] = field(default_factory=dict)


class Replay:
    """One micro-batch on one stage. Answers every call of a unit, and watches every placeholder."""

    def __init__(
        self, program: "StageProgram", microbatch: int, incoming: Values | None, seeds: MicrobatchSeeds
    ) -> None:
        self._program, self._microbatch = program, microbatch
        self.is_last = program.is_last
        self._seeds = seeds
        self._counts = [0] * len(program.stage_of)
        self._own_left = len(program.own_calls)
        self._received: dict[ValueKey, Tensor] = {}
        self._raw: dict[ValueKey, Tensor] = {}  # what goes out, as it was returned
        self._entries: list[Entry] = []
        self.inside = False
        self._exited = False
        self._error: SplitError | None = None
        self._handed_ids: set[int] = set()
        self._poison = Poison(program.mode, self._poisoned_read)
        self.remembered = program.remembered
        self._specs = program.read_table(incoming.table if incoming is not None else ())
        self.functions = _GlueFunctions(self)
        self.replayed = Replayed(None, None, [])
        if incoming is not None:
            self._accept(incoming)

    def _accept(self, incoming: Values) -> None:
        for key, tensor in zip(self._program.incoming, incoming.tensors, strict=True):
            needs_grad = tensor.requires_grad and torch.is_grad_enabled()
            leaf = tensor if needs_grad else None
            self.replayed.leaves.append(leaf)
            self._raw[key] = tensor
            self._received[key] = alias(tensor) if needs_grad else tensor

    # ---- running

    def run(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Replayed:
        """Call the step until this stage's part is done."""
        result = None
        try:
            with self.functions, self._poison:
                result = function(*args, **kwargs)
        except StageDone:
            pass
        except Exception as error:
            self._explain(error)
            raise
        else:
            self._check_return(result)
        if self._error is not None:
            raise self._error
        self.replayed.result = result
        self.replayed.outgoing = None if self._program.is_last else self._outgoing(result)
        return self.replayed

    def close(self) -> None:
        """Let go of all values. This object is part of a circle, which is collected some time later."""
        self._received.clear()
        self._raw.clear()
        self.replayed = Replayed(None, None, [])

    def _explain(self, error: Exception) -> None:
        if self._error is not None and error is not self._error:
            raise self._error from error
        if self._exited:
            raise SplitError(
                f"{self._program.step} raised {type(error).__name__} after stage {self._program.index} was "
                "done: a bare `except:` around the model's call swallowed what ends the step on this stage; "
                "catch Exception instead"
            ) from error

    def _check_return(self, result: Any) -> None:
        if self._exited:
            raise SplitError(
                f"{self._program.step} went on after stage {self._program.index} was done: a bare `except:` "
                "around the model's call swallowed what ends the step on this stage; catch Exception instead"
            )
        if self._program.is_last:
            self.check_real(result, f"what {self._program.step} returns")
        elif result is None and not any(self._counts):
            return
        elif self._program.has_later_calls or self._own_left:
            raise self._other_path(
                f"{self._program.step} ended on stage {self._program.index} before any unit of a later stage "
                f"was called, with {self._own_left} of the stage's own calls missing",
                line="",
            )

    def _outgoing(self, result: Any) -> Values:
        program = self._program
        if result is None and not any(self._counts) and (program.has_later_calls or program.own_calls):
            return Values([], (), empty=True)
        missing = [key for key in program.outgoing if key not in self._raw]
        if missing:
            unit, nth, _ = missing[0]
            raise self._other_path(
                f"unit {program.unit_name(unit)!r} (call {nth}) was not called on stage {program.index}, but "
                "a later stage needs its output",
                line="",
            )
        tensors = [self._raw[key] for key in program.outgoing]
        self.check_real(tensors, f"what stage {program.index} sends")
        return Values(tensors, program.write_table(self._entries))

    # ---- calls of units

    def call(self, unit: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call: run it, hand out what was received for it, or end the step."""
        if self.inside:
            return self._program.originals[unit](*args, **kwargs)
        ours = _get_current_function_mode() is self.functions
        if ours:  # out of the way, where no mode of the user's is above it
            _pop_mode()
        try:
            return self._answer(unit, args, kwargs)
        finally:
            if ours:
                _push_mode(self.functions)

    def _answer(self, unit: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nth = self._counts[unit]
        self._counts[unit] = nth + 1
        stage = self._program.stage_of[unit]
        if stage == self._program.index:
            output = self._own(unit, nth, args, kwargs)
        else:
            output = self._earlier(unit, nth) if stage < self._program.index else self._later(unit, nth)
        if self._program.host_random:
            self._seeds.host(unit, nth)
        return output

    def _own(self, unit: int, nth: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        program = self._program
        if (unit, nth) not in program.own_calls:
            count = "is called" if not nth else f"is called {nth + 1} times"
            raise self._other_path(f"unit {program.unit_name(unit)!r} {count}")
        self._own_left -= 1
        self._seeds.unit(unit, nth)
        output = self._really(unit, args, kwargs)
        return self._record(unit, nth, output)

    def _really(self, unit: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.inside = True
        try:
            return self._program.originals[unit](*args, **kwargs)
        finally:
            self.inside = False

    def _record(self, unit: int, nth: int, output: Any) -> Any:
        tensors, structure = flatten(output)
        program, specs, copied = self._program, [], False
        for leaf, tensor in enumerate(tensors):
            if is_placeholder(tensor):
                raise self._refuse(f"unit {program.unit_name(unit)!r} returns a value of another stage")
            key = (unit, nth, leaf)
            self._raw[key] = tensor
            specs.append(program.spec_of(key, tensor))
            if key in program.mutated:
                tensors[leaf], copied = tensor.clone(), True
        self._entries.append((unit, nth, structure, tuple(specs)))
        return unflatten(tensors, structure) if copied else output

    def _earlier(self, unit: int, nth: int) -> Any:
        known = self._specs.get((unit, nth))
        if known is None:
            raise self._other_path(
                f"unit {self._program.unit_name(unit)!r} is called on stage {self._program.index} "
                f"(call {nth}), but was not on its own stage"
            )
        structure, specs = known
        tensors = [self._received_or_placeholder((unit, nth, leaf), spec) for leaf, spec in enumerate(specs)]
        result = tensors[0] if structure == _LONE else unflatten(list(tensors), structure)
        if self._program.checkpointed:
            self.replayed.handed[unit] = result
        return result

    def _received_or_placeholder(self, key: ValueKey, spec: TensorSpec) -> Tensor:
        tensor = self._received.get(key)
        if tensor is None:
            tensor = self._program.placeholder(key, spec)
        elif key in self._program.mutated:
            tensor = tensor.clone()
        self._handed_ids.add(id(tensor))
        return tensor

    def _later(self, unit: int, nth: int) -> Any:
        if self._own_left <= 0:
            self._exited = True
            raise StageDone
        traced = self._program.traced_output(unit, nth, self._microbatch)
        if traced is None:
            raise self._other_path(
                f"unit {self._program.unit_name(unit)!r} is called (call {nth}), with {self._own_left} calls "
                f"of stage {self._program.index} before it missing"
            )
        structure, specs = traced
        tensors = [self._program.placeholder((unit, nth, leaf), spec) for leaf, spec in enumerate(specs)]
        return unflatten(list(tensors), structure)

    # ---- placeholders

    def placeholder_operation(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]
    ) -> Any:
        """Let glue compute shapes on placeholders; raise where a value would be needed."""
        if self.inside:
            raise self._refuse("a unit of this stage reads a value of another stage that it was not sent")
        if func._schema.name in ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero"):
            raise self._refuse("a value of another stage is used in control flow, or read as a number")
        for tensor in written_tensors(func, args, kwargs):
            self.remembered.writes(tensor)
            if not is_placeholder(tensor):
                self._poison.add(tensor)
        return run()

    def guard(self) -> None:
        """After a placeholder was written into a real tensor: look at every operation from now on."""
        if self._poison.unguarded and not self._poison.enter():
            raise self._refuse("a value of another stage is written into a tensor of this one, under a mode")

    def _poisoned_read(self) -> Exception | None:
        if not self.inside:
            return None
        return self._refuse("a unit of this stage reads a tensor that holds a value of another stage")

    def check_real(self, value: Any, what: str) -> None:
        """Raise where a placeholder is about to leave the step."""
        if any(is_placeholder(t) for t in tensors_in(value)) or self._poison.holds(value):
            raise self._refuse(f"{what} holds a value of another stage that was not sent here")

    def _refuse(self, reason: str) -> PlaceholderError:
        program = self._program
        error = PlaceholderError(f"{reason} (stage {program.index}) [at {user_line(program.root)}]")
        self._error = self._error or error
        return error

    def _other_path(self, what: str, line: str | None = None) -> SplitError:
        line = f" [at {user_line(self._program.root)}]" if line is None else line
        return SplitError(
            f"{what}, which is not what {self._program.step} did when it was traced: the path through the "
            "model varies, and stages cannot follow it. Put the choice into the forward of one module and "
            "keep that whole with PipelineStrategy(units=['<its name>']), or call every branch each time and "
            f"choose among what they return{line}"
        )

    def is_handed(self, tensor: Tensor) -> bool:
        """Whether glue got this very tensor as the output of a unit of an earlier stage."""
        return id(tensor) in self._handed_ids

    def draw(self, generator: torch.Generator | None) -> None:
        """A random call between units comes."""
        self._seeds.draw(generator)


class _NoHandle:
    """What `register_hook` returns where the hook belongs to another stage."""

    def remove(self) -> None:
        """Nothing was registered."""


class _GlueFunctions(TorchFunctionMode):
    """Seeds each random call between units; leaves hooks on received values to the stage of the unit."""

    def __init__(self, replay: Replay) -> None:
        super().__init__()
        self._replay = replay

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._replay.inside:
            return func(*args, **kwargs)
        if func in RANDOM_FUNCTIONS:
            self._replay.draw(kwargs.get("generator"))
            result = func(*args, **kwargs)
        elif func is Tensor.register_hook and self._replay.is_handed(args[0]):
            return _NoHandle()
        else:
            result = self._replay.remembered.call(func, args, kwargs)
        self._replay.guard()
        return result
