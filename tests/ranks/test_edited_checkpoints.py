"""Resumed runs whose `on_load_checkpoint` makes tensors anew, or changes what stands for optimizers."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, assert_same, loader, trainer, weights

Ranks = Callable[[int], Pool]


class Adam(Regression):
    """States, and a rate that goes down."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), 0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Queue(Adam):
    """A buffer is registered again, in the form of what is stored."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(3))

    def on_train_batch_end(self, *args: Any) -> None:
        self.queue[0] += 1

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.register_buffer("queue", torch.empty_like(checkpoint["state_dict"]["queue"]))


class Grown(Adam):
    """A buffer that grows takes the size of what is stored."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(0))

    def on_train_batch_end(self, *args: Any) -> None:
        self.queue = torch.cat([self.queue, torch.ones(1)])

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.queue = torch.empty_like(checkpoint["state_dict"]["queue"])


class Head(Adam):
    """The last layer is made anew, as large as what is stored."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        last: Any = list(self.net)[-1]
        torch.manual_seed(3)
        made = nn.Linear(last.in_features, len(checkpoint["state_dict"]["net.6.bias"])).double()
        self.net[6] = made


class Rate(Adam):
    """The rate is changed."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        for state in checkpoint["optimizer_states"]:
            for group in state["param_groups"]:
                group["lr"] = 0.2


class Forgets(Adam):
    """The moments are forgotten."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        for state in checkpoint["optimizer_states"]:
            state["state"] = {}


class Another(Adam):
    """An optimizer that begins anew takes the place."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["optimizer_states"] = [torch.optim.Adam(self.parameters(), 0.1).state_dict()]


class ReadsMoments(Adam):
    """The moments are read, which stages have of their own."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.moments = len(checkpoint["optimizer_states"][0]["state"])


def resumed(kind: type[Adam], pipeline: dict[str, Any] | None, folder: str) -> Any:
    path = Path(folder) / f"{pipeline and pipeline['stages']}.ckpt"
    first = trainer(pipeline, max_epochs=1)
    first.fit(kind(), loader(), loader(seed=4))
    first.save_checkpoint(path)
    module, run = kind(), trainer(pipeline)
    run.fit(module, loader(), ckpt_path=path, weights_only=False)  # without the validation it had
    logs = {name: float(value) for name, value in run.callback_metrics.items()}
    logs["rate"] = run.optimizers[0].param_groups[0]["lr"]
    return weights(module), {**logs, "rows": float(len(getattr(module, "queue", ())))}


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("kind", [Queue, Grown, Head, Rate, Forgets, Another])
def test_a_resumed_run_is_one_devices(ranks: Ranks, kind: type[Adam], stages: int) -> None:
    pipeline = {"stages": stages, "num_microbatches": 2}
    with tempfile.TemporaryDirectory() as folder:
        expected = resumed(kind, None, folder)
        for found in ranks(stages)(resumed, kind, pipeline, folder, group=False):
            assert_same(found, expected)


def refusal(folder: str) -> str:
    try:
        resumed(ReadsMoments, {"stages": 2, "num_microbatches": 2}, folder)
    except Exception as error:
        return str(error)
    return ""


def test_states_of_stages_are_not_there_to_be_read(ranks: Ranks) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for told in ranks(2)(refusal, folder, group=False):
            assert "cannot be read in on_load_checkpoint: each stage reads that of its own" in told
