"""`Trainer.fit` over stages gives the weights and the logged values of one device, on every rank."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pipeline.callbacks import BubbleMonitor, StageMemoryMonitor
from tests.pool import Pool, RankFailure
from tests.ranks.lightning_cases import Regression, assert_same, fit, loader, trainer, weights

Ranks = Callable[[int], Pool]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate_grad_batches": 2},
        {"gradient_clip_val": 0.05},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05, "max_epochs": 3},
    ],
    ids=str,
)
def test_fit_equals_one_device(ranks: Ranks, options: dict[str, Any]) -> None:
    expected = fit(None, **options)
    for found in ranks(2)(fit_with, {"stages": 2, "num_microbatches": 3}, options):
        assert_same(found, expected)


def fit_with(pipeline: dict[str, Any], options: dict[str, Any]) -> Any:
    return fit(pipeline, **options)


@pytest.mark.parametrize("pipeline", [
    {"stages": 3, "schedule": "GPipe", "num_microbatches": 7},
    {"stages": 4, "num_microbatches": "auto"},
    {"stages": 2, "partition": ["net.6"], "num_microbatches": 1},
    {"stages": 1},
    {"stages": 2, "data": "broadcast"},
], ids=str)  # fmt: skip
def test_any_layout_equals_one_device(ranks: Ranks, pipeline: dict[str, Any]) -> None:
    expected = fit(None)
    for found in ranks(pipeline["stages"])(fit_with, pipeline, {}):
        assert_same(found, expected)


def fit_bfloat16(pipeline: dict[str, Any]) -> tuple[dict[str, Tensor], str]:
    class Float(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.float()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            hidden = self.net[0](batch[0].float())
            self.kinds = str(hidden.dtype)
            return nn.functional.mse_loss(self.net[1:](hidden), batch[1].float())

        def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    module = Float()
    run = trainer(pipeline, precision="bf16-mixed")
    run.fit(module, loader())
    return weights(module), run.strategy.precision_plugin.precision


def test_bfloat16_mixed_stays_close_to_one_device(ranks: Ranks) -> None:
    expected = fit_bfloat16(None)[0]
    for found, precision in ranks(2)(fit_bfloat16, {"stages": 2, "num_microbatches": 2}):
        assert precision == "bf16-mixed"
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0.03, atol=0.03)


def fit_replicas(pipeline: dict[str, Any] | None) -> Any:
    module = Regression()
    options: dict[str, Any] = {"max_epochs": 1, "use_distributed_sampler": False}
    run = trainer(pipeline, **options)
    replica = run.strategy.replica_index if pipeline else None
    x, y = loader(16).dataset.tensors  # type: ignore[attr-defined]
    batches = []
    for start in range(0, 16, 8):  # each replica takes half of every batch of 8
        half = (
            slice(start, start + 8)
            if replica is None
            else slice(start + 4 * replica, start + 4 * replica + 4)
        )
        batches.append((x[half], y[half]))
    run.fit(module, DataLoader(batches, batch_size=None, shuffle=False))
    return weights(module)


@pytest.mark.parametrize("schedule", ["1F1B", "ZBH1", "ZBV"])
def test_two_replicas_of_two_stages_average_their_gradients(ranks: Ranks, schedule: str) -> None:
    expected = fit_replicas(None)
    pipeline = {"stages": 2, "data_parallel_size": 2, "num_microbatches": 2, "schedule": schedule}
    for found in ranks(4)(fit_replicas, pipeline):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-10)


def every_function(pipeline: dict[str, Any] | None) -> Any:
    module = Regression()
    run = trainer(pipeline, max_epochs=1)
    before = run.validate(module, loader(seed=4), verbose=False)
    run.fit(module, loader(), loader(seed=4))
    after = run.validate(module, loader(seed=4), verbose=False)
    predicted = run.predict(module, loader(seed=4))
    again = trainer(pipeline, max_epochs=1)
    again.fit(module, loader())
    last = again.predict(module, loader(seed=4))
    return before, after, predicted, last, weights(module)


def test_functions_of_one_or_several_trainers_follow_each_other(ranks: Ranks) -> None:
    before, after, predicted, last, trained = every_function(None)
    for rank, found in enumerate(ranks(2)(every_function, {"stages": 2, "num_microbatches": 2})):
        for name, value in before[0].items():
            assert found[0][0][name] == pytest.approx(value, rel=1e-6)
            assert found[1][0][name] == pytest.approx(after[0][name], rel=1e-6)
        for name, value in trained.items():
            torch.testing.assert_close(found[4][name], value, rtol=1e-9, atol=1e-9)
        for outputs, expected in ((found[2], predicted), (found[3], last)):
            if rank == 0:
                torch.testing.assert_close(torch.cat(outputs), torch.cat(expected))
            else:
                assert outputs == [None] * len(expected)


class Monitored(Regression):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


def fit_monitored(folder: str, pipeline: dict[str, Any] | None) -> Any:
    module = Monitored()
    best = ModelCheckpoint(folder, monitor="val_error", save_top_k=1)
    run = trainer(
        pipeline, max_epochs=5, enable_checkpointing=True,
        callbacks=[best, EarlyStopping("val_loss", patience=1, min_delta=10.0)],
    )  # fmt: skip
    run.fit(module, loader(), loader(seed=4))
    rate = run.optimizers[0].param_groups[0]["lr"]
    return run.current_epoch, rate, float(best.best_model_score), bool(best.best_model_path)


def test_monitors_decide_alike_on_every_rank(ranks: Ranks, tmp_path: Any) -> None:
    expected = fit_monitored(str(tmp_path / "one"), None)
    for found in ranks(2)(fit_monitored, str(tmp_path / "two"), {"stages": 2}):
        assert found == (expected[0], expected[1], pytest.approx(expected[2], rel=1e-6), True)
    assert expected[0] == 2


class Frozen(Regression):
    def __init__(self) -> None:
        super().__init__()
        for parameter in self.net[:3].parameters():
            parameter.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def fit_frozen(pipeline: dict[str, Any] | None) -> Any:
    return fit(pipeline, Frozen)


def test_a_stage_without_trainable_parameters_works(ranks: Ranks) -> None:
    expected = fit_frozen(None)
    for found in ranks(2)(fit_frozen, {"stages": 2, "partition": ["net.4"], "num_microbatches": 2}):
        assert_same(found, expected)


class Collecting(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []
        self.losses: list[Tensor] = []
        self.seen: Any = None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        out = self.net(batch[0])
        self.outputs.append(out)
        self.losses.append(nn.functional.mse_loss(out, batch[1]))

    def on_validation_epoch_end(self) -> None:
        self.seen = (torch.cat(self.outputs), torch.stack(self.losses))
        self.outputs.clear()
        self.losses = []


def validate_collecting(pipeline: dict[str, Any] | None) -> Any:
    module = Collecting()
    run = trainer(pipeline)
    run.validate(module, loader(), verbose=False)
    run.validate(module, loader(), verbose=False)
    return module.seen


def test_lists_filled_by_a_step_are_those_of_one_device_on_every_rank(ranks: Ranks) -> None:
    expected = validate_collecting(None)
    for rank in ranks(2)(validate_collecting, {"stages": 2, "num_microbatches": 3}):
        for found, value in zip(rank, expected, strict=True):
            torch.testing.assert_close(found, value)


class StopsOnOneRank(pl.Callback):
    def on_train_batch_end(self, run: pl.Trainer, *_: Any) -> None:
        if run.global_rank == 1 and run.global_step == 2:
            run.should_stop = True


def fit_stopping() -> tuple[int, int]:
    run = trainer({"stages": 2}, max_epochs=4, min_epochs=0, callbacks=[StopsOnOneRank()])
    run.fit(Regression(), loader())
    return run.global_step, run.current_epoch


def test_one_rank_stops_all_after_the_same_batch(ranks: Ranks) -> None:
    first, second = ranks(2)(fit_stopping)
    assert first == second
    assert first[0] < 12


def fit_shuffled(pipeline: dict[str, Any] | None) -> Any:
    pl.seed_everything(5, verbose=False)
    module = Regression()
    run = trainer(pipeline, max_epochs=3)
    run.fit(module, loader(shuffle=True))
    return weights(module)


def test_a_shuffled_loader_gives_the_batches_of_one_device(ranks: Ranks) -> None:
    expected = fit_shuffled(None)
    for found in ranks(2)(fit_shuffled, {"stages": 2, "num_microbatches": 2}):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9)


def fit_different_data(data: str) -> Any:
    run = trainer({"stages": 2, "data": data})
    run.fit(Regression(), loader(seed=run.global_rank))
    return run.global_step


def test_different_batches_are_an_error_that_names_the_way_out(ranks: Ranks) -> None:
    with pytest.raises(RankFailure, match=r'(?s)BatchMismatchError.*PipelineStrategy\(data="broadcast"\)'):
        ranks(2)(fit_different_data, "replicate")
    assert ranks(2)(fit_different_data, "broadcast") == [6, 6]


def fit_one_shot(pipeline: dict[str, Any] | None) -> list[int]:
    seen: list[int] = []

    class Counting(Regression):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            seen.append(round(float(batch[0].sum()) * 1e6))

    trainer(pipeline, max_epochs=1).fit(Counting(), iter(list(loader())))
    return seen


def test_a_one_shot_iterable_loses_nothing(ranks: Ranks) -> None:
    assert len(fit_one_shot(None)) == 3
    for found in ranks(2)(fit_one_shot, {"stages": 2}):
        assert found == fit_one_shot(None)


class Monitors(pl.Callback):
    def __init__(self) -> None:
        self.keys: set[str] = set()

    def on_train_end(self, run: pl.Trainer, *_: Any) -> None:
        self.keys = {key for key in run.callback_metrics if key.startswith("pipeline/")}


def fit_monitors() -> Any:
    monitors = Monitors()
    run = trainer({"stages": 2}, callbacks=[BubbleMonitor(), StageMemoryMonitor(), monitors])
    run.fit(Regression(), loader())
    return sorted(monitors.keys), float(run.callback_metrics["pipeline/bubble_fraction"])


def test_monitors_log_the_same_keys_and_values_on_every_rank(ranks: Ranks) -> None:
    (keys, bubble), other = ranks(2)(fit_monitors)
    assert other == (keys, bubble)
    assert 0 < bubble < 1
    assert keys == sorted(
        [f"pipeline/{name}" for name in ("bubble_fraction", "bubble_fraction_simulated", "step_time_s",
                                         "bubble_fraction_equal_stages", "slowest_stage", "makespan_s")]
        + [f"pipeline/stage_{s}/{name}" for s in (0, 1)
           for name in ("forward_s", "backward_s", "waiting_start_s", "waiting_steady_s", "waiting_drain_s",
                        "data_s", "optimizer_s", "other_s", "idle_s", "parameters", "peak_memory_gib",
                        "parameters_gib", "gradients_gib", "optimizer_state_gib", "activations_gib",
                        "activation_microbatches", "activations_planned_gib", "buffers_gib")]
    )  # fmt: skip


class Tied(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net[4].weight = self.net[2].weight


def fit_tied(pipeline: dict[str, Any] | None) -> Any:
    return fit(pipeline, Tied, gradient_clip_val=0.05, accumulate_grad_batches=2)


def test_a_weight_shared_by_two_stages_is_clipped_and_stepped_as_one(ranks: Ranks) -> None:
    expected = fit_tied(None)
    for found in ranks(2)(fit_tied, {"stages": 2, "partition": ["net.4"], "num_microbatches": 2}):
        assert_same(found, expected)


def fit_tied_replicas(pipeline: dict[str, Any]) -> Any:
    module = Tied()
    if trainer(pipeline).global_rank:  # unequal starts, as without a seed
        torch.nn.init.uniform_(module.net[2].weight)
    trainer(pipeline).fit(module, loader(), loader(seed=4))
    return weights(module)


def test_replicas_and_shared_weights_start_and_stay_equal(ranks: Ranks) -> None:
    pipeline = {"stages": 2, "data_parallel_size": 2, "partition": ["net.4"]}
    first, *others = ranks(4)(fit_tied_replicas, pipeline)
    for other in others:
        for name, value in first.items():
            torch.testing.assert_close(other[name], value, rtol=0, atol=0)


class ClipsInHook(Tied):
    norms: list[float]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(parameters, 0.05)
        self.norms.append(float(norm))
        largest = torch.nn.utils.clip_grad_norm_(parameters, 1e-3, norm_type=float("inf"))
        self.norms.append(float(largest))

    def on_fit_start(self) -> None:
        self.norms = []


def fit_clipping_in_hook(pipeline: dict[str, Any] | None) -> Any:
    module = ClipsInHook()
    trainer(pipeline).fit(module, loader())
    return weights(module), module.norms


def test_torch_clipping_in_a_hook_goes_by_all_stages(ranks: Ranks) -> None:
    expected, norms = fit_clipping_in_hook(None)
    for found, found_norms in ranks(2)(fit_clipping_in_hook, {"stages": 2, "partition": ["net.4"]}):
        assert found_norms == pytest.approx(norms, rel=1e-9)
        assert_same((found, {}), (expected, {}))
