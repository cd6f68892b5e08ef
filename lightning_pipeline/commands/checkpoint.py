"""`lightning-pipeline checkpoint ...`: what can be done with a checkpoint folder outside a run."""

import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import jsonargparse
import torch
from tqdm import tqdm

from lightning_pipeline.checkpoint import verify
from lightning_pipeline.checkpoint.folder import MODEL, WAY_OUT, Manifest, read_manifest
from lightning_pipeline.commands.progress import Progress
from lightning_pipeline.commands.refusals import BriefParser
from lightning_pipeline.errors import CheckpointError
from lightning_pipeline.model.cut import size_text
from lightning_pipeline.weights import Format, plan_conversion, unfinished, written_bytes
from lightning_pipeline.weights import convert as write_conversion

_SECONDS = 0.1  # between looks at what is on disk
_FLAGS = ("--force", "--dry_run")


def checkpoint(arguments: Sequence[str]) -> None:
    """Convert, consolidate, inspect or verify a checkpoint.

    Args:
        arguments: After `checkpoint`.

    Raises:
        PipelineError: What was asked for cannot be.
    """
    commands: dict[str, Any] = {
        "convert": convert, "consolidate": consolidate, "inspect": inspect, "verify": verify_folder,
    }  # fmt: skip
    given = [f"{one}=true" if one in _FLAGS else one for one in arguments]
    jsonargparse.auto_cli(
        commands, args=given, prog="lightning-pipeline checkpoint", parser_class=BriefParser
    )


def convert(
    source: str,
    target: str,
    to: Format | None = None,
    force: bool = False,
    dry_run: bool = False,
    prefix: str = "",
    strip: str = "",
    trust_checkpoint: bool = False,
    progress: bool | None = None,
) -> None:
    """Turn one kind of checkpoint into another: folders, one file, safetensors, Hugging Face folders.

    Args:
        source: A checkpoint folder, a one-file checkpoint, a folder as `save_pretrained` writes it, a
            safetensors file or index, or a `state_dict` of torch's.
        target: A new path. `.ckpt`: one file, as a run on one device writes it. `.safetensors`: the weights.
            `.pt`, `.pth`, `.bin`: the weights, as a `state_dict`. No suffix: a checkpoint folder.
        to: Kind of the target, where the suffix does not tell: huggingface is a folder of safetensors shards.
        force: Replace what is there.
        dry_run: Say what would be written, and write nothing.
        prefix: Put before each name; for weights alone.
        strip: Taken off each name, such as `model.`; names without it are left out. For weights alone.
        trust_checkpoint: Read objects of any class, which can run code.
        progress: Show a bar. Default: on a terminal.
    """
    planned = plan_conversion(
        Path(source), Path(target), kind=to, force=force, trust=trust_checkpoint, prefix=prefix, strip=strip
    )
    if dry_run:
        print(planned)
        print("nothing was written: --dry_run")
        return
    with _progress(planned.source, planned.target, progress):
        write_conversion(planned)
    print(planned)  # not before: a damaged source is refused while it is read
    print(f"wrote {target}, {size_text(_size(Path(target)))}")


def consolidate(
    folder: str,
    output: str,
    to: Literal["ckpt", "safetensors"] | None = None,
    force: bool = False,
    dry_run: bool = False,
    trust_checkpoint: bool = False,
    progress: bool | None = None,
) -> None:
    """Write a checkpoint as one file, for `load_from_checkpoint`, a plain Trainer, or other tools: `convert`.

    Args:
        folder: The checkpoint.
        output: The new file.
        to: `ckpt`: everything, as a run on one device writes it. `safetensors`: the weights. Default: by the
            suffix.
        force: Replace what is there.
        dry_run: Say what would be written, and write nothing.
        trust_checkpoint: Read objects of any class, which can run code.
        progress: Show a bar. Default: on a terminal.
    """
    kind = to or ("safetensors" if Path(output).suffix == ".safetensors" else "ckpt")
    convert(folder, output, kind, force, dry_run, trust_checkpoint=trust_checkpoint, progress=progress)


def _size(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


@contextmanager
def _progress(source: Path, target: Path, shown: bool | None) -> Iterator[None]:
    """Show how much is on disk, of about as much as the source has."""
    target.parent.mkdir(parents=True, exist_ok=True)
    before, ended = unfinished(target), threading.Event()
    with tqdm(
        total=_size(source), unit="B", unit_scale=True, disable=None if shown is None else not shown
    ) as bar:

        def watch() -> None:
            while not ended.wait(_SECONDS):
                bar.n = min(written_bytes(target, before), bar.total)
                bar.refresh()

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
        bar.n = bar.total
        bar.refresh()


def inspect(folder: str) -> None:
    """Print what a checkpoint folder holds. Nothing is unpickled.

    Args:
        folder: The checkpoint folder.
    """
    manifest = read_manifest(Path(folder))
    size = size_text(sum(entry["size"] for entry in manifest.files.values()))
    print(f"step {manifest.step}, epoch {manifest.epoch}, {len(manifest.files)} files, {size}")
    for title, values in (("saved by", manifest.versions), ("from", manifest.topology)):
        told = {key: value for key, value in values.items() if not isinstance(value, list)}
        print(f"{title}: {', '.join(f'{key} {value}' for key, value in told.items())}")
    for part, (count, elements, num_bytes, kinds) in sorted(_parts(manifest).items()):
        held = f"{elements:,} elements, {size_text(num_bytes)} ({', '.join(sorted(kinds))})"
        print(f"{part}: {count} tensors, {held}")
    stages = _stages(manifest)
    for key, (kind, *shape) in manifest.tensors.items():
        if key.startswith(f"{MODEL}."):
            name = key.removeprefix(f"{MODEL}.")
            stage = next((stages[unit] for unit in _prefixes(name) if unit in stages), None)
            on = "" if stage is None else f", stage {stage}"
            print(f"  {name}: {kind} {shape}, {size_text(_bytes(kind, shape))}{on}")


def _stages(manifest: Manifest) -> dict[str, int]:
    """The stage of each unit, where the run has said it."""
    units = manifest.topology.get("units")
    if not isinstance(units, list):
        return {}
    return {str(name): stage for stage, names in enumerate(units) for name in names}


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def _bytes(kind: str, shape: Sequence[int]) -> int:
    dtype = getattr(torch, kind, None)
    each = dtype.itemsize if isinstance(dtype, torch.dtype) else 0
    return torch.Size(shape).numel() * each


def _parts(manifest: Manifest) -> dict[str, tuple[int, int, int, set[str]]]:
    counts: dict[str, Any] = defaultdict(lambda: [0, 0, 0, set()])
    for key, (kind, *shape) in manifest.tensors.items():
        entry = counts[key.split(".", 1)[0]]
        entry[0] += 1
        entry[1] += torch.Size(shape).numel()
        entry[2] += _bytes(kind, shape)
        entry[3].add(kind)
    return {part: tuple(entry) for part, entry in counts.items()}


def verify_folder(folder: str) -> None:
    """Compare every file of a checkpoint folder with its manifest. Nothing is unpickled.

    Args:
        folder: The checkpoint folder.
    """
    with Progress(unit="B") as progress:
        try:
            manifest = verify(Path(folder), progress.tell)
        except CheckpointError as error:  # the advice in it is to run this command
            raise type(error)(str(error).replace(WAY_OUT, "")) from error
    checked = "sizes" if manifest.integrity == "off" else f"sizes and {manifest.integrity}"
    print(f"{folder} is whole: {checked} of {len(manifest.files)} files are right")
