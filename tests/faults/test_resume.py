"""A resumed run sees the batches, and ends with the weights, of the run that was never interrupted."""

import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torchmetrics import SumMetric

from lightning_pipeline import PipelineStrategy
from tests.faults.cases import WHOLE, whole
from tests.faults.chains import Seen, compare, link
from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, loader, trainer

Ranks = Callable[[int], Pool]


class Notes(Regression):
    """Writes down every batch that it trains on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, float]] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen.append((self.trainer.current_epoch, float(batch[0].sum())))


class Begins(Notes):
    """And every beginning of an epoch, where it draws; one device forgets some, as without this package."""

    def on_train_epoch_start(self) -> None:
        self.seen.append((self.trainer.current_epoch, float(torch.rand(()))))


def run(
    stages: int, folder: str, stop: int, resume: int | None, accumulate: int, workers: int, every: int = 1
) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Train until batch `stop`, from the checkpoint after batch `resume`."""
    pl.seed_everything(5, verbose=False)
    module = Notes() if stages == 1 else Begins()
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = pl.Trainer(
        accelerator="cpu", devices=stages, strategy=PipelineStrategy(stages=stages, num_microbatches=2),
        max_steps=stop, logger=False, callbacks=[saver], enable_progress_bar=False,
        enable_model_summary=False, accumulate_grad_batches=accumulate, val_check_interval=2,
        check_val_every_n_epoch=every,
    )  # fmt: skip
    options: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    path = None if resume is None else str(Path(folder) / f"step={resume}.ckpt")
    trainer.fit(module, loader(32, shuffle=True, **options), loader(16, seed=4), ckpt_path=path)
    return module.seen, {n: p.detach().clone() for n, p in module.named_parameters()}


def chain(stages: int, folder: str, stops: list[int], accumulate: int, workers: int, every: int = 1) -> Any:
    """The uninterrupted run, and one that is stopped and resumed at each of `stops`."""
    straight = run(stages, f"{folder}/straight", stops[-1], None, accumulate, workers, every)
    seen: list[Any] = []
    weights: Any = None
    for resume, stop in zip([None, *stops[:-1]], stops, strict=True):
        part, weights = run(stages, f"{folder}/chain", stop, resume, accumulate, workers, every)
        seen += part
    return straight, (seen, weights)


@pytest.mark.parametrize(
    ("stages", "stops", "accumulate", "workers", "every"),
    [
        whole(2, [4, 6, 10], 1, 0, 1),
        whole(2, [4, 8, 12], 1, 0, 1),
        whole(2, [3, 4, 5, 8, 9, 12], 1, 0, 1),
        (2, [3, 4, 5], 1, 0, 1),
        whole(1, [4, 5, 6, 10], 1, 2, 1),
        whole(2, [2, 3, 5], 2, 0, 1),
        (2, [4, 6, 10], 1, 0, 2),
        whole(1, [4, 8, 12, 16], 1, 0, 2),
        whole(1, [4, 6, 8, 9, 12, 13], 1, 0, 3),
    ],
)
def test_a_chain_of_resumed_runs_is_the_uninterrupted_run(
    ranks: Ranks, tmp_path: Path, stages: int, stops: list[int], accumulate: int, workers: int, every: int
) -> None:
    """Also where not every epoch ends with a validation, whose loader draws."""
    for straight, chained in ranks(stages)(chain, stages, str(tmp_path), stops, accumulate, workers, every):
        assert chained[0] == straight[0]
        for name, weight in straight[1].items():
            assert torch.equal(chained[1][name], weight), name


@pytest.mark.parametrize(
    ("microbatches", "dropout", "links"),
    [
        (4, 0.2, [(2, "1F1B", 1, 3), (3, "GPipe", 1, 8), (2, "Interleaved1F1B", 2, 9), (3, "ZBH1", 1, 12)]),
        (1, 0.0, [(2, "1F1B", 1, 4), (1, "1F1B", 1, 8), (3, "1F1B", 1, 10)]),
    ],
)
def test_a_chain_goes_on_over_other_ranks_and_schedules(
    ranks: Ranks, tmp_path: Path, microbatches: int, dropout: float, links: list[tuple[int, str, int, int]]
) -> None:
    common = {"microbatches": microbatches, "dropout": dropout, "accumulate": 1, "workers": False}
    stages = 2 if microbatches > 1 else 1
    plain = {"stages": stages, "schedule": "1F1B", "per_rank": 1, **common}
    straight = ranks(stages)(link, plain, str(tmp_path / "straight"), links[-1][3], None, group=False)[0]
    seen: Seen = []
    weights: dict[str, torch.Tensor] = {}
    resume = None
    for size, schedule, per_rank, stop in links:
        how = {"stages": size, "schedule": schedule, "per_rank": per_rank, **common}
        part, weights = ranks(size)(link, how, str(tmp_path / "chain"), stop, resume, group=False)[0]
        seen += part
        resume = stop
    assert compare(straight, (seen, weights)) == ""


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_save_after_the_run_goes_on_where_it_stood(tmp_path: Path, microbatches: int, own: bool) -> None:
    def train(epochs: int, resume: str | None = None) -> tuple[Notes, pl.Trainer]:
        options = {"generator": torch.Generator().manual_seed(9)} if own else {}
        module = Notes()
        pl.seed_everything(5, verbose=False)
        run = trainer({"stages": 1, "num_microbatches": microbatches}, max_epochs=epochs, limit_val_batches=0)
        run.fit(module, loader(32, shuffle=True, **options), ckpt_path=resume)
        return module, run

    path = str(tmp_path / "a.ckpt")
    train(1)[1].save_checkpoint(path)
    assert train(3, path)[0].seen == train(3)[0].seen[4:]


class Samples(Regression):
    """Counts the samples of an epoch, in a metric and in what it logs."""

    def __init__(self) -> None:
        super().__init__()
        self.samples = SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.samples.update(len(batch[0]))
        self.log("samples", self.samples, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


def resumed_in_an_epoch(folder: str) -> tuple[list[str], float, list[Any]]:
    """What a run says that goes on after two of an epoch's four batches, and the samples that it counts."""
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    options: dict[str, Any] = {"writes": True, "callbacks": [saver], "default_root_dir": folder}
    cut = {"stages": 2, "num_microbatches": 2}
    trainer(cut, max_steps=2, **options).fit(Samples(), loader(32))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run = trainer(cut, max_epochs=1, **options)
        run.fit(Samples(), loader(32), ckpt_path=f"{folder}/step=2.ckpt")
        ours = [one for one in warnings.filters if "ended before the epoch" in str(one[1])]
    return [str(one.message) for one in said], float(run.callback_metrics["samples"]), ours


def test_a_resume_in_an_epoch_is_not_called_unreliable_and_metrics_begin_anew(
    ranks: Ranks, tmp_path: Path
) -> None:
    for said, samples, filters in ranks(2)(resumed_in_an_epoch, str(tmp_path)):
        assert not [text for text in said if "resumable" in text]
        assert samples == 16
        assert not filters  # a later run's own warning is not lost


class Dies(Notes):
    """Is killed in its second epoch, the first time only."""

    def __init__(self, mark: Path, rank: int) -> None:
        super().__init__()
        self.mark, self.rank = mark, rank

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step == 6 and self.trainer.global_rank == self.rank and not self.mark.exists():
            self.mark.parent.mkdir(parents=True, exist_ok=True)
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def started_again(folder: str, rank: int, resume: str | None) -> tuple[list[Any], dict[str, torch.Tensor]]:
    pl.seed_everything(5, verbose=False)
    module = Dies(Path(folder, "mark"), rank)
    saver = ModelCheckpoint(f"{folder}/saved", every_n_train_steps=2, save_top_k=-1)
    strategy = PipelineStrategy(stages=2, num_microbatches=2, step_timeout=4, resume=resume)  # type: ignore[arg-type]
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_steps=10, logger=False, callbacks=[saver],
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(module, loader(32, shuffle=True))
    return module.seen, {n: p.detach().clone() for n, p in module.named_parameters()}


def test_a_job_that_is_started_again_goes_on_where_it_was(ranks: Ranks, tmp_path: Path) -> None:
    folder = str(tmp_path / "killed")
    ended = ranks(2).outcomes(started_again, folder, 1, "auto", timeout=30, group=False, dies=True)
    assert ended[1].exit_code == -signal.SIGKILL
    assert list(tmp_path.glob("killed/crash/rank0-*.txt"))
    newest = max(tmp_path.glob("killed/saved/*step=6.ckpt"))
    (newest / "meta.pt").write_bytes(b"damaged")
    again = ranks(2)(started_again, folder, 1, "auto", group=False)
    (tmp_path / "straight").mkdir()
    (tmp_path / "straight" / "mark").touch()
    straight = ranks(2)(started_again, str(tmp_path / "straight"), 1, None, group=False)
    for (seen, weights), (all_seen, expected) in zip(again, straight, strict=True):
        assert seen == all_seen[4:]
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


@WHOLE
@pytest.mark.timeout(400)  # four processes import torch
def test_torchrun_starts_a_job_again_that_goes_on_by_itself(ranks: Ranks, tmp_path: Path) -> None:
    """Rank 1 is killed in its second epoch; torchrun ends the other rank too, and starts both anew."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1", "--nproc-per-node",
        "2", "-m", "tests.faults.test_resume", str(tmp_path / "killed"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Signal 9 (SIGKILL)" in done.stderr or "exitcode: -9" in done.stderr, done.stderr[-4000:]
    again = [torch.load(tmp_path / "killed" / f"rank{rank}.pt") for rank in range(2)]
    (tmp_path / "straight").mkdir()
    (tmp_path / "straight" / "mark").touch()
    straight = ranks(2)(started_again, str(tmp_path / "straight"), 1, None, group=False)
    for (seen, weights), (all_seen, expected) in zip(again, straight, strict=True):
        assert seen == all_seen[len(all_seen) - len(seen) :]
        assert 0 < len(seen) < len(all_seen)
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


class AllRaise(Notes):
    """Every rank raises after the same batch, rank 1 a little later; or in another batch."""

    def __init__(self, alike: bool) -> None:
        super().__init__()
        self.alike = alike

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        rank = self.trainer.global_rank
        if self.trainer.global_step == 6 + (rank == 1 and not self.alike):
            time.sleep(0.1 * rank)
            raise ValueError("the loss is too high")


def ended_alike(folder: str, alike: bool) -> tuple[list[Any], dict[str, torch.Tensor]]:
    pl.seed_everything(5, verbose=False)
    run = part_of_a_run(folder, None)
    with pytest.raises(ValueError, match="the loss is too high"):
        run.fit(module := AllRaise(alike), loader(32, shuffle=True))
    return module.seen, {}


def part_of_a_run(folder: str, stop: int | None) -> pl.Trainer:
    saver = ModelCheckpoint(f"{folder}/saved", save_on_exception=True, every_n_epochs=100)
    return pl.Trainer(
        accelerator="cpu", devices=2, strategy=PipelineStrategy(stages=2, num_microbatches=2, step_timeout=4),
        max_steps=stop or 10, logger=False, callbacks=[saver], default_root_dir=folder,
    )  # fmt: skip


def goes_on(folder: str, resume: bool) -> tuple[list[Any], dict[str, torch.Tensor]]:
    pl.seed_everything(5, verbose=False)
    path = str(next(Path(folder, "saved").iterdir())) if resume else None
    module = Notes()
    part_of_a_run(folder, 10).fit(module, loader(32, shuffle=True), ckpt_path=path)
    return module.seen, {n: p.detach().clone() for n, p in module.named_parameters()}


def test_an_exception_of_all_ranks_is_saved_and_resumed_exactly(ranks: Ranks, tmp_path: Path) -> None:
    first = ranks(2)(ended_alike, str(tmp_path), True, group=False)
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["epoch=1-step=6.ckpt"]
    assert len(list(tmp_path.glob("crash/rank*-*.txt"))) == 2
    again = ranks(2)(goes_on, str(tmp_path), True, group=False)
    straight = ranks(2)(goes_on, str(tmp_path / "straight"), False, group=False)
    for (begun, _), (seen, weights), (all_seen, expected) in zip(first, again, straight, strict=True):
        assert begun + seen == all_seen
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_an_exception_of_one_rank_is_not_saved(ranks: Ranks, tmp_path: Path) -> None:
    outcomes = ranks(2).outcomes(ended_alike, str(tmp_path), False, timeout=20, group=False, dies=True)
    assert not (tmp_path / "saved").exists()
    assert [outcome.exit_code for outcome in outcomes] == [None, 1]
    assert "because pipeline rank 1 (global rank 0) failed" in outcomes[1].output
    assert "the loss is too high" in outcomes[1].output


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.save(started_again(sys.argv[1], 1, "auto"), Path(sys.argv[1]) / f"rank{os.environ['RANK']}.pt")
