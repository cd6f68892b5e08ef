"""`lightning-pipeline checkpoint convert`: every kind into every other, by suffix, and nothing is lost by mistake."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lightning_pipeline.__main__ import main
from lightning_pipeline.checkpoint import verify
from lightning_pipeline.weights import open_weights
from tests.checkpoint_parts import save
from tests.ranks.lightning_cases import Regression, loader, trainer, weights


def convert(source: Path, target: Path, *more: str) -> None:
    main(["checkpoint", "convert", str(source), str(target), *more])


def tensors(path: Path) -> dict[str, Tensor]:
    found = open_weights(path)
    own = {name: one.read() for name, one in found.tensors.items()}
    return {**own, **{new: own[old] for new, old in found.ties.items()}}


def equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], value) for name, value in expected.items()
    )


@pytest.fixture
def source(tmp_path: Path) -> Path:
    state = {"a.weight": torch.randn(40, 50), "b": torch.arange(3), "half": torch.randn(4).bfloat16()}
    save_file(state, tmp_path / "source.safetensors")
    return tmp_path / "source.safetensors"


def test_weights_go_round_through_every_kind(source: Path, tmp_path: Path) -> None:
    expected, last = tensors(source), source
    for name, more in (
        ("a.ckpt", ()), ("b", ()), ("c.pt", ()), ("d", ("--to=huggingface",)), ("e", ()), ("f.safetensors", ()),
        ("g.bin", ()), ("h", ("--to=huggingface", "--prefix=model.")), ("i.safetensors", ("--strip=model.",)),
    ):  # fmt: skip
        convert(last, tmp_path / name, *more)
        last = tmp_path / name
        if name != "h":
            assert equal(tensors(last), expected), name
    assert verify(tmp_path / "b").step == 0
    assert (tmp_path / "c.pt").stat().st_size < 2 * source.stat().st_size
    assert torch.load(tmp_path / "c.pt").keys() == expected.keys()
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith("lp-")]


class Net(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def fitted(path: Path | None, epochs: int) -> tuple[dict[str, Tensor], pl.Trainer]:
    module, run = Net(), trainer(None, max_epochs=epochs)
    run.fit(module, loader(), loader(seed=4), ckpt_path=path)
    return weights(module), run


def test_training_goes_on_from_a_converted_checkpoint(tmp_path: Path) -> None:
    _, run = fitted(None, 1)
    run.save_checkpoint(tmp_path / "one.ckpt")
    convert(tmp_path / "one.ckpt", tmp_path / "folder")
    convert(tmp_path / "folder", tmp_path / "back.ckpt")
    assert verify(tmp_path / "folder").step == 3
    expected, _ = fitted(tmp_path / "one.ckpt", 3)
    found, _ = fitted(tmp_path / "back.ckpt", 3)
    assert equal(found, expected)
    first, second = (torch.load(tmp_path / name) for name in ("one.ckpt", "back.ckpt"))
    assert first.keys() == second.keys()
    assert first["lr_schedulers"] == second["lr_schedulers"]
    assert first["loops"] == second["loops"]


def refused(source: Path, target: Path, *more: str) -> str:
    with pytest.raises(SystemExit) as caught:
        convert(source, target, *more)
    return str(caught.value)


def test_what_is_there_is_replaced_with_force_only(source: Path, tmp_path: Path) -> None:
    (tmp_path / "a.ckpt").write_text("mine")
    assert "a.ckpt is there already: --force replaces it" in refused(source, tmp_path / "a.ckpt")
    assert (tmp_path / "a.ckpt").read_text() == "mine"
    convert(source, tmp_path / "a.ckpt", "--force")
    assert equal(tensors(tmp_path / "a.ckpt"), tensors(source))
    save(tmp_path / "folder", 1)
    convert(source, tmp_path / "folder", "--force")
    assert equal(tensors(tmp_path / "folder"), tensors(source))
    assert "is what is to be converted" in refused(source, source, "--force")


def test_a_dry_run_tells_and_writes_nothing(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.iterdir())
    convert(source, tmp_path / "new" / "a.ckpt", "--dry_run")
    assert sorted(tmp_path.iterdir()) == before
    assert capsys.readouterr().out == (
        f"{source} -> {tmp_path / 'new' / 'a.ckpt'} (one-file checkpoint): the weights, 3 tensors of the model, "
        "7.8 KiB\nnothing was written: --dry_run\n"
    )


def test_what_cannot_be_converted_is_named(source: Path, tmp_path: Path) -> None:
    assert "'.doc' names no kind of checkpoint" in refused(source, tmp_path / "a.doc")
    (tmp_path / "empty").mkdir()
    assert "holds no weights" in refused(tmp_path / "empty", tmp_path / "a.ckpt")
    (tmp_path / "cut.safetensors").write_bytes(source.read_bytes()[:-3])
    assert "cut.safetensors cannot be read" in refused(tmp_path / "cut.safetensors", tmp_path / "a.ckpt")
    save(tmp_path / "run", 1)
    assert "leave the prefix out" in refused(tmp_path / "run", tmp_path / "a.ckpt", "--prefix=model.")
    net = nn.Linear(2, 2)
    groups = [{"params": [net.weight]}, {"params": [net.bias], "lr": 0.5}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    torch.save(
        {"state_dict": net.state_dict(), "optimizer_states": [optimizer.state_dict()], "lr_schedulers": []},
        tmp_path / "two.ckpt",
    )
    assert "optimizer 0 knows its parameters by number, and it has not all" in refused(
        tmp_path / "two.ckpt", tmp_path / "two"
    )
    assert not (tmp_path / "two").exists()
    convert(tmp_path / "two.ckpt", tmp_path / "two.safetensors")
    assert load_file(tmp_path / "two.safetensors").keys() == {"weight", "bias"}


def test_progress_is_shown(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert(source, tmp_path / "a.ckpt", "--progress=true")
    assert "100%" in capsys.readouterr().err
