"""What hooks give to loggers, which write on rank 0 alone, is what one device gives them."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, loader, trainer

Ranks = Callable[[int], Pool]


class Writer:
    """As TensorBoard's: reads what it is given as arrays."""

    def __init__(self) -> None:
        self.seen: dict[str, list[Any]] = {}
        self.text = ""

    def add_histogram(self, name: str, values: Any, step: int) -> None:
        self.seen.setdefault(name, []).append((step, *values.detach().cpu().numpy().ravel().tolist()))

    def __getitem__(self, name: str) -> "Series":
        return Series(self.seen.setdefault(name, []))


class Series:
    """As Neptune's."""

    def __init__(self, seen: list[Any]) -> None:
        self.append = lambda value: seen.append((float(value),))


class Writes(Logger):
    """A logger as Lightning's are: empty on all ranks but the first."""

    def __init__(self) -> None:
        super().__init__()
        self.writer = Writer()

    @property
    def name(self) -> str:
        return "writes"

    @property
    def version(self) -> int:
        return 0

    @property
    @rank_zero_experiment
    def experiment(self) -> Writer:
        return self.writer

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to write."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        for name, value in metrics.items():
            self.writer.seen.setdefault(name, []).append((float(value),))


class Watched(Regression):
    """Histograms of every parameter and gradient, as the tutorials of loggers show."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        experiment = self.logger.experiment
        assert isinstance(self.logger, Writes) and type(self.logger).__name__ == "Writes"
        if self.trainer.is_global_zero:
            assert isinstance(experiment, Writer)
        for name, parameter in self.named_parameters():
            experiment.add_histogram(f"{name}.grad", parameter.grad, self.global_step)
            experiment[f"{name}.norm"].append(parameter.norm())
        self.logger.log_metrics(
            {"largest": torch.stack([p.grad.abs().max() for p in self.parameters()]).max()}
        )

    def on_train_epoch_end(self) -> None:
        for name, parameter in self.named_parameters():
            self.logger.experiment.add_histogram(name, parameter, self.current_epoch)
        another = Writes()  # no logger of the run
        another.log_metrics({"alone": torch.ones(())})
        assert type(vars(another)["writer"]) is Writer and isinstance(another.writer, Writer)
        assert type(copy.deepcopy(self.logger)) is type(pickle.loads(pickle.dumps(self.logger))) is Writes


def attributes_of(kind: type) -> dict[str, Any]:
    return {name: value for name, value in vars(kind).items() if name != "__slotnames__"}  # copying sets it


def written(pipeline: dict[str, Any] | None, make: Any = Watched) -> dict[str, list[Any]]:
    logger, own = Writes(), attributes_of(Writes)
    run = trainer(pipeline, logger=logger, max_epochs=1)
    run.fit(make(), loader())
    assert attributes_of(Writes) == own
    return logger.writer.seen


@pytest.mark.parametrize("stages", [2, 3])
def test_histograms_of_all_stages_are_those_of_one_device(ranks: Ranks, stages: int) -> None:
    expected = written(None)
    assert {"net.0.weight.grad", "net.6.weight", "net.2.bias.norm", "largest"} <= set(expected)
    found, *others = ranks(stages)(written, {"stages": stages, "num_microbatches": 2}, group=False)
    assert not any(set(one) - {"epoch"} & set(one) for one in others if one), "only rank 0 writes"
    assert {name: len(rows) for name, rows in found.items()} == {n: len(rows) for n, rows in expected.items()}
    for name, rows in expected.items():
        for mine, theirs in zip(found[name], rows, strict=True):
            torch.testing.assert_close(Tensor(mine), Tensor(theirs), msg=name)
