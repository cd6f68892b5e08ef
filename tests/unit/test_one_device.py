"""`stages=1` is one device: the same numbers, the same files, and nothing that is refused."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Callback,
    EMAWeightAveraging,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_pipeline import PipelineStrategy
from lightning_pipeline.callbacks import BubbleMonitor, PipelineTimeline, StageMemoryMonitor
from lightning_pipeline.patching import standing
from lightning_pipeline.recording.clock import StreamClock
from tests.ranks.lightning_cases import Regression, assert_same, fit, loader, trainer, weights
from tests.ranks.test_nothing_is_patched import functions_of, libraries
from tests.unit.runtime.test_clock import Stream

ONE = {"stages": 1}


class Dropping(Regression):
    """Draws random numbers in its step."""

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        dropped = nn.functional.dropout(self.net(batch[0]), 0.5, self.training)
        return nn.functional.mse_loss(dropped, batch[1])


class Adversarial(Regression):
    """Two optimizers by hand, each for a half of the network."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
            self.log("train_loss", loss)

    def configure_optimizers(self) -> Any:
        halves = self.net[:4], self.net[4:]
        return [torch.optim.Adam(half.parameters(), lr=0.01) for half in halves]


class Quasi(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class Backward(Regression):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(2 * loss, *args, **kwargs)


class Fetching(Regression):
    def training_step(self, dataloader_iter: Iterator[Any]) -> Tensor:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        loss = self.loss(batch)
        self.log("train_loss", loss, batch_size=len(batch[0]))
        return loss


@pytest.mark.parametrize("make", [Regression, Dropping, Adversarial, Quasi, Backward, Fetching])
def test_every_module_trains_as_on_one_device(make: Callable[[], pl.LightningModule]) -> None:
    found = []
    for pipeline in (ONE, None):
        pl.seed_everything(7, verbose=False)
        found.append(fit(pipeline, make))
    assert_same(*found, tolerance=0)


class Asks(pl.Callback):
    """Runs the model, as callbacks that draw samples do."""

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        out = pl_module.net(torch.ones(1, 6, dtype=torch.float64))
        trainer.callback_metrics["asked"] = out.sum().detach()


@pytest.mark.parametrize(
    "callback",
    [
        Asks,
        WeightAveraging,
        lambda: EMAWeightAveraging(decay=0.9),
        lambda: StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1),
        lambda: ModelPruning("l1_unstructured", amount=0.5, parameter_names=["weight"]),
    ],
    ids=["asks", "averaging", "ema", "swa", "pruning"],
)
def test_every_callback_works_as_on_one_device(callback: Callable[[], pl.Callback]) -> None:
    found = []
    for pipeline in (ONE, None):
        pl.seed_everything(7, verbose=False)
        found.append(fit(pipeline, callbacks=[callback()], max_epochs=3))
    assert_same(*found, tolerance=0)


class Data(pl.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 2

    def train_dataloader(self) -> Any:
        return loader(batch_size=self.batch_size)

    def val_dataloader(self) -> Any:
        return loader(batch_size=self.batch_size)


def test_the_batch_size_finder_finds_the_same_size(tmp_path: Path) -> None:
    found = []
    for pipeline in (ONE, None):
        data = Data()
        finder = BatchSizeFinder(max_trials=2, steps_per_trial=1)
        trainer(pipeline, callbacks=[finder], default_root_dir=tmp_path).fit(Regression(), data)
        found.append(data.batch_size)
    assert found == [4, 4]


class Counting(pl.LightningModule):
    """Takes batches of any kind and learns from nothing but them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(batch)
        return self.weight * batch

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_any_batch_trains_and_the_step_runs_once_for_each() -> None:
    module = Counting()
    trainer(ONE, max_epochs=1).fit(module, DataLoader([3, None, 4], batch_size=None))  # type: ignore[arg-type]
    assert module.seen == [3, 4]  # Lightning itself leaves None out
    assert module.weight.item() == pytest.approx(1 - 0.3 - 0.4)


class Looks(Regression):
    """Notes in its step what of torch, of libraries and of its own modules is not what it was before the run."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.replaced = libraries(), list[str]()
        self.own = {name: (type(part), functions_of(part)) for name, part in self.named_modules()}
        self.steps = 0

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.steps += 1
        now = libraries()
        self.replaced += standing() + [name for name, found in self.before.items() if found != now[name]]
        for name, part in self.named_modules():
            assert type(part) is self.own[name][0]
            self.replaced += [f"{name}.{key}" for key in functions_of(part).keys() - self.own[name][1].keys()]
        return super().training_step(batch, batch_idx)


def test_with_whole_batches_nothing_is_traced_and_nothing_of_torch_or_the_user_is_patched() -> None:
    plain, module = Looks(), Looks()
    trainer(None, max_epochs=1).fit(plain, loader(), loader(seed=4))  # torch wraps an optimizer's step
    trainer({"stages": 1, "num_microbatches": 1}, max_epochs=1).fit(module, loader(), loader(seed=4))
    assert module.steps == plain.steps
    position = {f"_TrainingEpochLoop.{name}" for name in ("on_run_start", "_on_before_fetch")}
    assert set(module.replaced) - set(plain.replaced) == position  # for exact resumes


class Breaking(Regression):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 4:
            raise ValueError("broken on purpose")


@pytest.mark.parametrize("callback", [OnExceptionCheckpoint, ModelCheckpoint])
def test_a_run_that_fails_is_saved(callback: type[Any], tmp_path: Path) -> None:
    options: dict[str, Any] = {} if callback is OnExceptionCheckpoint else {"save_on_exception": True}
    run = trainer(ONE, callbacks=[callback(tmp_path, **options)], enable_checkpointing=True)
    with pytest.raises(ValueError, match="broken on purpose"):
        run.fit(Breaking(), loader())
    saved = [torch.load(file, weights_only=False)["global_step"] for file in tmp_path.iterdir()]
    assert max(saved) == 4


def test_a_checkpoint_is_lightnings_one_file(tmp_path: Path) -> None:
    files = []
    for name, pipeline in (("one", ONE), ("plain", None)):
        callback = ModelCheckpoint(tmp_path / name, save_last=True)
        module, run = Regression(), trainer(pipeline, callbacks=[callback], enable_checkpointing=True)
        run.fit(module, loader())
        read = Regression.load_from_checkpoint(callback.best_model_path, map_location="cpu")
        torch.testing.assert_close(weights(read), weights(module), rtol=0, atol=0)
        files.append(
            (sorted(p.name for p in (tmp_path / name).iterdir()), torch.load(callback.last_model_path))
        )
    (names, own), (expected, plain) = files
    assert names == expected
    assert own.keys() - plain.keys() == {"lightning_pipeline"}
    torch.testing.assert_close(own["optimizer_states"], plain["optimizer_states"], rtol=0, atol=0)


@pytest.mark.parametrize("batches", [3, 4, 6])
@pytest.mark.parametrize("distributed", [None, True])
def test_a_resumed_run_goes_on_as_if_nothing_had_happened(
    batches: int, distributed: bool | None, tmp_path: Path
) -> None:
    def run(**options: Any) -> pl.Trainer:
        pipeline = {**ONE, "save_distributed_checkpoint": distributed}
        return trainer(pipeline, max_epochs=3, **options)

    pl.seed_everything(11, verbose=False)
    whole = Dropping()
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=batches, save_top_k=-1, filename="{step}")
    run(callbacks=[saves], enable_checkpointing=True).fit(whole, loader(30, shuffle=True))
    pl.seed_everything(99, verbose=False)
    resumed = Dropping()
    path = tmp_path / f"step={batches}.ckpt"
    assert path.is_dir() == bool(distributed)
    run().fit(resumed, loader(30, shuffle=True), ckpt_path=path, weights_only=False)
    torch.testing.assert_close(weights(resumed), weights(whole), rtol=0, atol=0)


class Once(IterableDataset[Any]):
    """Items come once, as from a queue."""

    def __init__(self, items: Iterator[int]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return (torch.tensor(float(item)) for item in self.items)


class Recording(Counting):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append(int(batch))
        return self.weight * batch


def test_a_resumed_run_takes_nothing_from_a_stream(tmp_path: Path) -> None:
    def stream(first: int) -> Any:
        return DataLoader(Once(iter(range(first, 100))), batch_size=None)

    first = trainer(ONE, max_epochs=1, limit_train_batches=3)
    first.fit(Recording(), stream(1))
    first.save_checkpoint(tmp_path / "saved.ckpt")
    module = Recording()
    resumed = trainer(ONE, max_epochs=2, limit_train_batches=3)
    resumed.fit(module, stream(51), ckpt_path=tmp_path / "saved.ckpt", weights_only=False)
    assert module.seen == [51, 52, 53]


class Queue(IterableDataset[Any]):
    """Each epoch takes two items that nobody gets again."""

    def __init__(self) -> None:
        self.items = iter(range(100))

    def __iter__(self) -> Iterator[Any]:
        for _ in range(2):
            yield torch.tensor(float(next(self.items)))


def test_a_resumed_run_takes_an_item_of_a_queue_once(tmp_path: Path) -> None:
    first = trainer(ONE, max_epochs=2)
    first.fit(Recording(), DataLoader(Queue(), batch_size=None))
    first.save_checkpoint(tmp_path / "saved.ckpt")
    module, data = Recording(), Queue()
    resumed = trainer(ONE, max_epochs=4)
    resumed.fit(
        module, DataLoader(data, batch_size=None), ckpt_path=tmp_path / "saved.ckpt", weights_only=False
    )
    assert module.seen == [0, 1, 2, 3]
    assert next(data.items) == 4


class Standing:
    """Knows where it stands, and goes on there."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < 10:
            self.at += 1
            yield torch.tensor(float(self.at))

    def __len__(self) -> int:
        return 10

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_a_loader_that_knows_where_it_stands_goes_on_there_once(tmp_path: Path) -> None:
    first = trainer(ONE, max_steps=2, max_epochs=-1)
    first.fit(Recording(), Standing())
    first.save_checkpoint(tmp_path / "saved.ckpt")
    module = Recording()
    resumed = trainer(ONE, max_steps=4, max_epochs=-1)
    resumed.fit(module, Standing(), ckpt_path=tmp_path / "saved.ckpt", weights_only=False)
    assert module.seen == [3, 4]


@pytest.mark.parametrize("make", [Regression, Adversarial, Quasi])
def test_the_monitors_tell_what_one_device_does(make: Callable[[], Any], tmp_path: Path) -> None:
    monitors = [BubbleMonitor(), StageMemoryMonitor(), PipelineTimeline(steps=[1], dirpath=tmp_path)]
    module, run = make(), trainer(ONE, callbacks=monitors)
    run.fit(module, loader())
    metrics = {name: float(value) for name, value in run.callback_metrics.items()}
    assert metrics["pipeline/bubble_fraction"] < 0.05
    step = metrics["pipeline/step_time_s"]
    assert 0 < metrics["pipeline/stage_0/forward_s"] < step
    assert 0 < metrics["pipeline/stage_0/backward_s"] < step
    assert metrics["pipeline/stage_0/parameters"] == sum(p.numel() for p in module.parameters())
    assert metrics["pipeline/stage_0/activations_gib"] > 0
    assert {file.suffix for file in tmp_path.iterdir()} == {".json", ".svg"}


class OnStream(Callback):
    """As if the module were on a device that works later than the host asks."""

    def __init__(self, folder: Path) -> None:
        self.stream, self.folder = Stream(), folder
        self.written: list[int] = []

    def on_train_start(self, run: Any, module: Any) -> None:
        run.strategy.timeline.stream = StreamClock(self.stream.event, self.stream.synchronize)

    def on_train_batch_start(self, run: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.written.append(len(list(self.folder.iterdir())))
        self.stream.work(5.0)


def test_on_a_device_a_recorded_step_is_written_in_the_next_one_and_the_last_at_the_end(
    tmp_path: Path,
) -> None:
    watch = OnStream(tmp_path)
    timeline = PipelineTimeline(steps=[1, 3], dirpath=tmp_path)
    trainer(ONE, callbacks=[watch, timeline], max_epochs=1).fit(Regression(), loader(samples=32))
    assert watch.written == [0, 0, 0, 2]
    assert len(timeline.files) == 4


def test_one_device_starts_no_group_and_no_process() -> None:
    run = trainer(ONE)
    assert run.strategy.launcher is None
    run.fit(Regression(), loader())
    assert not torch.distributed.is_initialized()
    assert isinstance(run.strategy, PipelineStrategy)
    assert run.strategy.is_one_device


def test_a_run_of_one_process_computes_on_as_many_threads_as_its_script_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # with it, Lightning's launchers set no number
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        launcher = trainer({**ONE, "num_microbatches": 2}).strategy.launcher
        assert launcher.launch(torch.get_num_threads) == before + 1  # type: ignore[union-attr]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "setting", [{"num_microbatches": 2}, {"schedule": "Interleaved1F1B", "stages_per_rank": 2}]
)
def test_microbatches_or_several_stages_on_one_rank_are_a_pipeline(setting: dict[str, Any]) -> None:
    assert not trainer({**ONE, **setting}).strategy.is_one_device  # type: ignore[attr-defined]
