"""Random faults, and random chains of save and resume: does every run end in time, and does it go on exactly?

    python -m benchmarks.faults --faults 200 --chains 20 --seed 1

A fault is a kind, a rank and a moment in a run of 2 to 4 ranks, with the store hosted by rank 0, as
under Lightning's launcher, or outside, as under torchrun. A run passes when every rank that was not hit
ends within the bound and names the rank that was hit, and when `resume="auto"` goes on from what it
left to the weights of a run that met no fault. A chain stops and resumes a shuffled run at random
batches, each link with other ranks and another schedule, and passes when batches and weights are those
of the uninterrupted run, bit by bit.
"""

import argparse
import json
import random
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_pipeline import PipelineStrategy
from tests.faults.cases import SETTINGS, VISITS, Faulty
from tests.faults.test_resume import Notes
from tests.pool import Outcome, Pool
from tests.ranks.lightning_cases import loader

KINDS = ("fail", "kill", "stop", "terminate")
POINTS = (
    "preamble", "on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end",
    "on_validation_start", "on_validation_batch_start", "on_train_epoch_end", "on_save_checkpoint",
)  # fmt: skip
START_SECONDS = 6.0  # of a run, on a busy machine
SCHEDULES = ("1F1B", "GPipe", "ZBH1")


class Random(Faulty):
    """Meets its fault at a visit of a point that was drawn."""

    def __init__(self, fault: str, point: str, rank: int, visit: int) -> None:
        super().__init__(fault, point, rank)
        self.at = visit

    def here(self, point: str, visit: int = 1) -> None:
        super().here(point, self.at if point == self.point else visit)


def hit(fault: str, point: str, rank: int, visit: int, stages: int, folder: str) -> dict[str, torch.Tensor]:
    """Train for 8 steps with a fault; go on from what is in the folder. Gives the weights."""
    pl.seed_everything(3, verbose=False)
    VISITS.clear()
    module = Random(fault, point, rank, visit)
    saver = ModelCheckpoint(f"{folder}/saved", every_n_train_steps=1, save_top_k=-1, save_on_exception=True)
    strategy = PipelineStrategy(stages, num_microbatches=4, resume="auto", **SETTINGS)
    trainer = pl.Trainer(
        accelerator="cpu", devices=stages, strategy=strategy, logger=False, callbacks=[saver], max_steps=8,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(module)
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def judge(fault: str, rank: int, outcomes: list[Outcome]) -> str:
    """What is wrong with how the ranks ended; empty when nothing is."""
    for outcome in outcomes:
        if outcome.rank == rank and fault in ("kill", "stop"):
            continue
        if outcome.hung:
            return f"rank {outcome.rank} hangs"
        if outcome.seconds > START_SECONDS + (6 if fault == "stop" else 4):
            return f"rank {outcome.rank} took {outcome.seconds:.1f} s"
        if (
            fault != "terminate"
            and outcome.exit_code is not None
            and f"(global rank {rank})" not in outcome.output
        ):
            return f"rank {outcome.rank} does not name rank {rank}"
    return ""


def one_fault(draw: random.Random, pools: dict[int, Pool], expected: dict[int, Any]) -> dict[str, Any]:
    """Draw a fault, run it, and go on after it."""
    size, fault, point = draw.choice((2, 2, 3, 4)), draw.choice(KINDS), draw.choice(POINTS)
    rank, visit, hosted = draw.randrange(size), draw.randrange(1, 4), draw.random() < 0.5
    folder = tempfile.mkdtemp(prefix="fault-")
    began = time.monotonic()
    outcomes = pools[size].outcomes(
        hit, fault, point, rank, visit, size, folder, timeout=20, group=False, rank0_store=hosted, dies=True,
        without=[rank] if fault == "stop" else [],
    )  # fmt: skip
    wrong = judge(fault, rank, outcomes)
    seconds = max((o.seconds for o in outcomes if not o.hung), default=0.0)
    if not wrong:
        again = pools[size](hit, "fail", "nowhere", 0, 1, size, folder, group=False, timeout=60)
        same = all(torch.equal(w[n], expected[size][n]) for w in again for n in expected[size])
        wrong = "" if same else "goes on to other weights"
    shutil.rmtree(folder, ignore_errors=True)
    return {
        "size": size, "fault": fault, "point": point, "rank": rank, "visit": visit, "rank0_store": hosted,
        "seconds": round(seconds, 1), "all": round(time.monotonic() - began, 1), "wrong": wrong,
    }  # fmt: skip


def link(stages: int, schedule: str, folder: str, stop: int, resume: int | None) -> Any:
    """One link of a chain: batches seen and weights."""
    pl.seed_everything(5, verbose=False)
    module = Notes()
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    strategy = PipelineStrategy(stages, num_microbatches=2, schedule=schedule)
    trainer = pl.Trainer(
        accelerator="cpu", devices=stages, strategy=strategy, max_steps=stop, logger=False, callbacks=[saver],
        enable_progress_bar=False, enable_model_summary=False, val_check_interval=2,
    )  # fmt: skip
    path = None if resume is None else str(Path(folder) / f"step={resume}.ckpt")
    trainer.fit(module, loader(32, shuffle=True), loader(16, seed=4), ckpt_path=path)
    return module.seen, {name: p.detach().clone() for name, p in module.named_parameters()}


def one_chain(draw: random.Random, pools: dict[int, Pool], straight: Any) -> dict[str, Any]:
    """Draw a chain that ends at batch 12."""
    stops = [*sorted(draw.sample(range(1, 12), draw.randrange(2, 5))), 12]
    folder, seen, weights, links = tempfile.mkdtemp(prefix="chain-"), [], {}, []
    for resume, stop in zip([None, *stops[:-1]], stops, strict=True):
        stages = draw.choice((1, 2, 3))
        schedule = draw.choice(SCHEDULES) if stages > 1 else "1F1B"
        links.append(f"{stages} {schedule} to {stop}")
        part, weights = pools[stages](link, stages, schedule, folder, stop, resume, group=False, timeout=60)[
            0
        ]
        seen += part
    shutil.rmtree(folder, ignore_errors=True)
    same = all(torch.equal(weights[name], straight[1][name]) for name in straight[1])
    wrong = (
        "" if seen == straight[0] and same else "batches differ" if seen != straight[0] else "weights differ"
    )
    return {"links": links, "wrong": wrong}


def main() -> None:
    """Run what is asked for; a line of JSON each, and a sum."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--chains", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=60, help="no new one is begun after that")
    options = parser.parse_args()
    draw, pools = random.Random(options.seed), {size: Pool(size) for size in (1, 2, 3, 4)}
    until, results = time.monotonic() + 60 * options.minutes, []
    folders = [tempfile.mkdtemp(prefix="straight-") for _ in range(4)]
    straight = pools[1](link, 1, "1F1B", folders[0], 12, None, group=False)[0] if options.chains else None
    for _ in range(options.chains):
        if time.monotonic() < until:
            results.append(one_chain(draw, pools, straight))
            print(json.dumps(results[-1]), flush=True)
    expected = {
        size: pools[size](hit, "fail", "nowhere", 0, 1, size, folder, group=False)[0]
        for size, folder in zip((2, 3, 4), folders[1:], strict=True)
        if options.faults
    }
    for _ in range(options.faults):
        if time.monotonic() < until:
            results.append(one_fault(draw, pools, expected))
            print(json.dumps(results[-1]), flush=True)
    for pool in pools.values():
        pool.close()
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{sum(not one['wrong'] for one in results)} of {len(results)} right")


if __name__ == "__main__":
    main()
