"""A search over stages, replicas and micro-batches finds what single predictions find."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_pipeline.errors import ConfigurationError
from lightning_pipeline.forecast import Assumptions, ScaledWorkload, Search, Workload, search
from lightning_pipeline.forecast.predict import predict
from tests.unit.planning.command import GPT, in_examples, refusal, run
from tests.unit.planning.test_forecast import WIDTH, Chain

__all__ = ["in_examples"]


def workload(samples: int) -> Workload:
    return Workload(Chain(8), (torch.zeros(samples, WIDTH), 0))


def found(devices: int = 8, batch: int = 32, **assumptions: Any) -> Search:
    known: dict[int, Workload] = {}
    return search(
        lambda samples: known.setdefault(samples, workload(samples)), devices, batch,
        Assumptions(flops=1e9, latency=1e-7, link_bytes=1e9, **assumptions),
    )  # fmt: skip


@pytest.fixture(scope="module")
def result() -> Search:
    return found()


def test_the_best_way_is_given_for_each_number_of_devices(result: Search) -> None:
    assert [row.devices for row in result.best] == [1, 2, 4, 8]
    for best in result.best:
        assert best.devices == best.stages * best.replicas
        assert best.stages == 1 or best.replicas * best.microbatches * best.samples == 32
        assert best.step_s == min(row.step_s for row in result.rows if row.devices == best.devices)


def test_rows_are_what_a_prediction_of_the_same_sizes_gives(result: Search) -> None:
    row = next(row for row in result.rows if (row.stages, row.replicas, row.samples) == (4, 2, 2))
    assumptions = Assumptions(flops=1e9, latency=1e-7, link_bytes=1e9)
    predictions = predict(workload(2), 4, 8, assumptions, replicas=2)
    same = next(
        one for one in predictions if (one.name, one.stages_per_rank) == (row.schedule, row.stages_per_rank)
    )
    assert (row.step_s, row.peak_bytes) == (same.step, same.peak)
    most = max(rank.gradients for rank in same.memory)
    assert same.step - same.simulation.makespan == pytest.approx(2 * most / 2 / 1e9)


def test_no_way_of_the_line_is_both_slower_and_larger_than_another(result: Search) -> None:
    line = result.pareto
    assert len(line) > 1
    assert all(row.devices == 8 for row in line)
    assert [row.peak_bytes for row in line] == sorted(row.peak_bytes for row in line)
    assert [row.step_s for row in line] == sorted((row.step_s for row in line), reverse=True)


def test_a_limit_of_memory_decides(result: Search) -> None:
    limit = 0.5 * max(row.peak_bytes for row in result.rows)
    tight = found(memory=limit)
    assert all(row.fits == (row.peak_bytes <= limit) for row in tight.rows)
    assert tight.best[-1].fits
    assert tight.best[-1].step_s >= result.best[-1].step_s


def test_fsdp_stands_beside(result: Search) -> None:
    assert [row.devices for row in result.rivals] == [2, 4, 8]
    assert "Beside it FSDP" in str(result)


def test_a_batch_that_cannot_be_shared_out_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="16 devices cannot share a batch of 1 samples"):
        found(devices=16, batch=1)


def test_other_numbers_of_samples_are_read_off_two_traces() -> None:
    module = Chain(8)
    made = {n: Workload(module, (torch.zeros(n, WIDTH), 0)) for n in (1, 2, 8)}
    scaled = ScaledWorkload(made[1], made[2], (1, 2), 8)
    assert scaled.held(4, range(4)) == made[8].held(4, range(4))
    for one, two in zip(scaled.stages(4), made[8].stages(4), strict=True):
        assert (one.flops, one.activation_bytes, one.message_bytes) == (
            two.flops, two.activation_bytes, two.message_bytes,
        )  # fmt: skip
    first, second = scaled.times(4, Assumptions()), made[8].times(4, Assumptions())
    assert first.forward == pytest.approx(second.forward)
    assert first.backward == pytest.approx(second.backward)


def test_a_search_is_also_plain_data(result: Search) -> None:
    data = json.loads(json.dumps(result.to_dict(tokens=1e9)))
    assert [row["devices"] for row in data["best"]] == [1, 2, 4, 8]
    assert [row["days"] for row in data["best"]] == [None] * 4  # the batch has no tokens


def test_a_row_says_what_to_write(result: Search) -> None:
    row = next(row for row in result.rows if (row.stages, row.replicas, row.samples) == (4, 2, 2))
    inter = replace(row, schedule="Interleaved1F1B", stages_per_rank=2)
    told = '"Interleaved1F1B"); the loader of each replica gives 16 samples at once'
    assert inter.settings == f"strategy=PipelineStrategy(stages=4, num_microbatches=8, schedule={told}"
    assert "stages_per_rank=4);" in replace(inter, stages_per_rank=4).settings
    alone = replace(row, devices=1, stages=1, replicas=1, schedule="one device", microbatches=16)
    assert alone.settings == "accumulate_grad_batches=16; the loader gives 2 samples at once"
    ddp = replace(alone, devices=2, replicas=2, schedule="DDP", microbatches=1)
    assert ddp.settings == 'strategy="ddp"; the loader of each replica gives 2 samples at once'
    assert f"\n\nThe last row: {result.best[-1].settings}\n\n" in str(result)
    assert result.to_dict()["best"][-1]["settings"] == result.best[-1].settings


SMALL = [*GPT, "--batch", "16,65:int64", "--devices", "4"]


def test_the_command_searches_and_writes_a_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    text = run(capsys, *SMALL, "--device", "a100", "--tokens", "1e9", "--csv", str(path))
    assert text.startswith("Batches of 16 samples, the best way for each number of devices\ndevices  stages")
    assert "On 4 devices: less memory against less time" in text
    rows = list(csv.DictReader(path.open()))
    assert {row["devices"] for row in rows} == {"1", "2", "4"}


def test_what_a_search_does_not_use_is_refused() -> None:
    said = refusal(*SMALL, "--stages", "2", "--svg", "x.svg")
    assert "--svg has no place in a search over --devices" in said
    assert "--stages has no place in a search over --devices" in said
