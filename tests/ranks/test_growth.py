"""Modules that change in shape while a run is on: layers that come, go or are replaced between batches."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lightning_pipeline.callbacks import BubbleMonitor, StageMemoryMonitor
from tests.faults.cases import Ranks
from tests.ranks.lightning_cases import FEATURES, TARGETS, Regression, assert_same, loader, trainer, weights
from tests.whole import chosen

WIDTH = 8


class Growing(Regression):
    """A stack of layers between two others; each kind changes it in a hook of the second epoch."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.first = nn.Linear(FEATURES, WIDTH).double()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH).double() for _ in range(4))
        self.head = nn.Linear(WIDTH, TARGETS).double()
        self.net = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        for layer in self.layers:
            hidden = hidden + layer(hidden).tanh()
        return self.head(hidden)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        out = self(batch[0])
        self.error.update(out, batch[1])
        self.log("val_error", self.error)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.change()

    def change(self) -> None:
        raise NotImplementedError

    def trains(self, module: nn.Module) -> None:
        self.trainer.optimizers[0].add_param_group({"params": list(module.parameters()), "lr": 0.05})


class Appended(Growing):
    def change(self) -> None:
        self.layers.append(nn.Linear(WIDTH, WIDTH).double())
        self.trains(self.layers[-1])


class TwoAppended(Growing):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.change()

    def change(self) -> None:
        self.layers.append(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double())
        self.trains(self.layers[-1])


class InFront(Growing):
    def change(self) -> None:
        self.layers.insert(0, nn.Linear(WIDTH, WIDTH).double())
        self.trains(self.layers[0])


class NewHead(Growing):
    def change(self) -> None:
        self.head = nn.Linear(WIDTH, TARGETS).double()
        self.trains(self.head)


class FrozenThenTold(Growing):
    """The optimizer is told of the new layer an epoch after it came."""

    def change(self) -> None:
        self.layers.append(nn.Linear(WIDTH, WIDTH).double())

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 1:
            self.trains(self.layers[-1])


class Shorter(Growing):
    def change(self) -> None:
        del self.layers[-1]


class WithBuffer(Growing):
    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = super().loss(batch)
        return loss * self.scale if self.current_epoch else loss

    def change(self) -> None:
        self.register_buffer("scale", torch.full((), 0.5, dtype=torch.float64))


class WithParameter(Growing):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out + self.shift if self.current_epoch else out

    def change(self) -> None:
        self.shift = nn.Parameter(torch.ones(TARGETS, dtype=torch.float64))
        self.trainer.optimizers[0].add_param_group({"params": [self.shift]})


class InsideAUnit(Growing):
    """A module inside a unit gets a part more."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = Branches()

    def change(self) -> None:
        self.layers[1].more = nn.Linear(WIDTH, WIDTH).double()
        self.trains(self.layers[1].more)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH).double()
        self.more: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) if self.more is None else self.one(x) + self.more(x)


KINDS = [
    Appended, TwoAppended, InFront, NewHead, FrozenThenTold, Shorter, WithBuffer, WithParameter, InsideAUnit,
]  # fmt: skip
SEVERAL = [TwoAppended, InFront, Shorter, WithParameter]

ONE: dict[str, Any] = {}


def grown(pipeline: dict[str, Any] | None, kinds: list[type[Growing]], folder: str, **options: Any) -> Any:
    """By kind: weights, logged values, what the optimizer lists, and names in the last checkpoint."""
    found: dict[str, Any] = {}
    for kind in kinds:
        monitors = [] if pipeline is None else [BubbleMonitor(), StageMemoryMonitor()]
        module = kind()
        given = {
            "max_epochs": 3 if kind is FrozenThenTold else 2,
            "writes": True,
            "default_root_dir": folder,
            "callbacks": monitors,
            **options,
        }
        run = trainer(pipeline, **given)
        run.fit(module, loader(), loader(8, seed=4))
        metrics = run.callback_metrics.items()
        logged = {name: float(value) for name, value in metrics if not name.startswith("pipeline/")}
        every = [p for group in run.optimizers[0].param_groups for p in group["params"]]
        there = set(
            map(id, module.parameters())
        )  # of a layer that was taken away one stage alone has the values
        listed = [tuple(p.shape) if id(p) in there else None for p in every]
        (predicted, *_) = run.predict(module, loader(8, seed=5))  # as it is now
        found[kind.__name__] = (weights(module), logged), listed, predicted
    return found


@pytest.mark.parametrize(
    ("pipeline", "kinds"),
    [  # in `make test` each kind under one of the schedules
        (
            {"stages": 2, "num_microbatches": 4, "schedule": "1F1B"},
            chosen(KINDS, *map(KINDS.index, [NewHead, FrozenThenTold, WithBuffer, InsideAUnit])),
        ),
        ({"stages": 2, "num_microbatches": 1, "schedule": "ZBH1"}, SEVERAL),
        (
            {"stages": 2, "num_microbatches": 2, "stages_per_rank": 2, "schedule": "Interleaved1F1B"},
            chosen(SEVERAL, 1, 2),
        ),
        (
            {"stages": 2, "num_microbatches": 2, "schedule": "GPipe", "loss_over_batch": True},
            chosen(SEVERAL, 0, 3),
        ),
    ],
    ids=["1F1B", "ZBH1", "Interleaved1F1B", "over the batch"],
)
def test_a_module_that_changes_in_a_run_is_what_it_is_on_one_device(
    ranks: Ranks, tmp_path: Path, pipeline: dict[str, Any], kinds: list[type[Growing]]
) -> None:
    if not ONE:
        ONE.update(ranks(1)(grown, None, KINDS, str(tmp_path))[0])
    both = ranks(2)(grown, pipeline, kinds, str(tmp_path), timeout=180)
    assert any(found[kind.__name__][2] is not None for found in both for kind in kinds)
    for found in both:
        for kind, (numbers, listed, predicted) in ((k.__name__, ONE[k.__name__]) for k in kinds):
            assert_same(found[kind][0], numbers)
            assert found[kind][1] == listed, kind
            if found[kind][2] is not None:  # on the last stage
                torch.testing.assert_close(found[kind][2], predicted, rtol=1e-10, atol=1e-10, msg=kind)


def saved_and_resumed(pipeline: dict[str, Any] | None, folder: str) -> Any:
    """A run that grew, gone on with by a module that has the layer from the start."""
    module, run = Appended(), trainer(pipeline, max_epochs=2, writes=True, default_root_dir=folder)
    run.fit(module, loader(), loader(seed=4))
    again = Appended()
    again.layers.append(nn.Linear(WIDTH, WIDTH).double())

    def both() -> Any:
        parts = again.layers[-1].parameters()
        rest = [p for p in again.parameters() if not any(p is one for one in again.layers[-1].parameters())]
        optimizer = torch.optim.SGD(rest, lr=again.lr, momentum=0.9)
        optimizer.add_param_group({"params": list(parts), "lr": 0.05})
        return optimizer

    again.configure_optimizers = both
    on = trainer(pipeline, max_epochs=4, writes=True, default_root_dir=folder)
    on.fit(again, loader(), loader(seed=4), ckpt_path=run.checkpoint_callback.best_model_path)
    return weights(again), {name: float(value) for name, value in on.callback_metrics.items()}


@pytest.mark.parametrize("distributed", [True, False], ids=["folder", "one file"])
def test_a_run_that_grew_goes_on_from_its_checkpoint(ranks: Ranks, tmp_path: Path, distributed: bool) -> None:
    expected = ranks(1)(saved_and_resumed, None, str(tmp_path / "one"))[0]
    pipeline = {"stages": 2, "num_microbatches": 2, "save_distributed_checkpoint": distributed}
    for found in ranks(2)(saved_and_resumed, pipeline, str(tmp_path / "two")):
        assert_same(found, expected)


class Codebook(nn.Module):
    """Gives itself other parameters in its forward, as codebooks do that follow a moving average."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Embedding(5, TARGETS).double()
        self.sums = nn.Parameter(self.codes.weight.detach().clone())

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        chosen_codes = torch.cdist(hidden, self.codes.weight).argmin(1)
        taken = nn.functional.one_hot(chosen_codes, 5).to(hidden) @ self.codes.weight
        if self.training:
            own = nn.functional.one_hot(chosen_codes, 5).to(hidden).T @ hidden
            self.sums = nn.Parameter((0.9 * self.sums + 0.1 * own).detach())
            self.codes.weight = nn.Parameter(self.sums.detach().clone())
        return hidden + (taken - hidden).detach(), nn.functional.mse_loss(taken.detach(), hidden)


class Quantised(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.book = Codebook()
        self.head = nn.Linear(TARGETS, TARGETS).double()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        taken, near = self.book(self.net(batch[0]))
        return nn.functional.mse_loss(self.head(taken), batch[1]) + near

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([*self.net.parameters(), *self.head.parameters()], 0.1)


def quantised(pipeline: dict[str, Any] | None) -> Any:
    module = Quantised()
    trainer(pipeline, limit_val_batches=0).fit(module, loader(24))
    return weights(module)


@pytest.mark.parametrize("stages", [2, 3])
def test_a_layer_that_gives_itself_other_parameters_is_waited_for_by_none(ranks: Ranks, stages: int) -> None:
    expected = quantised(None)
    for found in ranks(stages)(quantised, {"stages": stages, "num_microbatches": 1}):
        assert_same((found, {}), (expected, {}))


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T


class ParametrizedLate(Regression):
    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            for place in (2, 4):
                parametrize.register_parametrization(self.net[place], "weight", Symmetric())


def parametrized(pipeline: dict[str, Any] | None) -> Any:
    module = ParametrizedLate()
    trainer(pipeline, max_epochs=2, limit_val_batches=0).fit(module, loader(24))
    return {name: value.clone() for name, value in module.state_dict().items()}


def test_a_weight_that_a_parametrization_moves_is_left_once(ranks: Ranks) -> None:
    expected = parametrized(None)
    for found in ranks(2)(parametrized, {"stages": 2, "num_microbatches": 2}):
        assert found.keys() == expected.keys()
        assert_same((found, {}), (expected, {}))
