"""What hooks see of single gradients is that of the whole batch, as on one device."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn

from tests.pool import Pool
from tests.ranks.lightning_cases import TARGETS, Regression, assert_same, loader, trainer, weights

Ranks = Callable[[int], Pool]


class ClipsInHooks(Regression):
    """Each gradient by its own norm: no sum of what micro-batches give."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.register_hook(lambda gradient: gradient * (0.02 / gradient.norm()).clamp(max=1.0))


class Watches(Regression):
    """Counts calls, as `wandb.watch` does, from hooks set in the fit."""

    def on_fit_start(self) -> None:
        self.seen: dict[str, list[float]] = {}
        self.handles = [
            parameter.register_hook(lambda gradient, name=name: self.note(name, gradient))
            for name, parameter in self.named_parameters()
        ]

    def note(self, name: str, gradient: Tensor) -> None:
        self.seen.setdefault(name, []).append(
            float(torch.histc(gradient, 4, -1.0, 1.0) @ torch.arange(4.0).double())
        )

    def on_fit_end(self) -> None:
        for handle in self.handles:
            handle.remove()


class StepsInTheBackward(Regression):
    """An optimizer for each parameter, that steps when its gradient is there."""

    def __init__(self) -> None:
        super().__init__()
        self.made = {parameter: torch.optim.Adam([parameter], 0.01) for parameter in self.net.parameters()}
        for parameter in self.made:
            parameter.register_post_accumulate_grad_hook(self.step)

    def step(self, parameter: Tensor) -> None:
        self.made[parameter].step()
        self.made[parameter].zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Tied(ClipsInHooks):
    """The first and the last layer have one weight."""

    def __init__(self) -> None:
        Regression.__init__(self)
        self.net[6] = nn.Linear(8, TARGETS).double()
        self.net[4].weight = self.net[2].weight
        for parameter in self.parameters():
            parameter.register_hook(lambda gradient: gradient * (0.02 / gradient.norm()).clamp(max=1.0))


class LogsNorms(Regression):
    """Lightning's function, and a histogram by hand."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, 2))
        self.log_dict(grad_norm(self.net[2], 1))
        for name, parameter in self.named_parameters():
            counts = torch.histc(parameter.grad, 4, -0.1, 0.1)
            self.log(f"histogram/{name}", float(counts[0] + 2 * counts[1]))


KINDS = [ClipsInHooks, StepsInTheBackward, Tied, LogsNorms]


def fitted(kind: type[Regression], stages: int | None, accumulate: int = 1) -> Any:
    strategy = {"stages": stages, "num_microbatches": 4, "step_timeout": 20} if stages else None
    module, run = kind(), trainer(strategy, accumulate_grad_batches=accumulate)
    run.fit(module, loader(24))
    logs = {name: float(value) for name, value in run.callback_metrics.items()}
    return (weights(module), logs), getattr(module, "seen", {})


@pytest.mark.parametrize(
    ("kind", "stages", "accumulate"), [(k, 2 + n % 2, 1 + n // 2) for n, k in enumerate(KINDS)]
)
def test_a_gradient_in_a_hook_is_that_of_one_device(
    ranks: Ranks, kind: type[Regression], stages: int, accumulate: int
) -> None:
    expected, _ = fitted(kind, None, accumulate)
    for found, _ in ranks(stages)(fitted, kind, stages, accumulate):
        assert_same(found, expected)


class SkipsBatches(Regression):
    """No loss in the second of two batches that add up; a layer whose gradients are there in the first alone."""

    def __init__(self) -> None:
        super().__init__()
        self.beside = nn.Linear(6, 3).double()
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(self.third)

    @staticmethod
    def third(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad = parameter.grad / 3

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        if batch_idx == 1:
            return None
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss + self.beside(batch[0]).square().mean() if batch_idx == 2 else loss


@pytest.mark.filterwarnings("ignore:training_step returned no loss")
@pytest.mark.parametrize("stages", [1, 2])
def test_a_hook_is_called_where_a_batch_gives_a_gradient(ranks: Ranks, stages: int) -> None:
    expected, _ = fitted(SkipsBatches, None, 3)
    for found, _ in ranks(stages)(fitted, SkipsBatches, stages, 3):
        assert_same(found, expected)


def test_a_hook_is_called_where_the_parameter_is_once_a_batch(ranks: Ranks) -> None:
    _, expected = fitted(Watches, None)
    seen: dict[str, list[float]] = {}
    for _, own in ranks(3)(fitted, Watches, 3):
        assert own and len(own) < len(expected)
        seen.update(own)
    assert seen == {name: pytest.approx(values) for name, values in expected.items()}


def fit_one_epoch(make: Any) -> None:
    trainer({"stages": 2}, max_epochs=1).fit(make(), loader())


class WaitsForSeveral(Regression):
    def on_fit_start(self) -> None:
        torch.autograd.graph.register_multi_grad_hook(list(self.parameters()), lambda gradients: None)


def test_a_hook_on_several_gradients_is_refused_with_the_hooks_to_use(ranks: Ranks) -> None:
    outcome = ranks(2).outcomes(fit_one_epoch, WaitsForSeveral, group=False)[1]
    assert "register_multi_grad_hook waits for several gradients" in str(outcome.error), outcome


class WatchesOnOneRank(Watches):
    """As `wandb.watch` on the rank that has the logger; after two batches a part of it is let go."""

    def on_fit_start(self) -> None:
        self.seen, self.handles = {}, []
        if self.trainer.is_global_zero:
            super().on_fit_start()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and self.trainer.current_epoch == 0:
            for handle in self.handles[::2]:
                handle.remove()


@pytest.mark.parametrize("stages", [2, 3])
def test_a_hook_of_one_rank_alone_sees_every_gradient(ranks: Ranks, stages: int) -> None:
    (weights_, expected) = fitted(WatchesOnOneRank, None)
    found, *others = ranks(stages)(fitted, WatchesOnOneRank, stages)
    assert found[1] == {name: pytest.approx(values) for name, values in expected.items()}
    assert_same(found[0], weights_)
    assert all(not seen for _, seen in others)


class Alone(Regression):
    """Registers a hook on rank 0 alone; `register` and `hook` are set by tests."""

    register = "register_post_accumulate_grad_hook"

    def on_fit_start(self) -> None:
        if self.trainer.is_global_zero:
            for parameter in self.parameters():
                getattr(parameter, self.register)(lambda held: held * 2 if self.register[9] == "h" else None)


class ChangesAlone(Alone):
    register = "register_hook"


@pytest.mark.parametrize("kind", [Alone, ChangesAlone])
def test_a_hook_of_one_rank_that_cannot_be_called_there_is_refused(ranks: Ranks, kind: type[Alone]) -> None:
    outcome = ranks(2).outcomes(fit_one_epoch, kind, group=False)[0]
    assert f"alone has registered a hook with {kind.register}" in str(outcome.error), outcome


class LooksOnOneRank(Regression):
    """Reads what every layer gives, on the rank that has the logger."""

    ranks = "global rank 0"

    def on_fit_start(self) -> None:
        if self.trainer.is_global_zero or self.ranks == "all":
            for layer in self.net:
                layer.register_forward_hook(lambda *_: None)


class LooksOnAll(LooksOnOneRank):
    ranks = "all"


def said_of_modules(kind: type[LooksOnOneRank]) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        fit_one_epoch(kind)
    return [str(one.message) for one in found if "on module" in str(one.message)]


def test_a_hook_on_a_module_that_no_rank_calls_is_warned_of(ranks: Ranks) -> None:
    said = ranks(2)(said_of_modules, LooksOnOneRank)
    assert [len(one) for one in said] == [1, 0]
    assert "alone has registered a hook on module 'net." in said[0][0]
    assert ranks(2)(said_of_modules, LooksOnAll) == [[], []]


class LogsGradients(Regression):
    """Reads in its step the gradients that the batch before has left."""

    def __init__(self, reads: str) -> None:
        super().__init__()
        self.reads = reads  # first and last in every step, late or sometimes in later ones
        self.norms: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first = self.norm() if self.reads == "first" else None
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        steps = self.global_step
        if {"late": steps > 1, "sometimes": steps % 2 == 1}.get(self.reads, True):
            self.log("norm", self.norm() if first is None else first)
        return loss

    def norm(self) -> Tensor:
        squares = [p.grad.norm() ** 2 for p in self.net.parameters() if p.grad is not None]
        return torch.sqrt(sum(squares, torch.zeros((), dtype=torch.float64)))

    def on_train_batch_end(self, *args: Any) -> None:
        self.norms.append(float(self.trainer.callback_metrics.get("norm", -1.0)))


def norms_read(pipeline: dict[str, Any] | None, reads: str, **options: Any) -> tuple[list[float], Any]:
    module = LogsGradients(reads)
    trainer(pipeline, max_epochs=2, limit_val_batches=0, **options).fit(module, loader(24))
    return module.norms, weights(module)


@pytest.mark.parametrize("schedule", ["1F1B", "ZBH1"])
@pytest.mark.parametrize("reads", ["first", "last"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_that_reads_gradients_finds_those_of_the_batch_before(
    schedule: str, reads: str, accumulate: int
) -> None:
    options = {"accumulate_grad_batches": accumulate}
    expected, trained = norms_read(None, reads, **options)
    pipeline = {"stages": 1, "num_microbatches": 4, "schedule": schedule}
    found, other = norms_read(pipeline, reads, **options)
    assert found == pytest.approx(expected)
    assert_same((other, {}), (trained, {}))


@pytest.mark.parametrize("reads", ["late", "sometimes"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_that_reads_gradients_in_later_batches_says_so_and_finds_them_from_the_next_on(
    reads: str, accumulate: int, recwarn: pytest.WarningsRecorder
) -> None:
    options = {"accumulate_grad_batches": accumulate}
    expected, trained = norms_read(None, reads, **options)
    found, other = norms_read({"stages": 1, "num_microbatches": 4}, reads, **options)
    assert found[-1] == pytest.approx(expected[-1])
    assert_same((other, {}), (trained, {}))
    told = any("of the batch before are gone" in str(one.message) for one in recwarn)
    assert told or found == pytest.approx(expected)


@pytest.mark.parametrize("reads", ["last", "late"])
def test_gradients_of_other_stages_that_a_step_reads_are_refused(ranks: Ranks, reads: str) -> None:
    with pytest.raises(AssertionError, match="sent here; gradients that a step reads .* on_before_zero_grad"):
        ranks(2)(norms_read, {"stages": 2, "num_microbatches": 2}, reads)
