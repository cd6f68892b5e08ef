"""A module built in `configure_model` over stages has the weights of one device, and no rank builds it whole."""

import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_pipeline.weights import open_weights
from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, loader, trainer, weights
from tests.ranks.staged_memory import measure, under_a_limit
from tests.ranks.staged_training import differences, train

Ranks = Callable[[int], Pool]


class Late(Regression):
    """Builds in `configure_model`; says so, and counts."""

    built = 0

    def __init__(self) -> None:
        pl.LightningModule.__init__(self)
        self.lr = 0.1
        self.history: list[float] = []
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is None:
            type(self).built += 1
            self.error = nn.MSELoss()
            self.net = self.layers()
            self.absent_here = [name for name, p in self.named_parameters() if type(p) is not nn.Parameter]

    def layers(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))


class Elaborate(Late):
    """Initialised by values: orthogonal, truncated, copied, tied, normed, by shares of depth, with own seeds."""

    def layers(self) -> nn.Module:
        nets = [nn.Linear(8, 8) for _ in range(5)]
        nn.init.orthogonal_(nets[0].weight)
        nn.init.trunc_normal_(nets[1].weight, std=0.1)
        with torch.no_grad():
            nets[2].weight.copy_(nets[1].weight * 2)
        nets[3].weight = nets[2].weight
        for net, depth in zip(nets, torch.linspace(0, 1, 5), strict=True):
            net.bias.data.fill_(depth.item())
        nets[4] = nn.utils.parametrizations.weight_norm(nets[4])
        with torch.random.fork_rng():
            torch.manual_seed(9)
            spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        nets[0].weight.no_decay = True  # type: ignore[attr-defined]
        net = nn.Sequential(nn.Linear(6, 8), *nets, spectral, nn.BatchNorm1d(8), nn.Linear(8, 3))
        return net.double().apply(lambda m: nn.init.zeros_(m.bias) if m is net[-1] else None)


def fit_late(kind: type[Late], pipeline: dict[str, Any] | None, **options: Any) -> dict[str, Any]:
    kind.built = 0
    pl.seed_everything(5, verbose=False)
    module = kind()
    run = trainer(pipeline, **{"max_epochs": 1, **options})
    states: list[Tensor] = []
    made: dict[str, Tensor] = {}

    class Looks(pl.Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            from lightning_pipeline.run.setup import held_states

            made.update({k: v.detach().clone() for k, v in held_states(pl_module).items()})
            states.append(torch.get_rng_state())

    run.callbacks.append(Looks())  # type: ignore[attr-defined]
    run.fit(module, loader(), loader(seed=4))
    held = {name: value for name, value in weights(module).items() if not value.is_meta}
    return {
        "built": kind.built, "made": made, "state": states[0], "held": held, "without": len(module.absent_here),
        "whole": len(held) == len(list(module.named_parameters())), "logged": dict(run.callback_metrics),
    }  # fmt: skip


@pytest.mark.parametrize(("kind", "stages"), [(Late, 2), (Elaborate, 2), (Elaborate, 4)])
def test_own_weights_are_those_of_one_device(ranks: Ranks, kind: type[Late], stages: int) -> None:
    compare(fit_late(kind, None), ranks(stages)(fit_late, kind, {"stages": stages, "num_microbatches": 1}))


def compare(expected: dict[str, Any], found: list[dict[str, Any]]) -> None:
    together: dict[str, Tensor] = {}
    for rank in found:
        assert rank["built"] == 1
        assert rank["without"] > 0
        assert not rank["whole"]
        assert torch.equal(rank["state"], expected["state"])
        for name, value in rank["made"].items():
            assert torch.equal(value, expected["made"][name]), name
        together.update(rank["held"])
    assert together.keys() == expected["held"].keys()
    for name, value in together.items():
        torch.testing.assert_close(value, expected["held"][name], rtol=1e-10, atol=1e-12, msg=name)


class Draws(TorchDispatchMode):
    """Counts numbers that are drawn into memory for weights; a loader's iterator draws one seed, an integer."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and type(args[0]) in (Tensor, nn.Parameter):
            self.count += args[0].numel() if args[0].is_floating_point() else 0
        return func(*args, **(kwargs or {}))


class Watched(pl.Callback):
    """From `setup` to `on_fit_start`: what is drawn, and then what is held and kept by the optimizer."""

    def __init__(self) -> None:
        self.draws = Draws()
        self.held: dict[str, Tensor] = {}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.draws.__enter__()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        from lightning_pipeline.run.setup import held_states

        self.draws.__exit__(None, None, None)
        self.held = {name: value.detach().clone() for name, value in held_states(pl_module).items()}
        self.kept = [dict(optimizer.state) for optimizer in trainer.optimizers]


class Normed(Late):
    """With a mask that is in no checkpoint."""

    def layers(self) -> nn.Module:
        net = super().layers()
        net.register_buffer("mask", torch.empty(64).uniform_(), persistent=False)
        return net


def fit_watched(
    kind: type[Late], pipeline: dict[str, Any] | None, path: Path | None = None
) -> dict[str, Any]:
    pl.seed_everything(5, verbose=False)
    module, watched = kind(), Watched()
    run = trainer(pipeline, max_epochs=2 if path and path.suffix == ".ckpt" else 1)
    run.callbacks.insert(0, watched)  # type: ignore[attr-defined]
    run.fit(module, loader(), loader(seed=4), ckpt_path=path)
    held = {name: value for name, value in weights(module).items() if not value.is_meta}
    return {"drawn": watched.draws.count, "made": watched.held, "kept": watched.kept, "held": held}


def test_the_first_replica_makes_the_weights_of_all(ranks: Ranks) -> None:
    pipeline = {"stages": 2, "num_microbatches": 1, "data_parallel_size": 2}
    found = ranks(4)(fit_watched, Normed, pipeline)
    expected = fit_watched(Normed, None)
    once = expected["drawn"]
    drawn = sorted(rank["drawn"] for rank in found)
    assert drawn[:2] == [once + 64] * 2  # as one device; what is in no checkpoint is made by each rank
    assert once + 64 < drawn[2] <= drawn[3] < 2 * once + 64
    for rank in found:
        assert {name: torch.equal(v, expected["made"][name]) for name, v in rank["made"].items()} == (
            dict.fromkeys(rank["made"], True)
        )


def test_optimizers_keep_nothing_before_the_first_step(ranks: Ranks) -> None:
    for rank in ranks(2)(fit_watched, Adaptive, {"stages": 2, "num_microbatches": 1}):
        assert rank["kept"] == [{}]


class Adaptive(Late):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


@pytest.mark.parametrize("kind", ["safetensors", "folder", "file"])
def test_weights_of_a_checkpoint_are_read_and_not_made(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    """And `on_fit_start` sees them, as on one device."""
    path = tmp_path / {"safetensors": "one.safetensors", "folder": "a.ckpt", "file": "b.ckpt"}[kind]
    saved: dict[str, Tensor] = {}
    for one in ranks(2)(save_late, str(path), kind):
        saved.update(one)
    expected, once = saved, fit_watched(Normed, None)["drawn"]
    found = ranks(2)(fit_watched, Normed, {"stages": 2, "num_microbatches": 1}, path)
    for rank in found:
        assert 0 < len(rank["made"]) < len(expected)
        assert {name: torch.equal(v, expected[name]) for name, v in rank["made"].items()} == (
            dict.fromkeys(rank["made"], True)
        )
        assert rank["drawn"] == once + 64


def save_late(path: str, kind: str) -> dict[str, Tensor]:
    pl.seed_everything(11, verbose=False)
    options = {"save_distributed_checkpoint": False} if kind == "file" else {}
    module, run = Normed(), trainer({"stages": 2, "num_microbatches": 1, **options}, max_epochs=1)
    run.fit(module, loader(), loader(seed=4))
    if kind == "safetensors":
        run.strategy.save_weights(Path(path).parent / "weights")  # type: ignore[attr-defined]
        if run.global_rank == 0:
            from lightning_pipeline.weights import convert, plan_conversion

            convert(plan_conversion(Path(path).parent / "weights", Path(path)))
        run.strategy.barrier()
    else:
        run.save_checkpoint(path)
    return {name: value for name, value in weights(module).items() if not value.is_meta}


class Numpy(Late):
    """Asks for numbers in a way that no tensor without memory can answer."""

    def layers(self) -> nn.Module:
        net = super().layers()
        with torch.no_grad():
            net[0].bias.fill_(float(net[0].weight.numpy().sum()))  # type: ignore[operator, index, union-attr]
        return net


class ByWeight(Late):
    """A step that looks at a weight's values outside of layers."""

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        return loss * 2 if self.net[0].bias[0] > 100 else loss


@pytest.mark.parametrize(("kind", "text"), [
    (Numpy, r"configure_model of Numpy cannot run without weights .* built the whole module: 0.0 MiB each"),
    (ByWeight, r"the step cannot be traced without weights, so every process built the whole module, 0.0 MiB"),
])  # fmt: skip
def test_what_needs_all_weights_is_built_whole_and_said_so(ranks: Ranks, kind: type[Late], text: str) -> None:
    found = ranks(2)(fit_warned, kind)
    assert [any(re.search(text, one) for one in warned) for _, warned in found] == [True, False]
    expected = fit_late(kind, None)
    for rank, _ in found:
        assert rank["whole"]
        assert torch.equal(rank["state"], expected["state"])
        for name, value in rank["made"].items():
            assert torch.equal(value, expected["made"][name]), name
        for name, value in rank["held"].items():
            torch.testing.assert_close(value, expected["held"][name], rtol=1e-10, atol=1e-12, msg=name)


class Fickle(Late):
    """Draws another number of values each time, and on each rank."""

    def layers(self) -> nn.Module:
        torch.rand(int.from_bytes(os.urandom(1)))
        return super().layers()


class FickleNumpy(Numpy, Fickle):
    """Which has to be built once more, with weights."""


@pytest.mark.parametrize("kind", [Fickle, FickleNumpy])
def test_constructors_that_draw_otherwise_each_time_are_built_and_trained(
    ranks: Ranks, kind: type[Late]
) -> None:
    expected = fit_late(Late, None)["made"]
    for rank in ranks(2)(fit_late, kind, {"stages": 2, "num_microbatches": 1}):
        assert rank["whole"] == (kind is FickleNumpy)
        for name, value in rank["made"].items():
            bound = expected[name].shape[-1] ** -0.5 if expected[name].dim() > 1 else 10
            assert value.shape == expected[name].shape
            assert 0 < value.abs().max() <= bound
        assert all(value.isfinite().all() for value in rank["held"].values())


def fit_warned(kind: type[Late]) -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = fit_late(kind, {"stages": 2, "num_microbatches": 1})
    return found, [str(one.message) for one in caught]


class Large(Regression):
    """With a gigabyte that nothing touches."""

    def __init__(self) -> None:
        super().__init__()
        self.rest = nn.Parameter(torch.empty(1 << 28), requires_grad=False)


def fit_large(kind: type[Regression]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer({"stages": 2, "num_microbatches": 1, "gather_weights": "none"}, max_epochs=1).fit(
            kind(), loader()
        )
    return [str(one.message) for one in caught]


def test_a_large_module_that_every_process_built_is_told_with_its_size(ranks: Ranks) -> None:
    found = ranks(2)(fit_large, Large)
    assert any("every process built the whole Large, 1.0 GiB each" in one for one in found[0])
    assert not any("every process built" in one for one in [*found[1], *ranks(2)(fit_large, Regression)[0]])


def fit_in_context(pipeline: dict[str, Any] | None) -> Any:
    pl.seed_everything(5, verbose=False)
    run = trainer(pipeline, max_epochs=1)
    with run.init_module():
        module = Regression()
    after = torch.randn(2)
    run.fit(module, loader(), loader(seed=4))
    return {name: value for name, value in weights(module).items() if not value.is_meta}, after


def test_modules_of_init_module_are_built_in_parts(ranks: Ranks) -> None:
    expected, drawn = fit_in_context(None)
    found = ranks(2)(fit_in_context, {"stages": 2, "num_microbatches": 2})
    assert all(torch.equal(after, drawn) for _, after in found)
    assert all(len(held) < len(expected) for held, _ in found)
    together = {**found[0][0], **found[1][0]}
    for name, value in expected.items():
        torch.testing.assert_close(together[name], value, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize(("name", "stages"), [("t5", 4), ("mixtral", 2), ("mamba", 2), ("norms", 4)])
def test_modules_train_as_on_one_device(ranks: Ranks, name: str, stages: int) -> None:
    """The others: `benchmarks/staged.py training`."""
    found = ranks(stages)(train, name, {"stages": stages, "num_microbatches": 1})
    assert differences(train(name, None)[0], found) == ""


def test_no_phase_takes_more_than_a_share_and_a_tensor(ranks: Ranks, tmp_path: Path) -> None:
    for rises, share, largest in ranks(4)(measure, str(tmp_path), 4, 8, 1448, group=False):
        assert rises.keys() == {
            "construction",
            "save_weights",
            "load safetensors",
            "save checkpoint",
            "load checkpoint",
        }
        assert (
            rises["construction"] < (share + largest) * 1.15 + 12 * 2**20
        )  # of the interpreter and the trace
        assert all(
            rise < largest * 1.15 + 12 * 2**20 for name, rise in rises.items() if name != "construction"
        )


@pytest.mark.whole  # 10 s of CPU; the test before it bounds what each phase takes
def test_a_run_goes_where_the_whole_module_does_not(ranks: Ranks, tmp_path: Path) -> None:
    layers, width = 8, 2896
    found = ranks(4)(under_a_limit, str(tmp_path), 4, layers, width, 240 * 2**20, group=False)
    together: dict[str, float] = {}
    for rank in found:
        assert "Unable to allocate 256. MiB" in rank["refusal"]
        assert rank["steps"] == 2
        together.update(rank["sums"])
    assert len(together) == layers
    loaded = open_weights(tmp_path / "weights").tensors
    assert {name: float(one.read().double().sum()) for name, one in loaded.items()} == together
