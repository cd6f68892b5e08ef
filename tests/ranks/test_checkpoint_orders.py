"""Adam's state finds its parameter by name, in whatever order an optimizer has them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_pipeline.checkpoint.consolidate import to_file
from tests.pool import Pool
from tests.ranks.checkpoint_cases import state_of
from tests.ranks.lightning_cases import Regression, loader, trainer

Ranks = Callable[[int], Pool]
TWO = {"stages": 2, "num_microbatches": 1}
KINDS = ["reversed", "by name", "layers backwards", "given names"]


class Ordered(Regression):
    """A square net, where no shape tells which parameter a state is of."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        del self.error
        self.kind = kind

    def configure_optimizers(self) -> Any:
        named = dict(self.named_parameters())
        if self.kind == "reversed":
            return torch.optim.AdamW(list(named.values())[::-1], lr=0.01)
        if self.kind == "by name":
            return torch.optim.AdamW([named[name] for name in sorted(named)], lr=0.01)
        if self.kind == "given names":
            mixed = sorted(named.items(), key=lambda pair: pair[0][::-1])
            return torch.optim.AdamW(mixed, lr=0.01)
        layers = [(i, list(self.net[i].parameters())) for i in (6, 4, 2, 0)]
        groups = [{"params": p, "lr": 0.01 * (i + 1)} for i, p in layers if p]
        return torch.optim.AdamW(groups)


def fit_ordered(pipeline: dict[str, Any] | None, kind: str, path: str | None, save: str) -> dict[str, Tensor]:
    module, run = Ordered(kind), trainer(pipeline, max_epochs=-1, max_steps=3)
    run.fit(module, loader(), ckpt_path=path)
    run.strategy.barrier()
    state = state_of(run, module)
    run.save_checkpoint(save)
    return state


def fit_all(folder: str, pipeline: dict[str, Any] | None, suffix: str, to: str) -> list[dict[str, Tensor]]:
    return [fit_ordered(pipeline, kind, f"{folder}/{kind}{suffix}", f"{folder}/{kind}{to}") for kind in KINDS]


def test_state_goes_to_stages_and_back_in_any_order(ranks: Ranks, tmp_path: Path) -> None:
    expected = [fit_ordered(None, kind, None, str(tmp_path / f"{kind}.one")) for kind in KINDS]
    by_rank = ranks(2)(fit_all, str(tmp_path), TWO, ".one", ".two")
    for kind, state, *parts in zip(KINDS, expected, *by_rank, strict=True):
        found = {name: value for part in parts for name, value in part.items()}
        assert_same(kind, found, state)
        if kind != "given names":  # on one device torch goes by position, and no stage knows that
            to_file(tmp_path / f"{kind}.two", tmp_path / f"{kind}.back", trust=False)
            back = fit_ordered(None, kind, str(tmp_path / f"{kind}.back"), str(tmp_path / "unused"))
            assert_same(kind, back, state)


def assert_same(kind: str, found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys(), kind
    for name, value in expected.items():
        assert torch.equal(found[name], value), (kind, name)


class PerLayer(Ordered):
    """As many schedules' entries as layers: no stage knows all."""

    def __init__(self) -> None:
        super().__init__("layers backwards")

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


def save_per_layer(pipeline: dict[str, Any] | None, path: str | None, save: str) -> dict[str, float]:
    module, run = PerLayer(), trainer(pipeline, max_epochs=2)
    run.fit(module, loader(), ckpt_path=path)
    run.save_checkpoint(save)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    groups = run.optimizers[0].param_groups
    return {names[id(p)]: float(group["lr"]) for group in groups for p in group["params"]}


def test_a_save_after_fit_knows_the_schedulers(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(2)(save_per_layer, {**TWO, "partition": ["net.6"]}, None, str(tmp_path / "two"))
    to_file(tmp_path / "two", tmp_path / "back", trust=False)
    assert save_per_layer(None, str(tmp_path / "back"), str(tmp_path / "unused")) == {**first, **second}


class Slower(PerLayer):
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["lr_schedulers"] = [{**one, "gamma": 0.25} for one in checkpoint["lr_schedulers"]]


def rates_after_an_edit(pipeline: list[dict[str, Any]] | list[None], path: str) -> dict[str, float]:
    trainer(pipeline[0], max_epochs=1).fit(before := PerLayer(), loader())
    before.trainer.save_checkpoint(path)
    module, run = Slower(), trainer(pipeline[1], max_epochs=3)
    run.fit(module, loader(), ckpt_path=path)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    groups = run.optimizers[0].param_groups
    return {names[id(p)]: float(group["lr"]) for group in groups for p in group["params"]}


def test_an_edited_scheduler_goes_on_as_edited_on_every_cut(ranks: Ranks, tmp_path: Path) -> None:
    expected = rates_after_an_edit([None, None], str(tmp_path / "one"))
    cuts = [{**TWO, "partition": [unit]} for unit in ("net.6", "net.2")]
    first, second = ranks(2)(rates_after_an_edit, cuts, str(tmp_path / "two"))
    assert {**first, **second} == expected


class Frozen(Ordered):
    """The first stage has nothing to train."""

    def __init__(self) -> None:
        super().__init__("frozen")
        self.net[:3].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


def rate_after(pipeline: dict[str, Any] | None, path: str | None, save: str) -> float:
    run = trainer(pipeline, max_epochs=2)
    run.fit(Frozen(), loader(), ckpt_path=path)
    run.strategy.barrier()
    run.save_checkpoint(save)
    return float(run.optimizers[0].param_groups[0]["lr"])


def test_a_stage_without_parameters_has_the_learning_rate_of_a_file(ranks: Ranks, tmp_path: Path) -> None:
    cut = {**TWO, "partition": ["net.4"]}
    expected = rate_after(None, None, str(tmp_path / "one"))
    assert ranks(2)(rate_after, cut, str(tmp_path / "one"), str(tmp_path / "two")) == [expected, expected]
