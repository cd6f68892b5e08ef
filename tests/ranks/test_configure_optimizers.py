"""Groups made by number, order or layer in `configure_optimizers` are those of one device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from lightning_pipeline.model.tensors import is_placeholder
from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, assert_same, loader, trainer, weights

Ranks = Callable[[int], Pool]


class ByPosition(Regression):
    """A learning rate for each parameter, by its place."""

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [parameter], "lr": 0.1 * 0.8**index, "name": name}
            for index, (name, parameter) in enumerate(self.named_parameters())
        ]
        return torch.optim.AdamW(groups)


class ByLayer(Regression):
    """A group for each layer with parameters, and a schedule for each group."""

    def configure_optimizers(self) -> Any:
        layers = [layer for layer in self.net if list(layer.parameters())]
        self.optimizer = torch.optim.SGD([{"params": layer.parameters(), "lr": 0.1} for layer in layers])
        rules = [lambda epoch, i=i: 0.5 ** (epoch * i) for i in range(len(layers))]
        return [self.optimizer], [LambdaLR(self.optimizer, rules)]

    def on_train_start(self) -> None:
        assert self.optimizer is self.trainer.optimizers[0]


class ByNumber(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1 / len(list(self.parameters())))


class BySlice(Regression):
    """A fused optimizer, which asks where its parameters are."""

    def configure_optimizers(self) -> Any:
        found = list(self.parameters())
        groups = [{"params": found[:3], "lr": 0.01}, {"params": found[3:], "lr": 0.1}]
        return torch.optim.Adam(groups, fused=True)


class ByGroupsThere(Regression):
    """Groups with nothing in them are left out."""

    def configure_optimizers(self) -> Any:
        first = [p for name, p in self.named_parameters() if name.startswith("net.0.")]
        rest = [p for name, p in self.named_parameters() if not name.startswith("net.0.")]
        return torch.optim.SGD([{"params": part} for part in (first, rest) if part], lr=0.1)


class AllFrozenButTheLast(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net[:6].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.Adagrad(
            [{"params": [p], "lr": 0.1 / (i + 1)} for i, p in enumerate(trained)] or trained
        )


class ByValue(Regression):
    """Groups by values, also of other stages."""

    def configure_optimizers(self) -> Any:
        large = [p for p in self.parameters() if float(p.detach().abs().max()) > 0.3]
        small = [p for p in self.parameters() if float(p.detach().abs().max()) <= 0.3]
        return torch.optim.SGD([{"params": large}, {"params": small, "lr": 0.1 / len(large)}], lr=0.01)


class Records(Regression):
    """What the hook itself sees and leaves behind."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def configure_optimizers(self) -> Any:
        self.seen += [name for name, _ in self.named_parameters()]
        self.drawn = float(torch.rand(()))
        return super().configure_optimizers()


def fit(cls: type[Regression], pipeline: dict[str, Any] | None) -> tuple[Any, list[Any], list[int]]:
    module, run = cls(), trainer(pipeline, max_epochs=3)
    run.fit(module, loader())
    optimizer = run.optimizers[0]
    options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    held = [p.numel() for group in optimizer.param_groups for p in group["params"]]
    assert all(p.device.type == "cpu" for group in optimizer.param_groups for p in group["params"])
    assert len(optimizer.state) <= len(held)
    return (weights(module), {}), options, held


@pytest.mark.parametrize(
    "cls", [ByPosition, ByLayer, ByNumber, BySlice, ByGroupsThere, AllFrozenButTheLast, ByValue]
)
def test_groups_are_those_of_one_device_on_every_stage(ranks: Ranks, cls: type[Regression]) -> None:
    expected, options, _ = fit(cls, None)
    found = ranks(2)(fit, cls, {"stages": 2, "num_microbatches": 4})
    for same, own_options, _ in found:
        assert_same(same, expected)
        assert own_options == options


def record(stages: int) -> tuple[list[str], float, list[str]]:
    torch.manual_seed(3)
    module, run = Records(), trainer({"stages": stages}, max_epochs=1)
    run.fit(module, loader())
    return module.seen, module.drawn, [name for name, _ in module.named_parameters()]


def test_the_hook_runs_once_and_lists_the_whole_model(ranks: Ranks) -> None:
    for seen, drawn, names in (found := ranks(2)(record, 2)):
        assert seen == names
        assert drawn == found[0][1]


def test_absent_parameters_have_no_memory(ranks: Ranks) -> None:
    whole = sum(map(_bytes, Regression().parameters()))
    found = ranks(2)(sizes, 2)
    assert min(found) > 0
    assert sum(found) == whole


def sizes(stages: int) -> int:
    seen: list[int] = []

    class Looks(Regression):
        def configure_optimizers(self) -> Any:
            seen.append(sum(map(_bytes, self.parameters())))
            return super().configure_optimizers()

    trainer({"stages": stages}, max_epochs=1).fit(Looks(), loader())
    assert len(seen) == 1
    return seen[0]


def _bytes(parameter: Tensor) -> int:
    return 0 if is_placeholder(parameter) else parameter.untyped_storage().nbytes()
