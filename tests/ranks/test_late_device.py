"""A device that works later than the host asks: no tensor is used before it is there, and no host waits."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from lightning_pipeline.errors import ConfigurationError
from lightning_pipeline.executor.executor import Executor
from lightning_pipeline.ranks.groups import Groups
from lightning_pipeline.schedules import get_schedule
from tests import island, shared_island, streams
from tests.pool import Pool
from tests.ranks import serial_backend
from tests.ranks.device_cases import Adam, Residual
from tests.ranks.lightning_cases import Regression, assert_same, fit, loader, trainer
from tests.ranks.test_launch_order import ALL, ragged
from tests.ranks.toy import Toy, by_hand, forwards

Ranks = Callable[[int], Pool]


def late_executor(
    name: str, num_ranks: int, number: int, lanes: int, way: str
) -> tuple[Executor, Groups, dict[int, Toy]]:
    plan = get_schedule(name).plan(num_ranks, number)
    island.register()
    island.work_late(lanes)
    shared_island.register()
    groups = Groups(
        plan, edge_backend=serial_backend.NAME if way == "serial" else None,
        copies="only" if way == "ipc" else "never", device=torch.device(island.NAME, 0),
        step_timeout=timedelta(seconds=60),
    )  # fmt: skip
    stages = {
        s: Toy(s, plan.num_stages, number, shape=ragged, device=island.NAME)
        for s in plan.stages_of(groups.rank)
    }
    return Executor(stages, groups, device=torch.device(island.NAME, 0)), groups, stages


def step(executor: Executor, name: str, num_ranks: int, number: int) -> None:
    plan = get_schedule(name).plan(num_ranks, number)
    executor.run(plan, [("train", ragged(k)) for k in range(number)])


def found(groups: Groups, stages: dict[int, Toy]) -> Any:
    gradients = [
        (index, [None if g is None else g.cpu() for g in toy.gradients()]) for index, toy in stages.items()
    ]
    groups.close()
    errors = list(streams.Queue.errors)
    island.work_at_once()
    return gradients, errors


def run_late(name: str, num_ranks: int, number: int, lanes: int, way: str) -> Any:
    executor, groups, stages = late_executor(name, num_ranks, number, lanes, way)
    for _ in range(2):
        step(executor, name, num_ranks, number)
    return found(groups, stages)


def check(results: Any, name: str, num_ranks: int, number: int) -> None:
    plan = get_schedule(name).plan(num_ranks, number)
    reference = by_hand(plan.num_stages, number, shape=ragged, steps=2)
    for stages, errors in results:
        assert errors == []
        for index, gradients in stages:
            assert all(map(torch.equal, gradients, reference[index].gradients()))


CASES = [(name, 2, 0, "serial") for name in ALL]
CASES += [(name, 4, 0, "serial") for name in ("1F1B", "Interleaved1F1B", "DualPipeV")]
CASES += [("1F1B", 2, 1, "serial"), ("ZBV", 4, 1, "serial"), ("LoopedBFS", 2, 2, "serial")]
CASES += [(name, 2, 0, "ipc") for name in ("GPipe", "1F1B", "ZBH1", "ZBV", "LoopedBFS")]
CASES += [("1F1B", 4, 1, "ipc"), ("DualPipeV", 4, 2, "ipc")]


@pytest.mark.parametrize(("name", "num_ranks", "lanes", "way"), CASES)
def test_every_schedule_uses_what_has_arrived_and_nothing_that_was_let_go_of(
    apart: Ranks, name: str, num_ranks: int, lanes: int, way: str
) -> None:
    number = 2 * num_ranks
    check(apart(num_ranks)(run_late, name, num_ranks, number, lanes, way), name, num_ranks, number)


def run_held(name: str, num_ranks: int, number: int, way: str) -> Any:
    executor, groups, stages = late_executor(name, num_ranks, number, 0, way)
    step(executor, name, num_ranks, number)
    for edge in groups.edges.values():
        edge.settle()
    streams.current().synchronize()
    streams.Event.host_waits = 0
    with streams.held():
        step(executor, name, num_ranks, number)
        waits = streams.Event.host_waits
    return found(groups, stages), waits


@pytest.mark.parametrize("way", ["serial", "ipc"])
@pytest.mark.parametrize("name", ["1F1B", "ZBV", "Interleaved1F1B"])
def test_the_host_comes_to_the_end_of_a_step_that_the_device_has_not_begun(
    apart: Ranks, name: str, way: str
) -> None:
    results = apart(2)(run_held, name, 2, 4, way)
    assert [waits for _, waits in results] == [0, 0]
    check([one for one, _ in results], name, 2, 4)


def longer(microbatch: int) -> int:
    return 5 - microbatch % 2


def run_changing(name: str, way: str) -> Any:
    executor, groups, stages = late_executor(name, 2, 4, 0, way)
    step(executor, name, 2, 4)
    for toy in stages.values():
        toy.shape = longer
    plan = get_schedule(name).plan(2, 4)
    executor.run(plan, [("train", ragged(k)) for k in range(4)])  # as announced before, but it is not
    executor.run(plan, [("train", longer(k)) for k in range(4)])
    with torch.no_grad():
        executor.run(forwards(plan), [("eval", longer(k)) for k in range(4)])
    return found(groups, stages)


@pytest.mark.parametrize("way", ["serial", "ipc"])
@pytest.mark.parametrize("name", ["1F1B", "ZBV"])
def test_lengths_change_between_steps_and_forwards_go_alone(apart: Ranks, name: str, way: str) -> None:
    plan = get_schedule(name).plan(2, 4)
    first = by_hand(plan.num_stages, 4, shape=ragged)
    then = by_hand(plan.num_stages, 4, shape=longer, steps=2)
    for stages, errors in apart(2)(run_changing, name, way):
        assert errors == []
        for index, gradients in stages:
            pairs = zip(first[index].gradients(), then[index].gradients(), strict=True)
            torch.testing.assert_close(gradients, [a + b for a, b in pairs])


def fit_late(pipeline: dict[str, Any], lanes: int, make: Callable[[], Any]) -> Any:
    island.register()
    island.work_late(lanes)
    shared_island.register()
    try:
        device = {**pipeline, "process_group_backend": serial_backend.NAME}
        return fit(device, make, accelerator=island.IslandAccelerator())
    finally:
        island.work_at_once()


FITS: list[tuple[dict[str, Any], int, type[Regression]]] = [
    ({"stages": 2, "num_microbatches": 3, "transport": "nccl"}, 0, Residual),
    ({"stages": 2, "num_microbatches": 3, "transport": "ipc", "schedule": "ZBH1"}, 0, Residual),
    ({"stages": 2, "num_microbatches": 2, "transport": "nccl", "data_parallel_size": 2}, 0, Regression),
    ({"stages": 4, "num_microbatches": 2, "transport": "ipc"}, 1, Regression),
]


@pytest.mark.parametrize(("pipeline", "lanes", "make"), FITS)
def test_fits_with_ragged_batches_and_validation_equal_those_on_the_cpu(
    apart: Ranks, pipeline: dict[str, Any], lanes: int, make: type[Regression]
) -> None:
    size = pipeline["stages"] * pipeline.get("data_parallel_size", 1)
    expected = apart(size)(fit, {**pipeline, "transport": "host"}, make)
    for found_here, one in zip(apart(size)(fit_late, pipeline, lanes, make), expected, strict=True):
        assert_same(found_here, one)


def refused(why: str, transport: str) -> str:
    island.register()
    shared_island.register()
    shared_island.IslandSharing.refused = why
    device = {"stages": 2, "num_microbatches": 2, "process_group_backend": serial_backend.NAME}
    try:
        fit({**device, "transport": transport}, accelerator=island.IslandAccelerator())
    except ConfigurationError as error:
        return str(error)
    finally:
        shared_island.IslandSharing.refused = ""
    return ""


def test_copies_that_do_not_work_are_refused_with_the_reason(apart: Ranks) -> None:
    for text in apart(2)(refused, "peer access is not supported", "ipc"):
        assert "transport='ipc' does not work between ranks 0 and 1 of a pipeline" in text
        assert "peer access is not supported" in text


def faster(why: str) -> Any:
    plan = get_schedule("1F1B").plan(2, 4)
    island.register()
    island.work_late(0)
    shared_island.register()
    shared_island.IslandSharing.refused = why
    groups = Groups(
        plan, edge_backend=serial_backend.NAME, copies="faster", device=torch.device(island.NAME, 0)
    )
    shared_island.IslandSharing.refused = ""
    kinds, ways = [type(edge).__name__ for edge in groups.edges.values()], groups.ways
    stages = {groups.rank: Toy(groups.rank, 2, 4, shape=ragged, device=island.NAME)}
    executor = Executor(stages, groups, device=torch.device(island.NAME, 0))
    for _ in range(2):
        step(executor, "1F1B", 2, 4)
    return kinds, ways, found(groups, stages)


def test_the_faster_way_is_measured_once_and_taken_by_both(apart: Ranks) -> None:
    results = apart(2)(faster, "")
    (one,), (other,) = (kinds for kinds, *_ in results)
    assert one == other
    name = {"Copies": "ipc", "Communicators": serial_backend.NAME}[one]
    for _, ways, _ in results:
        told = f"by {name} between ranks 0 and 1 (8 MiB and back: {serial_backend.NAME} "
        assert ways.startswith(f"Tensors between stages travel {told}")
        assert ", ipc " in ways
    check([result for *_, result in results], "1F1B", 2, 4)


def test_where_copies_do_not_work_communicators_are_taken(apart: Ranks) -> None:
    for kinds, ways, _ in apart(2)(faster, "peer access is not supported"):
        assert kinds == ["Communicators"]
        assert ways == f"Tensors between stages travel by {serial_backend.NAME} between ranks 0 and 1"


def reads_in_batches(pipeline: dict[str, Any]) -> Any:
    """What is read to the host between the start and the end of a training batch, clipping and all."""

    class Count(Callback):
        reads: list[Any] = []  # noqa: RUF012  # one object a run

        def on_train_batch_start(self, *args: Any) -> None:
            island.reads.clear()

        def on_train_batch_end(self, *args: Any) -> None:
            self.reads.append(list(island.reads))

    island.register()
    shared_island.register()
    count = Count()
    run = trainer(
        {**pipeline, "process_group_backend": serial_backend.NAME}, callbacks=[count], gradient_clip_val=0.1,
        accelerator=island.IslandAccelerator(), enable_progress_bar=False, max_epochs=1,
    )  # fmt: skip
    run.fit(Adam(), loader(samples=32 * run.strategy.num_replicas))  # type: ignore[attr-defined]
    return count.reads[1:]


@pytest.mark.parametrize(
    "pipeline",
    [
        {"stages": 2, "num_microbatches": 2, "transport": "nccl"},
        {"stages": 2, "num_microbatches": 2, "transport": "ipc", "schedule": "ZBH1"},
        {"stages": 2, "num_microbatches": 2, "transport": "nccl", "data_parallel_size": 2},
    ],
)
def test_a_batch_with_clipping_and_optimizer_reads_nothing_to_the_host(
    apart: Ranks, pipeline: dict[str, Any]
) -> None:
    for reads in apart(2 * pipeline.get("data_parallel_size", 1))(reads_in_batches, pipeline):
        assert len(reads) == 3
        assert not any(reads[1:]), "the first batches of an epoch are compared, which reads them"
