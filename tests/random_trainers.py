"""Random Trainers: flags, callbacks and data drawn from a seed, to run on one device and over stages.

`tests/ranks/test_random_trainers.py` runs a few, `benchmarks/random_trainers.py` as many as asked.
"""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import callbacks as given
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_pipeline.errors import PipelineError
from tests.ranks.lightning_cases import Regression, assert_same, loader, trainer, weights

_HOOKS = (
    "on_fit_start", "on_sanity_check_start", "on_sanity_check_end", "on_train_start", "on_train_epoch_start",
    "on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward",
    "on_before_optimizer_step", "on_train_batch_end", "on_validation_start", "on_validation_epoch_start",
    "on_validation_batch_end", "on_validation_epoch_end", "on_validation_end", "on_train_epoch_end",
    "on_save_checkpoint", "on_train_end", "on_fit_end",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """What a run is given.

    Attributes:
        seed: It was drawn from.
        options: Of the Trainer.
        callbacks: Names and arguments.
        scheduler: "none", or a kind of learning-rate scheduler.
        train: Samples and batch size, and whether they are shuffled.
        validated: Samples of each loader for validation.
        resumes: Whether a second Trainer goes on from the last checkpoint.
    """

    seed: int
    options: dict[str, Any]
    callbacks: tuple[tuple[str, dict[str, Any]], ...]
    scheduler: str
    train: tuple[int, int, bool]
    validated: tuple[int, ...]
    resumes: bool


def drawn(seed: int) -> Case:
    """A case; the same for the same seed."""
    draw = random.Random(seed)
    options: dict[str, Any] = {"max_epochs": draw.choice([1, 2, 3])}

    def maybe(name: str, *values: Any, chance: float = 0.3) -> None:
        if draw.random() < chance:
            options[name] = draw.choice(values)

    maybe("accumulate_grad_batches", 2, 3)
    maybe("gradient_clip_val", 0.02, 0.2)
    if "gradient_clip_val" in options:
        maybe("gradient_clip_algorithm", "value", "norm", chance=0.5)
    maybe("limit_train_batches", 2, 0.5, 3, chance=0.25)
    maybe("limit_val_batches", 0, 1, 0.5, chance=0.25)
    maybe("val_check_interval", 0.5, 1, 2, chance=0.35)
    if draw.random() < 0.15:
        options |= {"val_check_interval": draw.choice([2, 3, 4]), "check_val_every_n_epoch": None}
    else:
        maybe("check_val_every_n_epoch", 2, chance=0.2)
    maybe("num_sanity_val_steps", 0, -1, 1, chance=0.5)
    maybe("overfit_batches", 1, 2, 0.5, chance=0.12)
    maybe("reload_dataloaders_every_n_epochs", 1, 2, chance=0.25)
    maybe("max_steps", 2, 5, 7, chance=0.2)
    maybe("min_epochs", 1, 2, chance=0.15)
    maybe("min_steps", 3, 6, chance=0.15)
    maybe("max_time", "00:01:00:00", {"hours": 1}, chance=0.15)
    maybe("precision", "64-true", chance=0.15)
    maybe("log_every_n_steps", 2, 50, chance=0.3)
    maybe("fast_dev_run", True, 2, chance=0.08)
    maybe("enable_progress_bar", False, chance=0.3)
    maybe("inference_mode", True, chance=0.3)
    maybe("detect_anomaly", True, chance=0.1)
    maybe("deterministic", True, chance=0.1)
    maybe("use_distributed_sampler", False, chance=0.1)
    options["csv"] = draw.random() < 0.6
    callbacks: list[tuple[str, dict[str, Any]]] = []

    def add(chance: float, name: str, **arguments: Any) -> None:
        if draw.random() < chance:
            callbacks.append((name, arguments))

    add(
        0.3, "EarlyStopping", monitor=draw.choice(["val_loss", "train_loss", "train_loss_epoch"]),
        patience=draw.choice([0, 1]), min_delta=draw.choice([0.0, 0.1, 9.0]), strict=False,
        check_on_train_epoch_end=draw.choice([None, True, False]),
    )  # fmt: skip
    add(
        0.3, "ModelCheckpoint", monitor=draw.choice([None, "train_loss"]),
        save_top_k=draw.choice([1, 2, -1]), save_last=draw.choice([None, True]),
        every_n_train_steps=draw.choice([1, 2, 3]),
    )  # fmt: skip
    add(
        0.3, "ModelCheckpoint", monitor=draw.choice([None, "train_loss_epoch"]), save_last=True,
        save_top_k=1, every_n_epochs=draw.choice([1, 2]), filename="{epoch}-{step}-{train_loss_epoch:.3f}",
        save_on_train_epoch_end=draw.choice([None, True, False]),
        save_weights_only=draw.choice([False, False, True]),
    )  # fmt: skip
    add(0.15, "StochasticWeightAveraging", swa_lrs=0.05, swa_epoch_start=draw.choice([0.5, 1]))
    add(0.15, draw.choice(["EMAWeightAveraging", "WeightAveraging"]))
    if options["csv"] and not options.get("fast_dev_run"):
        add(0.3, "LearningRateMonitor", logging_interval=draw.choice([None, "step", "epoch"]))
    if "accumulate_grad_batches" not in options:
        add(0.15, "GradientAccumulationScheduler", scheduling={0: 1, 1: 2})
    add(0.15, "Timer", duration="00:01:00:00")
    add(0.15, draw.choice(["RichProgressBar", "TQDMProgressBar"]))
    return Case(
        seed=seed,
        options=options,
        callbacks=tuple(callbacks),
        scheduler=draw.choice(["none", "none", "step", "epoch", "plateau", "frequency", "one cycle"]),
        train=(draw.choice([7, 8, 12, 14]), draw.choice([2, 4]), draw.random() < 0.5),
        validated=draw.choice([(6,), (6,), (4, 6)]),
        resumes=draw.random() < 0.3,
    )


class Drawn(Regression):
    """Its loaders are its own, so that they can be loaded again.

    Args:
        case: Says how.
        resumed: Whether the run goes on from a checkpoint. It shuffles no more then: ours draws the order that
            the run would have drawn which was saved, and Lightning's another one.
    """

    def __init__(self, case: Case, resumed: bool) -> None:
        super().__init__()
        self.case, self.resumed = case, resumed

    def train_dataloader(self) -> Any:
        samples, size, shuffled = self.case.train
        return loader(samples, size, shuffle=shuffled and not self.resumed)

    def val_dataloader(self) -> Any:
        return [loader(samples, 3, seed=4 + index) for index, samples in enumerate(self.case.validated)]

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:  # type: ignore[override]
        loss = self.loss(batch)
        if not dataloader_idx:
            self.log("val_loss", loss, add_dataloader_idx=False, prog_bar=True)
        self.log("val_each", loss, on_step=True, on_epoch=True)
        self.log("val_max", loss.abs().max(), reduce_fx="max")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        kind, schedulers = self.case.scheduler, torch.optim.lr_scheduler
        if kind == "none":
            return optimizer
        config: dict[str, Any] = {"interval": "step" if kind in ("step", "one cycle") else "epoch"}
        if kind == "plateau":
            config |= {"scheduler": schedulers.ReduceLROnPlateau(optimizer, patience=0, threshold=9.0),
                       "monitor": "train_loss_epoch", "strict": False}  # fmt: skip
        elif kind == "one cycle":
            steps = max(1, int(self.trainer.estimated_stepping_batches))
            config["scheduler"] = schedulers.OneCycleLR(optimizer, 0.05, total_steps=steps + 1)
        else:
            config["scheduler"] = schedulers.ExponentialLR(optimizer, 0.7)
            config["frequency"] = 2 if kind == "frequency" else 1
        return {"optimizer": optimizer, "lr_scheduler": config}


class Recorder(pl.Callback):
    """Writes down when each hook is called, and what has been logged by then."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.values: list[dict[str, float]] = []


def _recording(name: str) -> Any:
    def hook(self: Recorder, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
        index = args[-1] if name.endswith("_batch_start") else None
        self.calls.append((name, trainer.current_epoch, trainer.global_step, index))
        if name in ("on_train_batch_end", "on_validation_end", "on_train_epoch_end"):
            seen = dict(trainer.callback_metrics)
            seen |= {f"learning rate {i}": g["lr"] for i, g in enumerate(trainer.optimizers[0].param_groups)}
            if name == "on_train_batch_end" and args[0]:
                seen["loss of the batch"] = args[0]["loss"]
            self.values.append({key: float(value) for key, value in seen.items()})

    return hook


for _name in _HOOKS:
    setattr(Recorder, _name, _recording(_name))


def run(pipeline: dict[str, Any] | None, seed: int, folder: str) -> Any:
    """What is to be compared, or the class of Lightning's error, or the words of a refusal."""
    case = drawn(seed)
    pl.seed_everything(seed, verbose=False)
    try:
        return _ran(pipeline, case, folder)
    except PipelineError as error:
        return f"refused: {error}"
    except (MisconfigurationException, ValueError, TypeError, RuntimeError, KeyError) as error:
        if pipeline is not None and not isinstance(error, MisconfigurationException):
            error.add_note(str(case))
        return f"{type(error).__name__}: {error}"


def _ran(pipeline: dict[str, Any] | None, case: Case, folder: str) -> list[Any]:
    found = [_fitted(pipeline, case, f"{folder}/first", None)]
    saved = Path(folder, "first", "of epochs", "last.ckpt")
    if case.resumes and saved.exists() and not case.options.get("fast_dev_run"):
        found.append(_fitted(pipeline, case, f"{folder}/second", str(saved)))
    return found


def _fitted(pipeline: dict[str, Any] | None, case: Case, folder: str, resume: str | None) -> dict[str, Any]:
    options = dict(case.options)
    recorder, logger = Recorder(), CSVLogger(folder, "logs", "0") if options.pop("csv") else False
    if resume:
        options["max_epochs"] += 1
        options["max_steps"] = -1
    made: list[Any] = [recorder]
    for name, arguments in case.callbacks:
        if name == "ModelCheckpoint":
            kind = "steps" if "every_n_train_steps" in arguments else "epochs"
            arguments = {**arguments, "dirpath": f"{folder}/of {kind}"}
        made.append(getattr(given, name)(**arguments))
    saves = any(isinstance(one, given.ModelCheckpoint) for one in made)
    run = trainer(
        pipeline, **{"callbacks": made, "logger": logger, "enable_checkpointing": saves,
                     "default_root_dir": folder, **options},
    )  # fmt: skip
    module = Drawn(case, resume is not None)
    run.fit(module, ckpt_path=resume, weights_only=False)
    if run.is_global_zero and logger:
        logger.save()
    return {
        "weights": weights(module),
        "logged": {key: float(value) for key, value in run.callback_metrics.items()},
        "calls": recorder.calls,
        "values": recorder.values,
        "state": (run.global_step, run.current_epoch, run.should_stop, run.num_training_batches),
        "callbacks": [_state(one) for one in made],
        "files": sorted(str(path.relative_to(folder)) for path in Path(folder).glob("of */*")),
    }


def _state(callback: Any) -> Any:
    if isinstance(callback, given.ModelCheckpoint):
        score = callback.best_model_score
        return (
            Path(callback.best_model_path).name, None if score is None else round(float(score), 6),
            sorted(Path(path).name for path in callback.best_k_models), Path(callback.last_model_path).name,
        )  # fmt: skip
    if isinstance(callback, given.EarlyStopping):
        return callback.stopped_epoch, callback.wait_count, round(float(callback.best_score), 6)
    return type(callback).__name__


def compare(found: Any, expected: Any) -> None:
    """Raise where a run over stages is not that of one device.

    Args:
        found: What `run` gave on a rank.
        expected: What it gave on one device.
    """
    if isinstance(expected, str) or isinstance(found, str):
        assert isinstance(expected, str) and isinstance(found, str), (_short(found), _short(expected))
        return
    assert len(found) == len(expected)
    for own, one in zip(found, expected, strict=True):
        assert own["calls"] == one["calls"], _difference(own["calls"], one["calls"])
        assert own["state"] == one["state"], (own["state"], one["state"])
        assert own["callbacks"] == one["callbacks"], (own["callbacks"], one["callbacks"])
        assert own["files"] == one["files"], (own["files"], one["files"])
        assert_same((own["weights"], own["logged"]), (one["weights"], one["logged"]), 1e-7)
        for index, (values, others) in enumerate(zip(own["values"], one["values"], strict=True)):
            assert_same(({}, values), ({}, others), 1e-7), index


def _short(result: Any) -> str:
    return result if isinstance(result, str) else "it ran"


def _difference(own: list[Any], one: list[Any]) -> str:
    for index, (mine, other) in enumerate(zip(own, one, strict=False)):
        if mine != other:
            return (
                f"call {index}: {own[max(0, index - 2) : index + 3]} and {one[max(0, index - 2) : index + 3]}"
            )
    return f"{len(own)} and {len(one)} calls: {own[len(one) :]}{one[len(own) :]}"
