"""Weights are copied straight out of the mapped file, and a file that changes meanwhile is refused."""

import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from torch import Tensor

from lightning_pipeline.checkpoint import load as loading
from lightning_pipeline.checkpoint.contents.meta_file import as_bytes
from lightning_pipeline.checkpoint.folder import mapped
from lightning_pipeline.checkpoint.folder.mapped import MappedFile
from lightning_pipeline.checkpoint.folder.reader import Reader
from lightning_pipeline.checkpoint.load import Target, load_folder
from lightning_pipeline.checkpoint.save import Part, write
from lightning_pipeline.errors import CheckpointCorruptError
from tests.checkpoint_parts import ABOUT, alone, anonymous, load, same, save, values


def large() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "odd": torch.randn(10_001, dtype=torch.float64),
        "bytes": torch.randint(0, 255, (33_333,), dtype=torch.uint8),
        "half": torch.randn(9_999, 3).to(torch.bfloat16),
        "turned": torch.randn(70, 130).t(),
        "complex": torch.randn(5_000, dtype=torch.complex64),
        "bool": torch.rand(20_000) > 0.5,
        "small": torch.randn(3),
        "one": torch.tensor(2.5),
        "none": torch.empty(0, 4),
        "float8": torch.randn(50_000).to(torch.float8_e4m3fn),
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(Part({"model": large()}, 0, {}, as_bytes({}), ABOUT), tmp_path / "a.ckpt", alone(), "sha256")
    return tmp_path / "a.ckpt"


def read(folder: Path, *, map_files: bool = True) -> dict[str, Tensor]:
    reader = Reader(folder, trust=False)
    found = reader.read([f"model.{name}" for name in large()], mapped=map_files)
    return {name.removeprefix("model."): value for name, value in found.items()}


def assert_right(found: dict[str, Tensor]) -> None:
    for name, value in large().items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
        assert torch.equal(found[name].contiguous().view(-1).view(torch.uint8),
                           value.contiguous().view(-1).view(torch.uint8)), name  # fmt: skip


def lies_in_a_file(tensor: Tensor) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        ends, *_, name = line.split(maxsplit=5)
        start, end = (int(text, 16) for text in ends.split("-"))
        if start <= tensor.data_ptr() < end:
            return name.endswith(".distcp")
    return False


def test_every_kind_of_tensor_is_mapped_as_it_was_saved(folder: Path) -> None:
    found = read(folder)
    assert_right(found)
    assert_right(read(folder, map_files=False))
    if os.path.exists("/proc/self/maps"):
        in_file = {name for name, tensor in found.items() if lies_in_a_file(tensor)}
        assert in_file == set(found) - {"small", "one", "none"}


def refuse_to_map(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENODEV, "No such device")


def test_a_file_that_cannot_be_mapped_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped.mmap, "mmap", refuse_to_map)
    assert_right(read(folder))


class OldKernel(MappedFile):
    """A map that cannot be populated."""

    def __init__(self, file: IO[bytes], *, editable: bool = False) -> None:
        super().__init__(file, editable=editable)
        self._memory = Unpopulated(file.fileno(), 0, access=mmap.ACCESS_READ)


class Unpopulated(mmap.mmap):
    def madvise(self, *_: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")


def test_without_populating_the_bytes_are_read_once_before_use(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_pipeline.checkpoint.folder.reader.MappedFile", OldKernel)
    assert_right(read(folder))


class FailingDisk(OldKernel):
    def fetch(self, file: IO[bytes], start: int, length: int) -> None:
        super().fetch(Failing(file), start, length)  # type: ignore[arg-type]


class Failing:
    def __init__(self, file: IO[bytes]) -> None:
        self.seek = file.seek

    def read(self, count: int) -> bytes:
        raise OSError(errno.EIO, "Input/output error")


def test_a_failing_disk_is_an_error_that_names_the_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_pipeline.checkpoint.folder.reader.MappedFile", FailingDisk)
    with pytest.raises(CheckpointCorruptError, match=r"__0_0\.distcp cannot be read: .*Input/output error"):
        read(folder)


def test_a_file_that_was_cut_is_an_error_and_no_signal(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(3 * mmap.PAGESIZE))
    with (tmp_path / "file").open("rb") as file:
        memory = MappedFile(file)
        os.truncate(tmp_path / "file", mmap.PAGESIZE)
        memory.fetch(file, 0, mmap.PAGESIZE)
        with pytest.raises(OSError, match=f"{mmap.PAGESIZE} bytes are missing at its end"):
            memory.fetch(file, mmap.PAGESIZE // 2, 3 * mmap.PAGESIZE // 2)
        with pytest.raises(OSError, match="missing"):
            sum(len(block) for block in memory.blocks(file, mmap.PAGESIZE))


def flip(path: Path) -> None:
    with (path / "__0_0.distcp").open("rb+") as file:
        file.seek(600)
        byte = file.read(1)
        file.seek(600)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("integrity", ["sha256", "off"])
@pytest.mark.parametrize("change", [flip, lambda path: save(path, 3), lambda path: (path / "meta.pt").touch()],
                         ids=["a byte", "another save", "the time"])  # fmt: skip
@pytest.mark.parametrize("when", ["after the check", "after the reading"])
def test_a_change_during_the_load_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, integrity: str, change: Callable[[Path], Any], when: str
) -> None:
    path = tmp_path / "a.ckpt"
    save(path, 1, integrity=integrity)
    tensors, optimizer, run = load(path, 2)
    before, original = values(tensors, optimizer), loading.stage

    def stage(*given: Any) -> Any:
        if when == "after the check":
            change(path)
            return original(*given)
        staged = original(*given)
        change(path)
        return staged

    monkeypatch.setattr(loading, "stage", stage)
    with pytest.raises(CheckpointCorruptError, match="was changed while it was read"):
        run()
    assert same(before, values(tensors, optimizer))


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux's account of memory")
def test_a_load_takes_little_memory_beside_the_model(tmp_path: Path) -> None:
    weights = {"w": torch.arange(8 << 20, dtype=torch.float32)}
    write(Part({"model": weights}, 0, {}, as_bytes({}), ABOUT), tmp_path / "a.ckpt", alone(), "sha256")
    live = {"w": torch.zeros(8 << 20)}
    seen: list[int] = []
    original = loading.apply

    def apply(*given: Any) -> None:
        original(*given)
        seen.append(anonymous())

    before = anonymous()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "apply", apply)
        load_folder(
            tmp_path / "a.ckpt", Target(live, [], {}, strict=True, trust=False, checksums=True), alone()
        )
    assert torch.equal(live["w"], weights["w"])
    assert seen[0] - before < 16 << 20  # bytes; the tensor has 32 MiB
