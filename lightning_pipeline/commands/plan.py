"""`lightning-pipeline plan`: what a run would need and how fast it would be, without running it."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, DefaultHelpFormatter, Namespace
from lightning.pytorch import LightningDataModule, LightningModule
from typing_extensions import override

from lightning_pipeline.commands.batch_spec import made_up_batch
from lightning_pipeline.commands.config import defaults_from
from lightning_pipeline.commands.inputs import first_batch, made_data, made_module
from lightning_pipeline.commands.options import check_options, write_picture
from lightning_pipeline.commands.progress import Progress
from lightning_pipeline.commands.refusals import BriefParser, brief
from lightning_pipeline.errors import ConfigurationError, PartitionError, SplitError
from lightning_pipeline.forecast import DEVICES, Assumptions, Workload, sweep
from lightning_pipeline.model.cut import size_text
from lightning_pipeline.run import PRECISIONS, ForecastInput
from lightning_pipeline.schedules import Schedule, get_schedule
from lightning_pipeline.settings import Settings, read_settings

_GIB = 2.0**30
_DESCRIPTION = """\
Predict the cut, the memory of each stage, and step and bubble of every schedule, best first, for a
LightningModule that is neither trained nor given weights. Its batch comes from a LightningDataModule
(--data), from shapes (--batch), or from the module's own train_dataloader.

  lightning-pipeline plan --model my.GPT --model.layers 32 --batch 64,2049:int64 --stages 8 --memory 80
  lightning-pipeline plan --config config.yaml              of a LightningCLI: model, data, trainer.strategy
  lightning-pipeline plan --config config.yaml --sweep --csv sweep.csv
  lightning-pipeline plan --model my.GPT --batch 512,4097:int64 --devices 64 --device h100 --tokens 1e12
"""


class _Help(argparse.RawDescriptionHelpFormatter, DefaultHelpFormatter):
    """Keeps the lines of the description, and adds types and defaults."""


def plan(arguments: Sequence[str] | None = None) -> None:
    """Predict memory, step and bubble of a run without starting it.

    Args:
        arguments: Default: the process's own, after `plan`.

    Raises:
        PipelineError: What was asked for cannot be.
    """
    arguments = list(sys.argv[2:] if arguments is None else arguments)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python script.py` has it; an installed command has not
    parser = _parser()
    _take_config(parser, arguments)
    given = parser.parse_args(arguments)
    check_options(given, arguments)
    try:
        with Progress() as progress:
            text = _answer(given, _prospect(parser, given, progress), progress)
    except PartitionError:
        raise
    except SplitError as error:
        if given.batch is None:
            raise
        raise SplitError(
            f"{error}\nOr a shape or type in --batch {given.batch} is not what training_step takes: ids are "
            "whole numbers, such as 16,65:int64, and without a type numbers are float32"
        ) from error
    if not given.json and given.device is None and given.tflops is None and not given.measure:
        print(f"{_assumed(_assumptions(given, None), may_measure=given.devices is None)}\n")
    print(text)


def _assumed(known: Assumptions, *, may_measure: bool) -> str:
    """What a device is taken for where nobody has said it."""
    memory = "memory not limited" if known.memory is None else f"memory of {size_text(known.memory)}"
    measured = ", or --measure" if may_measure else ""
    return (
        f"assumed device: 100 TFLOP/s, {memory}, links of {known.link_bytes / 1e9:g} GB/s: "
        f"--device {'|'.join(DEVICES)}{measured}"
    )


class _First(argparse.ArgumentParser):
    """Refuses as the parser of all options does."""

    @override
    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(message)


def _take_config(parser: ArgumentParser, arguments: list[str]) -> None:
    """What a config says are the defaults of the command's own options."""
    first = _First(add_help=False, allow_abbrev=False)
    for name in ("--config", "--model", "--data"):
        first.add_argument(name)
    known, _ = first.parse_known_args(arguments)
    if known.config is None:
        return
    found = defaults_from(known.config, known.model, known.data)
    try:
        parser.set_defaults(found)
    except (AttributeError, ImportError, TypeError, ValueError) as error:  # of a class that is not there
        raise ConfigurationError(f"--config {known.config}: {brief(str(error), ())}") from error


def _parser() -> ArgumentParser:
    parser = BriefParser(
        prog="lightning-pipeline plan",
        description=_DESCRIPTION,
        formatter_class=_Help,
    )
    parser.add_argument("--config", help="LightningCLI config to take model, data and trainer.strategy from.")
    for base, name, what in (
        (LightningModule, "model", "The module: class path; its arguments follow as --model.NAME VALUE."),
        (LightningDataModule, "data", "Where the first batch comes from: class path and arguments."),
    ):
        parser.add_subclass_arguments(base, name, as_group=False, fail_untyped=False, help=what)
    parser.add_argument(
        "--batch", type=dict | list | str,
        help="The batch by shapes, e.g. 64,2049:int64 or '{input_ids: \"64,2048:int64\"}'.",
    )  # fmt: skip
    _add_pipeline(parser)
    _add_machine(parser)
    _add_output(parser)
    return parser


def _add_pipeline(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("the pipeline, as of PipelineStrategy")
    group.add_argument("--stages", type=int, help="Ranks to spread the model over.")
    group.add_argument("--num_microbatches", type=int | str, default="auto", help="Parts of a batch.")
    group.add_argument("--schedule", type=dict | str, help="The one to show. Default: the best.")
    group.add_argument("--stages_per_rank", type=int, default=1, help="Stages per rank of --schedule.")
    group.add_argument("--partition", type=list[str] | str, default="auto", help="Where to cut.")
    group.add_argument("--units", type=list[str], help="Name patterns of modules to keep whole.")
    group.add_argument("--precision", default="32-true", help=f"One of {', '.join(PRECISIONS)}.")


def _add_machine(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("the machine")
    group.add_argument(
        "--device", help=f"Takes all below from a data sheet: {', '.join(DEVICES)}. They win where given."
    )
    group.add_argument("--memory", type=float, help="GiB of a device. Default: no limit.")
    group.add_argument("--tflops", type=float, help="TFLOP/s that a device achieves. Default: 100.")
    group.add_argument(
        "--bandwidth", type=float,
        help="GB/s that its memory achieves. Default: a byte in the time of 16 operations.",
    )  # fmt: skip
    group.add_argument(
        "--link", type=float, help="GB/s between devices of a node. Default: 25; --measure measures it."
    )
    group.add_argument("--node", type=int, help="Devices of a node. Default: all are in one.")
    group.add_argument("--node_link", type=float, help="GB/s of a device to another node. Default: --link.")
    group.add_argument(
        "--latency", type=float, help="Microseconds of a message. Default: 20; --measure measures it."
    )
    group.add_argument(
        "--optimizer_copies", type=float,
        help="Numbers kept per trained parameter: 2 for Adam, 1 for momentum, 0 for plain SGD. Default: "
        "those of the module's own optimizer, or 2.",
    )  # fmt: skip
    group.add_argument(
        "--measure", action="store_true",
        help="Build the model with weights and time each stage here, and messages between two processes.",
    )  # fmt: skip


def _add_output(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--tokens", type=float, help="To train on, such as 1e12: says how many days it takes.")
    group.add_argument("--json", action="store_true", help="Print plain data instead of the report.")
    group.add_argument(
        "--devices", type=int,
        help="Search for the best use of so many and fewer: stages, replicas, micro-batches, schedule; the "
        "batch is then that of all replicas together.",
    )  # fmt: skip
    group.add_argument("--svg", help="File for the picture of the schedule shown: .svg, or .png.")
    group.add_argument("--png", help="The same as PNG, which needs matplotlib.")
    group.add_argument(
        "--sweep", action="store_true", help="A table over stages, micro-batches and schedules instead."
    )
    group.add_argument("--sweep_stages", type=list[int], help="Default: half, once and twice --stages.")
    group.add_argument(
        "--sweep_microbatches", type=list[int], help="Default: those that divide the batch, up to 8 a rank."
    )
    group.add_argument("--sweep_schedules", type=list[str], help="Default: all.")
    group.add_argument("--csv", help="File for the whole table of --sweep or --devices.")


def _prospect(parser: ArgumentParser, given: Namespace, progress: Progress) -> ForecastInput:
    if given.model is None:
        raise ConfigurationError(
            "no model: name its class with --model my_package.MyModule, or --config FILE"
        )
    name = _class_name(given.model)
    module = made_module(lambda: _made(parser, given, "model"), name, weights=given.measure)
    batch = _batch(parser, given, module)
    return ForecastInput(
        module, batch, precision=given.precision, measure=given.measure, progress=progress.tell
    )


def _class_name(named: Any) -> str:
    return str(named["class_path"]).rpartition(".")[2]


def _made(parser: ArgumentParser, given: Namespace, name: str) -> Any:
    make = getattr(parser, "instantiate", None) or parser.instantiate_classes  # the former since 4.49
    alone: Any = Namespace
    return make(alone(**{name: given[name]}))[name]


def _batch(parser: ArgumentParser, given: Namespace, module: LightningModule) -> Any:
    if given.batch is not None:
        return made_up_batch(given.batch)
    if given.data is None:
        return first_batch(module)
    return first_batch(made_data(lambda: _made(parser, given, "data"), _class_name(given.data)))


def _settings(given: Namespace) -> Settings:
    stages = given.stages
    if stages is None and given.sweep_stages:
        stages = max(given.sweep_stages)
    if stages is None:
        raise ConfigurationError("how many stages? --stages 8, or stages of PipelineStrategy in the --config")
    return read_settings(
        stages=stages,
        num_microbatches=given.num_microbatches,
        schedule=_schedule(given) or "1F1B",
        stages_per_rank=given.stages_per_rank,
        partition=given.partition,
        units=given.units,
        data_parallel_size=1,
        title="these options cannot work",
    )


def _schedule(given: Namespace) -> str | Schedule | None:
    named: Any = given.schedule
    if isinstance(named, dict):
        return get_schedule(named["class_path"], **named.get("init_args", {}))
    return None if named is None else str(named)


def _assumptions(given: Namespace, prospect: ForecastInput | None) -> Assumptions:
    scales = (
        ("link", "link_bytes", 1e9), ("latency", "latency", 1e-6), ("tflops", "flops", 1e12),
        ("bandwidth", "bandwidth", 1e9), ("memory", "memory", _GIB), ("node", "node_size", 1),
        ("node_link", "node_link_bytes", 1e9), ("optimizer_copies", "optimizer_copies", 1.0),
    )  # fmt: skip
    said = {field: given[name] * scale for name, field, scale in scales if given[name] is not None}
    if given.device is not None:
        return Assumptions.of_device(given.device, **said)
    asks = given.link is None or given.latency is None
    known = prospect.assumptions if prospect is not None and asks else Assumptions()
    return replace(known, **said, link_measured=known.link_measured and given.link is None)


def _answer(given: Namespace, prospect: ForecastInput, progress: Progress) -> str:
    if given.devices is not None:
        return _search(given, prospect)
    return _sweep(given, prospect, progress) if given.sweep else _forecast(given, prospect)


def _search(given: Namespace, prospect: ForecastInput) -> str:
    settings = read_settings(
        stages=1, num_microbatches="auto", schedule="1F1B", stages_per_rank=1, partition=given.partition,
        units=given.units, data_parallel_size=1, title="these options cannot work",
    )  # fmt: skip
    found = prospect.search(settings, given.devices, _assumptions(given, prospect))
    if given.csv is not None:
        found.to_csv(given.csv)
    return json.dumps(found.to_dict(given.tokens), indent=2) if given.json else found.text(given.tokens)


def _forecast(given: Namespace, prospect: ForecastInput) -> str:
    settings = _settings(given)
    own = settings.schedule if given.schedule is not None else None
    found = prospect.forecast(settings, _assumptions(given, prospect), own=own)
    for path in (given.svg, given.png):
        if path is not None:
            write_picture(found.picture, Path(path))
    return json.dumps(found.to_dict(given.tokens), indent=2) if given.json else found.text(given.tokens)


def _sweep(given: Namespace, prospect: ForecastInput, progress: Progress) -> str:
    settings = _settings(given)
    stages = int(settings.stages)
    samples = prospect.parts(1).batch_size

    def workload_of(number: int) -> tuple[Workload, int, int | None]:
        parts = prospect.parts(number)
        return prospect.workload(parts, settings), len(parts.args), parts.batch_size

    found = sweep(
        workload_of,
        given.sweep_stages or sorted({max(2, stages // 2), stages, 2 * stages}),
        given.sweep_microbatches or _numbers(samples, stages, settings),
        _assumptions(given, prospect),
        schedules=given.sweep_schedules,
        progress=progress.tell,
    )
    if given.csv is not None:
        found.to_csv(given.csv)
    return json.dumps(found.to_dict(), indent=2) if given.json else found.text(given.csv or "")


def _numbers(samples: int | None, stages: int, settings: Settings) -> list[int]:
    if samples is None:
        return [1 if settings.num_microbatches == "auto" else settings.num_microbatches]
    return [number for number in range(1, min(samples, 8 * stages) + 1) if samples % number == 0]
