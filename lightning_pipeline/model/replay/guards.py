"""Code around a step meets a part of the model: guards that make a wrong use an error."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_pipeline.errors import SplitError
from lightning_pipeline.model.replay.stage import StageProgram
from lightning_pipeline.model.tensors import user_line
from lightning_pipeline.model.trace import Stand, UnitPatches

# Library code that asks a whole model for its parameters around a step and is right with a part of them:
# torch's own recursion, look-ups of dtype and device.
_ALLOWED = (
    "torch.nn.modules.",
    "lightning.",
    "lightning_pipeline.",
    "transformers.modeling_utils",
    "torchmetrics.",
)
_METHODS = ("parameters", "named_parameters", "state_dict")
_CLIPPING = "torch.nn.utils.clip_grad"  # its norm is made global by the strategy, so it may see a part


class _Unread:
    """What `parameters()` returns where it is guarded: clipping may read it, any other code may not."""

    def __init__(self, parameters: Iterator[Any], refuse: Callable[[], SplitError]) -> None:
        self._parameters, self._refuse = parameters, refuse

    def __iter__(self) -> "_Unread":
        return self

    def __next__(self) -> Any:
        if sys._getframe(1).f_globals.get("__name__") != _CLIPPING:
            raise self._refuse()
        return next(self._parameters)


class ParameterGuard:
    """Inside a step and its hooks, `parameters()` of a module of several stages raises for user code.

    A loop over it there would see one stage's part only: a penalty would miss the rest, an averaged copy
    would pair the wrong ones.
    """

    def __init__(self, root: nn.Module, modules: list[nn.Module]) -> None:
        self.active = False
        self.answers: dict[
            str, Callable[[nn.Module], Any]
        ] = {}  # instead of a method, by the caller's module
        self._root = root
        self._modules = modules

    def install(self) -> None:
        """Put the guard on the modules."""
        for module in self._modules:
            for name in _METHODS:
                vars(module)[name] = Stand(module, name, self._guarded(module, name))

    def remove(self) -> None:
        """Take it away."""
        for module in self._modules:
            for name in _METHODS:
                vars(module).pop(name, None)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Guard for the time of a step or a hook around it."""
        before, self.active = self.active, True
        try:
            yield
        finally:
            self.active = before

    def _guarded(self, module: nn.Module, name: str) -> Callable[..., Any]:
        original = getattr(type(module), name)

        def refuse() -> SplitError:
            return SplitError(
                f"{name}() of a module that is spread over stages is used inside a step or a hook around "
                "it, where it lists this stage's part only. Use the optimizer's weight_decay for a "
                "penalty, Trainer(gradient_clip_val=...) or clip_grad_norm_ for clipping, and "
                "on_train_epoch_end or later for what one stage may do alone [at "
                f"{user_line(self._root)}]"
            )

        def method(*args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(2).f_globals.get("__name__", "")
            if not self.active:
                return original(module, *args, **kwargs)
            if caller in self.answers:
                return self.answers[caller](module)
            if caller.startswith(_ALLOWED):
                return original(module, *args, **kwargs)
            if name == "parameters":
                return _Unread(original(module, *args, **kwargs), refuse)
            raise refuse()

        return method


class IdleRunner:
    """Answers calls of units outside a step: own ones run, those of other stages raise."""

    inside = False

    def __init__(self, root: nn.Module, patches: UnitPatches, programs: dict[int, StageProgram]) -> None:
        self._root, self._patches, self._programs = root, patches, programs

    def call(self, unit: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an own unit, or raise."""
        program = next(iter(self._programs.values()))
        if program.stage_of[unit] in self._programs:
            return self._patches.originals[unit](*args, **kwargs)
        raise SplitError(
            f"unit {self._patches.units[unit].name!r} is on stage {program.stage_of[unit]} and is called "
            "outside a step on a rank that does not hold it: do this in validation_step or predict_step, "
            f"which run across the stages, or on the whole model after fit [at {user_line(self._root)}]"
        )
