"""Random chains of save and resume: are they the uninterrupted run, bit by bit?

    python -m benchmarks.resume_chains --chains 20 --seed 1

A chain stops and resumes a shuffled run with validation, workers or accumulation at random batches, each link
with other ranks and another schedule; batches, losses and weights are compared. Two kinds are drawn. With
links of one rank beside others there is one micro-batch, for one rank trains on whole batches, and sums of
parts are rounded in another way. With several ranks in every link there are four, and dropout.
"""

import argparse
import json
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_pipeline import PipelineStrategy
from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, loader

SCHEDULES = (("1F1B", 1), ("GPipe", 1), ("ZBH1", 1), ("Interleaved1F1B", 2), ("ZBV", 2))
LAST = 12  # batches of a whole run
Seen = list[tuple[float, float]]


class Noted(Regression):
    """Writes down batch and loss of every training step; Adam, and a schedule by steps."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.net.insert(3, nn.Dropout(dropout))
        self.seen: Seen = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Every rank has the loss of the whole batch."""
        self.seen.append((float(batch[0].sum()), float(outputs["loss"])))

    def configure_optimizers(self) -> Any:
        """Both have state that a checkpoint must bring back."""
        made = torch.optim.AdamW(self.parameters(), 0.02, amsgrad=True)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(made, 0.05, total_steps=2 * LAST)
        return [made], [{"scheduler": scheduler, "interval": "step"}]


def link(how: dict[str, Any], folder: str, stop: int, resume: int | None) -> tuple[Seen, dict[str, Tensor]]:
    """Train until step `stop`, from the checkpoint of step `resume`."""
    pl.seed_everything(5, verbose=False)
    module = Noted(how["dropout"])
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    strategy = PipelineStrategy(
        how["stages"],
        num_microbatches=how["microbatches"],
        schedule=how["schedule"],
        stages_per_rank=how["per_rank"],
    )
    trainer = pl.Trainer(
        accelerator="cpu", devices=how["stages"], strategy=strategy, max_steps=stop, logger=False,
        callbacks=[saver], enable_progress_bar=False, enable_model_summary=False, val_check_interval=2,
        accumulate_grad_batches=how["accumulate"],
    )  # fmt: skip
    path = None if resume is None else str(Path(folder) / f"step={resume}.ckpt")
    workers: Any = {"num_workers": 1, "multiprocessing_context": "fork"} if how["workers"] else {}
    trainer.fit(module, loader(32, shuffle=True, **workers), loader(16, seed=4), ckpt_path=path)
    return module.seen, {name: p.detach().clone() for name, p in module.named_parameters()}


def draw_chain(draw: random.Random) -> tuple[dict[str, Any], list[dict[str, Any]], list[int]]:
    """What all links have in common, what each has, and where they stop."""
    with_one = draw.random() < 0.5
    accumulate = draw.choice((1, 1, 2))
    last = LAST // accumulate
    common = {
        "microbatches": 1 if with_one else 4, "dropout": 0.0 if with_one else draw.choice((0.0, 0.2)),
        "accumulate": accumulate, "workers": draw.random() < 0.3,
    }  # fmt: skip
    stops = [*sorted(draw.sample(range(1, last), draw.randrange(2, 5))), last]
    links = []
    for _ in stops:
        stages = draw.choice((1, 2, 3) if with_one else (2, 3))
        # six units: three ranks of two stages, and a plan of one micro-batch is no interleaved one
        schedule, per_rank = draw.choice(SCHEDULES[:3] if with_one or stages == 3 else SCHEDULES)
        if stages == 1:
            schedule, per_rank = "1F1B", 1
        links.append({"stages": stages, "schedule": schedule, "per_rank": per_rank})
    return common, links, stops


def one_chain(draw: random.Random, pools: dict[int, Pool]) -> dict[str, Any]:
    """Draw a chain and run it, and the run without a stop."""
    common, links, stops = draw_chain(draw)
    folders = [tempfile.mkdtemp(prefix="chain-") for _ in range(2)]
    plain = {"stages": 1 if common["microbatches"] == 1 else 2, "schedule": "1F1B", "per_rank": 1, **common}
    straight = pools[plain["stages"]](link, plain, folders[0], stops[-1], None, group=False)[0]
    seen: Seen = []
    weights: dict[str, Tensor] = {}
    for how, resume, stop in zip(links, [None, *stops[:-1]], stops, strict=True):
        pool = pools[how["stages"]]
        part, weights = pool(link, {**common, **how}, folders[1], stop, resume, group=False, timeout=60)[0]
        seen += part
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    names = [f"{how['stages']} {how['schedule']} to {stop}" for how, stop in zip(links, stops, strict=True)]
    return {**common, "links": names, "wrong": compare(straight, (seen, weights))}


def compare(straight: tuple[Seen, dict[str, Tensor]], chained: tuple[Seen, dict[str, Tensor]]) -> str:
    """What differs first; empty when nothing does."""
    if [batch for batch, _ in chained[0]] != [batch for batch, _ in straight[0]]:
        return "batches differ"
    losses = [abs(a[1] - b[1]) for a, b in zip(chained[0], straight[0], strict=True)]
    weights = [float((chained[1][name] - value).abs().max()) for name, value in straight[1].items()]
    worst = max(*losses, *weights)
    return "" if worst == 0 else f"losses or weights differ by up to {worst:.1e}"


def main() -> None:
    """Run what is asked for; a line of JSON each, and a sum."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chains", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    draw, pools = random.Random(options.seed), {size: Pool(size) for size in (1, 2, 3)}
    results = []
    for _ in range(options.chains):
        results.append(one_chain(draw, pools))
        print(json.dumps(results[-1]), flush=True)
    for pool in pools.values():
        pool.close()
    print(f"{sum(not one['wrong'] for one in results)} of {len(results)} right")


if __name__ == "__main__":
    main()
