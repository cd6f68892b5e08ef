"""Run one unit without computing it: in fake-tensor mode, or really where that cannot be done."""

import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lightning_pipeline.errors import SplitError
from lightning_pipeline.model.tensors import (
    Generators,
    ObjectState,
    TensorSpec,
    alias,
    is_placeholder,
    map_tensors,
)
from lightning_pipeline.model.trace.costs import operation_cost
from lightning_pipeline.model.trace.watch import AttributeSnapshot

if TYPE_CHECKING:
    from lightning_pipeline.model.trace.record import Call
    from lightning_pipeline.model.trace.tracer import Tracer


class FakeRun:
    """Runs units for a tracer."""

    def __init__(self, tracer: "Tracer") -> None:
        self._tracer = tracer
        self._generators = Generators(tracer.root.modules())

    def run(self, call: "Call", args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output of a unit with no values in it; what it costs is noted on `call`."""
        tracer = self._tracer
        module = tracer.patches.units[call.unit].module
        args, kwargs = tracer.glue.without_poison((args, kwargs))
        before = AttributeSnapshot(module.modules())
        draws = _host_draws(self._generators)
        tracer.inside = call
        try:
            output = self._try_fake(call, args, kwargs)
        finally:
            tracer.inside = None
        tracer.trace.host_random |= draws != _host_draws(self._generators)
        tracer.attributes.changed_by_unit(call, before.changed())
        return output

    def _try_fake(self, call: "Call", args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        original = self._tracer.patches.originals[call.unit]
        objects = ObjectState((args, kwargs))
        try:
            with _quiet(), self._tracer.mode, self._tracer.keeping.in_unit(call):
                return original(*args, **kwargs)
        except SplitError:
            raise
        except Exception as error:
            objects.restore()
            return self._run_really(call, args, kwargs, error)

    def _run_really(self, call: "Call", args: Any, kwargs: Any, cause: Exception) -> Any:
        """Operators without a shape rule, or code that looks at values: run this unit on made-up input."""
        unit = self._tracer.patches.units[call.unit]
        if self._tracer.weightless:
            raise SplitError(
                f"unit {unit.name!r} cannot be traced on the meta device: {type(cause).__name__}: {cause}; "
                "build the module with its weights"
            ) from cause
        if any(is_placeholder(value) for module in unit.module.modules() for value in vars(module).values()):
            raise SplitError(
                f"unit {unit.name!r} cannot be traced on a stage that does not hold it: {cause}"
            ) from cause
        args, kwargs = map_tensors(_made_up, (args, kwargs))
        call.saved.clear()
        call.activation_bytes = 0
        counter = FlopCounterMode(display=False)
        try:
            with counter, self._tracer.keeping.in_unit(call):
                output = self._tracer.patches.originals[call.unit](*args, **kwargs)
        except Exception as error:
            raise SplitError(
                f"unit {unit.name!r} cannot be traced: {type(cause).__name__}: {cause}; nor does it run on "
                f"made-up input: {type(error).__name__}: {error}"
            ) from error
        call.flops = call.cost = float(counter.get_total_flops())
        return map_tensors(self._tracer.mode.like, output)

    def count(
        self, call: "Call", func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Add one operation's work to a call."""
        flops, cost = operation_cost(func, args, kwargs, result)
        call.flops += flops
        call.cost += cost
        self._tracer.keeping.operation_in_unit(call, func, args, result)

    def hand_out(self, tensor: Tensor) -> tuple[Tensor, TensorSpec]:
        """An output cut off from the unit's graph, as the next stage would get it, and its description."""
        spec = TensorSpec.of(tensor)
        leaf = tensor.detach() if is_placeholder(tensor) else self._tracer.mode.like(tensor.detach())
        if not spec.requires_grad:
            return leaf, spec
        with torch.enable_grad():
            return alias(leaf.requires_grad_()), spec

    def scalar(self) -> Tensor:
        """A number that is not known yet."""
        return self._tracer.mode.make(TensorSpec((), (), torch.float32, "cpu", False))


@contextmanager
def _quiet() -> Iterator[None]:
    """Operators that cannot run fake are run really; torch need not log each as an error."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _host_draws(generators: Generators) -> str:
    """Where numpy's and Python's generators stand in their blocks, and those of the module."""
    host: Any = numpy.random.get_state(legacy=False)
    return str((host["state"]["pos"], random.getstate()[1][-1], generators.host_states()))


def _made_up(tensor: Tensor) -> Tensor:
    if not is_placeholder(tensor):
        return tensor
    options: dict[str, Any] = {"dtype": tensor.dtype, "device": tensor.device}
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.randn(tensor.shape, **options).requires_grad_(tensor.requires_grad)
    return torch.zeros(tensor.shape, **options)
