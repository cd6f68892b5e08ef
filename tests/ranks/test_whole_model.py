"""The whole model in a hook: called by all ranks or by one, equal to one device."""

import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn

from lightning_pipeline.errors import ConfigurationError, SplitError
from tests.pool import Pool, RankFailure
from tests.ranks.lightning_cases import FEATURES, Regression, loader, trainer

Ranks = Callable[[int], Pool]


class Drops(Regression):
    """Draws in its layers, where a hook asks for it, and keeps running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(2, nn.Dropout(0.0))
        self.net.insert(2, nn.BatchNorm1d(8).double())

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def inputs() -> Tensor:
    return torch.linspace(-1, 1, 5 * FEATURES, dtype=torch.float64).reshape(5, FEATURES)


class Samples(Callback):
    """Calls the module in hooks of training and validation, in both modes."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        torch.manual_seed(trainer.global_step)
        module.net[3].p = 0.5
        with torch.no_grad():
            self.seen.append(module(inputs() + 0.1 * torch.randn(5, FEATURES, dtype=torch.float64)))
        self.seen.append(torch.randn(2))
        module.net[3].p = 0.0

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        self.seen.append(module(inputs()))
        module.log("sampled", self.seen[-1].mean())


class SamplesAlone(Samples):
    """The same, under `rank_zero_only`."""

    @rank_zero_only
    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        module.eval()
        super().on_train_batch_end(trainer, module)
        module.train()

    @rank_zero_only
    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        self.seen.append(module(inputs()).argmax(-1))


def sampled(pipeline: dict[str, Any] | None, kind: type[Samples]) -> Any:
    module, samples = Drops(), kind()
    run = trainer(pipeline, writes=True, callbacks=[samples], inference_mode=True, default_root_dir="here")
    run.fit(module, loader(drop_last=True), loader(seed=4))
    return samples.seen, {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("kind", [Samples, SamplesAlone])
@pytest.mark.parametrize("stages", [2, 3])
def test_a_hook_may_call_the_module(
    ranks: Ranks, kind: type[Samples], stages: int, tmp_path: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    seen, weights = sampled(None, kind)
    pipeline = {"stages": stages, "num_microbatches": 1}
    for rank, (found, held) in enumerate(ranks(stages)(sampled, pipeline, kind, group=False)):
        if kind is Samples or rank == 0:
            torch.testing.assert_close(found, seen)
        torch.testing.assert_close(held, weights)


class LooksAtAll(Callback):
    """Gathers the module on rank 0 in a hook, and tells what it has there."""

    def __init__(self, on: str) -> None:
        self.on, self.seen = on, []

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        with trainer.strategy.whole_model(self.on) as whole, torch.no_grad():
            if whole is not None:
                whole.eval()
                self.seen += [whole(inputs()), {name: p.clone() for name, p in whole.named_parameters()}]
                whole.train()


def gathered(on: str) -> Any:
    module, looks = Drops(), LooksAtAll(on)
    trainer({"stages": 2, "num_microbatches": 2}, max_epochs=1, callbacks=[looks]).fit(module, loader())
    return looks.seen, dict(module.named_parameters()), module(inputs())


@pytest.mark.parametrize("on", ["rank_zero", "all"])
def test_the_gathered_module_has_all_weights(ranks: Ranks, on: str) -> None:
    for rank, (seen, weights, _) in enumerate(ranks(2)(gathered, on, group=False)):
        if rank == 0 or on == "all":
            torch.testing.assert_close(seen[1], weights)
            assert seen[0].shape == (5, 3)
        else:
            assert seen == []


def asked_afterwards(how: str, stages: int = 2) -> Any:
    module = Drops()
    run = trainer({"stages": stages, "gather_weights": how}, max_epochs=1)
    with pytest.raises(ConfigurationError, match="there is no module yet"):
        run.strategy.whole_model()
    run.fit(module, loader())
    seen = run.strategy.describe(), run.strategy.last_plan
    with run.strategy.whole_model() as on_zero, run.strategy.whole_model("all") as everywhere:
        assert everywhere is module
        return *(str(one) for one in seen), on_zero is module


@pytest.mark.parametrize("stages", [1, 2])
def test_stages_plan_and_the_whole_module_may_be_asked_for_after_a_run(ranks: Ranks, stages: int) -> None:
    for rank, (table, plan, whole) in enumerate(ranks(stages)(asked_afterwards, "all", stages, group=False)):
        assert "parameters" in table
        assert plan != "None"
        assert whole == (rank == 0)


def test_a_module_that_a_run_left_in_parts_is_not_taken_for_whole(ranks: Ranks) -> None:
    with pytest.raises(
        RankFailure, match="whole_model\\(\\) in a hook such as on_train_end, or set gather_weights"
    ):
        ranks(2)(asked_afterwards, "none", group=False)


class ChangesACopy(Callback):
    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        with trainer.strategy.whole_model("all") as whole, torch.no_grad():
            whole.net[0].weight.zero_()
            whole.net[-1].weight.zero_()


def changed() -> None:
    trainer({"stages": 2}, max_epochs=1, callbacks=[ChangesACopy()]).fit(Drops(), loader())


def test_changes_of_copies_are_refused(ranks: Ranks) -> None:
    with pytest.raises(RankFailure, match=r"were changed inside whole_model\(\)"):
        ranks(2)(changed, group=False)


class RefusedAfterTwo(Callback):
    """Asks for what cannot be served, and changes nothing of this rank."""

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        if trainer.global_step == 2:
            self.ask(trainer, module)

    def ask(self, trainer: Any, module: Any) -> None:
        with trainer.strategy.whole_model("all") as whole, torch.no_grad():
            whole.net[0 if trainer.is_global_zero else -1].weight.zero_()


class ReadsAloneAfterTwo(RefusedAfterTwo):
    @rank_zero_only
    def ask(self, trainer: Any, module: Any) -> None:
        float(module.net[0].weight.norm())


REFUSED = {RefusedAfterTwo: "were changed", ReadsAloneAfterTwo: "not at the same place"}


def refused_and_resumed(folder: str, kind: type[RefusedAfterTwo]) -> Any:
    def fitted(callbacks: list[Callback], start: str | None = None) -> Any:
        saver = ModelCheckpoint(folder, every_n_epochs=100)
        run = trainer({"stages": 2}, max_epochs=2, enable_checkpointing=True, callbacks=[saver, *callbacks])
        module = Drops()
        run.fit(module, loader(), ckpt_path=start)
        return {name: value.clone() for name, value in module.state_dict().items()}

    expected = fitted([])
    with pytest.raises(SplitError, match=REFUSED[kind]) as refused:
        fitted([kind()])
    (path,) = re.findall("ckpt_path='(.*)'", "".join(refused.value.__notes__))
    return expected, fitted([], path)


@pytest.mark.parametrize("kind", REFUSED)
def test_a_run_is_saved_before_a_hook_is_refused(
    ranks: Ranks, tmp_path: Any, kind: type[RefusedAfterTwo]
) -> None:
    for expected, resumed in ranks(2)(refused_and_resumed, str(tmp_path), kind, group=False):
        torch.testing.assert_close(resumed, expected, rtol=1e-10, atol=1e-10)
    assert "refused-epoch=0-step=2.ckpt" in os.listdir(tmp_path)


class Counts(Callback):
    """Of rank 0 alone, and calls nothing of the module."""

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self.batches = 1 + getattr(self, "batches", 0)


def counted() -> int:
    mine = [Counts()] if int(os.environ["RANK"]) == 0 else []
    trainer({"stages": 2}, max_epochs=1, callbacks=[*mine, Samples()]).fit(Drops(), loader())
    return sum(one.batches for one in mine)


def test_a_callback_of_one_rank_does_not_stop_the_others(ranks: Ranks) -> None:
    assert ranks(2)(counted, group=False) == [3, 0]


class ReadsAlone(Callback):
    @rank_zero_only
    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        float(module.net[0].weight.norm())


def read_alone() -> None:
    trainer({"stages": 2}, max_epochs=1, callbacks=[ReadsAlone()]).fit(Drops(), loader())


def test_what_one_rank_reads_alone_is_refused_at_once(ranks: Ranks) -> None:
    with pytest.raises(RankFailure, match="reads values of other stages; global rank 1 has come to the end"):
        ranks(2)(read_alone, group=False)
