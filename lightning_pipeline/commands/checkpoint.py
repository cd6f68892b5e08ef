"""`lightning-pipeline checkpoint ...`: what can be done with a checkpoint folder outside a run."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jsonargparse
import torch

from lightning_pipeline.checkpoint import to_file, to_safetensors, verify
from lightning_pipeline.checkpoint.folder import MODEL, Manifest, read_manifest

_MIB = 1 << 20


def checkpoint(arguments: Sequence[str]) -> None:
    """Consolidate, inspect or verify a checkpoint folder.

    Args:
        arguments: After `checkpoint`.

    Raises:
        PipelineError: What was asked for cannot be.
    """
    commands: dict[str, Any] = {"consolidate": consolidate, "inspect": inspect, "verify": verify_folder}
    jsonargparse.auto_cli(commands, args=list(arguments), prog="lightning-pipeline checkpoint")


def consolidate(
    folder: str, output: str, to: Literal["ckpt", "safetensors"] = "ckpt", trust_checkpoint: bool = False
) -> None:
    """Write a checkpoint folder as one file, for `load_from_checkpoint`, a plain Trainer, or other tools.

    Args:
        folder: The checkpoint folder.
        output: The new file.
        to: `ckpt`: everything, as a run on one device writes it. `safetensors`: the weights.
        trust_checkpoint: Read objects of any class, which can run code.
    """
    if to == "safetensors":
        to_safetensors(Path(folder), Path(output))
    else:
        to_file(Path(folder), Path(output), trust=trust_checkpoint)
    print(f"wrote {output}, {Path(output).stat().st_size / _MIB:.1f} MiB")


def inspect(folder: str) -> None:
    """Print what a checkpoint folder holds. Nothing is unpickled.

    Args:
        folder: The checkpoint folder.
    """
    manifest = read_manifest(Path(folder))
    size = sum(entry["size"] for entry in manifest.files.values()) / _MIB
    print(f"step {manifest.step}, epoch {manifest.epoch}, {len(manifest.files)} files, {size:.1f} MiB")
    for title, values in (("saved by", manifest.versions), ("from", manifest.topology)):
        print(f"{title}: {', '.join(f'{key} {value}' for key, value in values.items())}")
    for part, (count, elements, kinds) in sorted(_parts(manifest).items()):
        print(f"{part}: {count} tensors, {elements:,} elements ({', '.join(sorted(kinds))})")
    for key, (kind, *shape) in manifest.tensors.items():
        if key.startswith(f"{MODEL}."):
            print(f"  {key.removeprefix(f'{MODEL}.')}: {kind} {shape}")


def _parts(manifest: Manifest) -> dict[str, tuple[int, int, set[str]]]:
    counts: dict[str, Any] = defaultdict(lambda: [0, 0, set()])
    for key, (kind, *shape) in manifest.tensors.items():
        entry = counts[key.split(".", 1)[0]]
        entry[0] += 1
        entry[1] += torch.Size(shape).numel()
        entry[2].add(kind)
    return {part: tuple(entry) for part, entry in counts.items()}


def verify_folder(folder: str) -> None:
    """Compare every file of a checkpoint folder with its manifest. Nothing is unpickled.

    Args:
        folder: The checkpoint folder.
    """
    manifest = verify(Path(folder))
    checked = "sizes" if manifest.integrity == "off" else f"sizes and {manifest.integrity}"
    print(f"{folder} is whole: {checked} of {len(manifest.files)} files are right")
