"""A checkpoint is made one file in far less memory than it has bytes."""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_pipeline.__main__ import main
from lightning_pipeline.checkpoint.contents.meta_file import as_bytes
from lightning_pipeline.checkpoint.contents.optimizers import flat_state, groups_of, names_by_identity
from lightning_pipeline.checkpoint.folder import mapped
from lightning_pipeline.checkpoint.folder.reader import Reader
from lightning_pipeline.checkpoint.save import Part, write
from tests.checkpoint_parts import ABOUT, alone, anonymous, save

LAYERS, WIDTH = 16, 768
MIB = 1 << 20
TOTAL = 3 * LAYERS * WIDTH * WIDTH * 4  # bytes: weights and Adam's two averages
ROOM = TOTAL // 5


def save_large(path: Path) -> None:
    layers = {
        f"layer{n}": torch.nn.Parameter(torch.full((WIDTH, WIDTH), float(n + 1))) for n in range(LAYERS)
    }
    optimizer = torch.optim.Adam(layers.values())
    for layer in layers.values():
        layer.grad = layer.detach().clone()
    optimizer.step()
    names = names_by_identity(layers.items())
    own = {"ranks": [{"lr_schedulers": [], "groups": [groups_of(optimizer, names)]}], "order": list(layers)}
    meta = {
        "epoch": 0,
        "global_step": 1,
        "lr_schedulers": [],
        "lightning_pipeline": {**own, "schedulers": []},
    }
    state: dict[str, Any] = {"model": {name: layer.detach() for name, layer in layers.items()}}
    state["optimizer_0"] = flat_state(optimizer, names)
    write(Part(state, 0, {}, as_bytes(meta), ABOUT), path, alone(), "crc32")


@contextmanager
def peak() -> Iterator[list[int]]:
    """The most memory that is no file which this process had inside, more than before, in bytes."""
    release = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if release is None:
        pytest.skip("without glibc's malloc_trim, memory that was freed before hides what is taken")
    release(0)
    before, stop, found = anonymous(), threading.Event(), [0]

    def watch() -> None:
        while not stop.wait(0.002):
            found[0] = max(found[0], anonymous() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield found
    finally:
        stop.set()
        watcher.join()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's account of memory")
@pytest.mark.parametrize("maps", [True, False], ids=["", "no maps"])
def test_consolidating_takes_less_memory_than_the_checkpoint_has(
    tmp_path: Path, maps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out, tensors = (tmp_path / name for name in ("a.ckpt", "out.ckpt", "out.safetensors"))
    save_large(folder)
    if not maps:
        monkeypatch.setattr(mapped.mmap, "mmap", refuse_to_map)
    with peak() as taken:
        main(["checkpoint", "consolidate", str(folder), str(out)])
        main(["checkpoint", "consolidate", str(folder), str(tensors), "--to", "safetensors"])
    reader = Reader(folder, trust=False)
    with peak() as whole:
        kept = reader.read(reader.entries)
    assert len(kept) > 3 * LAYERS and whole[0] > TOTAL // 2, "the measure does not see what is read"
    assert not maps or taken[0] < ROOM, (taken[0] / MIB, TOTAL / MIB)
    found = torch.load(out, mmap=True, weights_only=False)
    assert out.stat().st_size > TOTAL and tensors.stat().st_size > TOTAL // 3
    assert all(torch.equal(found["state_dict"][f"layer{n}"], kept[f"model.layer{n}"]) for n in range(LAYERS))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.ckpt", "out.ckpt", "out.safetensors"]


def refuse_to_map(*_: Any, **__: Any) -> None:
    raise OSError("No such device")


@pytest.mark.parametrize("to", ["ckpt", "safetensors"])
def test_a_checkpoint_replaced_meanwhile_is_refused(
    tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a.ckpt"
    save(folder, 1)
    original = Reader.under

    def under(reader: Reader, prefix: str) -> dict[str, Any]:
        save(folder, 2)
        return original(reader, prefix)

    monkeypatch.setattr(Reader, "under", under)
    with pytest.raises(SystemExit, match="CheckpointCorruptError: .* was changed while it was read"):
        main(["checkpoint", "consolidate", str(folder), str(tmp_path / "out"), "--to", to])
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]
