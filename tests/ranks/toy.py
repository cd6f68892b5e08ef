"""Stages without a LightningModule, and the loop by hand that they are compared with."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeline.schedules import Plan
from lightning_pipeline.wire.stage import Values


class Toy:
    """A stage with a linear layer; two tensors cross each cut, and an integer one that needs no gradient."""

    def __init__(
        self, index: int, num_stages: int, num_microbatches: int, *, shape: Any = lambda k: 4,
        device: str = "cpu",
    ) -> None:  # fmt: skip
        self.index = index
        self.last = index == num_stages - 1
        self.num_microbatches = num_microbatches
        self.shape = shape
        self.held: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        self.most_held = 0
        self.half: dict[int, Any] = {}
        self.losses: dict[int, Tensor] = {}
        torch.manual_seed(index)
        self.layer, self.device = nn.Linear(6, 6).to(device), device

    def forward(self, microbatch: int, incoming: Values | None) -> Values | None:
        if incoming is None:
            x = torch.randn(self.shape(microbatch), 6, generator=torch.Generator().manual_seed(microbatch))
            x = x.to(self.device)
            received, values = [], [x, x.t() * 2, torch.arange(3).to(self.device)]
        else:
            received = values = incoming.tensors
        hidden = self.layer(values[0]).tanh()
        if self.last:
            loss = (hidden * values[1].t()).mean() * (values[2].sum() / 3) / self.num_microbatches
            self.losses[microbatch] = loss.detach()
            sent = [loss]
        else:
            sent = [hidden, values[1] + hidden.mean(), values[2]]
        if torch.is_grad_enabled():
            self.held[microbatch] = (received, sent)
            self.most_held = max(self.most_held, len(self.held))
        return None if self.last else Values(sent, ("table", self.shape(microbatch)))

    def backward(
        self, microbatch: int, gradients: Sequence[Tensor | None] | None
    ) -> list[Tensor | None] | None:
        received, sent = self.held.pop(microbatch)
        if gradients is None:
            gradients = [torch.ones((), device=self.device)]
        pairs = [(t, g) for t, g in zip(sent, gradients, strict=True) if g is not None]
        torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
        return [tensor.grad for tensor in received] if self.index else None

    def backward_input(
        self, microbatch: int, gradients: Sequence[Tensor | None] | None
    ) -> list[Tensor | None] | None:
        received, sent = self.held[microbatch]
        if gradients is None:
            gradients = [torch.ones((), device=self.device)]
        self.half[microbatch] = pairs = [
            (t, g) for t, g in zip(sent, gradients, strict=True) if g is not None
        ]
        leaves = [tensor for tensor in received if tensor.requires_grad]
        if not leaves:
            return [None for _ in received]
        torch.autograd.backward(
            [t for t, _ in pairs], [g for _, g in pairs], inputs=leaves, retain_graph=True
        )
        return [tensor.grad for tensor in received]

    def backward_weight(self, microbatch: int) -> None:
        del self.held[microbatch]
        pairs = self.half.pop(microbatch)
        weights = list(self.layer.parameters())
        torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs], inputs=weights)

    def gradients(self) -> list[Tensor | None]:
        return [parameter.grad for parameter in self.layer.parameters()]


def by_hand(num_stages: int, num_microbatches: int, *, shape: Any = lambda k: 4, steps: int = 1) -> list[Toy]:
    """One process runs the same stages, one micro-batch after the other."""
    stages = [Toy(index, num_stages, num_microbatches, shape=shape) for index in range(num_stages)]
    for microbatch in list(range(num_microbatches)) * steps:
        values = None
        for stage in stages:
            values = stage.forward(microbatch, values)
            if values is not None:
                leaves = [t.detach().clone().requires_grad_(t.requires_grad) for t in values.tensors]
                values = Values(leaves, values.table)
        gradients = None
        for stage in reversed(stages):
            gradients = stage.backward(microbatch, gradients)
    return stages


def forwards(plan: Plan) -> Plan:
    """What of a plan runs where nothing is trained."""
    return Plan([[action for action in row if action.kind == "F"] for row in plan])
