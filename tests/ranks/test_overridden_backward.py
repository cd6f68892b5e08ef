"""A module's own `backward` counts: what it makes of the loss are the gradients of the whole batch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_pipeline.errors import SplitError
from tests.pool import Pool, RankFailure
from tests.ranks.lightning_cases import Regression, loader, trainer

Ranks = Callable[[int], Pool]


class Backs(Regression):
    """Hooks on gradients that are no sum of parts, and a note of what each parameter has after the backward."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))
        self.net[2].weight.register_post_accumulate_grad_hook(self.quarter)

    @staticmethod
    def quarter(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad = parameter.grad / 4

    def on_after_backward(self) -> None:
        self.history += [float("nan") if p.grad is None else float(p.grad.norm()) for p in self.parameters()]


class KeepsGraph(Backs):
    def backward(self, loss: Tensor, *args: Any, **options: Any) -> None:
        self.history.append(float(loss.detach()))
        loss.backward(retain_graph=True)
        loss.backward()


class Scales(Backs):
    def backward(self, loss: Tensor, *args: Any, **options: Any) -> None:
        (3 * loss + 0.01 * sum((one**2).sum() for one in self.net[0].parameters())).backward()


class SkipsOne(Backs):
    def backward(self, loss: Tensor, *args: Any, **options: Any) -> None:
        if self.trainer.fit_loop.batch_idx != 1:
            super().backward(loss, *args, **options)


class TakesThem(Backs):
    """By `autograd.grad`, where the parameters are here."""

    def backward(self, loss: Tensor, *args: Any, **options: Any) -> None:
        listed = list(self.parameters())
        for one, gradient in zip(listed, torch.autograd.grad(loss, listed, allow_unused=True), strict=True):
            if gradient is not None:
                one.grad = gradient / 2 if one.grad is None else one.grad + gradient / 2


def fit(cls: type[Backs], stages: int | None, accumulate: int) -> tuple[list[float], dict[str, Tensor]]:
    module, pipeline = cls(), {"stages": stages, "num_microbatches": 4} if stages else None
    run = trainer(pipeline, accumulate_grad_batches=accumulate)
    run.fit(module, loader(), loader(seed=4))
    return module.history, dict(module.state_dict())


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("cls", [KeepsGraph, Scales, SkipsOne, TakesThem])
@pytest.mark.parametrize("stages", [1, 2])
def test_a_backward_of_the_projects_own_has_the_gradients_of_one_device(
    ranks: Ranks, cls: type[Backs], accumulate: int, stages: int
) -> None:
    history, weights = fit(cls, None, accumulate)
    for seen, found in ranks(stages)(fit, cls, stages, accumulate):
        assert seen == pytest.approx(history, rel=1e-9, nan_ok=True)
        for name, value in weights.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9, msg=name)


class SecondOrder(Backs):
    def backward(self, loss: Tensor, *args: Any, **options: Any) -> None:
        loss.backward(create_graph=True)


def test_gradients_of_gradients_in_it_are_refused(ranks: Ranks) -> None:
    with pytest.raises((RankFailure, SplitError), match="create_graph=True.* whole_steps=True"):
        ranks(2)(fit, SecondOrder, 2, 1)
