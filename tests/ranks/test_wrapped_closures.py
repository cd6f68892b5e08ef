"""`optimizer_step` overrides that wrap the closure: what follows it sees gradients of the whole model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, loader, trainer, weights

Ranks = Callable[[int], Pool]


class Wraps(Regression):
    """Does something in the closure, once Lightning's has run the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        def closure() -> Any:
            loss = optimizer_closure()
            self.after_backward(optimizer_closure)
            return loss

        optimizer.step(closure=closure)

    def after_backward(self, closure: Callable[[], Any]) -> None:
        raise NotImplementedError


class Reads(Wraps):
    def after_backward(self, closure: Callable[[], Any]) -> None:
        gradients = [one.grad for one in self.parameters() if one.grad is not None]
        self.norms.append(float(torch.stack([one.norm() for one in gradients]).norm()))


class Clips(Wraps):
    def after_backward(self, closure: Callable[[], Any]) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.05)


class ByAll(Wraps):
    """Scales each gradient by what all have."""

    def after_backward(self, closure: Callable[[], Any]) -> None:
        every = [one.grad for one in self.parameters() if one.grad is not None]
        total = torch.stack([one.square().sum() for one in every]).sum().sqrt()
        for one in every:
            one.mul_(1 / (1 + total))


class Perturbs(Wraps):
    """Adversarial training: once more with weights moved along their gradient, and both gradients."""

    def after_backward(self, closure: Callable[[], Any]) -> None:
        weight = self.net[0].weight
        if weight.grad is not None and weight.grad.norm() > 0:
            before, first = weight.data.clone(), [one.grad.clone() for one in self.parameters()]
            weight.data.add_(0.1 * weight.grad / weight.grad.norm())
            closure()
            weight.data.copy_(before)
            for one, gradient in zip(self.parameters(), first, strict=True):
                one.grad.add_(gradient)


KINDS = {kind.__name__: kind for kind in (Reads, Clips, ByAll, Perturbs)}


def fitted(pipeline: dict[str, Any] | None, kind: str) -> tuple[Tensor, dict[str, Tensor]]:
    module = KINDS[kind]()
    trainer(pipeline).fit(module, loader())
    return torch.tensor(module.norms), weights(module)


@pytest.mark.parametrize("kind", KINDS)
def test_what_follows_the_closure_sees_gradients_of_the_whole_model(ranks: Ranks, kind: str) -> None:
    expected = fitted(None, kind)
    for found in ranks(2)(fitted, {"stages": 2, "num_microbatches": 2}, kind, group=False):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
