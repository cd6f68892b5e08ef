"""What Lightning makes of `torch.compile(module)`, which it allows with strategies that it lists alone."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.compile import to_uncompiled

from lightning_pipeline.patching import Undo, patch

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
_STEPS = ("forward", "training_step", "validation_step", "test_step", "predict_step")


def compile_of(module: LightningModule) -> Compile | None:
    """What compiles a function as `torch.compile` was asked to for this module; None for a plain one.

    `from_compiled` keeps it in `_compiler_ctx`, private since 2.1, before any hook of a strategy is called,
    and `_verify_strategy_supports_compile` refuses every strategy but three where it is not None.
    """
    context = module._compiler_ctx
    found: Compile | None = None if context is None else context["dynamo_ctx"]
    return found


def take_compile_from(module: LightningModule) -> None:
    """Let its steps be the plain ones again, and not even attributes of the instance."""
    to_uncompiled(module)
    for name in _STEPS:
        if getattr(vars(module).get(name), "__func__", None) is getattr(type(module), name, None):
            del vars(module)[name]


def hide_compile_of(module: LightningModule) -> Undo:
    """Let its steps stay compiled, with nothing that tells; gives the undoing."""
    return patch(module, "_compiler_ctx", None)
