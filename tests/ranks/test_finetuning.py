"""Lightning's finetuning callbacks give the weights and learning rates of one device."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import Tensor, nn

from lightning_pipeline.errors import CheckpointError
from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, assert_same, loader, mlp, trainer, weights

Ranks = Callable[[int], Pool]


class Tuned(Regression):
    """A backbone whose first stage is all backbone, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.net = None
        layers = mlp().double()
        self.backbone, self.head = layers[:4], layers[4:]

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.mse_loss(self.head(self.backbone(batch[0])), batch[1])

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=0.01)


def fit_tuned(
    pipeline: dict[str, Any] | None, save: str | None = None, resume: str | None = None, epochs: int = 4
) -> tuple[dict[str, Tensor], list[float]]:
    torch.manual_seed(1)
    module = Tuned()
    run = trainer(pipeline, max_epochs=epochs, callbacks=[BackboneFinetuning(unfreeze_backbone_at_epoch=1)])
    run.fit(module, loader(), ckpt_path=resume)
    if save:
        run.save_checkpoint(save)
    return weights(module), [group["lr"] for group in run.optimizers[0].param_groups]


@pytest.mark.parametrize("stages", [2, 3])
def test_a_backbone_is_unfrozen_on_all_stages_alike(ranks: Ranks, stages: int) -> None:
    expected, rates = fit_tuned(None)
    assert len(set(rates)) == 2
    for found, own_rates in ranks(stages)(fit_tuned, {"stages": stages}):
        assert_same((found, {}), (expected, {}))
        assert own_rates == pytest.approx(rates)


def resume_tuned(path: str, saved_after: int, stages: int | None, one_file: bool = True) -> Any:
    pipeline = None if stages is None else {"stages": stages, "save_distributed_checkpoint": not one_file}
    fit_tuned(pipeline, save=path, epochs=saved_after)
    return fit_tuned(pipeline, resume=path)


@pytest.mark.parametrize(("saved_after", "stages", "one_file"), [(1, 2, False), (3, 3, False), (2, 2, True)])
def test_a_resume_goes_on_with_the_groups_that_the_callback_added(
    ranks: Ranks, tmp_path: Path, saved_after: int, stages: int, one_file: bool
) -> None:
    # Lightning freezes the backbone anew after the epoch in which it was unfrozen.
    expected, rates = resume_tuned(str(tmp_path / "one.ckpt"), saved_after, None)
    path = str(tmp_path / "tuned.ckpt")
    for found, own_rates in ranks(stages)(resume_tuned, path, saved_after, stages, one_file):
        assert_same((found, {}), (expected, {}))
        assert own_rates == pytest.approx(rates)


def resume_without(path: str) -> str:
    fit_tuned({"stages": 2}, save=path)
    module = Tuned()
    module.backbone.requires_grad_(False)
    try:
        trainer({"stages": 2}, max_epochs=5).fit(module, loader(), ckpt_path=path)
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_resume_that_would_leave_out_the_backbones_group_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    for text in ranks(2)(resume_without, str(tmp_path / "tuned.ckpt")):
        assert "in no optimizer here: optimizer_0.backbone.0.bias, optimizer_0.backbone.0.weight" in text


class LowRank(nn.Module):
    """A frozen layer and what is learned beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.full((2, base.in_features), 0.1, dtype=base.weight.dtype))
        self.up = nn.Parameter(torch.full((base.out_features, 2), 0.01, dtype=base.weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


class Adapted(Regression):
    """Layers are wrapped when the run begins; only what is learned is saved."""

    strict_loading = False

    def configure_model(self) -> None:
        for number, layer in enumerate(self.net):
            if isinstance(layer, nn.Linear):
                self.net[number] = LowRank(layer)

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=0.01)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: state[name] for name in state if name.endswith(("down", "up"))}


def fit_adapted(pipeline: dict[str, Any] | None, path: str) -> Any:
    """Trained for two epochs, saved, and for one more."""
    first, begun = Adapted(), trainer(pipeline)
    begun.fit(first, loader(), loader(seed=4))
    begun.save_checkpoint(path)
    module, run = Adapted(), trainer(pipeline, max_epochs=3)
    run.fit(module, loader(), loader(seed=4), ckpt_path=path, weights_only=False)
    logged = {name: float(value) for name, value in run.callback_metrics.items()}
    return weights(module), logged, sorted(torch.load(path, weights_only=False)["state_dict"])


def test_adapters_that_configure_model_puts_around_layers_train_and_resume(
    ranks: Ranks, tmp_path: Path
) -> None:
    pipeline = {
        "stages": 2,
        "num_microbatches": 2,
        "save_distributed_checkpoint": False,
        "gather_weights": "all",
    }
    expected, logs, names = fit_adapted(None, str(tmp_path / "one.ckpt"))
    for found, own_logs, own_names in ranks(2)(fit_adapted, pipeline, str(tmp_path / "two.ckpt")):
        assert_same((found, own_logs), (expected, logs))
        assert own_names == names and len(names) == 8
