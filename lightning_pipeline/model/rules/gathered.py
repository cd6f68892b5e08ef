"""What units gave the micro-batches of a batch, from which the end of the step runs once for all of it."""

import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_pipeline.model.rules.made_up import MadeUp, Outputs, joined_values, made_up
from lightning_pipeline.model.rules.trial import Merge, NoFit
from lightning_pipeline.model.tensors import Structure, TensorSpec, joined_structure
from lightning_pipeline.model.trace import Trace

_LARGE = 50.0  # times a normal distribution
ValueKey = tuple[int, int, int]
"""Unit, which call of it, which output tensor."""


def at_end(start: Any, results: list[Any], sizes: list[int], merge: Merge) -> Any:
    """Instead of a rule: it is worked out at the end of the batch."""
    raise NoFit


def values_at_end(trace: Trace) -> frozenset[ValueKey]:
    """Outputs of units that the last stage has when a step ends: it, or what it leaves, depends on them."""
    found = ((trace.calls[tag.call], tag.leaf) for tag in trace.tail if tag.kind == "value")
    return frozenset((call.unit, call.nth, leaf) for call, leaf in found)


class Gathered:
    """What units gave the micro-batches of one batch.

    Args:
        whole: Arguments of the batch as one.
        trace: Of the step on its way.
        outputs: What units return for the whole batch.
        sizes: Samples of each micro-batch.
        copied: Whether copies are kept, so that activations go with their backward, and count as in others.
        fills: Whether rows are made up for micro-batches that have not called a unit.

    Attributes:
        keys: Of what is gathered.
        whole: The arguments.
        takes_means: After `values`, whether it took numbers that units gave micro-batches for their mean.
        is_filled: Likewise, whether rows were made up: what is made of them is nobody's.
    """

    def __init__(
        self,
        whole: tuple[tuple[Any, ...], dict[str, Any]],
        trace: Trace,
        outputs: Outputs,
        sizes: Sequence[int],
        *,
        copied: bool = False,
        fills: bool = False,
    ) -> None:
        self._copied, self._fills = copied, fills
        known = values_at_end(trace)  # of other batches, too, in which it may call more
        given = {call: len(specs) for call, (_, specs) in outputs.items()}
        self.keys: Collection[ValueKey] = frozenset(key for key in known if key[2] < given.get(key[:2], 0))
        self.whole, self._trace, self._outputs, self._sizes = whole, trace, outputs, sizes
        self._given: dict[int, Mapping[ValueKey, Tensor]] = {}
        self._described: dict[int, Mapping[tuple[int, int], Structure]] = {}
        self.takes_means = self.is_filled = self._again = False

    def take(
        self, microbatch: int, given: Mapping[ValueKey, Tensor],
        described: Mapping[tuple[int, int], Structure],
    ) -> None:  # fmt: skip
        """Keep what a micro-batch was given, in no graph.

        Args:
            microbatch: Its number.
            given: Tensors.
            described: How they are put together, with what is no tensor.
        """
        self._described[microbatch] = described
        self._given[microbatch] = {
            key: tensor.detach().clone() if self._copied else tensor.detach() for key, tensor in given.items()
        }

    def values(self, *, again: bool = False) -> MadeUp:
        """What units give the batch as one; nothing of it is kept any longer, but where rows are made up.

        Args:
            again: Whether for a second time, with other rows.

        Raises:
            NoFit: Units did not give each micro-batch the same kind of values.
        """
        self._again = again
        found = {
            call: (self._joined(call), self._together(call, structure))
            for call, (structure, _) in self._outputs.items()
        }
        given = {key for one in self._given.values() for key in one}
        if again or not self.is_filled:
            self._given.clear()
        made = MadeUp(found, self._trace, frozenset(), sees=False)
        made.unknown = frozenset(
            (*call, leaf) for call, (tensors, _) in found.items() for leaf in range(len(tensors))
        ).difference(given)
        return made

    def _together(self, call: tuple[int, int], structure: Structure) -> Structure:
        """How what a call gives the batch is put together, with the micro-batches' numbers and texts."""
        found = [self._described.get(number, {}).get(call) for number in range(len(self._sizes))]
        there = [one for one in found if one is not None]
        if len(there) < len(found):
            return structure
        made = joined_structure(structure, there, self._sizes)
        if made is None:
            raise NoFit("a unit has not given its micro-batches numbers or texts that make the batch's")
        return made

    def _joined_of_some(
        self, parts: Sequence[Tensor | None], spec: TensorSpec, blocks: int, generator: torch.Generator
    ) -> Tensor:  # fmt: skip
        """Some micro-batches have not called it: without their samples, or with rows that are made up."""
        there = [(part, size) for part, size in zip(parts, self._sizes, strict=False) if part is not None]
        shape, size = there[0][0].shape, there[0][1]
        if not self._fills or len(parts) < len(self._sizes):
            raise NoFit("units have not run for all of its micro-batches")
        sums = [sum(part.shape[d] for part, _ in there) for d in range(len(shape))]
        uneven = [d for d, total in enumerate(spec.shape) if total != shape[d]]
        if len(uneven) == 1 and sums[uneven[0]] == spec.shape[uneven[0]]:
            return torch.cat([part for part, _ in there], uneven[0])
        every = sum(self._sizes)
        grown = [d for d, total in enumerate(spec.shape) if total == shape[d] / size * every]
        dim, found = grown[0] if len(grown) == 1 else None, list[Tensor]()
        if dim is None:
            raise NoFit("no dimension of what a unit gives is that of the samples")
        for part, own in zip(parts, self._sizes, strict=True):
            rows = (*shape[:dim], round(shape[dim] / size * own), *shape[dim + 1 :])
            found.append(self._filling(spec._replace(shape=rows), generator) if part is None else part)
        self.is_filled = True
        return joined_values(found, spec, self._sizes, blocks)

    def _filling(self, spec: TensorSpec, generator: torch.Generator) -> Tensor:
        """Rows of large values; the second time with the other signs, so that what goes by them is seen."""
        made = made_up(spec, generator)
        if made.is_floating_point() or made.is_complex():
            return made * (-_LARGE if self._again else _LARGE)
        return 1 - made if self._again and made.dtype is not torch.bool else made

    @property
    def bytes(self) -> int:
        """Of all that is gathered."""
        specs = [self._outputs[unit, nth][1][leaf] for unit, nth, leaf in self.keys]
        return sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs)

    def _joined(self, call: tuple[int, int]) -> list[Tensor]:
        made, generator = [], torch.Generator().manual_seed(0)  # for what nothing depends on
        for leaf, spec in enumerate(self._outputs[call][1]):
            parts = [given.get((*call, leaf)) for _, given in sorted(self._given.items())]
            there = [part for part in parts if part is not None]
            try:
                blocks = self._trace.blocks.get((*call, leaf), 1)
                if there and len(there) < len(self._sizes):
                    tensor = self._joined_of_some(parts, spec, blocks, generator)
                else:
                    joins = partial(joined_values, there, spec, self._sizes, blocks)
                    tensor = joins() if there else made_up(spec, generator)
            except ValueError as error:
                raise NoFit(str(error)) from error
            self.takes_means |= _is_mean(tensor, there)
            made.append(tensor.requires_grad_(spec.requires_grad))
        return made


def _is_mean(joined: Tensor, parts: Sequence[Tensor]) -> bool:
    plain = joined.is_floating_point() and len(parts) > 1 and joined.shape == parts[0].shape
    return plain and not all(torch.equal(part, parts[0]) for part in parts)
