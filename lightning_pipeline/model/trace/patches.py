"""Put ourselves between the caller of a unit and its forward, without replacing any module object."""

import copy
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

from torch import nn
from typing_extensions import override

from lightning_pipeline.errors import SplitError
from lightning_pipeline.model.trace.units import Unit
from lightning_pipeline.patching import Undo, all_undone, patch

Hooks = Callable[[], Any]


class Runner(Protocol):
    """Decides what a call of a unit does: a trace, a replay, or nothing special."""

    @property
    def inside(self) -> Any:
        """What is true while a unit runs."""

    def call(self, unit: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call of unit number `unit`."""
        ...


class Stand:
    """Stands in a module's `__dict__` for one of its methods; a copy of the module gets its own method.

    Args:
        module: Whose.
        name: Of the method.
        call: What is called instead.
        own: What stood there; None: the method of the class.
    """

    def __init__(self, module: nn.Module, name: str, call: Callable[..., Any], own: Any = None) -> None:
        self._module, self._name, self._call, self._own = module, name, call, own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self._module))
        if copied is None:  # this alone is copied, and not its module
            return self
        if self._own is not None:
            return copy.deepcopy(self._own, memo)
        return types.MethodType(getattr(type(copied), self._name), copied)


class _UnitStand(Stand):
    """Stands for the `forward` of a unit; whoever runs units now answers.

    Args:
        patches: Of all units.
        number: Of this one.
        own: What stood there; None: the method of the class.
    """

    def __init__(self, patches: "UnitPatches", number: int, own: Any) -> None:
        super().__init__(patches.units[number].module, "forward", patches.originals[number], own)
        self._patches, self._number = patches, number

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self._module))
        if copied is not None:
            self._patches.copies.append((weakref.ref(copied), self._number))
        return super().__deepcopy__(memo)

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        runner = self._patches.runner or self._patches.idle
        if runner is None:
            return self._call(*args, **kwargs)
        return runner.call(self._number, args, kwargs)


class UnitPatches:
    """The patched `forward` of every unit. Calls go to the current `runner`, or to the original.

    Attributes:
        units: The units, in the order of their numbers.
        originals: What `forward` was before, one per unit; an instance's own `forward` is kept.
        runner: Who answers calls now. None: `idle` does.
        idle: Who answers outside a step. None: the original does.
        copies: Modules that were copied from units meanwhile, with the unit's number.
        around_alone: Makes the context in which a unit runs that is called outside of steps.
        alone: The unit that runs so now.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = list(units)
        self.originals: list[Callable[..., Any]] = [_original(unit) for unit in self.units]
        self.runner: Runner | None = None
        self.idle: Runner | None = None
        self.copies: list[tuple[weakref.ref[nn.Module], int]] = []
        self.around_alone: Callable[[int], AbstractContextManager[None]] = lambda _: nullcontext()
        self.alone: int | None = None
        self._own = [vars(unit.module).get("forward") for unit in self.units]
        self._undo: list[Undo] = []

    def install(self) -> None:
        """Patch every unit."""
        for number in range(len(self.units)):
            self._install(number)

    def take_in(self, unit: Unit) -> None:
        """Patch one more, which has come in the run."""
        self.units.append(unit)
        self.originals.append(_original(unit))
        self._own.append(vars(unit.module).get("forward"))
        self._install(len(self.units) - 1)

    def _install(self, number: int) -> None:
        module = self.units[number].module
        hooks, before = module._get_backward_hooks, module._get_backward_pre_hooks
        stands: dict[str, Stand] = {"forward": _UnitStand(self, number, self._own[number])}
        for name, call in (
            ("_get_backward_hooks", self._outside_steps(hooks, ([], []))),
            ("_get_backward_pre_hooks", self._outside_steps(before, [])),
        ):
            stands[name] = Stand(module, name, call)
        self._undo += [patch(module, name, stand) for name, stand in stands.items()]

    @contextmanager
    def run_by(self, runner: Runner) -> Iterator[None]:
        """Inside, `runner` answers the calls of units."""
        before, self.runner = self.runner, runner
        try:
            yield
        finally:
            self.runner = before

    def run_alone(self, unit: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a unit of this rank that is called outside of steps."""
        before, self.alone = self.alone, unit
        try:
            with self.around_alone(unit):
                return self.originals[unit](*args, **kwargs)
        finally:
            self.alone = before

    def copied(self) -> dict[int, int]:
        """The unit that a module was copied from, by its `id`: its weights are where the unit's are."""
        found = [(copied(), number) for copied, number in self.copies]
        return {id(module): number for module, number in found if module is not None}

    def remove(self) -> None:
        """Give every unit its own `forward` back."""
        undo, self._undo = self._undo, []
        all_undone(undo)()

    def _outside_steps(self, hooks: Hooks, none: Any) -> Hooks:
        """In a step `BackwardHooks` calls them, on the stage that runs the unit.

        `Module.__call__` would put them around what the forward returns: above what a stage sends, and
        again around what the others receive.
        """

        def answer() -> Any:
            inside_a_step = self.runner is not None and not self.runner.inside
            return none if inside_a_step else hooks()

        return answer


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether hooks on gradients are around a module: its own, or those of all modules."""
    every: Any = nn.modules.module
    own = module._backward_hooks or module._backward_pre_hooks
    return bool(own or every._global_backward_hooks or every._global_backward_pre_hooks)


class BackwardHooks:
    """Puts a module's hooks on gradients around its forward, as `Module.__call__` does.

    Args:
        module: A unit.

    Raises:
        SplitError: Hooks of the kind that torch calls with gradients of single operations.
    """

    def __init__(self, module: nn.Module) -> None:
        kind: Any = type(module)
        full, legacy = kind._get_backward_hooks(module)
        if legacy:
            raise SplitError(
                f"register_backward_hook of {kind.__name__} is on a unit of a pipeline: torch calls such "
                "hooks with gradients of single operations; use register_full_backward_hook"
            )
        every: Any = nn.modules.module
        self._hook = every.BackwardHook(module, full, kind._get_backward_pre_hooks(module))

    def before(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments to call the forward with."""
        arguments: tuple[Any, ...] = self._hook.setup_input_hook(args)
        return arguments

    def after(self, output: Any) -> Any:
        """What the forward returned, to be handed on."""
        return self._hook.setup_output_hook(output)


def _original(unit: Unit) -> Callable[..., Any]:
    forward: Callable[..., Any] = unit.module.forward
    return forward
