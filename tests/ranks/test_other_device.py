"""Fits on a device whose memory the host cannot read equal those on the CPU: weights, logs, devices, reads."""

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from lightning_pipeline import PipelineStrategy
from lightning_pipeline.model.tensors import result_dtypes
from lightning_pipeline.weights import Staging
from tests import island
from tests.pool import Pool
from tests.ranks import serial_backend
from tests.ranks.device_cases import Looks, Residual, Tied
from tests.ranks.lightning_cases import (
    Regression,
    assert_same,
    fit,
    loader,
    trainer,
    weights,
)

Ranks = Callable[[int], Pool]


class Devices(Callback):
    """Where things are, hook by hook."""

    def __init__(self) -> None:
        self.seen: dict[str, dict[str, str]] = {}

    def note(self, hook: str, module: Any) -> None:
        layer = module.blocks[0][0]
        found = {"module": module, "metric": module.error, "weight": layer.weight, "scale": module.scale}
        self.seen[hook] = {name: one.device.type for name, one in found.items()}

    def setup(self, run: Any, module: Any, stage: str) -> None:
        self.note("setup", module)

    def on_fit_start(self, run: Any, module: Any) -> None:
        self.note("on_fit_start", module)

    def on_train_batch_end(self, run: Any, module: Any, *args: Any) -> None:
        self.note("on_train_batch_end", module)

    def on_validation_epoch_end(self, run: Any, module: Any) -> None:
        self.note("on_validation_epoch_end", module)


def devices_seen() -> Any:
    module, seen = Residual(), Devices()
    run = trainer({"stages": 2}, accelerator=island.IslandAccelerator(), callbacks=[seen])
    run.fit(module, loader(), loader(seed=4))
    after = {str(module.device), *(str(tensor.device) for tensor in module.state_dict().values())}
    return seen.seen, after


def test_modules_say_where_they_are(apart: Ranks) -> None:
    """As with SingleDeviceStrategy, where the module alone is on its device in `setup`."""
    there = dict.fromkeys(["module", "metric", "weight", "scale"], "island")
    later = ["on_fit_start", "on_train_batch_end", "on_validation_epoch_end"]
    for seen, after in apart(2)(devices_seen):
        assert seen == {
            "setup": {**dict.fromkeys(there, "cpu"), "module": "island"},
            **dict.fromkeys(later, there),
        }
        assert after == {"cpu"}


@pytest.fixture(scope="module")
def on_cpu(apart: Ranks) -> Callable[..., Any]:
    """What rank 0 has after such a fit on the CPU, each done once."""
    known: dict[str, Any] = {}

    def fitted(pipeline: dict[str, Any], make: type[Regression]) -> Any:
        key = f"{pipeline} {make.__name__}"
        if key not in known:
            known[key] = apart(pipeline["stages"])(fit, pipeline, make)[0]
        return known[key]

    return fitted


def on_island(pipeline: dict[str, Any], make: Callable[[], Any], free: int = 0, **options: Any) -> Any:
    island.free_memory[:] = [free]
    return fit(pipeline, make, accelerator=island.IslandAccelerator(), **options)


MANY = {"stages": 1, "stages_per_rank": 3, "schedule": "LoopedBFS", "num_microbatches": 2}


@pytest.mark.parametrize("make", [Residual, Looks])
@pytest.mark.parametrize("free", [0, 2**30], ids=["no room for the whole", "room for the whole"])
def test_stages_of_one_rank(
    apart: Ranks, on_cpu: Callable[..., Any], make: type[Regression], free: int
) -> None:
    (found,) = apart(1)(on_island, MANY, make, free)
    assert_same(found, on_cpu(MANY, make))


@pytest.mark.parametrize("transport", ["host", "nccl"])
@pytest.mark.parametrize("schedule", ["1F1B", "ZBH1"])
def test_two_ranks(apart: Ranks, on_cpu: Callable[..., Any], schedule: str, transport: str) -> None:
    """Messages through host memory, and from device to device over the backend of its collectives."""
    pipeline = {"stages": 2, "schedule": schedule, "num_microbatches": 2}
    device = {**pipeline, "transport": transport, "process_group_backend": serial_backend.NAME}
    for found in apart(2)(on_island, device, Residual):
        assert_same(found, on_cpu(pipeline, Residual))


@pytest.mark.parametrize(
    ("replicas", "make"), [(1, Tied), (2, Regression), (2, Tied)], ids=["tied", "replicas", "both"]
)
def test_collectives_that_serve_only_the_device(apart: Ranks, replicas: int, make: type[Regression]) -> None:
    """As those of NCCL: what is still in host memory before a run is made equal another way."""
    pipeline = {"stages": 2, "num_microbatches": 2, "data_parallel_size": replicas}
    device = {**pipeline, "transport": "nccl", "process_group_backend": serial_backend.NAME}
    found = apart(2 * replicas)(on_island, device, make)
    for rank, expected in enumerate(apart(2 * replicas)(fit, pipeline, make)):
        assert_same(found[rank], expected)


def saved_and_resumed(kind: str, folder: str) -> Any:
    """Weights after two epochs, the second of which follows from a checkpoint; then metrics and predictions."""
    accelerator = island.IslandAccelerator() if kind == "island" else "cpu"
    pipeline = {"stages": 2, "num_microbatches": 2}
    path = Path(folder) / kind
    first = trainer(pipeline, accelerator=accelerator, max_epochs=1)
    first.fit(Regression(), loader(), loader(seed=4))
    first.save_checkpoint(path)
    module, second = Regression(), trainer(pipeline, accelerator=accelerator)
    second.fit(module, loader(), loader(seed=4), ckpt_path=path, weights_only=False)
    validated = second.validate(module, loader(seed=5))
    predicted = second.predict(module, loader(seed=5))
    return weights(module), validated, [None if one is None else one.cpu() for one in predicted or []]


def test_checkpoints_validation_and_prediction(apart: Ranks) -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = apart(2)(saved_and_resumed, "island", folder)
        expected = apart(2)(saved_and_resumed, "cpu", folder)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def reads_in_a_step() -> Any:
    """What a training step reads to the host, messages aside: with one rank there are none."""

    class Count(Callback):
        reads: list[Any] = []  # noqa: RUF012  # one object a run

        def on_train_batch_start(self, *args: Any) -> None:
            island.reads.clear()

        def on_before_optimizer_step(self, *args: Any) -> None:
            self.reads.append(list(island.reads))

    count = Count()
    run = trainer(MANY, accelerator=island.IslandAccelerator(), callbacks=[count], enable_progress_bar=False)
    run.fit(Regression(), loader(samples=32))
    return count.reads[1:]


def test_a_step_reads_nothing_to_the_host(apart: Ranks) -> None:
    (reads,) = apart(1)(reads_in_a_step)
    assert len(reads) == 7
    assert reads.pop(3)  # the first batch of the second epoch is looked at as one
    assert reads == [[]] * 6


def test_the_strategy_is_given_the_devices_of_the_accelerator(apart: Ranks) -> None:
    (device,) = apart(1)(root_device)
    assert device == "island:0"


def root_device() -> str:
    run = trainer(MANY, accelerator=island.IslandAccelerator())
    assert isinstance(run.strategy, PipelineStrategy)
    return str(run.strategy.root_device)


def keys_under_autocast() -> list[Any]:
    keys = []
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast(island.NAME, dtype=dtype):
            keys.append(result_dtypes())
    return [*keys, result_dtypes()]


def test_remembered_results_know_the_autocast_of_the_device(apart: Ranks) -> None:
    (keys,) = apart(1)(keys_under_autocast)
    assert len(set(keys)) == 3


def built_there() -> tuple[list[str], list[str]]:
    torch.manual_seed(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Staging().building(None, lambda module: None):
            net = nn.Sequential(nn.Linear(256, 1024, bias=False, device=island.NAME), nn.Linear(2, 2))
    return [str(one.message) for one in caught], [p.device.type for p in net.parameters()]


def test_what_configure_model_makes_there_is_told_with_its_size(apart: Ranks) -> None:
    (told,), devices = apart(1)(built_there)[0]
    assert "makes 1.0 MiB on island:0, so every process builds all of it" in told
    assert devices == [island.NAME, "cpu", "cpu"]
