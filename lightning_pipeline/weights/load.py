"""Fills what a rank holds from files of weights, each rank its own names."""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lightning_pipeline.checkpoint import Ranks
from lightning_pipeline.checkpoint.contents import Misfits, compare
from lightning_pipeline.checkpoint.folder import MANIFEST, read_manifest, verify_file
from lightning_pipeline.errors import CheckpointError
from lightning_pipeline.weights.files import Weights, open_weights, prefix_for


def fillers(
    path: Path, shapes: Mapping[str, torch.Size], *, trust: bool
) -> dict[str, Callable[[Tensor], None]]:
    """What reads the tensors of a module that is to be loaded and has no values yet, straight into place.

    Args:
        path: What will be loaded; where it cannot be, nothing is read, and the load will tell.
        shapes: Of all parameters and buffers, by name.
        trust: Whether objects of any class may be unpickled.

    Returns:
        By name, fills a tensor. Stored ones of another shape are not among them.
    """
    try:
        found = open_weights(path, trust=trust)
    except CheckpointError:  # told where it is loaded
        return {}
    found = found.renamed(prefix_for([*found.tensors, *found.ties], shapes))
    stored = found.under("model")

    def fill(name: str, tensor: Tensor) -> None:
        tensor.copy_(stored[name].read())

    return {name: partial(fill, name) for name, one in stored.items() if shapes.get(name) == one.size}


def load_weights(
    path: Path, held: Mapping[str, Tensor], names: Collection[str], ranks: Ranks, *, prefix: str | None,
    strict: bool, trust: bool, checksums: bool,
) -> None:  # fmt: skip
    """Fill tensors from a checkpoint folder, a Hugging Face folder, safetensors, or a file of torch's.

    All ranks call. Each reads the tensors that it holds, from mapped files straight into place.

    Args:
        path: Of any of these, the same on every rank.
        held: What this rank holds, by all its names in the whole module.
        names: All names in the whole module.
        ranks: Of the load.
        prefix: Stands before the stored names in the module. Default: that with which most names fit.
        strict: Whether missing and unexpected names are errors.
        trust: Whether objects of any class may be unpickled.
        checksums: Whether those of a checkpoint folder are compared.

    Raises:
        CheckpointError: On every rank, with nothing changed: it does not fit, or cannot be read.
    """
    what = f"loading {path}"

    def open_here() -> Weights:
        if checksums and (path / MANIFEST).exists():
            manifest = read_manifest(path)
            for name in sorted(manifest.files)[ranks.rank :: ranks.size]:
                verify_file(path, name, manifest)
        found = open_weights(path, trust=trust)
        stored = [*found.tensors, *found.ties]
        return found.renamed(prefix_for(stored, names) if prefix is None else prefix)

    weights = ranks.everyone_local(what, open_here)
    stored = weights.under("model")

    def compare_here() -> Misfits:
        misfits = compare(weights, {name: tensor for name, tensor in held.items() if name in stored}, [], {})
        filled = {id(held[name]) for name in held if name in stored}
        misfits.expected.update(name for name, tensor in held.items() if id(tensor) not in filled)
        misfits.expected.update(name for name in held if name in stored)
        misfits.dtypes.clear()  # cast, as on one device
        return misfits

    ranks.collect(what, compare_here, lambda found: Misfits.refuse(found, path, strict=strict))

    def fill() -> None:
        once: dict[int, str] = {}
        for name, tensor in held.items():
            if name in stored:
                once.setdefault(id(tensor), name)
        with torch.no_grad():
            for name in once.values():
                held[name].copy_(stored[name].read())

    ranks.everyone_local(what, fill)
