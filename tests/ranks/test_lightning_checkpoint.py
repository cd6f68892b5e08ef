"""Checkpoints hold all stages under the whole module's names, and resume on any number of stages."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor

from lightning_pipeline.errors import CheckpointError
from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, assert_same, loader, trainer, weights

Ranks = Callable[[int], Pool]


class Scheduled(Regression):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


class FrozenStart(Scheduled):
    def __init__(self) -> None:
        super().__init__()
        for parameter in self.net[:3].parameters():
            parameter.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.05)


def fit_saving(
    pipeline: dict[str, Any] | None, folder: str, epochs: int, start: str | None, kind: str
) -> Any:
    module = {"scheduled": Scheduled, "frozen": FrozenStart}[kind]()
    saver = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, save_last=True)
    run = trainer(pipeline, max_epochs=epochs, enable_checkpointing=True, callbacks=[saver])
    run.fit(module, loader(), ckpt_path=start, weights_only=False)
    return weights(module), run.global_step, run.optimizers[0].param_groups[0]["lr"]


@pytest.mark.parametrize(("resumed", "kind"), [(3, "scheduled"), (2, "frozen"), (3, "frozen")])
def test_a_resumed_run_equals_one_that_was_not_stopped(
    ranks: Ranks, tmp_path: Path, kind: str, resumed: int
) -> None:
    expected = fit_saving(None, str(tmp_path / "one"), 4, None, kind)
    ranks(2)(fit_saving, {"stages": 2, "num_microbatches": 2}, str(tmp_path), 2, None, kind)
    start = str(tmp_path / "last.ckpt")
    for found in ranks(resumed)(fit_saving, {"stages": resumed}, str(tmp_path / "two"), 4, start, kind):
        assert found[1:] == expected[1:]
        for name, value in expected[0].items():
            torch.testing.assert_close(found[0][name], value, rtol=1e-9, atol=1e-9)


def validate_from(path: str, strict: bool = True) -> list[Any]:
    module = Regression()
    module.strict_loading = strict
    if not strict:
        module.extra = torch.nn.Parameter(torch.zeros(1))
    return trainer({"stages": 2}).validate(
        module, loader(), ckpt_path=path, verbose=False, weights_only=False
    )


def test_weights_of_one_device_can_be_validated_over_stages(ranks: Ranks, tmp_path: Path) -> None:
    module, one = Regression(), trainer(None, max_epochs=1)
    one.fit(module, loader())
    path = str(tmp_path / "one.ckpt")
    one.save_checkpoint(path)
    expected = one.validate(module, loader(), verbose=False)[0]
    for found in ranks(2)(validate_from, path):
        assert found[0] == pytest.approx(expected, rel=1e-6)


class Wider(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.more = torch.nn.Linear(2, 2).double()


def fit_other(path: str) -> str:
    with pytest.raises(CheckpointError, match=r"missing: more\.bias, more\.weight"):
        trainer({"stages": 2}).fit(Wider(), loader(), ckpt_path=path)
    return "refused"


def test_a_checkpoint_of_another_module_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2)(fit_saving, {"stages": 2}, str(tmp_path), 1, None, "scheduled")
    assert ranks(2)(fit_other, str(tmp_path / "last.ckpt")) == ["refused", "refused"]


def save_after_fit(folder: str) -> dict[str, Tensor]:
    module = Regression()
    run = trainer({"stages": 2}, max_epochs=1)
    run.fit(module, loader())
    run.save_checkpoint(f"{folder}/after.ckpt")
    return weights(module)


def test_a_checkpoint_after_fit_has_all_weights(ranks: Ranks, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    first, second = ranks(2)(save_after_fit, str(tmp_path))
    dcp_to_torch_save(tmp_path / "after.ckpt", tmp_path / "whole.pt")
    stored = torch.load(tmp_path / "whole.pt", weights_only=False)
    for name, value in first.items():
        torch.testing.assert_close(second[name], value, rtol=0, atol=0)
        torch.testing.assert_close(stored["model"][name], value, rtol=0, atol=0)
    assert any(key.startswith("state.net.0") for key in stored["optimizer_0"])
    assert any(key.startswith("state.net.6") for key in stored["optimizer_0"])


class Noted(pl.Callback):
    """Has a factor that a checkpoint halves."""

    factor = 1.0

    def state_dict(self) -> dict[str, Any]:
        return {"factor": 0.5 * self.factor}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.factor = state_dict["factor"]


class ByWhatWasLoaded(Regression):
    """Makes its schedulers by what a checkpoint has brought to the module and to a callback."""

    total = 10

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["total"] = 2 * self.total

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.total = checkpoint["total"]

    def configure_optimizers(self) -> Any:
        noted = next(one for one in self.trainer.callbacks if isinstance(one, Noted))
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        total, factor = self.total, noted.factor
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: factor * (1 - n / total))]


def fit_by_what_was_loaded(pipeline: dict[str, Any] | None, path: str) -> Any:
    first = trainer(pipeline, callbacks=[Noted()])
    first.fit(ByWhatWasLoaded(), loader())
    first.save_checkpoint(path)
    module, run = ByWhatWasLoaded(), trainer(pipeline, max_epochs=3, callbacks=[Noted()])
    run.fit(module, loader(), ckpt_path=path, weights_only=False)
    rates = {"rate": run.optimizers[0].param_groups[0]["lr"]}
    return weights(module), rates


@pytest.mark.parametrize("stages", [1, 2])
def test_optimizers_are_made_after_hooks_have_loaded(ranks: Ranks, tmp_path: Path, stages: int) -> None:
    expected = fit_by_what_was_loaded(None, str(tmp_path / "one.ckpt"))
    pipeline = {"stages": stages, "num_microbatches": 2}
    for found in ranks(stages)(fit_by_what_was_loaded, pipeline, str(tmp_path / "own.ckpt")):
        assert_same(found, expected)


class Stops(Regression):
    """Its run is interrupted."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_step == 2:
            raise KeyboardInterrupt


def test_one_rank_saves_after_it_was_interrupted(tmp_path: Path) -> None:
    saves = OnExceptionCheckpoint(tmp_path)
    run = trainer({"stages": 1, "num_microbatches": 2}, callbacks=[saves], enable_checkpointing=True)
    module = Stops()
    with suppress(KeyboardInterrupt, SystemExit):
        run.fit(module, loader())
    run.save_checkpoint(tmp_path / "by_hand.ckpt")
    for name in ("on_exception", "by_hand"):
        found = Stops()
        again = trainer({"stages": 1})
        again.validate(found, loader(), ckpt_path=str(tmp_path / f"{name}.ckpt"), verbose=False)
        assert_same((weights(found), {}), (weights(module), {}))
