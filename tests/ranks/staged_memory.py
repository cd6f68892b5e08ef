"""How far the anonymous memory of a rank rises while a large module is built, saved, read and trained in parts."""

import gc
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pipeline import PipelineStrategy
from tests.checkpoint_parts import anonymous

_MIB = 1 << 20


class Wide(pl.LightningModule):
    """Square layers, built in `configure_model`, without biases."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers, self.width, self.net = layers, width, None
        self.at: dict[str, Callable[[], None]] = {}

    def configure_model(self) -> None:
        if self.net is None:
            self.net = nn.Sequential(
                *[nn.Linear(self.width, self.width, bias=False) for _ in range(self.layers)]
            )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def on_fit_start(self) -> None:
        for call in self.at.values():
            call()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Rises:
    """The highest rise of anonymous memory over what it was before, by name, in bytes."""

    def __init__(self) -> None:
        self.found: dict[str, int] = {}

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Watch memory inside, every two milliseconds."""
        gc.collect()
        before, highest, ended = anonymous(), [0], threading.Event()

        def watch() -> None:
            while not ended.wait(0.002):
                highest[0] = max(highest[0], anonymous())

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self.found[name] = max(highest[0], anonymous()) - before


def trainer(stages: int, **options: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu", devices=stages, strategy=PipelineStrategy(stages=stages, num_microbatches=1),
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        limit_train_batches=1, max_epochs=1, **options,
    )  # fmt: skip


def measure(folder: str, stages: int, layers: int, width: int) -> tuple[dict[str, int], int, int]:
    """Rises of this rank for each phase, its share, and the largest tensor, all in bytes."""
    data, rises, path = DataLoader(torch.zeros(1, width)), Rises(), Path(folder)  # type: ignore[arg-type]
    trainer(stages).fit(Wide(stages, 8), DataLoader(torch.zeros(1, 8)))  # type: ignore[arg-type]  # imports
    module = Wide(layers, width)
    run = trainer(stages)
    strategy: Any = run.strategy
    share: list[int] = []

    def phases() -> None:
        building.__exit__(None, None, None)
        share.append(sum(parameter.nbytes for parameter in strategy.own_parameters()))
        with rises.of("save_weights"):
            strategy.save_weights(path / "weights")
        with rises.of("load safetensors"):
            strategy.load_weights(path / "weights")
        with rises.of("save checkpoint"):
            run.save_checkpoint(path / "a.ckpt")
        with rises.of("load checkpoint"):
            strategy.load_weights(path / "a.ckpt")

    module.at["phases"] = phases
    building = rises.of("construction")
    building.__enter__()
    run.fit(module, data)
    return rises.found, share[0], width * width * 4


class Limited(Wide):
    """May have so many bytes more, from its construction on, than this process had before that."""

    def __init__(self, layers: int, width: int, allowed: int) -> None:
        super().__init__(layers, width)
        self.allowed, self.refusal = allowed, ""

    def configure_model(self) -> None:
        if self.net is None:
            lines = Path("/proc/self/status").read_text().splitlines()
            now = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))
            resource.setrlimit(resource.RLIMIT_DATA, (now + self.allowed, resource.RLIM_INFINITY))
            try:
                numpy.empty(self.layers * self.width**2, dtype=numpy.float32)
            except MemoryError as error:
                self.refusal = str(error)
        super().configure_model()


def under_a_limit(folder: str, stages: int, layers: int, width: int, allowed: int) -> dict[str, Any]:
    """Build, fit, save and resume where the whole module would be refused."""
    data, path = DataLoader(torch.zeros(1, width)), Path(folder)  # type: ignore[arg-type]
    trainer(stages).fit(Wide(stages, 8), DataLoader(torch.zeros(1, 8)))  # type: ignore[arg-type]  # imports
    try:
        module, run = Limited(layers, width, allowed), trainer(stages)
        run.fit(module, data)
        run.save_checkpoint(path / "a.ckpt")
        run.strategy.save_weights(path / "weights")  # type: ignore[attr-defined]
        sums = {n: float(p.double().sum()) for n, p in module.named_parameters() if not p.is_meta}
        refusal = module.refusal
        del module, run
        gc.collect()
        again, more = Limited(layers, width, allowed), trainer(stages)
        more.fit_loop.max_epochs = 2
        more.fit(again, data, ckpt_path=path / "a.ckpt")
        return {"refusal": refusal, "sums": sums, "steps": more.global_step}
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def table(found: list[tuple[dict[str, int], int, int]]) -> str:
    """A line for each phase, in MiB, with what is allowed."""
    lines = []
    for name in found[0][0]:
        rises = ", ".join(f"{rises[name] / _MIB:7.1f}" for rises, _, _ in found)
        lines.append(f"{name:18} {rises}")
    shares = ", ".join(f"{(share + largest) / _MIB:7.1f}" for _, share, largest in found)
    return "\n".join([*lines, f"{'share + largest':18} {shares}"])
