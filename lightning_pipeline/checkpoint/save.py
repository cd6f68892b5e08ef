"""Writes a checkpoint: each rank its part, the leader the rest, and the commit."""

import os
import platform
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata

from lightning_pipeline.checkpoint.contents import on_host
from lightning_pipeline.checkpoint.folder import (
    MANIFEST,
    META,
    METADATA,
    MODEL,
    HashingStream,
    Manifest,
    Pace,
    Writer,
    beside,
    check_owners,
    clean,
    described,
    faults,
    publish,
    write_manifest,
)
from lightning_pipeline.checkpoint.ranks import Ranks
from lightning_pipeline.errors import CheckpointWriteError


@dataclass
class Part:
    """What one rank writes.

    Attributes:
        state: Tensors and values by key: `model`, `optimizer_0`, ...
        owner: Pipeline rank; the same for replicas, which hold the same.
        aliases: Further names of tied tensors, with the name each is stored under.
        meta: `meta.pt` of the leader, as bytes.
        about: For the manifest: `step`, `epoch`, `topology`.
    """

    state: dict[str, dict[str, Any]]
    owner: int
    aliases: dict[str, str] = field(default_factory=dict)
    meta: bytes = b""
    about: Mapping[str, Any] = field(default_factory=dict)

    def staged(self) -> "Part":
        """A copy that no step of training changes."""
        state = {key: on_host(values) for key, values in self.state.items()}
        return Part(state, self.owner, self.aliases, self.meta, self.about)


def without_ties(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Each tensor once, under its first name; and the other names.

    Returns:
        The tensors, detached, and for each further name the one that its tensor is stored under.
    """
    first: dict[int, str] = {}
    kept: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for name, tensor in tensors.items():
        known = first.setdefault(id(tensor), name)
        if known == name:
            kept[name] = tensor.detach()
        else:
            aliases[f"{MODEL}.{name}"] = f"{MODEL}.{known}"
    return kept, aliases


def write(part: Part, path: Path, ranks: Ranks, integrity: str, pace: Pace | None = None) -> None:
    """Write a checkpoint and give it its name. Every rank calls this.

    Args:
        part: This rank's.
        path: Of the checkpoint; replaced when it exists.
        ranks: Of the save.
        integrity: Kind of checksum.
        pace: Entered around each piece of work on a shard.

    Raises:
        CheckpointWriteError: On every rank; what had the name before still has it.
    """
    folder = Path(ranks.leader(f"saving {path}", lambda: str(_new_folder(path))))
    try:
        _write(part, folder, path, ranks, Writer(folder, integrity, pace))
    except BaseException:
        if ranks.leads:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _new_folder(path: Path) -> Path:
    _refuse_other_folders(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    clean(path.parent)
    folder = beside(path, "partial")
    folder.mkdir()
    return folder


def _refuse_other_folders(path: Path) -> None:
    """What had the name before is removed with all that is in it: that must have been a checkpoint."""
    if not path.is_dir():
        return
    found = sorted(os.listdir(path))
    if found and MANIFEST not in found and METADATA not in found:
        raise CheckpointWriteError(
            f"{path} is a folder with {', '.join(found[:3])}{', ...' if len(found) > 3 else ''} in it and no "
            f"checkpoint, and a save would replace it: save to a new name in it, such as {path / 'last.ckpt'}"
        )


def _write(part: Part, folder: Path, path: Path, ranks: Ranks, writer: Writer) -> None:
    planner = DefaultSavePlanner()
    found: dict[str, Metadata] = {}

    def plan_here() -> tuple[Any, int, dict[str, str]]:
        planner.set_up_planner(dict(part.state), is_coordinator=ranks.leads)
        writer.set_up_storage_writer(ranks.leads)
        return writer.prepare_local_plan(planner.create_local_plan()), part.owner, part.aliases

    def plan_all(given: list[tuple[Any, int, dict[str, str]]]) -> list[Any]:
        plans, owners = [entry[0] for entry in given], [entry[1] for entry in given]
        check_owners(plans, owners)
        for _, _, aliases in given:
            writer.aliases.update(aliases)
        plans, found["metadata"] = planner.create_global_plan(plans)
        return writer.prepare_global_plan(plans)

    def write_here() -> tuple[Any, dict[str, Any]]:
        faults.point("save.shard.before")
        results = writer.write_data(planner.finish_plan(plan), planner).wait()
        faults.point("save.shard.after")
        return results, writer.files

    def commit(written: list[tuple[Any, dict[str, Any]]]) -> None:
        _finish(part, folder, writer, found["metadata"], written)
        publish(folder, path)

    plan = ranks.collect(f"saving {path}", plan_here, plan_all, scatter=True)
    ranks.collect(f"saving {path}", write_here, commit)


def _finish(part: Part, folder: Path, writer: Writer, metadata: Metadata, written: Sequence[Any]) -> None:
    """Write what the leader writes: DCP's metadata, `meta.pt`, and the manifest as the last."""
    files: dict[str, Any] = {}
    for _, own in written:
        files.update(own)
    writer.finish(metadata, [results for results, _ in written])
    files[METADATA] = writer.files[METADATA]
    files[META] = _write_meta(folder / META, part.meta, writer.integrity)
    tensors, objects = described(metadata)
    write_manifest(
        folder,
        Manifest(
            integrity=writer.integrity,
            files=files,
            tensors=tensors,
            objects=objects,
            versions=_versions(),
            **part.about,
        ),
    )


def _write_meta(path: Path, content: bytes, integrity: str) -> dict[str, Any]:
    stream = HashingStream(path, integrity)
    try:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    except OSError as error:
        raise CheckpointWriteError(f"{path} could not be written: {error}") from error
    finally:
        stream.close()
    return {"size": stream.size, "checksum": stream.checksum()}


def _versions() -> dict[str, str]:
    try:
        own = version("lightning-pipeline")
    except PackageNotFoundError:  # run from a checkout
        own = "not installed"
    return {
        "lightning_pipeline": own,
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "python": platform.python_version(),
    }
