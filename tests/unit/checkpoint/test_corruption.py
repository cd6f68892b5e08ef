"""A checkpoint that is not what was written is refused by name, and nothing live is touched."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lightning_pipeline.checkpoint.consolidate import verify
from lightning_pipeline.errors import CheckpointCorruptError, CheckpointError
from tests.checkpoint_parts import alone, load, part_of, same, save, stage, values

PAGE = 4096


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "a.ckpt"
    save(path, 1)
    return path


def refused(folder: Path, name: str) -> None:
    tensors, optimizer, run = load(folder, 2)
    before = values(tensors, optimizer)
    with pytest.raises(CheckpointCorruptError, match=name.replace(".", r"\.")):
        run()
    assert same(before, values(tensors, optimizer))
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        verify(folder)


@pytest.mark.parametrize("integrity", ["sha256", "crc32", "off"])
def test_what_was_saved_comes_back_bit_by_bit(tmp_path: Path, integrity: str) -> None:
    save(tmp_path / "a.ckpt", 1, integrity=integrity)
    tensors, optimizer, run = load(tmp_path / "a.ckpt", 2)
    assert run()["global_step"] == 1
    assert same(values(tensors, optimizer), values(*stage(1)[:2]))
    assert optimizer.param_groups[0]["lr"] == 1.1
    verify(tmp_path / "a.ckpt")


@pytest.mark.parametrize("integrity", ["sha256", "crc32"])
def test_none_of_200_byte_flips_loads(tmp_path: Path, integrity: str) -> None:
    folder = tmp_path / "a.ckpt"
    save(folder, 1, integrity=integrity)
    chance = random.Random(5)
    files = sorted(folder.iterdir())
    for _ in range(100):
        path = chance.choice(files)
        content = bytearray(path.read_bytes())
        place = chance.randrange(len(content))
        content[place] ^= 1 << chance.randrange(8)
        whole = path.read_bytes()
        path.write_bytes(content)
        refused(folder, path.name)
        path.write_bytes(whole)
    verify(folder)


DAMAGE: dict[str, Callable[[Path, Path], None]] = {
    "truncated": lambda path, other: path.write_bytes(path.read_bytes()[:-1]),
    "emptied": lambda path, other: path.write_bytes(b""),
    "deleted": lambda path, other: path.unlink(),
    "grown": lambda path, other: path.write_bytes(path.read_bytes() + b"x"),
    "swapped": lambda path, other: path.write_bytes(other.read_bytes()),
    "zeroed": lambda path, other: path.write_bytes(b"\0" * path.stat().st_size),
}


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "meta.pt", "manifest.json"])
@pytest.mark.parametrize("how", DAMAGE)
def test_damaged_files_are_named(folder: Path, name: str, how: str) -> None:
    other = folder.with_name("b.ckpt")
    shutil.copytree(folder, other)
    DAMAGE[how](folder / name, folder / ("meta.pt" if name != "meta.pt" else ".metadata"))
    refused(folder, name)
    verify(other)


def test_misfits_are_listed_together(tmp_path: Path) -> None:
    from lightning_pipeline.checkpoint.save import write

    part = part_of(1)
    model = part.state["model"]
    model["layer0.bias"] = model["layer0.bias"][:4]
    model["other"] = model.pop("layer0.weight")
    write(part, tmp_path / "a.ckpt", alone(), "sha256")
    tensors, optimizer, run = load(tmp_path / "a.ckpt", 2)
    before = values(tensors, optimizer)
    with pytest.raises(
        CheckpointError, match=r"missing: layer0.weight; unexpected: other; wrong shape: layer0.bias \(\(4"
    ):
        run()
    assert same(before, values(tensors, optimizer))


def test_another_data_type_is_a_misfit(tmp_path: Path) -> None:
    from lightning_pipeline.checkpoint.save import write

    part = part_of(1)
    part.state["model"]["layer0.bias"] = part.state["model"]["layer0.bias"].double()
    write(part, tmp_path / "a.ckpt", alone(), "sha256")
    with pytest.raises(CheckpointError, match=r"wrong dtype: layer0.bias \(torch.float64 stored"):
        load(tmp_path / "a.ckpt", 2)[2]()


def test_a_zeroed_page_is_found_in_every_file(tmp_path: Path) -> None:
    from lightning_pipeline.checkpoint.contents.meta_file import as_bytes
    from lightning_pipeline.checkpoint.save import write

    part = part_of(1)
    part.state["model"]["large"] = torch.randn(64, 64)
    part.meta = as_bytes({"noise": torch.randn(64, 64)})
    folder = tmp_path / "a.ckpt"
    write(part, folder, alone(), "sha256")
    pages = 0
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        for start in range(0, len(whole), PAGE):
            zeroed = bytearray(whole)
            zeroed[start : start + PAGE] = bytes(len(whole[start : start + PAGE]))
            if zeroed == whole:
                continue  # padding
            path.write_bytes(zeroed)
            refused(folder, path.name)
            pages += 1
        path.write_bytes(whole)
    assert pages >= 10
    verify(folder)
