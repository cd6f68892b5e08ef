"""What a step and a message cost on a GPU, for `gpu.py`."""

import itertools
import os
import statistics
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from gpu_cases import Language
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipeline import PipelineStrategy
from lightning_pipeline.ranks import Groups
from lightning_pipeline.schedules import OneFOneB
from lightning_pipeline.wire import Layout, TensorSpec


class Waits:
    """Inside, operations that make the host wait for the device are counted, by the line that they are on."""

    def __init__(self) -> None:
        self.lines: Counter[str] = Counter()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count."""

        def note(message: Any, *args: Any, **kwargs: Any) -> None:
            if "synchroniz" not in str(message):
                return
            frames = [
                one for one in traceback.extract_stack() if f"{os.sep}torch{os.sep}" not in one.filename
            ]
            self.lines[" < ".join(f"{Path(one.filename).name}:{one.lineno}" for one in frames[-1:-4:-1])] += 1

        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = note
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode("default")


class Watched(PipelineStrategy):
    """In steps after the first ones, operations that make the host wait for the device are counted."""

    waits = Waits()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """As ever, between two settings of CUDA."""
        assert self.lightning_module is not None
        if self.lightning_module.trainer.global_step < 5:
            return super().training_step(*args, **kwargs)
        with self.waits.counted():
            return super().training_step(*args, **kwargs)


class Steps(Callback):
    """Seconds of a batch, the mean of all after the first ones, and what the allocator holds after each.

    The host may run ahead of the device, as it does without this callback.
    """

    def __init__(self, first: int) -> None:
        self.first, self.reserved = first, list[int]()
        self.seconds = 0.0

    def on_train_batch_end(self, *args: Any) -> None:
        """Count it."""
        self.reserved.append(torch.cuda.memory_reserved())
        if len(self.reserved) == self.first:
            torch.cuda.synchronize()
            self._since = time.perf_counter()

    def on_train_end(self, *args: Any) -> None:
        """Stop when the device has."""
        torch.cuda.synchronize()
        self.seconds = (time.perf_counter() - self._since) / (len(self.reserved) - self.first)


def large() -> Language:
    """A GPT of 12 layers and width 1024."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=8192, n_positions=512, n_embd=1024, n_layer=12, n_head=16)
    seed_everything(1, verbose=False)
    return Language(GPT2LMHeadModel(config), "gpt2")


def steps_of(strategy: Any, folder: Path, accumulate: int, samples: int, steps: int = 60) -> Steps:
    """Steps of the large model."""
    tokens = torch.randint(8192, (samples * steps * accumulate, 512))
    watch = Steps(5 * accumulate)
    trainer = Trainer(
        accelerator="cuda", devices=1, precision="bf16-true", strategy=strategy, callbacks=[watch],
        max_epochs=1, default_root_dir=folder, enable_checkpointing=False, accumulate_grad_batches=accumulate,
    )  # fmt: skip
    trainer.fit(large(), DataLoader(TensorDataset(tokens), batch_size=samples))
    return watch


def figures(folder: Path) -> dict[str, Any]:
    """Host waits in a step, its time against the unsplit step's, and whether memory stays."""
    pipeline = {"stages": 1, "stages_per_rank": 4, "schedule": "LoopedBFS", "num_microbatches": 4}
    found: dict[str, Any] = {}
    ratios = {}
    for samples, steps in ((4, 60), (32, 24)):
        whole = steps_of("auto", folder, accumulate=4, samples=samples, steps=steps)
        ours = steps_of(PipelineStrategy(**pipeline), folder, accumulate=1, samples=4 * samples, steps=steps)
        ratios[samples] = ours.seconds / (4 * whole.seconds)
        name = f"{samples} samples of 512 tokens a micro-batch"
        found[f"{name}: ms of an unsplit step of 4 accumulated batches"] = 4e3 * whole.seconds
        found[f"{name}: ms of a step of 4 stages and 4 micro-batches"] = 1e3 * ours.seconds
        found[f"{name}: ratio"] = ratios[samples]
    steps_of(Watched(**pipeline), folder, accumulate=1, samples=16, steps=10)
    alone = Waits()
    module, tokens = large().to("cuda", torch.bfloat16), torch.randint(8192, (4, 512), device="cuda")
    for _ in range(2):
        with alone.counted():
            module.loss(tokens).backward()
        torch.cuda.synchronize()
    kept = [ours.reserved[n] / 2**20 for n in (5, 10, -1)]
    before = [whole.reserved[n] / 2**20 for n in (20, 40, -1)]
    return {
        **found,
        "host waits in 5 steps": dict(Watched.waits.lines),
        "host waits in 2 forwards and backwards without a pipeline": dict(alone.lines),
        "MiB reserved after steps 5 and 10 and at the end": kept,
        "the same of the unsplit model": before,
        "missed": [
            text
            for text, holds in (
                ("a step of large micro-batches within 2 % of the unsplit one", ratios[32] <= 1.02),
                ("one host wait for a micro-batch", sum(Watched.waits.lines.values()) <= 20),
                ("memory reserved constant after step 5", kept[0] == kept[-1]),
            )
            if not holds
        ],
    }


def message(mebibytes: int = 64, count: int = 50) -> dict[str, Any]:
    """Microseconds of a message between two processes of one GPU, by CUDA's IPC."""
    rank = int(os.environ["NODE_RANK"])
    device = torch.device("cuda", 0)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    groups = Groups(OneFOneB().plan(2, 1), copies="only", device=device)
    (edge,) = groups.edges.values()
    size = mebibytes * 2**20
    layout = Layout((TensorSpec((size,), (1,), torch.uint8, False),), start=0)
    tensor = torch.zeros(size, dtype=torch.uint8, device=device)
    marks = []
    for number in range(count):
        if rank == 1:
            edge.send(layout, [tensor])
        else:
            edge.receive(layout).tensors()
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()
        if number % 8 == 7:  # as messages go the other way in a step, and say what was copied
            groups.control.barrier().wait()
            told: list[Any] = [None, None]
            torch.distributed.all_gather_object(told, edge.copied, group=groups.control)
            edge.peer_copied(told[1 - rank])
    torch.cuda.synchronize()
    groups.close()
    if rank == 1:
        return {}
    gaps = [1e3 * before.elapsed_time(after) for before, after in itertools.pairwise(marks)]
    quickest = statistics.median(sorted(gaps[count // 2 :])[: count // 8])
    return {
        f"microseconds of a message of {mebibytes} MiB by IPC, in a row": quickest,
        "missed": [] if quickest < 100 else ["64 MiB by IPC within 100 microseconds"],
    }
