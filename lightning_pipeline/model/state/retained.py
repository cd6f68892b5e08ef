"""Gradients of values that a step leaves behind and has asked to keep, by `retain_grad`."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_pipeline.model.rules import Rows, Rule
from lightning_pipeline.model.state.sent import Gradients
from lightning_pipeline.model.tensors import is_placeholder, tensors_in


class _Kept(NamedTuple):
    number: int
    tensor: Tensor


class Retained:
    """The tensors of one batch on one rank whose gradients are whole here.

    Args:
        microbatches: How many the batch has.
    """

    def __init__(self, microbatches: int) -> None:
        self._count = microbatches
        self._kept: dict[str, dict[int, list[_Kept]]] = {}

    def note(self, label: str, microbatch: int, value: Any) -> None:
        """A stage has run a micro-batch.

        Args:
            label: Of a place.
            microbatch: Which.
            value: What stands there.
        """
        kept = [
            _Kept(number, tensor)
            for number, tensor in enumerate(tensors_in(value))
            if tensor.retains_grad and not is_placeholder(tensor)
        ]
        if kept:
            self._kept.setdefault(label, {}).setdefault(microbatch, []).extend(kept)

    def gradients(self, rules: Mapping[str, Rule | None]) -> Gradients:
        """After the backwards: those of the whole batch, joined by rows.

        Args:
            rules: For the places, by label.
        """
        found: Gradients = {}
        for label, by_microbatch in self._kept.items():
            rule = rules.get(label)
            parts: dict[int, list[Tensor]] = {}
            for microbatch in sorted(by_microbatch):
                for number, tensor in by_microbatch[microbatch]:
                    if tensor.grad is not None and len(parts.get(number, ())) <= microbatch:
                        parts.setdefault(number, []).append(tensor.grad)
            whole = {number: self._joined(number, own, rule) for number, own in parts.items()}
            found[label] = {number: one.detach().cpu() for number, one in whole.items() if one is not None}
        self._kept.clear()
        return found

    def _joined(self, number: int, parts: Sequence[Tensor], rule: Rule | None) -> Tensor | None:
        if self._count == 1:
            return parts[0]
        if len(parts) != self._count or not isinstance(rule, Rows) or number >= len(rule.dims):
            return None
        return torch.cat(list(parts), rule.dims[number])


def give_gradients(value: Any, found: Sequence[Mapping[int, Tensor]]) -> bool:
    """Let tensors in a value have the gradients that the ranks found.

    Args:
        value: What stands in a place, without a graph.
        found: Of each rank, by the number of the tensor.

    Returns:
        Whether any had one.
    """
    given = False
    for number, tensor in enumerate(tensors_in(value)):
        own = next((one[number] for one in found if number in one), None)
        if own is not None and own.shape == tensor.shape:
            tensor.grad, given = own.to(tensor.device), True
    return given
