"""`lightning-pipeline plan` and `PipelineStrategy.plan`, in this process."""

import csv
import io
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import yaml
from torch import nn

from lightning_pipeline import PipelineStrategy
from lightning_pipeline.__main__ import main
from lightning_pipeline.commands.batch_spec import made_up_batch
from lightning_pipeline.commands.progress import Progress
from lightning_pipeline.errors import ConfigurationError
from lightning_pipeline.forecast import Workload, forecast, sweep
from lightning_pipeline.forecast.machine import Assumptions
from lightning_pipeline.forecast.machine import link as machine_link
from lightning_pipeline.forecast.workload import unit_times
from tests.checkpoint_parts import anonymous
from tests.pool import Pool
from tests.unit.planning.command import CLASSES, CONFIG, GPT, in_examples, refusal, run
from tests.unit.planning.test_forecast import WIDTH, Chain

Ranks = Callable[[int], Pool]
__all__ = ["in_examples"]  # a fixture of every test here


def test_a_config_of_lightning_cli_says_everything(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "--config", CONFIG, *CLASSES)
    assumed, _, text = text.partition("\n\n")
    assert assumed.startswith(
        "assumed device: 100 TFLOP/s, memory not limited, links of 25 GB/s: --device b200|"
    )
    assert assumed.endswith("|mi300x, or --measure")
    assert text.startswith("GPT, 701,952 parameters, on 2 ranks; 4 micro-batches of a batch of 16")
    assert "Memory with 1F1B\n" in text
    assert "1F1B, as predicted\nrank 0 | F0 F1" in text


def test_the_command_line_overrides_the_config(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "--config", CONFIG, *CLASSES, "--stages=3", "--model.layers=4", "--schedule=GPipe")
    assert ", on 3 ranks; 4 micro-batches" in text
    assert "blocks.3" in text
    assert "blocks.4" not in text
    assert "Memory with GPipe\n" in text


def test_classes_in_the_config_need_no_classes_beside_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = yaml.safe_load(Path(CONFIG).read_text())
    config["model"] = {"class_path": "gpt.GPT", "init_args": {"layers": 5}}
    config["data"] = {"class_path": "gpt.StandardLibrary", "init_args": {"batch_size": 8}}
    config["trainer"]["strategy"]["init_args"]["schedule"] = {
        "class_path": "lightning_pipeline.schedules.Interleaved1F1B", "init_args": {"stages_per_rank": 2},
    }  # fmt: skip
    config["trainer"]["precision"] = "bf16-mixed"
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    text = run(capsys, "--config", str(tmp_path / "config.yaml"))
    assert "on 2 ranks; 4 micro-batches of a batch of 8" in text
    assert "Memory with Interleaved1F1B\n" in text


def test_a_model_and_a_shape_are_enough(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "plan.svg"
    text = run(
        capsys, "--model", "gpt.GPT", "--model.layers=8", "--batch", "32,65:int64", "--stages", "4",
        "--memory", "0.05", "--svg", str(picture),
    )  # fmt: skip
    assert ", on 4 ranks; 16 micro-batches of a batch of 32" in text
    assert "Memory of a device is 51.2 MiB" in text
    assert picture.read_text().startswith("<svg")
    drawn = re.findall(r"^rank \d \| (.*)$", text, flags=re.MULTILINE)
    assert len(drawn) == 4 and all("F0" in line for line in drawn)  # messages take longer than forwards
    assert "\n(the beginning; --svg FILE writes all of it, .svg has it in Python)\n" in text


@pytest.fixture(params=["new processes", "ranks"])
def ends(request: pytest.FixtureRequest, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two ends of the link that is measured: ranks that are there, as new ones take 5 s of CPU each for torch."""
    if request.param == "ranks":
        monkeypatch.setattr(
            machine_link,
            "_run_both",
            lambda folder, device: ranks(2)(an_end, str(folder), device, group=False),
        )


def an_end(folder: str, device: str) -> None:
    with mock.patch.multiple(machine_link, RUNS=3, _WARM_UP=1):
        machine_link._main(folder, os.environ["RANK"], device)


@pytest.mark.usefixtures("ends")
def test_stages_are_measured_with_weights(capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.multiple(unit_times, WARM_UP=1, PASSES=1, ROUNDS=2):
        text = run(
            capsys, "--model=gpt.GPT", "--model.layers=2", "--model.width=16", "--batch=4,9:int64",
            "--stages=2", "--measure",
        )  # fmt: skip
    link = re.search(
        r"Times of the stages were measured on this machine's CPU\. A message takes ([\d.e+-]+) (us|ms) and its "
        r"bytes at ([\d.e+-]+) GB/s, as measured between two processes here\. Memory",
        " ".join(text.split()),
    )
    assert link is not None, text
    assert "FLOP/s a device" in text and "TFLOP/s" not in text
    assert 1e-5 < float(link[1]) * {"us": 1e-6, "ms": 1e-3}[link[2]] < 0.1
    assert 0.01 < float(link[3]) < 1000


def test_a_sweep_is_a_table_and_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "sweep.csv"
    text = run(
        capsys, "--config", CONFIG, *CLASSES, "--sweep", "--sweep_stages", "[2,4]", "--sweep_microbatches",
        "[4,8]", "--csv", str(path), "--memory=0.015", "--tflops=0.1",
    )  # fmt: skip
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert {(row["ranks"], row["num_microbatches"]) for row in rows} == {
        ("2", "4"), ("2", "8"), ("4", "4"), ("4", "8"),
    }  # fmt: skip
    assert {"1F1B", "ZBH1", "GPipe"} <= {row["schedule"] for row in rows}
    fits = [row["fits"] for row in rows]
    assert fits == sorted(fits, reverse=True)
    assert len(set(fits)) == 2
    steps = [float(row["step_s"]) for row in rows if row["fits"] == "True"]
    assert steps == sorted(steps)
    assert float(rows[0]["samples_per_s"]) == pytest.approx(16 / steps[0])
    assert text.splitlines()[2].split()[:3] == [
        rows[0]["ranks"],
        rows[0]["num_microbatches"],
        rows[0]["schedule"],
    ]
    assert f"... and {len(rows) - 20} more, in {path}\n\nTimes are estimated: a device achieves 0.1" in text


def test_a_sweep_is_also_plain_data(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--sweep_stages=[2]", "--sweep_microbatches=[4]", "--sweep_schedules=[gpipe]", "--json"]
    data = json.loads(run(capsys, *GPT, "--batch=4,9:int64", "--sweep", *options))
    assert [(row["ranks"], row["schedule"]) for row in data["rows"]] == [(2, "GPipe")]
    assert data["basis"].startswith("Times are estimated")


def test_work_that_takes_long_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, told in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr("sys.stderr", stream)
        with Progress(unit="B") as progress:
            progress.tell("verifying", 0, 4_000_000)
            progress.tell("verifying", 4_000_000, 4_000_000)
        assert ("verifying" in stream.getvalue()) == told
    sizes: list[int] = []
    work = Workload(Chain(8), (torch.zeros(8, WIDTH), 0))
    sweep(lambda number: (work, number, 8), [2, 4], [2, 4], Assumptions(),
          progress=lambda what, done, of: sizes.append(done * 10 + of))  # fmt: skip
    assert sizes == [4, 14, 24, 34]
    schedules: list[tuple[str, int, int]] = []
    found = forecast(work, 2, 4, Assumptions(), progress=lambda *done: schedules.append(done))
    count = len(found.predictions)
    assert schedules == [("schedules", done, schedules[0][2]) for done in range(schedules[0][2])]
    assert 5 < count <= len(schedules)


def test_a_sweep_leaves_out_what_the_model_cannot_be_cut_into(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = run(
        capsys, *GPT, "--model.layers=1", "--batch=16,65:int64", "--sweep", "--sweep_stages", "[2,512]",
        "--sweep_microbatches", "[4]", "--sweep_schedules", "[gpipe]", "--tflops=100",
    )  # fmt: skip
    assert len(text.partition("\n\n")[0].splitlines()) == 3


def test_refusals_end_with_a_message() -> None:
    assert refusal("--stages=2").startswith("ConfigurationError: no model: name its class with --model")
    assert "no batch: name a LightningDataModule" in refusal("--model=gpt.GPT", "--stages=2")
    assert "how many stages?" in refusal("--model=gpt.GPT", "--batch=16,65:int64")
    assert "is no shape" in refusal("--model=gpt.GPT", "--batch=16,65:intish", "--stages=2")
    assert "gives arguments of model but no class" in refusal("--config", CONFIG)
    assert "cannot be read" in refusal("--config", "nowhere.yaml")
    assert "precision='8' is unknown" in refusal(
        "--model=gpt.GPT", "--batch=16,65:int64", "--stages=2", "--precision=8"
    )
    assert refusal("--model=gpt.GPT", "--batch=16,65:int64", "--stages=2", "--schedule=Best").startswith(
        "ConfigurationError: these options cannot work: there is no schedule 'Best'"
    )
    assert refusal(*GPT, "--batch=4,5:int64", "--stages=2", "--schedule=ForwardOnly").startswith(
        "ConfigurationError: these options cannot work: schedule='ForwardOnly' would train nothing"
    )
    told = refusal(*GPT, "--batch=16,65", "--stages=2")
    assert (
        "Or a shape or type in --batch 16,65 is not what training_step takes: ids are whole numbers" in told
    )


def test_options_that_cannot_work_are_refused_together_before_any_work(tmp_path: Path) -> None:
    gone = tmp_path / "gone" / "plan.svg"
    told = refusal(
        "--model=gpt.GPT", "--memory=-1", "--tflops=0", "--link=0", "--latency=-1", "--stages=0",
        "--num_microbatches=0", "--stages_per_rank=0", f"--svg={gone}", f"--csv={tmp_path}",
        "--sweep_stages=[0]", "--sweep_microbatches=[]", "--sweep_schedules=[gpipe,foo]",
    )  # fmt: skip
    assert told.splitlines()[0] == "ConfigurationError: these options cannot work: 16 problems"
    for line in (
        "--memory -1 must be above 0 GiB",
        "--tflops 0 must be above 0 TFLOP/s",
        "--link 0 must be above 0 GB/s",
        "--latency -1 must not be below 0 microseconds",
        "--stages 0 must be at least 1",
        "--stages_per_rank 0 must be at least 1",
        "--num_microbatches 0 must be a whole number of at least 1, or auto",
        "--csv needs --sweep",
        "--sweep_stages needs --sweep",
        "--sweep_stages [0] must be whole numbers of at least 1",
        "--sweep_microbatches [] must be whole numbers of at least 1",
        "--sweep_schedules ['foo'] cannot be swept over: known are 1F1B, Auto, DualPipeV, GPipe",
        f"--svg {gone} cannot be written: there is no folder {gone.parent}",
        f"--csv {tmp_path} is a folder: name a file in it",
    ):
        assert f"\n  - {line}" in told
    assert "--svg has no picture in a --sweep" in refusal(*GPT, "--sweep", "--svg=plan.svg")
    told = refusal(*GPT, "--sweep", "--schedule=ZBH1", "--num_microbatches", "4", "--tokens=1e9")
    assert "--num_microbatches is one, and a --sweep tries several: --sweep_microbatches names them" in told
    assert "--schedule is one, and a --sweep tries several: --sweep_schedules names them" in told
    assert "--tokens has no days in a --sweep" in told


def test_the_schedule_asked_for_is_said_not_to_fit_and_numbers_have_units(
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = ["--model.layers=2", "--model.width=16", "--batch=8,9:int64", "--num_microbatches=4"]
    text = run(capsys, *GPT, *small, "--stages=2", "--schedule=GPipe", "--memory=0.00022")
    assert "Memory with GPipe, which does not fit\n" in text
    assert "GPipe does not fit in 230.7 KiB: it needs " in text
    assert ". Of what fits, " in text
    assert " kFLOP" in text and "e-0" not in text
    text = run(capsys, *GPT, *small, "--stages=1")
    assert "One device holds the model (" in text and "). A step takes " in text
    assert "as fast as" not in text


def test_a_sweep_over_stages_needs_no_number_of_stages(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(
        capsys, *GPT, "--model.layers=2", "--batch=4,9:int64", "--sweep", "--sweep_stages=[1,2]",
        "--sweep_microbatches=[4]", "--sweep_schedules=[GPIPE]", "--device=l4",
    )  # fmt: skip
    rows = text.partition("\n\n")[0].splitlines()[2:]
    assert sorted(row.split()[:3] for row in rows) == [["1", "4", "GPipe"], ["2", "4", "GPipe"]]


def test_both_help_texts_are_readable(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, expected in ((["--help"], "plan"), (["plan", "--help"], "--sweep_microbatches")):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 0
        assert expected in capsys.readouterr().out


# ---- PipelineStrategy.plan


class Whole(pl.LightningModule):
    """Logs, and uses what a Trainer would set."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        hidden = batch["x"].to(self.device)
        for layer in self.layers:
            hidden = layer(hidden)
        loss = nn.functional.cross_entropy(hidden, batch["y"])
        self.log("loss", loss)
        self.log_dict({"epoch": float(self.current_epoch), "item": loss.item()})
        return loss


class Late(Whole):
    """Makes its layers in `configure_model`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = None

    def configure_model(self) -> None:
        if self.layers is None:
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))


BATCH = {"x": torch.randn(8, 8), "y": torch.zeros(8, dtype=torch.long)}


@pytest.mark.parametrize("make", [Whole, Late])
def test_the_strategy_plans_without_trainer_and_processes(make: Any) -> None:
    module = make()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    found = PipelineStrategy(2, schedule="ZBH1").plan(module, BATCH)
    assert str(found).startswith(
        f"{make.__name__}, 288 parameters, on 2 ranks; 8 micro-batches of a batch of 8"
    )
    assert found.chosen.name == "ZBH1"
    assert module.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert not torch.distributed.is_initialized()
    assert "RANK" not in os.environ


def test_a_module_on_the_meta_device_gets_the_same_plan() -> None:
    with torch.device("meta"):
        meta = Whole()
    strategy = PipelineStrategy(2)
    assert str(strategy.plan(meta, BATCH)) == str(strategy.plan(Whole(), BATCH))
    with pytest.raises(ConfigurationError, match="stages without weights cannot be measured"):
        strategy.plan(meta, BATCH, measure=True)


def test_the_strategy_takes_assumptions_and_precision() -> None:
    strategy = PipelineStrategy(2, num_microbatches=2)
    half = strategy.plan(Whole(), BATCH, precision="bf16-true", assumptions=Assumptions(memory=1e3))
    whole = strategy.plan(Whole(), BATCH, assumptions=Assumptions(memory=1e3))
    assert half.chosen.memory[0].parameters * 2 == whole.chosen.memory[0].parameters == 2 * 4 * 72
    assert "No schedule fits in 1000 B" in whole.verdict


def test_all_devices_are_unknown_without_a_trainer() -> None:
    with pytest.raises(ConfigurationError, match=r"say how many, such as PipelineStrategy\(stages=4\)"):
        PipelineStrategy("auto").plan(Whole(), BATCH)
    with pytest.raises(ConfigurationError, match="LightningModule has no training_step"):
        PipelineStrategy(2).plan(pl.LightningModule(), BATCH)


class Broken(Late):
    """Asks its Trainer while it is configured."""

    def configure_model(self) -> None:
        self.trainer.max_epochs  # noqa: B018  # asking is what fails


def test_a_configure_model_that_needs_a_trainer_is_named() -> None:
    with pytest.raises(ConfigurationError, match="configure_model of Broken fails without a Trainer"):
        PipelineStrategy(2).plan(Broken(), BATCH)


def test_shapes_become_batches() -> None:
    batch = made_up_batch({"x": "4, 8", "y": ["4:int64", "4,2:bool"]})
    assert batch["x"].shape == (4, 8)
    assert [part.dtype for part in batch["y"]] == [torch.int64, torch.bool]
    for wrong in ("", "4;8", "4:save", None):
        with pytest.raises(ConfigurationError, match="is no shape"):
            made_up_batch(wrong)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--model", "gpt.GTP"], "--model: gpt.GTP: module 'gpt' has no attribute 'GTP'; did you mean GPT?"),
        (
            ["--model", "gpt.GPT", "--model.layer", "3"],
            "Option 'layer' is not accepted; did you mean layers?",
        ),
        (
            ["--model", "gpt.GPT", "--model.layers", "six"],
            "--model.layers: gpt.GPT: Expected a int; Got value: six",
        ),
        (["--model", "gpt.GPT", "--stages", "two"], "--stages: Expected a int; Got value: two"),
        (["--modle", "gpt.GPT"], "--modle gpt.GPT; did you mean --model?"),
    ],
)
def test_typos_are_told_in_a_line_or_two(arguments: list[str], told: str) -> None:
    said = refusal(*arguments, "--batch", "16,65:int64")
    assert told in said
    assert len(said.splitlines()) <= 2 and len(said) < 200


BROKEN = {
    "bytes": b"\xff\xfe\x00\x80",
    "no yaml": b"model: [\n",
    "no section": b"model: gpt\ntrainer: 3\n",
    "no class": b"model: {class_path: gpt.GTP}\n",
    "a number for a class": b"model: {class_path: 3}\n",
    "a word for a number": b"trainer: {strategy: {class_path: PipelineStrategy, init_args: {stages: two}}}\n",
    "no names": b"trainer: {strategy: {class_path: PipelineStrategy, init_args: [1]}}\n",
    "nodes": b"trainer: {devices: 2, num_nodes: x, strategy: PipelineStrategy}\n",
}
TOLD = {
    "bytes": "cannot be read: ",
    "no yaml": "cannot be read: line 2, column 1: ",
    "no section": "trainer is 3, not a section of arguments",
    "no class": "module 'gpt' has no attribute 'GTP'; did you mean GPT?",
    "a number for a class": "model is {'class_path': 3}, which names no class",
    "a word for a number": "stages is 'two', which is no whole number",
    "no names": "the strategy's init_args are [1], not by name",
    "nodes": "no model: ",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_config_that_is_none_is_refused_in_a_line(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(BROKEN[kind])
    said = refusal("--config", str(path))
    assert TOLD[kind] in said
    assert len(said.splitlines()) == 1


def test_an_option_without_a_value_and_a_command_of_checkpoints_are_told_in_a_line() -> None:
    assert refusal("--model") == "ConfigurationError: argument --model: expected one argument"
    with pytest.raises(SystemExit, match="there is no command 'verfy', .*; did you mean checkpoint verify"):
        main(["verfy", "folder"])


class SaysMuch(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        raise RuntimeError("no file\n" * 100)


def test_what_the_users_code_says_in_many_lines_is_told_in_one() -> None:
    said = refusal("--model", f"{__name__}.SaysMuch", "--batch", "8,4", "--stages", "2")
    assert "SaysMuch cannot be built: RuntimeError: no file no file" in said
    assert len(said.splitlines()) == 1 and len(said) < 450


class Large(Whole):
    """7 billion parameters, initialised by rejection."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = None

    def configure_model(self) -> None:
        if self.layers is None:
            rates = [0.1 * depth / 32 for depth in range(32)]
            layers = [
                nn.Sequential(nn.Linear(4096, 26624), nn.Linear(26624, 4096), nn.Dropout(r)) for r in rates
            ]
            for layer in layers:
                nn.init.trunc_normal_(layer[0].weight)  # type: ignore[arg-type]
            self.layers = nn.ModuleList(layers)


def test_a_model_of_7_billion_parameters_is_planned_without_weights() -> None:
    batch = {"x": torch.randn(8, 4096), "y": torch.zeros(8, dtype=torch.long)}
    module, before = Large(), anonymous()
    states = torch.get_rng_state()
    found = PipelineStrategy(8, num_microbatches=8).plan(module, batch)
    assert str(found).startswith("Large, 6,980,")
    table = PipelineStrategy(8).describe(module, batch)
    assert [len(row.units) for row in table.rows] == [4] * 8
    assert sum(row.num_parameters for row in table.rows) == 6_980_304_896
    assert anonymous() - before < 1 << 29
    assert torch.equal(torch.get_rng_state(), states)
