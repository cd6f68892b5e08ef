"""What a module, its callbacks and its Trainer must not ask of a pipeline. All of it is said at once."""

import inspect
import platform
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    Checkpoint,
    EarlyStopping,
    ModelPruning,
    Timer,
)
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipeline._lightning import (
    STEPS,
    configured_to_log_graph,
    syncs_batch_norm,
    takes,
    uploads_checkpoints,
)
from lightning_pipeline.errors import ConfigMismatchError
from lightning_pipeline.ranks import Company
from lightning_pipeline.registry import named_parameters_of
from lightning_pipeline.settings import Problems, Settings

_REFUSED: tuple[tuple[type[Callback], str], ...] = (
    (
        BatchSizeFinder,
        "tries sizes until one rank is out of memory, and the others wait for it; Lightning "
        "refuses it with its own strategies of several processes (`lightning-pipeline plan` says what a "
        "batch needs, StageMemoryMonitor what it took)",
    ),
    (ModelPruning, "gives parameters other names in mid-run, and ranks and checkpoints know them by name"),
)


def check_run(module: LightningModule) -> None:
    """Refuse what cannot work, before anything is placed.

    Args:
        module: Attached to its Trainer.

    Raises:
        ConfigurationError: Naming everything found.
    """
    problems = Problems()
    trainer = module.trainer
    problems.extend(_steps(module))
    problems.extend(_trainer(trainer))
    problems.extend(_callbacks(trainer))
    problems.refuse(f"{type(module).__name__} cannot run with PipelineStrategy")


def _steps(module: LightningModule) -> Iterator[str]:
    for step in STEPS.values():
        function: Any = getattr(module, step, None)
        if callable(function) and takes(function, "dataloader_iter", explicit=True):
            yield f"{step} takes dataloader_iter, but the strategy must see a batch to split it: take batch"


def _trainer(trainer: Trainer) -> Iterator[str]:
    if syncs_batch_norm(trainer.strategy) and trainer.strategy.num_replicas > 1:  # type: ignore[attr-defined]
        yield "sync_batchnorm=True does not work across replicas of a pipeline yet: leave it out"
    folders = trainer.strategy._settings.save_distributed_checkpoint is not False  # type: ignore[attr-defined]
    for logger in trainer.loggers:
        if folders and trainer.state.fn == TrainerFn.FITTING and uploads_checkpoints(logger):
            rank_zero_warn(
                f"{type(logger).__name__}(log_model=...) uploads checkpoints that are one file, and those of "
                "a pipeline are folders: nothing will be uploaded. save_distributed_checkpoint=False writes "
                "one file"
            )
        if configured_to_log_graph(logger) and trainer.lightning_module.example_input_array is not None:
            yield (
                f"{type(logger).__name__}(log_graph=True) runs the model on rank 0, which has one stage, on "
                "example_input_array: leave one of them out"
            )


def _callbacks(trainer: Trainer) -> Iterator[str]:
    for callback in getattr(trainer, "callbacks", ()):
        for kind, reason in _REFUSED:
            passed_over = kind is BatchSizeFinder and trainer.fast_dev_run  # type: ignore[attr-defined]
            if isinstance(callback, kind) and not passed_over:
                yield f"callback {type(callback).__name__} {reason}: remove it"


# Each rank runs the user's script by itself: a learning rate drawn before a seed, an option read from the
# environment, a file copied to one machine only, and every stage would train with its own, without a word.

_NUMBERS = (
    "max_epochs", "min_epochs", "max_steps", "min_steps", "accumulate_grad_batches", "gradient_clip_val",
    "gradient_clip_algorithm", "limit_train_batches", "limit_val_batches", "limit_test_batches",
    "limit_predict_batches", "val_check_interval", "check_val_every_n_epoch", "num_sanity_val_steps",
    "overfit_batches", "reload_dataloaders_every_n_epochs", "precision", "fast_dev_run", "world_size",
)  # fmt: skip
_SYNCHRONISE = (Checkpoint, EarlyStopping, Timer, BaseFinetuning)
_LIBRARIES = ("torch", "lightning", "pytorch_lightning", "torchmetrics")
_SHOWN = 5


def compare_runs(trainer: Trainer, settings: Settings) -> None:
    """Compare settings, the Trainer's numbers, callbacks that wait for other ranks, and versions.

    Args:
        trainer: Of the run.
        settings: Of the strategy.

    Raises:
        ConfigMismatchError: On every rank: each field that differs, with the values.
    """
    if dist.get_world_size() == 1:
        return
    own = {
        f"PipelineStrategy({field.name})": _text(getattr(settings, field.name)) for field in fields(settings)
    }
    own |= {f"Trainer({name})": _text(getattr(trainer, name, None)) for name in _NUMBERS}
    own["the Trainer's call"] = str(trainer.state.fn)
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    own["callbacks that wait for other ranks"] = str(
        [one.state_key for one in callbacks if isinstance(one, _SYNCHRONISE)]
    )
    own |= {"version of torch": torch.__version__, "version of lightning": lightning.__version__}
    own["version of Python"] = ".".join(platform.python_version_tuple()[:2])
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    _refuse(dict(enumerate(found)))


def compare_modules(module: LightningModule, world: Company) -> None:
    """Compare the modules of all ranks, before they are cut: parts, parameters and the code of their classes.

    Args:
        module: Whole.
        world: All ranks.

    Raises:
        ConfigMismatchError: On every rank: what differs first.
    """
    own = _structure(module)
    checksums = world.gather("comparing the modules", zlib.crc32(repr(own).encode()))
    if len(set(checksums.values())) > 1:
        told = world.gather("comparing the modules", own)
        _refuse_remains(told)
        _refuse(told)


def _refuse_remains(told: Mapping[int, Mapping[str, str]]) -> None:
    """Raise where the ranks have empty parameters in place of other stages', as a failed run leaves them."""
    for name in told[min(told)]:
        empty = [rank for rank, own in sorted(told.items()) if own.get(name, "").startswith(_EMPTY)]
        if 0 < len(empty) < len(told):
            where = f"{name} is empty on global rank {', '.join(map(str, empty))}"
            raise ConfigMismatchError(
                "the module is what a run that failed has left: each rank still has the weights of its own "
                f"stages, and no others ({where}). Make the module anew before the next run, or load it from "
                "a checkpoint"
            )


def compare_optimizers(optimizers: Sequence[Optimizer], schedulers: Sequence[Any], world: Company) -> None:
    """Compare what `configure_optimizers` made: classes, defaults, groups but for their parameters.

    Args:
        optimizers: Of this rank.
        schedulers: Lightning's configurations of learning-rate schedulers.
        world: All ranks.

    Raises:
        ConfigMismatchError: On every rank: each field that differs, with the values.
    """
    own: dict[str, str] = {"number of optimizers": str(len(optimizers))}
    for index, optimizer in enumerate(optimizers):
        name = f"optimizer {index}"
        own[name] = type(optimizer).__name__
        own |= {f"{name}, default {key}": _text(v) for key, v in optimizer.defaults.items()}
        own[f"{name}, number of groups"] = str(len(optimizer.param_groups))
        for number, group in enumerate(optimizer.param_groups):
            options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            own |= {f"{name}, group {number}, {key}": _text(v) for key, v in options.items()}
    for index, config in enumerate(schedulers):
        own[f"learning-rate scheduler {index}"] = (
            f"{type(config.scheduler).__name__}, interval={config.interval!r}, frequency={config.frequency}, "
            f"monitor={config.monitor!r}"
        )
    _refuse(world.gather("comparing the optimizers", own))


_EMPTY = "(0,) "
"""How the structure of a module tells of a parameter without elements."""


def _text(value: Any) -> str:
    """A value for comparison: without addresses, which differ between processes."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value.tolist() if isinstance(value, Tensor) else value))


def _structure(module: LightningModule) -> dict[str, str]:
    """What of a module must be the same: its parts in order, parameters and buffers, its classes' files."""
    found = {}
    for name, part in module.named_modules():
        own = type(part).__module__.startswith("torch.nn.modules.") and not list(part.children())
        found[f"module {name or '(itself)'}"] = type(part).__qualname__ + (
            f"({part.extra_repr()})" if own else ""
        )
    for name, parameter in named_parameters_of(module, remove_duplicate=False):
        shape = None if isinstance(parameter, nn.UninitializedParameter) else tuple(parameter.shape)
        found[f"parameter {name}"] = f"{shape} {parameter.dtype}, requires_grad={parameter.requires_grad}"
    for file in sorted({file for part in module.modules() if (file := _file_of(type(part))) is not None}):
        found[f"code of {file.name}"] = f"crc32 {zlib.crc32(file.read_bytes()):08x}"
    return found


def _file_of(kind: type) -> Path | None:
    """The file that a class of the user's is written in; `None` for libraries' and typed-in ones."""
    if kind.__module__.partition(".")[0] in _LIBRARIES:
        return None
    try:
        file = Path(inspect.getfile(kind))
    except (TypeError, OSError):
        return None
    return file if file.is_file() else None


def _refuse(told: Mapping[int, Mapping[str, str]]) -> None:
    """Raise where ranks differ in a field, naming who has which value."""
    names = dict.fromkeys(name for own in told.values() for name in own)
    lines = [line for name in names if (line := _difference(name, told))]
    if lines:
        more = [f"... and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
        raise ConfigMismatchError(
            "\n  - ".join(
                [
                    "the ranks of this run do not agree. Each runs the script by itself: what it draws, "
                    "reads or decides must be the same everywhere (seed before drawing; no options by rank)",
                    *lines[:_SHOWN],
                    *more,
                ]
            )
        )


def _difference(name: str, told: Mapping[int, Mapping[str, str]]) -> str:
    holders: dict[str, list[int]] = {}
    for rank, own in told.items():
        holders.setdefault(own.get(name, "nothing"), []).append(rank)
    if len(holders) == 1:
        return ""
    return f"{name}: " + "; ".join(
        f"{value} on global rank {', '.join(map(str, ranks))}" for value, ranks in holders.items()
    )
