"""Every argument, callback, logger, profiler, plugin and precision of a Trainer: what each does over stages.

`python -m tests.matrix` writes the table into docs/lightning.md. tests/ranks/test_lightning_matrix.py runs each
row on one device and on two stages, and fails where the page says something else.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning.pytorch import callbacks as given
from lightning.pytorch.callbacks.spike import SpikeDetection
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO, TorchSyncBatchNorm
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.profilers import (
    AdvancedProfiler,
    PassThroughProfiler,
    PyTorchProfiler,
    SimpleProfiler,
)

PAGE = Path(__file__).resolve().parents[1] / "docs" / "lightning.md"
BEGIN, END = "<!-- matrix: python -m tests.matrix -->", "<!-- end of the matrix -->"
EQUAL = "as on one device"


@dataclass(frozen=True)
class Row:
    """One thing that a Trainer is given.

    Attributes:
        section: Of the table.
        name: As a user writes it.
        options: Makes the Trainer's arguments, given a folder.
        refused: What the refusal says; empty where the run is that of one device.
        note: More on the page.
        tolerance: Of weights and logged values against one device.
        timed: Whether logged values are times, which are not compared.
        evaluated: Whether the run tests and predicts, too.
    """

    section: str
    name: str
    options: Callable[[str], dict[str, Any]]
    refused: str = ""
    note: str = ""
    tolerance: float = 1e-10
    timed: bool = False
    evaluated: bool = False

    @property
    def says(self) -> str:
        """The last column of the page."""
        verdict = f"refused: {self.refused}" if self.refused else EQUAL
        return f"{verdict}; {self.note}" if self.note else verdict


def _plain(section: str, **options: Any) -> list[Row]:
    """A row for each argument by itself."""
    return [Row(section, f"`{n}={_said(v)}`", lambda folder, n=n, v=v: {n: v}) for n, v in options.items()]


def _said(value: Any) -> str:
    return repr(value)


def _callback(name: str, make: Callable[[str], Any], **more: Any) -> Row:
    def options(folder: str) -> dict[str, Any]:
        callback = make(folder)
        saves = isinstance(callback, given.Checkpoint)
        return {"callbacks": [callback], "enable_checkpointing": saves}

    return Row("Callbacks", f"`{name}`", options, **more)


def _with_logger(row: Row) -> Row:
    """The same with a logger, which the callback needs."""
    return Row(
        row.section, row.name, lambda folder: {**row.options(folder), "logger": CSVLogger(folder)},
        row.refused, row.note, row.tolerance, row.timed, row.evaluated,
    )  # fmt: skip


_ARGUMENT, _PRECISION = "Arguments", "Precision"
_LOGGERS, _PROFILERS, _PLUGINS = "Loggers", "Profilers", "Plugins"

ROWS: list[Row] = [
    *_plain(
        _ARGUMENT, max_epochs=1, min_epochs=1, max_steps=4, min_steps=2, limit_train_batches=2,
        limit_val_batches=1, overfit_batches=1, val_check_interval=2, check_val_every_n_epoch=2,
        num_sanity_val_steps=0, log_every_n_steps=2, enable_progress_bar=False, enable_model_summary=False,
        accumulate_grad_batches=2, gradient_clip_val=0.05, deterministic=True, benchmark=True,
        use_distributed_sampler=False, detect_anomaly=True, fast_dev_run=True,
        reload_dataloaders_every_n_epochs=1, sync_batchnorm=True,
    ),
    *(
        Row(_ARGUMENT, f"`{name}=1`", lambda folder, name=name: {name: 1}, evaluated=True)
        for name in ("limit_test_batches", "limit_predict_batches")
    ),
    Row(_ARGUMENT, "`enable_autolog_hparams=False`", lambda folder: {
        "enable_autolog_hparams": False, "logger": CSVLogger(folder)}),
    Row(_ARGUMENT, "`inference_mode=True`", lambda folder: {"inference_mode": True},
        note="over several stages by `torch.no_grad`, which Lightning takes over gloo; over NCCL too"),
    Row(_ARGUMENT, "`barebones=True`", lambda folder: {"barebones": True, "log_every_n_steps": None}),
    Row(_ARGUMENT, "`max_time=timedelta(hours=1)`", lambda folder: {"max_time": timedelta(hours=1)}),
    Row(
        _ARGUMENT, "`gradient_clip_algorithm='value'`",
        lambda folder: {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ),
    Row(_ARGUMENT, "`default_root_dir`, `enable_checkpointing=True`", lambda folder: {
        "default_root_dir": folder, "enable_checkpointing": True, "logger": True}),
    Row(
        _ARGUMENT, "`val_check_interval=timedelta(...)`",
        lambda folder: {"val_check_interval": timedelta(0)},
        note="by the clock of global rank 0",
    ),
    Row(_PRECISION, "`precision='64-true'`, `DoublePrecision`", lambda folder: {"precision": "64-true"}),
    Row(_PRECISION, "`precision='bf16-mixed'`", lambda folder: {"precision": "bf16-mixed"}, tolerance=0.02),
    Row(_PRECISION, "`precision='bf16-true'`, `HalfPrecision`", lambda folder: {"precision": "bf16-true"}, tolerance=0.05),
    Row(_PRECISION, "`precision='16-true'`", lambda folder: {"precision": "16-true"}, tolerance=0.02),
    Row(_PRECISION, "`MixedPrecision('16-mixed', 'cpu')`",
        lambda folder: {"plugins": [MixedPrecision("16-mixed", "cpu")]}, tolerance=0.02,
        note="one scale, and the same steps skipped on all stages"),
    Row(_LOGGERS, "`logger=False`", lambda folder: {"logger": False}),
    Row(_LOGGERS, "`CSVLogger`", lambda folder: {"logger": CSVLogger(folder)}),
    Row(_LOGGERS, "`TensorBoardLogger`", lambda folder: {"logger": TensorBoardLogger(folder)}),
    Row(_LOGGERS, "`TensorBoardLogger(log_graph=True)`",
        lambda folder: {"logger": TensorBoardLogger(folder, log_graph=True)},
        note="but refused where the module has an `example_input_array`"),
    Row(_LOGGERS, "several loggers",
        lambda folder: {"logger": [CSVLogger(folder), TensorBoardLogger(folder)]}),
    Row(_PROFILERS, "`SimpleProfiler`", lambda folder: {"profiler": SimpleProfiler(folder, "simple")}),
    Row(_PROFILERS, "`AdvancedProfiler`", lambda folder: {"profiler": AdvancedProfiler(folder, "advanced")}),
    Row(_PROFILERS, "`PyTorchProfiler`",
        lambda folder: {"profiler": PyTorchProfiler(folder, "torch", export_to_chrome=False)}),
    Row(_PROFILERS, "`PassThroughProfiler`", lambda folder: {"profiler": PassThroughProfiler()}),
    Row(_PLUGINS, "`TorchSyncBatchNorm`",
        lambda folder: {"plugins": [TorchSyncBatchNorm()], "sync_batchnorm": True}),
    Row(_PLUGINS, "`TorchCheckpointIO`, or one of your own", lambda folder: {
        "plugins": [_OwnFiles()], "default_root_dir": folder, "enable_checkpointing": True},
        note="it writes and reads one file; refused with `PipelineStrategy(save_distributed_checkpoint=True)`"),
    Row(_PLUGINS, "`AsyncCheckpointIO`", lambda folder: {
        "plugins": [AsyncCheckpointIO()], "default_root_dir": folder, "enable_checkpointing": True},
        note="it writes one file; `PipelineStrategy(async_save=True)` writes a folder in the background"),
    _callback("ModelCheckpoint", lambda folder: given.ModelCheckpoint(
        folder, monitor="val_loss", save_last=True, save_top_k=1)),
    _callback("ModelCheckpoint(every_n_train_steps=2)", lambda folder: given.ModelCheckpoint(
        folder, every_n_train_steps=2, save_top_k=-1)),
    _callback("OnExceptionCheckpoint", lambda folder: given.OnExceptionCheckpoint(folder),
              note="the file of a run that fails is not written: the other stages are gone"),
    _callback("EarlyStopping", lambda folder: given.EarlyStopping("val_loss", patience=0, min_delta=9.0)),
    _callback("GradientAccumulationScheduler",
              lambda folder: given.GradientAccumulationScheduler({0: 1, 1: 2})),
    _callback("StochasticWeightAveraging",
              lambda folder: given.StochasticWeightAveraging(0.05, swa_epoch_start=1)),
    _callback("WeightAveraging", lambda folder: given.WeightAveraging()),
    _callback("EMAWeightAveraging", lambda folder: given.EMAWeightAveraging()),
    _callback("BackboneFinetuning", lambda folder: _Finetuning(), note="and other `BaseFinetuning`"),
    _callback("LambdaCallback", lambda folder: given.LambdaCallback(on_train_start=print)),
    _callback("Timer", lambda folder: given.Timer("00:01:00:00")),
    _callback("ModelSummary", lambda folder: given.ModelSummary(max_depth=-1),
              note="of the whole model, printed before it is cut"),
    _callback("RichModelSummary", lambda folder: given.RichModelSummary()),
    _callback("TQDMProgressBar", lambda folder: given.TQDMProgressBar(2)),
    _callback("RichProgressBar", lambda folder: given.RichProgressBar()),
    _with_logger(_callback("LearningRateMonitor", lambda folder: given.LearningRateMonitor())),
    _with_logger(_callback("DeviceStatsMonitor", lambda folder: given.DeviceStatsMonitor(cpu_stats=True),
                           timed=True, note="of rank 0")),
    _with_logger(_callback(
        "ThroughputMonitor", lambda folder: given.ThroughputMonitor(lambda batch: len(batch[0]), window_size=2),
        timed=True, note="a batch counts once, not once for each stage")),
    _callback("SpikeDetection", lambda folder: SpikeDetection(exclude_batches_path=folder)),
    _callback("BasePredictionWriter", lambda folder: _Writer(), evaluated=True,
              note="on global rank 0, which has what `predict` returns"),
    _callback("LearningRateFinder", lambda folder: given.LearningRateFinder(num_training_steps=5)),
    _callback("BatchSizeFinder", lambda folder: given.BatchSizeFinder(),
              refused="tries sizes until one rank is out of memory, and the others wait for it; Lightning refuses it "
                      "with its own strategies of several processes (`lightning-pipeline plan` says what a batch needs, "
                      "StageMemoryMonitor what it took)"),
    _callback("ModelPruning", lambda folder: given.ModelPruning("l1_unstructured", amount=0.5),
              refused="gives parameters other names in mid-run, and ranks and checkpoints know them by name"),
]  # fmt: skip


ELSEWHERE = {
    "`accelerator`, `devices`, `num_nodes`, `strategy`": "the pipeline's layout itself: quickstart.md, gpu.md",
    "`model_registry`": "names the place of Lightning's `LitModelCheckpoint`, whose package is not installed here",
    "`LitLogger`, `CometLogger`, `MLFlowLogger`, `WandbLogger`": "run by Lightning's own tests on two stages, with "
    "mocks of their services (benchmarks.md); `log_model` warns where a checkpoint is a folder",
    "`BitsandbytesPrecision`, `TransformerEnginePrecision`": "replace layers by those of packages that need a GPU",
    "`DeepSpeedPrecision`, `FSDPPrecision`": "of other strategies",
    "`XLAPrecision`, `XLACheckpointIO`, `XLAProfiler`": "of TPUs, which the strategy does not run on",
}  # fmt: skip
"""What no row is about, and why."""


class _Writer(given.BasePredictionWriter):
    """Adds up what it is given."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")

    def write_on_batch_end(self, trainer: Any, pl_module: Any, prediction: Any, *rest: Any) -> None:
        trainer.written = [*getattr(trainer, "written", []), prediction]

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        trainer.written = [trainer.written, predictions, batch_indices]


class _OwnFiles(TorchCheckpointIO):
    """One of the user's own."""


class _Finetuning(given.BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer)


def table() -> str:
    """The page's part."""
    lines: list[str] = []
    for section in dict.fromkeys(row.section for row in ROWS):
        lines += ["", f"## {section}", "", "| given | over stages |", "|---|---|"]
        lines += [f"| {row.name} | {row.says} |" for row in ROWS if row.section == section]
    lines += ["", "## Not in these tables", ""]
    lines += [f"* {names}: {why}." for names, why in ELSEWHERE.items()]
    return "\n".join([BEGIN, *lines, "", END])


def on_the_page() -> str:
    """What stands there now."""
    text = PAGE.read_text()
    return text[text.index(BEGIN) : text.index(END) + len(END)]


if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text().replace(on_the_page(), table()))
