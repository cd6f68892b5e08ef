"""Lists of weights that a constructor, an object or a callback keeps: hooks read those of all stages by them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from lightning_pipeline.model.places import exchange_kept
from lightning_pipeline.model.state import Elsewhere
from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, assert_same, loader, trainer, weights

Ranks = Callable[[int], Pool]


class Keeps(Regression):
    """Keeps its weights when it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.tracked = list(self.net.parameters())
        self.by_name = dict(self.net.named_parameters())
        self.seen: list[float] = []


class Measured(Keeps):
    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append(float(sum(p.detach().square().sum() for p in self.tracked)))


class Clipped(Keeps):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append(float(nn.utils.clip_grad_norm_(self.by_name.values(), 0.1)))


class Drift:
    """An object of the user's own class."""

    def __init__(self, parameters: Any) -> None:
        self.parameters = tuple(parameters)
        self.start = [p.detach().clone() for p in self.parameters]

    def __call__(self) -> float:
        pairs = zip(self.parameters, self.start, strict=True)
        return float(sum((p.detach() - before).square().sum() for p, before in pairs))


class Drifts(Keeps):
    def __init__(self) -> None:
        super().__init__()
        self.drift = Drift(self.net.parameters())

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append(self.drift())


class ByHand(Keeps):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.optimizer = torch.optim.Adam(self.tracked, lr=0.01)

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.seen.append(float(sum(p.grad.square().sum() for p in self.tracked if p.grad is not None)))
        self.optimizer.step()

    def configure_optimizers(self) -> Any:
        return self.optimizer


class Averages(Callback):
    """Is given the weights before the model is split."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.live = list(pl_module.net.parameters())
        self.averages = [p.detach().clone() for p in self.live]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        for average, p in zip(self.averages, self.live, strict=True):
            average.lerp_(p.detach(), 0.2)
        pl_module.seen.append(float(sum(average.square().sum() for average in self.averages)))


def fitted(pipeline: dict[str, Any] | None, kind: type[Keeps]) -> tuple[Any, list[float]]:
    module, callbacks = kind(), [Averages()] if kind is Keeps else []
    trainer(pipeline, max_epochs=2, callbacks=callbacks).fit(module, loader(24), loader(8))
    assert all(one is p for one, p in zip(module.tracked, module.net.parameters(), strict=True))
    return (weights(module), {}), module.seen


@pytest.mark.parametrize("kind", [Keeps, Measured, Clipped, Drifts, ByHand])
def test_hooks_read_weights_that_are_kept_as_on_one_device(ranks: Ranks, kind: type[Keeps]) -> None:
    expected, seen = fitted(None, kind)
    assert len(seen) == 6
    for found, own in ranks(2)(fitted, {"stages": 2, "num_microbatches": 2}, kind, group=False):
        assert_same(found, expected)
        assert own == pytest.approx(seen, rel=1e-9)


class Pair(NamedTuple):
    first: Tensor
    more: list[Tensor]


def test_weights_are_exchanged_in_whatever_keeps_them() -> None:
    root = nn.Module()
    root.layer = nn.Linear(2, 2)
    weight, bias = root.layer.weight, root.layer.bias
    new = nn.Parameter(torch.zeros(2, 2))
    kept: Any = vars(root)
    kept["alone"], kept["set"], kept["pair"] = weight, {weight, bias}, Pair(weight, [bias, weight])
    kept["by"], kept["deep"] = {weight: 1, bias: 2}, [[{"a": (bias, weight)}]]
    kept["circle"] = [weight]
    kept["circle"].append(kept["circle"])
    kept["drift"] = Drift([weight])
    kept["elsewhere"] = [Elsewhere("what another stage has"), weight]
    exchange_kept(root, [], {id(weight): new})
    assert root.layer.weight is weight
    assert kept["alone"] is new and kept["set"] == {new, bias}
    assert kept["pair"].first is new and kept["pair"].more[1] is new
    assert list(kept["by"]) == [new, bias] and list(kept["by"].values()) == [1, 2]
    assert kept["deep"][0][0]["a"][1] is new and kept["circle"][0] is new
    assert kept["drift"].parameters == (new,)
    assert kept["elsewhere"][1] is new
    exchange_kept(root, [], {id(new): weight})
    assert kept["alone"] is weight and kept["pair"].more == [bias, weight]
