"""`lightning-pipeline checkpoint inspect` and `verify`: what they print, and that they run nothing."""

import os
import pickle
import runpy
import sys
from pathlib import Path

import pytest

from lightning_pipeline.__main__ import main
from lightning_pipeline.checkpoint import verify
from lightning_pipeline.checkpoint.folder.manifest import Manifest, write_manifest
from lightning_pipeline.model.cut import size_text
from tests.checkpoint_parts import save
from tests.unit.checkpoint.test_hostile import Evil, seal


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "a.ckpt"
    save(path, 7)
    return path


def test_inspect_prints_what_is_inside(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["checkpoint", "inspect", str(folder)])
    printed = capsys.readouterr().out
    size = size_text(sum(file.stat().st_size for file in folder.iterdir() if file.name != "manifest.json"))
    assert printed.startswith(f"step 7, epoch 1, 3 files, {size}\nsaved by: ")
    assert size.endswith(" KiB")
    assert "from: ranks 1\n" in printed
    assert "model: 2 tensors, 72 elements, 288 B (float32)\n" in printed
    assert "  layer0.bias: float32 [8], 32 B\n  layer0.weight: float32 [8, 8], 256 B\n" in printed
    assert "optimizer_0: 6 tensors" in printed


def test_inspect_names_stages_and_schedule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    topology = {"ranks": 2, "stages": 2, "schedule": "1F1B", "units": [["layer0"], ["layer1"]]}
    tensors = {
        "model.layer0.weight": ["bfloat16", 8, 8],
        "model.layer1.bias": ["float32", 8],
        "model.s": ["float32"],
    }
    (tmp_path / "a").mkdir()
    write_manifest(tmp_path / "a", Manifest(3, 1, "off", {}, tensors=tensors, topology=topology))
    main(["checkpoint", "inspect", str(tmp_path / "a")])
    printed = capsys.readouterr().out
    assert "from: ranks 2, schedule 1F1B, stages 2\n" in printed
    assert (
        "  layer0.weight: bfloat16 [8, 8], 128 B, stage 0\n  layer1.bias: float32 [8], 32 B, stage 1\n"
        in printed
    )
    assert printed.endswith("  s: float32 [], 4 B\n")


@pytest.mark.parametrize(("integrity", "checked"), [
    ("sha256", "sizes and sha256"), ("crc32", "sizes and crc32"), ("off", "sizes"),
])  # fmt: skip
def test_verify_says_what_it_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], integrity: str, checked: str
) -> None:
    save(tmp_path / "a.ckpt", 1, integrity=integrity)
    main(["checkpoint", "verify", str(tmp_path / "a.ckpt")])
    assert capsys.readouterr().out == f"{tmp_path / 'a.ckpt'} is whole: {checked} of 3 files are right\n"


def run_module(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["lightning_pipeline", *arguments])
    runpy.run_module("lightning_pipeline", run_name="__main__", alter_sys=True)


def test_python_m_does_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_module(monkeypatch, "checkpoint", "verify", str(folder))
    assert "is whole: sizes and sha256 of 3 files are right" in capsys.readouterr().out
    run_module(monkeypatch, "checkpoint", "consolidate", str(folder), str(folder.with_name("out.ckpt")))
    assert folder.with_name("out.ckpt").is_file()
    (folder / "__0_0.distcp").unlink()
    with pytest.raises(SystemExit, match=r"CheckpointCorruptError: .*__0_0\.distcp"):
        run_module(monkeypatch, "checkpoint", "verify", str(folder))


def refused(*arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["checkpoint", *arguments])
    return str(ended.value)


@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_one_file_and_no_file_are_not_called_damaged(folder: Path, command: str) -> None:
    one = folder.with_name("one.ckpt")
    one.write_bytes(b"whatever one device wrote")
    told = refused(command, str(one))
    assert told.startswith(f"CheckpointError: {one} is one file, not a checkpoint folder")
    gone = folder.with_name("gone.ckpt")
    assert refused(command, str(gone)) == f"CheckpointError: there is no checkpoint {gone}"


def test_a_damaged_checkpoint_is_refused_in_words_that_fit_the_command(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = folder / "__0_0.distcp"
    written.write_bytes(bytes(written.stat().st_size))
    told = refused("verify", str(folder))
    assert told.startswith(f"CheckpointCorruptError: checkpoint file {written} was changed")
    assert "checkpoint verify" not in told
    capsys.readouterr()
    told = refused("consolidate", str(folder), str(folder.with_name("out.ckpt")))
    assert "`lightning-pipeline checkpoint verify` says which are whole" in told
    assert "->" not in capsys.readouterr().out


def test_consolidate_says_what_it_wrote(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder.with_name("out.ckpt")
    main(["checkpoint", "consolidate", str(folder), str(out)])
    assert capsys.readouterr().out == (
        f"{folder} -> {out} (one-file checkpoint): weights, optimizers and all else, 2 tensors of the model, "
        f"288 B\nwrote {out}, {size_text(out.stat().st_size)}\n"
    )


def test_verify_tells_how_many_bytes_it_has_read(folder: Path) -> None:
    told: list[tuple[int, int]] = []
    manifest = verify(folder, lambda what, done, of: told.append((done, of)))
    whole = sum(entry["size"] for entry in manifest.files.values())
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert (told[0], told[-1]) == ((0, whole), (whole, whole))


def test_verify_names_every_file_that_is_wrong(folder: Path) -> None:
    (folder / "__0_0.distcp").unlink()
    (folder / "meta.pt").write_bytes(b"changed")
    with pytest.raises(SystemExit) as refused:
        main(["checkpoint", "verify", str(folder)])
    told = str(refused.value)
    assert "2 of 3 files are not as written" in told
    assert f"{folder / '__0_0.distcp'} is missing" in told
    assert f"{folder / 'meta.pt'} has 7 bytes instead of" in told


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_nothing_is_unpickled(folder: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    for name in (".metadata", "meta.pt", "__0_0.distcp"):
        (folder / name).write_bytes(pickle.dumps(Evil(folder.parent / "ran")))
    seal(folder)
    main(["checkpoint", command, str(folder)])
    assert capsys.readouterr().out
    assert not (folder.parent / "ran").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["plann"], "there is no command 'plann', but plan and checkpoint; did you mean plan?"),
        (["checkpoint", "inspekt", "x"], "'inspect', 'verify'; did you mean inspect?"),
        (["checkpoint", "inspect"], "ConfigurationError: missing: folder"),
        (["checkpoint", "inspect", "x", "--forse"], "unrecognized arguments: --forse"),
        (["checkpoint", "convert", "x", "y", "--forse", "1"], "--forse 1; did you mean --force?"),
        (["checkpoint", "convert", "x", "y", "--to", "folders"], "--to: expected one of 'folder', 'ckpt'"),
        (["checkpoint"], 'expected "subcommand" to be one of'),
    ],
)
def test_typos_are_told_in_a_line(arguments: list[str], told: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    said = str(stopped.value.code)
    assert told in said
    assert len(said.splitlines()) == 1


def test_output_that_nobody_reads_ends_quietly(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "w") as closed, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", closed)
        with pytest.raises(SystemExit) as stopped:
            main(["checkpoint", "inspect", str(folder)])
    assert stopped.value.code == 141
