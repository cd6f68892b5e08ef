"""One rank sees other files of a checkpoint than the others, as on a file system of the network: all refuse it."""

import shutil
from pathlib import Path

import pytest

from lightning_pipeline.errors import CheckpointCorruptError
from tests.checkpoint_parts import load, same, save, together, values
from tests.faults.cases import Ranks


def loads_what_it_sees(folder: str, name: str, how: str) -> str:
    """Global rank 1 has an older file of that name, or none."""
    ranks = together()
    path, older = Path(folder) / "seen0" / "a.ckpt", Path(folder) / "older.ckpt"
    save(older, 1, ranks)
    save(path, 2, ranks)
    if ranks.rank == 1:
        own = Path(folder) / "seen1" / "a.ckpt"
        shutil.copytree(path, own)
        (own / name).unlink()
        if how == "older":
            shutil.copy(older / name, own / name)
        path = own
    tensors, optimizer, run = load(path, 3, ranks)
    before = values(tensors, optimizer)
    with pytest.raises(CheckpointCorruptError, match="global rank 1") as caught:
        run()
    assert same(before, values(tensors, optimizer))
    return str(caught.value)


@pytest.mark.parametrize("name", [".metadata", "meta.pt", "__1_0.distcp"])
@pytest.mark.parametrize("how", ["older", "missing"])
def test_a_file_that_one_rank_sees_otherwise_is_refused_by_all(
    ranks: Ranks, tmp_path: Path, name: str, how: str
) -> None:
    for seen in ("seen0", "seen1"):
        (tmp_path / seen).mkdir()
    for text in ranks(2)(loads_what_it_sees, str(tmp_path), name, how):
        assert name in text
