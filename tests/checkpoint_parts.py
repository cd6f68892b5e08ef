"""A small state over ranks, saved and loaded without a Trainer."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pipeline.checkpoint.contents.meta_file import as_bytes
from lightning_pipeline.checkpoint.contents.optimizers import flat_state, groups_of, names_by_identity
from lightning_pipeline.checkpoint.folder.pace import Pace
from lightning_pipeline.checkpoint.load import Target, load_folder
from lightning_pipeline.checkpoint.ranks import Ranks
from lightning_pipeline.checkpoint.save import Part, without_ties, write

ABOUT = {"step": 7, "epoch": 1, "topology": {"ranks": 1}}


def alone() -> Ranks:
    return Ranks(None, None, 0, timedelta(seconds=5))


def together(seconds: float = 6) -> Ranks:
    timeout = timedelta(seconds=seconds)
    assert dist.group.WORLD is not None
    group = dist.new_group(timeout=timeout, backend="gloo")
    return Ranks(group, dist.group.WORLD.get_group_store(), dist.get_rank(), timeout)


def stage(seed: int, rank: int = 0) -> tuple[dict[str, Tensor], torch.optim.Optimizer, dict[int, str]]:
    """A layer named after its rank, and Adam after one step."""
    torch.manual_seed(seed)
    layer = nn.Linear(8, 8)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1 + seed)
    layer(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    tensors = {f"layer{rank}.{name}": parameter for name, parameter in layer.named_parameters()}
    return tensors, optimizer, names_by_identity(tensors.items())


def part_of(seed: int, rank: int = 0) -> Part:
    tensors, optimizer, names = stage(seed, rank)
    own = {"ranks": [{"lr_schedulers": [], "groups": [groups_of(optimizer, names)]}], "order": list(tensors)}
    meta = as_bytes({"epoch": 1, "global_step": seed, "lightning_pipeline": own})
    kept, aliases = without_ties(tensors)
    state: dict[str, Any] = {"model": kept, "optimizer_0": flat_state(optimizer, names)}
    return Part(state, rank, aliases, meta, {**ABOUT, "step": seed})


def save(
    path: Path,
    seed: int,
    ranks: Ranks | None = None,
    integrity: str = "sha256",
    pace: Pace | None = None,
) -> None:
    ranks = ranks or alone()
    write(part_of(seed, ranks.rank), path, ranks, integrity, pace)


def load(
    path: Path, into: int, ranks: Ranks | None = None, *, trust: bool = False, checksums: bool = True
) -> Any:
    """Load into a stage made from another seed; gives what it held before and after."""
    ranks = ranks or alone()
    tensors, optimizer, names = stage(into, ranks.rank)
    target = Target(tensors, [optimizer], names, strict=True, trust=trust, checksums=checksums)
    return tensors, optimizer, lambda: load_folder(path, target, ranks)


def values(tensors: dict[str, Tensor], optimizer: torch.optim.Optimizer) -> list[Tensor]:
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    return [tensor.detach().clone() for tensor in (*tensors.values(), *state)]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def anonymous() -> int:
    """Memory of this process that is no file, in bytes. Linux only."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) << 10
    raise AssertionError("/proc/self/status has no RssAnon")
