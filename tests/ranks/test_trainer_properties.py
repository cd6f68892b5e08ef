"""Every public attribute of a Trainer, its loops and its module, read in every hook and step, is one device's."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, loader, trainer

Ranks = Callable[[int], Pool]
TWO = {"stages": 2, "num_microbatches": 2}

HOOKS = [
    "setup",
    "configure_model",
    "on_fit_start",
    "on_sanity_check_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_fit_end",
    "on_save_checkpoint",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_validation_model_eval",
    "on_validation_model_train",
    "on_test_start",
    "on_test_batch_start",
    "on_test_batch_end",
    "on_test_epoch_end",
    "on_test_end",
    "on_predict_start",
    "on_predict_batch_start",
    "on_predict_batch_end",
    "on_predict_epoch_end",
    "on_predict_end",
    "on_before_batch_transfer",
    "on_after_batch_transfer",
    "teardown",
]
STEPS = ("training_step", "validation_step", "test_step", "predict_step")

# What a rank is among others, and how many there are.
OF_RANKS = {
    "world_size", "num_devices", "device_ids", "global_rank", "local_rank", "node_rank", "is_global_zero",
    "distributed_sampler_kwargs", "strategy", "device_mesh",
}  # fmt: skip
REPLACED = {"print", "log", "log_dict", "on_run_start", "on_advance_end", *HOOKS}
"""Methods: a run puts its own in their place, which call them."""
LOADS = {"estimated_stepping_batches"}
"""Outside of `fit` one device asks for the training loader where this is read, and forgets which step it is in."""
SAYS = {"done"}
"""Tells each time that the run has stopped."""


def plain(value: Any, depth: int = 0) -> Any:
    """What can be written to a file and compared."""
    if isinstance(value, Tensor):
        return ["tensor", list(value.shape), str(value.dtype)]
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float):
        return round(value, 9)
    if isinstance(value, list | tuple) and depth < 3:
        return [plain(item, depth + 1) for item in value]
    if isinstance(value, dict) and depth < 3:
        return {str(key): plain(item, depth + 1) for key, item in value.items()}
    return value.__class__.__name__


def attributes(label: str, holder: Any) -> Iterator[tuple[str, Any]]:
    kind = type(holder)
    names = {name for name in dir(kind) if not callable(getattr(kind, name, None))} | set(vars(holder))
    for name in sorted(names - OF_RANKS - REPLACED - SAYS):
        if not name.startswith("_") and (name not in LOADS or holder.state.fn == "fit"):
            try:
                yield f"{label}.{name}", plain(getattr(holder, name))
            except Exception as error:  # as on one device
                yield f"{label}.{name}", f"raises {type(error).__name__}"


def look(module: Any, where: str) -> None:
    run = module.trainer
    fit, checked = run.fit_loop, run.fit_loop.epoch_loop.val_loop
    holders = {
        "trainer": run, "module": module, "state": run.state, "fit_loop": fit, "epoch_loop": fit.epoch_loop,
        "batches": fit.epoch_loop.batch_progress.current, "epochs": fit.epoch_progress.current,
        "val_loop": checked, "checked": checked.batch_progress.current, "validate_loop": run.validate_loop,
        "validated": run.validate_loop.batch_progress.current, "test_loop": run.test_loop,
        "predict_loop": run.predict_loop,
    }  # fmt: skip
    if run.datamodule is not None:
        holders["datamodule"] = run.datamodule
    found = {name: value for label, one in holders.items() for name, value in attributes(label, one)}
    with Path(module.notes).open("a") as file:
        file.write(json.dumps([f"{run.state.fn.value}: {where} {run.global_step}", found]) + "\n")


class Looks(Regression):
    """Looks around in every hook and step, while they are traced too."""

    def __init__(self, notes: str) -> None:
        super().__init__()
        self.notes = notes

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))


def _looking(name: str) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        look(self, name)
        return getattr(super(LooksEverywhere, self), name)(*args, **kwargs)

    return call


LooksEverywhere = type("LooksEverywhere", (Looks,), {name: _looking(name) for name in (*HOOKS, *STEPS)})


def seen(pipeline: dict[str, Any] | None, folder: str, options: dict[str, Any]) -> dict[str, list[Any]]:
    """By place and attribute, all values that it had there."""
    torch.manual_seed(5)
    notes = Path(folder) / f"notes of {os.getpid()}"
    module = LooksEverywhere(str(notes))
    run = trainer(pipeline, writes=True, default_root_dir=folder, enable_model_summary=False, **options)
    run.fit(module, loader(24), loader(20, seed=4))
    run.validate(module, loader(seed=4), verbose=False)
    run.test(module, [loader(seed=4)], verbose=False)
    run.predict(module, loader(seed=4), return_predictions=False)
    found: dict[str, list[Any]] = {}
    for line in notes.read_text().splitlines():
        where, values = json.loads(line)
        for name, value in values.items():
            if name != "module.notes" and value not in found.setdefault(f"{where}: {name}", []):
                found[f"{where}: {name}"].append(value)
    return found


@pytest.mark.parametrize(
    "options",
    [{}, {"val_check_interval": 0.5, "accumulate_grad_batches": 2, "limit_train_batches": 2}],
    ids=str,
)
def test_attributes_are_those_of_one_device(ranks: Ranks, tmp_path: Path, options: dict[str, Any]) -> None:
    expected = seen(None, str(tmp_path), options)
    (tmp_path / "lightning_logs").rename(tmp_path / "of one device")
    for found in ranks(2)(seen, TWO, str(tmp_path), options):
        assert found.keys() == expected.keys()
        other = {
            place: (values, expected[place])
            for place, values in found.items()
            if any(value not in expected[place] for value in values)
        }
        assert not other, "\n".join(f"{place}: {values}" for place, values in list(other.items())[:30])
