"""Put ourselves between the caller of a unit and its forward, without replacing any module object."""

from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, Protocol

from torch import nn
from torch.utils.hooks import BackwardHook

from lightning_pipeline.errors import SplitError
from lightning_pipeline.model.trace.units import Unit

Hooks = Callable[[], Any]


class Runner(Protocol):
    """Decides what a call of a unit does: a trace, a replay, or nothing special."""

    @property
    def inside(self) -> Any:
        """What is true while a unit runs."""

    def call(self, unit: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call of unit number `unit`."""
        ...


class UnitPatches:
    """The patched `forward` of every unit. Calls go to the current `runner`, or to the original.

    Attributes:
        units: The units, in the order of their numbers.
        originals: What `forward` was before, one per unit; an instance's own `forward` is kept.
        runner: Who answers calls now. None: `idle` does.
        idle: Who answers outside a step. None: the original does.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = list(units)
        self.originals: list[Callable[..., Any]] = [_original(unit) for unit in self.units]
        self.runner: Runner | None = None
        self.idle: Runner | None = None
        self._own = [vars(unit.module).get("forward") for unit in self.units]

    def install(self) -> None:
        """Patch every unit."""
        for number, unit in enumerate(self.units):
            held = vars(unit.module)
            held["forward"] = self._answer(number)
            held["_get_backward_hooks"] = self._outside_steps(unit.module._get_backward_hooks, ([], []))
            held["_get_backward_pre_hooks"] = self._outside_steps(unit.module._get_backward_pre_hooks, [])

    def remove(self) -> None:
        """Give every unit its own `forward` back."""
        for unit, own in zip(self.units, self._own, strict=True):
            for name in ("forward", "_get_backward_hooks", "_get_backward_pre_hooks"):
                vars(unit.module).pop(name, None)
            if own is not None:
                vars(unit.module)["forward"] = own

    def _answer(self, number: int) -> "_Answer":
        return _Answer(self, number)

    def _outside_steps(self, hooks: Hooks, none: Any) -> Hooks:
        """In a step `with_backward_hooks` calls them, on the stage that runs the unit.

        `Module.__call__` would put them around what the forward returns: above what a stage sends, and
        again around what the others receive.
        """

        def answer() -> Any:
            inside_a_step = self.runner is not None and not self.runner.inside
            return none if inside_a_step else hooks()

        return answer


class _Answer:
    """The `forward` of a patched unit. A copy of the unit gets its class's own."""

    def __init__(self, patches: UnitPatches, number: int) -> None:
        self._patches, self._number = patches, number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        patches = self._patches
        runner = patches.runner or patches.idle
        if runner is None:
            return patches.originals[self._number](*args, **kwargs)
        return runner.call(self._number, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        original = self._patches.originals[self._number]
        copied = memo.get(id(self._patches.units[self._number].module))
        function = getattr(original, "__func__", None)
        return self if copied is None else MethodType(function, copied) if function else original


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether hooks on gradients are around a module: its own, or those of all modules."""
    every: Any = nn.modules.module
    own = module._backward_hooks or module._backward_pre_hooks
    return bool(own or every._global_backward_hooks or every._global_backward_pre_hooks)


def with_backward_hooks(
    module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call `forward` as `Module.__call__` does, with the module's hooks on gradients around it."""
    kind: Any = type(module)
    full, legacy = kind._get_backward_hooks(module)
    before = kind._get_backward_pre_hooks(module)
    if legacy:
        raise SplitError(
            f"register_backward_hook of {kind.__name__} is on a unit of a pipeline: torch calls such hooks "
            "with gradients of single operations; use register_full_backward_hook"
        )
    hook = BackwardHook(module, full, before)
    output = forward(*hook.setup_input_hook(args), **kwargs)
    return hook.setup_output_hook(output)


def _original(unit: Unit) -> Callable[..., Any]:
    forward: Callable[..., Any] = unit.module.forward
    return forward
