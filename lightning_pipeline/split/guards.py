"""Code around a step meets a part of the model: guards that make a wrong use an error."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_pipeline.errors import SplitError
from lightning_pipeline.split.patches import UnitPatches
from lightning_pipeline.split.placeholder import user_line
from lightning_pipeline.split.program import StageProgram

# Library code that asks a whole model for its parameters around a step and is right with a part of them:
# torch's own recursion, norms and clipping (made global by the strategy), look-ups of dtype and device.
_ALLOWED = (
    "torch.nn.modules.",
    "torch.nn.utils.clip_grad",
    "lightning.",
    "lightning_pipeline.",
    "transformers.modeling_utils",
    "torchmetrics.",
)
_REFUSED = ("lightning.pytorch.utilities.grads",)  # `grad_norm` would log one stage's, under each stage's names
_METHODS = ("parameters", "named_parameters", "state_dict")


def _may_ask(caller: str) -> bool:
    return caller.startswith(_ALLOWED) and not caller.startswith(_REFUSED)


class ParameterGuard:
    """Inside a step and its hooks, `parameters()` of a module of several stages raises for user code.

    A loop over it there would see one stage's part only: a penalty would miss the rest, an averaged copy
    would pair the wrong ones.
    """

    def __init__(self, root: nn.Module, modules: list[nn.Module]) -> None:
        self.active = False
        self._root = root
        self._modules = modules

    def install(self) -> None:
        """Put the guard on the modules."""
        for module in self._modules:
            for name in _METHODS:
                vars(module)[name] = self._guarded(module, name)

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

        def method(*args: Any, **kwargs: Any) -> Any:
            if self.active and not _may_ask(sys._getframe(1).f_globals.get("__name__", "")):
                raise SplitError(
                    f"{name}() of a module that is spread over stages is used inside a step or a hook around "
                    "it, where it lists this stage's part only. Use the optimizer's weight_decay for a "
                    "penalty, Trainer(gradient_clip_val=...) or clip_grad_norm_ for clipping, and "
                    "on_train_epoch_end or later for what one stage may do alone [at "
                    f"{user_line(self._root)}]"
                )
            return original(module, *args, **kwargs)

        return method


class IdleRunner:
    """Answers calls of units outside a step: own ones run, those of other stages raise.

    Activation checkpointing calls units again inside the backward; a unit of an earlier stage then returns
    what it handed out in the forward.
    """

    def __init__(self, root: nn.Module, patches: UnitPatches, programs: dict[int, StageProgram]) -> None:
        self._root, self._patches, self._programs = root, patches, programs

    def call(self, unit: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an own unit, or raise."""
        program = next(iter(self._programs.values()))
        running = next((p for p in self._programs.values() if p.current is not None), None)
        if running is not None and running.current is not None and unit in running.current.handed:
            return running.current.handed[unit]
        if program.stage_of[unit] in self._programs:
            return self._patches.originals[unit](*args, **kwargs)
        raise SplitError(
            f"unit {self._patches.units[unit].name!r} is on stage {program.stage_of[unit]} and is called "
            "outside a step on a rank that does not hold it: do this in validation_step or predict_step, "
            f"which run across the stages, or on the whole model after fit [at {user_line(self._root)}]"
        )
