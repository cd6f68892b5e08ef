"""Random faults and signals: does every run end in time, name the rank that was hit, and go on exactly?

    python -m benchmarks.faults --faults 200 --signals 60 --launched 20 --minutes 40 --seed 1

A fault is a kind, a rank and a moment in a run of 2 to 4 ranks, with the store hosted by rank 0, as under
Lightning's launcher, or outside, as under torchrun; `--launched` ones run under those two themselves. A
signal comes at a random moment to a random rank, or to all. A run passes when every rank that was not hit
ends in time (step_timeout + 2 s after a stopped rank, one whose data ended in a hook, or one that was lost
before all had made their groups; `init_timeout` after one that never came; 3 s after anything else) and
names the rank, and when `resume="auto"` goes on from what it left to the weights of a run that met no fault,
bit by bit.
"""

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_pipeline import PipelineStrategy
from tests.faults.cases import BOUND, SETTINGS, SOON, VISITS, Faulty, after_fault, say_when
from tests.pool import Outcome, Pool
from tests.ranks.lightning_cases import loader

KINDS = ("fail", "kill", "stop", "terminate", "leave", "abort", "end_data")
POINTS = (
    "setup", "configure_optimizers", "preamble", "on_train_batch_start", "on_before_optimizer_step",
    "on_train_batch_end", "on_validation_start", "on_validation_batch_start", "on_train_epoch_end",
    "on_save_checkpoint", "on_train_end",
)  # fmt: skip
ONCE = ("setup", "configure_optimizers", "on_train_end")
EACH_EPOCH = ("on_train_epoch_end",)  # of the two that a run has
SIGNALS = {"SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT, "SIGKILL": signal.SIGKILL}
LATE = ("stop", "end_data")  # Lightning takes a StopIteration in a hook for the end of that rank's data
COMES = 40  # seconds to come to the start: on a busy machine that takes long, and is not what is tested
MISSED = "the fault was not met"


class Shuffled(Faulty):
    """Meets its fault at a visit of a point that was drawn, or a signal after a while."""

    def train_dataloader(self) -> Any:
        super().train_dataloader()
        return loader(32, shuffle=True)


def hit(case: dict[str, Any], folder: str) -> tuple[str, dict[str, Tensor]]:
    """Train for 8 steps with a fault, from what is in the folder. Gives how it ended, and the weights."""
    pl.seed_everything(3, verbose=False)
    VISITS.clear()
    module = Shuffled(case["fault"], case["point"], case["rank"], case["visit"])
    saver = ModelCheckpoint(f"{folder}/saved", every_n_train_steps=1, save_top_k=-1, save_on_exception=True)
    settings = {**SETTINGS, "init_timeout": case.get("comes", COMES)}
    strategy = PipelineStrategy(case["size"], num_microbatches=4, resume="auto", **settings)
    trainer = pl.Trainer(
        accelerator="cpu", devices=case["size"], strategy=strategy, logger=False, callbacks=[saver],
        max_steps=8, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    timer = threading.Timer(case.get("after", 0.0), send, [SIGNALS.get(case["fault"])])
    timer.daemon = True
    if case["fault"] in SIGNALS and int(os.environ["RANK"]) in case["ranks"]:
        timer.start()
    try:
        trainer.fit(module)
    except SystemExit as error:
        return f"ended by SystemExit({error.code})", {}
    finally:
        timer.cancel()  # the process serves the next case
    return "finished", {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def send(number: int) -> None:
    """A signal to this process."""
    say_when()
    os.kill(os.getpid(), number)


def judge(case: dict[str, Any], outcomes: list[Outcome]) -> str:
    """What is wrong with how the ranks ended; empty when nothing is."""
    hit_ranks = case.get("ranks", [case["rank"]])
    if not any("fault at" in outcome.output for outcome in outcomes):
        others = [outcome for outcome in outcomes if outcome.rank not in hit_ranks]
        return MISSED if all(outcome.ok for outcome in others) else "failed without a fault"
    fault, gone = case["fault"], {one.rank for one in outcomes if (one.exit_code or 0) < 0}
    asked = fault in ("terminate", "SIGTERM", "SIGINT") and not gone
    late = [line for outcome in outcomes if (line := _late(outcome, outcomes, fault, hit_ranks))]
    if late:
        return late[0]
    if asked:
        ends = Counter(_how(outcome) for outcome in outcomes)
        return "" if len(ends) == 1 else f"the ranks end differently: {dict(ends)}"
    for outcome in outcomes:
        finished = outcome.ok and outcome.value[0] == "finished"
        if outcome.rank in gone or outcome.rank in hit_ranks or finished:
            continue
        if not any(_names(outcome.output, rank) for rank in hit_ranks):
            return f"rank {outcome.rank} does not name rank {hit_ranks}"
    return ""


def _late(outcome: Outcome, outcomes: list[Outcome], fault: str, hit_ranks: list[int]) -> str:
    """Whether a rank took too long to end, in words."""
    if outcome.rank in hit_ranks and fault == "stop":
        return ""
    if outcome.hung:
        return f"rank {outcome.rank} hangs"
    took = after_fault(outcome, outcomes)
    bound = BOUND if fault in LATE or "could not start:" in outcome.output else SOON
    if "(init_timeout)" in outcome.output:  # a rank has ended before it came
        bound = COMES + 2
    if outcome.rank in hit_ranks or took <= bound:
        return ""
    return f"rank {outcome.rank} took {took:.1f} s"


def _names(output: str, rank: int) -> bool:
    return re.search(rf"\bglobal rank {rank}\b", output) is not None


def _how(outcome: Outcome) -> str:
    """How a rank ended that was asked to; Lightning ends with 1 after SIGINT, as any exception does."""
    if outcome.ok:
        return str(outcome.value[0]).replace("ended by SystemExit(1)", "ended with code 1")
    return f"ended with code {outcome.exit_code}" if outcome.exit_code is not None else outcome.report[-60:]


def draw_fault(draw: random.Random) -> dict[str, Any]:
    """A kind, a rank and a moment."""
    size, point = draw.choice((2, 2, 3, 4)), draw.choice(POINTS)
    visits = 1 if point in ONCE else 2 if point in EACH_EPOCH else 3
    return {
        "size": size, "fault": draw.choice(KINDS), "point": point, "rank": draw.randrange(size),
        "visit": draw.randint(1, visits), "rank0_store": draw.random() < 0.5,
    }  # fmt: skip


def draw_signal(draw: random.Random) -> dict[str, Any]:
    """A signal, its ranks and when, in seconds from the start."""
    size = draw.choice((2, 3))
    rank = draw.randrange(size)
    ranks = list(range(size)) if draw.random() < 0.3 else [rank]
    kind = draw.choice(("SIGTERM", "SIGTERM", "SIGTERM", "SIGINT", "SIGKILL"))
    return {
        "size": size, "fault": kind, "point": "nowhere", "rank": rank, "visit": 1, "ranks": ranks,
        "after": round(draw.uniform(0.05, 1.2), 3), "rank0_store": draw.random() < 0.5,
    }  # fmt: skip


def one_case(case: dict[str, Any], pools: dict[int, Pool], expected: dict[int, Any]) -> dict[str, Any]:
    """Run a case, and go on after it."""
    size, folder, began = case["size"], tempfile.mkdtemp(prefix="fault-"), time.monotonic()
    outcomes = pools[size].outcomes(
        hit, case, folder, timeout=COMES + 40, group=False, rank0_store=case["rank0_store"], dies=True,
        without=[case["rank"]] if case["fault"] == "stop" else [],
    )  # fmt: skip
    wrong = judge(case, outcomes)
    seconds = 0.0
    if wrong != MISSED and "without a fault" not in wrong:
        seconds = max((after_fault(o, outcomes) for o in outcomes if not o.hung), default=0.0)
    if not wrong:
        wrong = goes_on(case, folder, pools[size], expected[size])
    if wrong not in ("", MISSED):
        kept = tempfile.mkdtemp(prefix="fault-output-")
        for outcome in outcomes:
            Path(kept, f"rank{outcome.rank}.txt").write_text(f"{outcome.report}\n{outcome.output}")
        case = {**case, "output": kept}
    shutil.rmtree(folder, ignore_errors=True)
    return {
        **case,
        "seconds": round(seconds, 2),
        "all": round(time.monotonic() - began, 1),
        "wrong": wrong,
    }


def goes_on(case: dict[str, Any], folder: str, pool: Pool, expected: dict[str, Tensor]) -> str:
    """Resume from what a run left; what is wrong with the weights in the end."""
    calm = {**case, "fault": "fail", "point": "nowhere"}
    try:
        again = pool(hit, calm, folder, group=False, timeout=60)
    except AssertionError as error:
        return f"does not go on: {str(error)[-400:]}"
    same = all(how == "finished" and torch.equal(w[n], expected[n]) for how, w in again for n in expected)
    return "" if same else "goes on to other weights"


def one_launched(case: dict[str, Any], pools: dict[int, Pool], expected: dict[int, Any]) -> dict[str, Any]:
    """Run a case under torchrun or Lightning's launcher."""
    size, folder, began = case["size"], tempfile.mkdtemp(prefix="fault-"), time.monotonic()
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(size), "--standalone"]
    command = [
        sys.executable, *([] if case["rank0_store"] else torchrun), "-m", "benchmarks.faults",
        "--case", json.dumps(case), "--folder", folder,
    ]  # fmt: skip
    wrong, log = "", Path(folder, "output.txt")
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            process.wait(timeout=150)  # torchrun gives a stopped rank 30 s to end
        except subprocess.TimeoutExpired:
            wrong = "hangs"
    until = time.monotonic() + BOUND + 2
    while running(folder) and time.monotonic() < until:  # Lightning's launcher is rank 0, which may be gone
        time.sleep(0.05)
    ended = time.monotonic()
    end_all(folder)  # a stopped rank, which nobody else ends
    output = log.read_text()
    moments = [float(moment) for moment in re.findall(r"fault at ([\d.]+)", output)]
    if not wrong and not moments:
        wrong = MISSED if process.returncode == 0 else "failed without a fault"
    elif not wrong and case["fault"] != "terminate" and not _names(output, case["rank"]):
        wrong = f"nobody names rank {case['rank']}"
    if not wrong:
        wrong = goes_on(case, folder, pools[size], expected[size])
    if wrong not in ("", MISSED):
        kept = tempfile.mkdtemp(prefix="fault-output-")
        Path(kept, "all.txt").write_text(output)
        case = {**case, "output": kept}
    shutil.rmtree(folder, ignore_errors=True)
    return {
        **case, "launcher": "Lightning" if case["rank0_store"] else "torchrun", "code": process.returncode,
        "seconds": round(ended - max(moments), 2) if moments else 0.0,
        "all": round(time.monotonic() - began, 1), "wrong": wrong,
    }  # fmt: skip


def started(folder: str) -> list[Path]:
    """Every process that was started for a folder, in /proc."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended by itself
            if folder.encode() in file.read_bytes():
                found.append(file.parent)
    return found


def running(folder: str) -> bool:
    """Whether one of them is neither stopped nor dead."""
    for process in started(folder):
        with contextlib.suppress(OSError):
            if (process / "stat").read_text().rpartition(") ")[2][0] not in "TtZX":
                return True
    return False


def end_all(folder: str) -> None:
    """End every process that was started for a folder."""
    for process in started(folder):
        with contextlib.suppress(OSError):
            os.kill(int(process.name), signal.SIGKILL)


def main() -> None:
    """Run what is asked for; a line of JSON each, and a sum."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--signals", type=int, default=60)
    parser.add_argument("--launched", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--skip", type=int, default=0, help="that many of the same seed have run before")
    parser.add_argument("--minutes", type=float, default=60, help="no new one is begun after that")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        torch.set_num_threads(1)
        how, _ = hit(json.loads(options.case), options.folder)
        print(how, flush=True)
        return
    draw, pools = random.Random(options.seed), {size: Pool(size) for size in (2, 3, 4)}
    until, results = time.monotonic() + 60 * options.minutes, []
    cases = [(one_case, draw_fault(draw)) for _ in range(options.faults)]
    cases += [(one_case, draw_signal(draw)) for _ in range(options.signals)]
    launched = [draw_fault(draw) for _ in range(options.launched)]
    for case in launched:
        case["comes"] = 90  # each process imports torch
        if case["fault"] == "stop" and case["rank0_store"]:
            case["rank"] = max(1, case["rank"])  # a stopped rank 0 is Lightning's launcher itself
    draw.shuffle(cases)
    cases += [(one_launched, case) for case in launched]
    calm = {"fault": "fail", "point": "nowhere", "rank": 0, "visit": 1}
    expected = {}
    for size in pools:
        folder = tempfile.mkdtemp(prefix="straight-")
        expected[size] = pools[size](hit, {**calm, "size": size}, folder, group=False)[0][1]
        shutil.rmtree(folder)
    for run, case in cases[options.skip :]:
        if time.monotonic() < until:
            results.append(run(case, pools, expected))
            print(json.dumps(results[-1]), flush=True)
    for pool in pools.values():
        pool.close()
    missed = sum(one["wrong"] == MISSED for one in results)
    print(
        f"{sum(not one['wrong'] for one in results)} of {len(results) - missed} right; {missed} met no fault"
    )


if __name__ == "__main__":
    main()
