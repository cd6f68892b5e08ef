"""Layers that learn their sizes from the first batch (`nn.LazyLinear`): made before the module is cut."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from lightning_pipeline.data import random_states_kept, set_random_states
from lightning_pipeline.errors import SplitError
from lightning_pipeline.hooks import Beside
from lightning_pipeline.model.loss import stub_metrics
from lightning_pipeline.model.places import Standing, metrics_of
from lightning_pipeline.model.tensors import ModuleState, map_tensors
from lightning_pipeline.model.trace import stub_sinks
from lightning_pipeline.registry import parameters_of
from lightning_pipeline.run.setup.trainer import as_the_loop_will, loggers_set_aside

_HOOKS = ("_initialize_hook", "_load_hook")  # of torch.nn.modules.lazy.LazyModuleMixin, since torch 1.8


class FirstCall(NamedTuple):
    """A step that the run will call, as it will be called first.

    Attributes:
        step: Its name.
        args: Its arguments, of one micro-batch.
        states: The random states in which it begins.
    """

    step: str
    args: tuple[Any, ...]
    states: tuple[Any, ...]


class _AllMade(BaseException):
    """No layer is left whose sizes are not known."""


class _Made(NamedTuple):
    module: nn.Module
    attributes: dict[str, Any]
    buffers: list[tuple[Tensor, Tensor]]


def lazy_layers(module: nn.Module) -> dict[str, nn.Module]:
    """Modules in it whose parameters or buffers have no sizes yet, by name."""
    return {name: part for name, part in module.named_modules() if _is_lazy(part)}


def _is_lazy(module: nn.Module) -> bool:
    held = (*module._parameters.values(), *module._buffers.values())
    return any(isinstance(tensor, UninitializedParameter | UninitializedBuffer) for tensor in held)


def make_lazy_layers(
    trainer: Trainer, calls: Sequence[FirstCall], context: Callable[[], AbstractContextManager[Any]]
) -> None:
    """Run the first steps, really and without gradients, until each such layer has been called.

    They draw what they begin with as on one device, in the order of their calls. Nothing else stays of it.

    Args:
        trainer: In its setup.
        calls: In the order in which one device makes them.
        context: Makes that of a forward.

    Raises:
        SplitError: A layer is not called by these steps, or they fail before it is.
    """
    module, failed = trainer.lightning_module, ""
    for call in calls:
        if lazy_layers(module):
            failed = _run(trainer, call, context) or failed
    left = lazy_layers(module)
    if left:
        raise SplitError(
            f"{', '.join(map(repr, left))} of {type(module).__name__} learn their sizes from the first "
            f"batch, and {' and '.join(call.step for call in calls)} {failed or 'do not call them'}: give "
            "the sizes, or call the layers once in setup"
        )


def _run(trainer: Trainer, call: FirstCall, context: Callable[[], AbstractContextManager[Any]]) -> str:
    """Call a step up to the last layer that is made; why it ended before, if it did."""
    module, made = trainer.lightning_module, list[_Made]()
    device = next(
        (p.device for p in parameters_of(module) if not isinstance(p, UninitializedParameter)), "cpu"
    )
    args = map_tensors(lambda tensor: tensor.detach().to(device, copy=True), call.args)
    saved, outside = ModuleState(module), Standing(Beside(trainer).owners())
    try:
        with ExitStack() as stack:
            stack.enter_context(as_the_loop_will(trainer, call.step))
            stack.enter_context(loggers_set_aside(trainer))
            stack.enter_context(stub_sinks(module, ("log", "log_dict"), _drop))
            stack.enter_context(stub_metrics(metrics_of(module), _drop, lambda: torch.zeros(())))
            stack.enter_context(random_states_kept())
            set_random_states(call.states)
            stack.enter_context(torch.no_grad())
            stack.enter_context(context())
            for part in lazy_layers(module).values():
                _watch(module, part, made)
            getattr(module, call.step)(*args)
    except _AllMade:
        return ""
    except Exception as error:  # the user's: the step raises again where it is traced
        return f"ends in {type(error).__name__}: {error}"
    finally:
        saved.restore()
        outside.restore()
        for one in made:
            _set_made(one)
    return ""


def _watch(root: nn.Module, part: nn.Module, made: list[_Made]) -> None:
    """Note what a layer is once it has its sizes; torch makes it in a hook of its own between these two."""
    before: dict[str, Any] = {}

    def begins(module: nn.Module, args: Any, kwargs: Any) -> None:
        before.update(vars(module))

    def has_begun(module: nn.Module, args: Any, kwargs: Any) -> None:
        if before and not _is_lazy(module):
            new = {name: value for name, value in vars(module).items() if before.get(name) is not value}
            buffers = [b for b in module._buffers.values() if b is not None]
            made.append(_Made(module, new, [(buffer, buffer.detach().clone()) for buffer in buffers]))
            before.clear()
            if not lazy_layers(root):
                raise _AllMade

    part.register_forward_pre_hook(begins, prepend=True, with_kwargs=True)
    part.register_forward_pre_hook(has_begun, with_kwargs=True)


def _set_made(one: _Made) -> None:
    """After the module was put back: a layer stays made, and torch's hooks that make it stay away."""
    held = vars(one.module)
    for name in _HOOKS:
        handle = held.pop(name, None)
        if handle is not None:
            handle.remove()
    held.update(one.attributes)
    with torch.no_grad():
        for buffer, value in one.buffers:
            buffer.copy_(value)


def _drop(value: Any) -> None:
    pass
