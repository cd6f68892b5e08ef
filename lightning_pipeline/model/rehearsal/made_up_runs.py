"""Runs of a step in which units give made-up values."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from lightning_pipeline.model.cut import Microbatch
from lightning_pipeline.model.random import Generators, random_state_kept, seed_torch
from lightning_pipeline.model.replay import Step
from lightning_pipeline.model.rules import MadeUp, Outputs
from lightning_pipeline.model.tensors import map_tensors
from lightning_pipeline.model.trace import Trace, UnitPatches
from lightning_pipeline.registry import parameters_of

_ROUNDING = {torch.float64: 1e-8, torch.complex128: 1e-8, torch.float32: 1e-3, torch.complex64: 1e-3}
_COARSE = 5e-2  # of all other types
AsOne = Callable[[Microbatch], tuple[Trace, Outputs]]
"""Gives the trace of arguments, such as a batch's as one, and what units return for them."""


class MadeUpRuns:
    """Makes them.

    Args:
        root: The LightningModule.
        patches: The patched units.
        apart: Inside, given the step's name, runs of a step leave nothing behind.
        quiet: Inside, they log nothing.
    """

    def __init__(
        self, root: nn.Module, patches: UnitPatches,
        apart: Callable[[str], AbstractContextManager[None]],
        quiet: Callable[[], AbstractContextManager[None]],
    ) -> None:  # fmt: skip
        self.root, self.patches, self._apart, self._quiet = root, patches, apart, quiet

    @contextmanager
    def apart(self, step: Step) -> Iterator[None]:
        """Inside, runs of the step leave nothing behind and log nothing."""
        with self._apart(step.name), self._quiet():
            yield

    def run(
        self, step: Step, batch: Microbatch, runner: MadeUp, *inside: AbstractContextManager[Any],
        seed: int = 0,
    ) -> None:  # fmt: skip
        """Run the step once, `apart`; what it raises is passed on.

        Args:
            step: The batch.
            batch: Arguments, of which the step gets copies.
            runner: Answers the calls of units.
            inside: Are entered around the step.
            seed: Of all generators but the module's own; each goes on afterwards where it was.
        """
        args, kwargs = map_tensors(lambda t: t.detach().clone().requires_grad_(t.requires_grad), batch)
        with (
            self.patches.run_by(runner), random_state_kept(Generators(self.root.modules())), step.context(),
            torch.compiler.set_stance("force_eager"), ExitStack() as stack,  # see `trace.tracing`
        ):  # fmt: skip
            for one in inside:
                stack.enter_context(one)
            seed_all(seed)
            step.function(*args, **kwargs)


def seed_all(seed: int) -> None:
    """Seed torch, NumPy and Python."""
    seed_torch(seed)
    numpy.random.seed(seed)
    random.seed(seed)


def rounding_of(module: nn.Module, inputs: Sequence[Tensor]) -> float:
    """How much of the largest number two results may differ by and be the same: by the coarsest type."""
    kinds = {tensor.dtype for tensor in (*inputs, *parameters_of(module)) if tensor.is_floating_point()}
    devices = {tensor.device.type for tensor in inputs}
    kinds |= {torch.get_autocast_dtype(one) for one in devices if torch.is_autocast_enabled(one)}
    return max((_ROUNDING.get(kind, _COARSE) for kind in kinds), default=_COARSE)


def are_same(one: Tensor, two: Tensor, rounding: float) -> bool:
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    if not one.is_floating_point() or not one.numel():
        return torch.equal(one, two)
    one, two = one.double(), two.double()
    largest = float(torch.stack([one, two]).nan_to_num(0.0, 0.0, 0.0).abs().max())
    return torch.allclose(one, two, rtol=0.0, atol=rounding * largest, equal_nan=True)
