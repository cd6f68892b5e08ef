"""Checkpoints hold all stages under the whole module's names, and resume on any number of stages."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_pipeline.errors import CheckpointError
from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, loader, trainer, weights

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
    told = r"missing: more\.bias, more\.weight; missing in the optimizers: optimizer_0\.more\.bias, optimizer_0\.more"
    with pytest.raises(CheckpointError, match=told):
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
