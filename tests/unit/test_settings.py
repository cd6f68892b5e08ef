"""Settings that cannot work are refused at once, all of them, with the way out."""

import copy
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import pytest
import pytorch_lightning

from lightning_pipeline import PipelineStrategy
from lightning_pipeline.errors import ConfigurationError, PipelineError
from lightning_pipeline.ranks.mesh import fit_to_devices
from lightning_pipeline.schedules import GPipe, OneFOneB
from lightning_pipeline.settings import Settings, read_settings


def read(**changes: Any) -> Settings:
    given: dict[str, Any] = {
        "stages": 2, "num_microbatches": "auto", "schedule": "1F1B", "stages_per_rank": 1,
        "partition": "auto",
        "units": None, "data_parallel_size": "auto", "data": "replicate", "process_group_backend": None,
        "init_timeout": 300, "step_timeout": timedelta(minutes=1), **changes,
    }  # fmt: skip
    return read_settings(**given)


def test_settings_are_read() -> None:
    settings = read(schedule=GPipe, units="net.*", init_timeout=1.5)
    assert isinstance(settings.schedule, GPipe)
    assert settings.units == ["net.*"]
    assert (settings.init_timeout, settings.step_timeout) == (timedelta(seconds=1.5), timedelta(minutes=1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": 0}, r"stages=0 must be a whole number of at least 1"),
        ({"stages": -2}, r"stages=-2"),
        ({"stages": True}, r"stages=True"),
        ({"stages": 1.5}, r"stages=1.5"),
        ({"stages": "all"}, r"stages='all' must be .* or 'auto'"),
        ({"num_microbatches": 0}, r"num_microbatches=0"),
        ({"stages_per_rank": 0}, r"stages_per_rank=0"),
        ({"stages_per_rank": 2}, r"schedule='1F1B' holds 1 stage.* and cannot hold stages_per_rank=2"),
        ({"schedule": OneFOneB(), "stages_per_rank": 3}, r"contradicts 1F1B, which holds 1"),
        ({"schedule": "2F2B"}, r"no schedule '2F2B': known are .*1F1B.*GPipe"),
        ({"schedule": "ForwardOnly"}, r"schedule='ForwardOnly' would train nothing: it has no backwards"),
        ({"schedule": 7}, r"schedule=7 is no schedule"),
        ({"partition": "equal"}, r"partition='equal' is unknown: use 'auto', .*, or a list"),
        ({"partition": ["a", "b"]}, r"partition names 2 first unit.* but 2 stages have 1"),
        ({"units": [1]}, r"units=\[1\] must be a list of name patterns"),
        ({"data_parallel_size": 0}, r"data_parallel_size=0"),
        ({"data": "both"}, r"data='both' is unknown: use 'auto' or 'replicate' or 'broadcast'"),
        ({"step_timeout": 0}, r"step_timeout=0 must be seconds or a timedelta"),
        ({"process_group_backend": "pigeon"}, r"process_group_backend='pigeon' is not available"),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read(**changes)


def test_a_schedule_of_two_stages_takes_that_number() -> None:
    assert read(schedule="ZBV", stages_per_rank=2).schedule.stages_per_rank == 2


def test_wrong_names_of_arguments_are_refused_with_those_that_were_meant() -> None:
    meant = r"PipelineStrategy does not have the argument num_micro_batches, did you mean num_microbatches\?"
    wrong: dict[str, Any] = {"num_micro_batches": 4, "chunks": 4, "num_stages": 2}
    with pytest.raises(
        ConfigurationError, match=f"{meant}; chunks; num_stages, did you mean stages"
    ) as raised:
        PipelineStrategy(2, **wrong)
    assert "\n" not in str(raised.value)


def test_a_subclass_has_the_arguments_that_it_says() -> None:
    class Longer(PipelineStrategy):
        def __init__(self, patience: int, **others: Any) -> None:
            super().__init__(2, **others, step_timeout=patience)

    class Named(PipelineStrategy):
        def __init__(self, *, patience: int) -> None:
            super().__init__(2, step_timeout=patience)

    longer = copy.deepcopy(Longer(patience=3, num_microbatches=4))
    assert longer._settings.step_timeout == timedelta(seconds=3)
    with pytest.raises(ConfigurationError, match=r"Named does not have the argument patienc, .* patience\?"):
        Named(patienc=3)  # type: ignore[call-arg]


def test_all_wrong_settings_are_named_at_once() -> None:
    with pytest.raises(ConfigurationError, match=r"(?s)3 problems.*stages=0.*num_microbatches=0.*data='x'"):
        PipelineStrategy(stages=0, num_microbatches=0, data="x")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "devices", "nodes", "sizes"),
    [
        ({}, 2, 1, (2, 1)),
        ({}, 4, 1, (2, 2)),
        ({}, 1, 2, (2, 1)),
        ({"stages": "auto"}, 3, 1, (3, 1)),
        ({"stages": "auto", "data_parallel_size": 2}, 4, 2, (4, 2)),
    ],
)
def test_devices_are_shared_out(
    changes: dict[str, Any], devices: int, nodes: int, sizes: tuple[int, int]
) -> None:
    found = fit_to_devices(read(**changes), devices, nodes, "cpu")
    assert (found.placement.num_ranks, found.num_replicas) == sizes


@pytest.mark.parametrize(
    ("changes", "devices", "message"),
    [
        (
            {},
            1,
            r"num_nodes=1 is 1, but stages=2 \* data_parallel_size=1 is 2; devices='auto' on CPU is 1",
        ),
        ({}, 3, r"devices=3 .* stages=2 \* data_parallel_size=1 is 2: use Trainer\(devices=2\)"),
        ({"data_parallel_size": 2}, 2, r"stages=2 \* data_parallel_size=2 is 4: use Trainer\(devices=4\)"),
    ],
)
def test_stages_that_do_not_fit_the_devices_are_refused(
    changes: dict[str, Any], devices: int, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        fit_to_devices(read(**changes), devices, 1, "cpu")


def test_the_trainer_refuses_devices_that_do_not_fit() -> None:
    with pytest.raises(
        ConfigurationError, match=r"devices=1 .*devices='auto' on CPU is 1: use Trainer\(devices=2\)"
    ):
        pl.Trainer(accelerator="cpu", strategy=PipelineStrategy(stages=2), logger=False)


def test_the_registered_name_takes_all_devices() -> None:
    trainer = pl.Trainer(accelerator="cpu", devices=3, strategy="pipeline", logger=False)
    assert isinstance(trainer.strategy, PipelineStrategy)
    assert [trainer.strategy.stage_index(rank) for rank in range(3)] == [2, 1, 0]


def test_the_other_lightning_says_what_to_import() -> None:
    assert pytorch_lightning is not None  # imported above
    with pytest.warns(UserWarning, match=r"use `from lightning\.pytorch import Trainer`"):
        PipelineStrategy(stages=2)


def test_a_strategy_prints_as_it_is_written() -> None:
    assert repr(PipelineStrategy(stages=2)) == "PipelineStrategy(stages=2, schedule=1F1B)"


def test_one_device_for_a_pipeline_warns() -> None:
    with pytest.warns(UserWarning, match=r"one stage, for there is one device: give Trainer\(devices=N\)"):
        pl.Trainer(accelerator="cpu", strategy="pipeline", logger=False)


def test_asking_too_early_is_an_error() -> None:
    strategy = PipelineStrategy(stages=2)
    for ask in (lambda: strategy.stage_index(0), strategy.describe, lambda: strategy.device_mesh):
        with pytest.raises(PipelineError):
            ask()
