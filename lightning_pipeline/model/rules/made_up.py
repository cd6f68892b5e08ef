"""Values that no unit has computed, given to the code between the units in their place."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_pipeline.model.tensors import (
    Given,
    Structure,
    TensorSpec,
    alias,
    is_placeholder,
    joined_in_blocks,
    map_tensors,
    tensors_in,
)
from lightning_pipeline.model.trace import Trace, Watch

Observed = list[tuple[int | None, list[Tensor]]]
"""What each unit was given, by its number, and last what the step returned."""
Outputs = Mapping[tuple[int, int], tuple[Structure, Sequence[TensorSpec]]]
"""What each call of a unit returns, by unit and number of the call."""
LARGEST = 1 << 28
"""Bytes of made-up values for a batch."""


class MadeUp:
    """Answers calls of units with values that nobody computed.

    Args:
        values: For each call of a unit, tensors and the structure that they are put into.
        trace: Of the step.
        really: Units that run all the same, for what they keep.
        originals: The units' own forwards.
        sees: Whether what units are given is kept.

    Attributes:
        inside: Whether such a unit runs.
        seen: What was computed so far.
        unknown: Outputs that nothing is known of, by unit, number of the call and tensor.
        gives_unknown: Told each of these that a unit gives.
    """

    def __init__(
        self, values: Mapping[tuple[int, int], Any], trace: Trace, really: frozenset[int],
        originals: Sequence[Callable[..., Any]] = (), *, sees: bool = True,
    ) -> None:  # fmt: skip
        self.inside = False
        self._values, self._trace = values, trace
        self._really, self._originals, self._sees = really, originals, sees
        self._counts: dict[int, int] = {}
        self._modules = list(trace.root.modules())
        self.seen: Observed = []
        self.unknown: frozenset[tuple[int, int, int]] = frozenset()
        self.gives_unknown: Callable[[Tensor], None] = lambda tensor: None

    def again(self, originals: Sequence[Callable[..., Any]]) -> "MadeUp":
        """The same, for another run, in which units have these forwards."""
        made = MadeUp(self._values, self._trace, self._really, originals, sees=self._sees)
        made.unknown = self.unknown
        return made

    def but(self, keys: Collection[tuple[int, int, int]]) -> "MadeUp":
        """The same with other values for all outputs but these, by unit, number of the call and tensor."""
        generator = torch.Generator().manual_seed(7)
        values = {}
        for call, (tensors, structure) in self._values.items():
            others = [
                tensor
                if (*call, leaf) in keys
                else made_up(TensorSpec.of(tensor), generator).requires_grad_(tensor.requires_grad)
                for leaf, tensor in enumerate(tensors)
            ]
            values[call] = (others, structure)
        made = MadeUp(values, self._trace, self._really, self._originals, sees=self._sees)
        made.unknown = self.unknown
        return made

    def call(self, unit: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call."""
        if self.inside:  # a unit that is called by another is part of that
            return self._originals[unit](*args, **kwargs)
        if unit in self._really:
            copies = map_tensors(_copied, (args, kwargs))
            self.inside = True
            try:
                self._originals[unit](*copies[0], **copies[1])
            finally:
                self.inside = False
        nth = self._counts.get(unit, 0)
        self._counts[unit] = nth + 1
        if self._sees:
            self.seen.append((unit, values_in((args, kwargs))))
        tensors, structure = self._values[unit, nth]
        fresh = [alias(t.clone().requires_grad_()) if t.requires_grad else t.clone() for t in tensors]
        for leaf, tensor in enumerate(fresh):
            if (unit, nth, leaf) in self.unknown:
                self.gives_unknown(tensor)
        given, ports = Given(args, kwargs), self._trace.ports.get((unit, nth))
        if ports is None:
            return given.put_together(fresh, structure)
        watch = Watch(self._modules, self._trace.units[unit].module, ports, given)
        result = watch.put_together(fresh, structure)
        for hook in watch.put_off(fresh, structure):
            hook()
        return result


def _copied(tensor: Tensor) -> Tensor:
    copy = tensor.detach().clone()
    return alias(copy.requires_grad_()) if tensor.requires_grad else copy


def values_in(value: Any) -> list[Tensor]:
    """Copies of the tensors in it that are here."""
    return [tensor.detach().clone() for tensor in tensors_in(value) if not is_placeholder(tensor)]


def made_up(spec: TensorSpec, generator: torch.Generator) -> Tensor:
    """A tensor of this shape: of a normal distribution, or of zeros and ones where it holds whole numbers."""
    if spec.dtype.is_floating_point or spec.dtype.is_complex:
        return (
            torch.randn(spec.shape, generator=generator, dtype=torch.float64).to(spec.dtype).to(spec.device)
        )
    return torch.randint(0, 2, spec.shape, generator=generator).to(spec.dtype).to(spec.device)


def bytes_of(outputs: Outputs) -> int:
    """Of all that units return."""
    return sum(spec.num_bytes for _, specs in outputs.values() for spec in specs)


def made_up_values(outputs: Outputs) -> dict[tuple[int, int], tuple[list[Tensor], Structure]]:
    """Tensors of these forms, the same each time, with the structure that a call of a unit puts them into."""
    generator = torch.Generator().manual_seed(0)
    return {
        call: ([made_up(spec, generator) for spec in specs], structure)
        for call, (structure, specs) in outputs.items()
    }


def joined_values(
    parts: Sequence[Tensor], spec: TensorSpec, sizes: Sequence[float], blocks: int = 1
) -> Tensor:
    """What a unit returns for the batch, from what it returns for the parts: see `dimension_of`.

    Args:
        parts: For each part.
        spec: Of what it returns for the batch.
        sizes: Samples of the parts.
        blocks: How often all samples stand one after the other among the rows.

    Raises:
        ValueError: No dimension is that of the samples.
    """
    dimension = dimension_of(parts, spec)
    if dimension is not None:
        return joined_in_blocks(parts, dimension, blocks)
    if not parts[0].is_floating_point():
        return parts[0]
    weighted = [part * (size / sum(sizes)) for part, size in zip(parts, sizes, strict=True)]
    return torch.stack(weighted).sum(0)


def dimension_of(parts: Sequence[Tensor], spec: TensorSpec) -> int | None:
    """The dimension that has grown; None for a number, which is the mean over samples, as a loss is.

    Raises:
        ValueError: No dimension is that of the samples.
    """
    if all(tuple(part.shape) == spec.shape for part in parts):
        return None
    grown = [d for d, size in enumerate(spec.shape) if size == sum(part.shape[d] for part in parts)]
    if len(grown) != 1:
        raise ValueError("no dimension is that of the samples")
    return grown[0]
