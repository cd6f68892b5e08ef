"""Optimizers of one stage: they may have nothing to optimize, and must not hold other stages' parameters."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from lightning_pipeline.errors import ConfigurationError


@contextmanager
def nothing_to_optimize_allowed() -> Iterator[None]:
    """Inside, `AdamW([])` makes an optimizer with one empty group, so that schedulers and loops still work.

    torch raises for an empty list of parameters, but not for a group without any; a stage may have no
    trainable parameter. Could go if torch accepted the empty list.
    """
    original = Optimizer.__init__

    def init(self: Optimizer, params: Any, defaults: dict[str, Any]) -> None:
        given = params if isinstance(params, Tensor | dict) else list(params)
        original(self, given if isinstance(given, Tensor | dict) or given else [{"params": []}], defaults)

    Optimizer.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        Optimizer.__init__ = original  # type: ignore[method-assign]


def keep_only(optimizers: Iterable[Optimizer], parameters: Iterable[Tensor]) -> None:
    """Take other stages' parameters, and their state, out of optimizers.

    An optimizer may have been built from the whole module, as LightningCLI does it. Groups stay where they
    are, so that schedulers see the same groups on every stage.

    Args:
        optimizers: To prune, in place.
        parameters: What this rank holds.
    """
    own = {id(parameter) for parameter in parameters}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) in own]
        for parameter in [p for p in optimizer.state if id(p) not in own]:
            del optimizer.state[parameter]


def refuse_unserved(optimizers: Iterable[Optimizer]) -> None:
    """Refuse optimizers that run the step a number of times which each rank decides for itself.

    Raises:
        ConfigurationError: For LBFGS.
    """
    for optimizer in optimizers:
        if isinstance(optimizer, LBFGS):
            raise ConfigurationError(
                "LBFGS runs the step several times per batch and decides from one stage's parameters how "
                "often: with PipelineStrategy use an optimizer that runs it once, such as torch.optim.AdamW"
            )


def called_once(closure: Callable[[], Any], optimizer: Any) -> Callable[[], Any]:
    """A closure that refuses to be called twice.

    Raises:
        ConfigurationError: On the second call: stages may differ in how often they call.
    """
    calls = 0

    def once() -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise ConfigurationError(
                f"{type(optimizer).__name__} runs the step more than once per batch; the stages of a "
                "pipeline cannot: use an optimizer that calls its closure once"
            )
        return closure()

    return once


def trainable_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """All parameters of an optimizer, each once."""
    return list({id(p): p for group in optimizer.param_groups for p in group["params"]}.values())
