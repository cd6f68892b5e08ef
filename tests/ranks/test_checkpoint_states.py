"""What a checkpoint keeps beside parameters: buffers, extra state, state of callbacks and optimizers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from torch import nn

from lightning_pipeline.checkpoint.consolidate import to_file
from tests.pool import Pool
from tests.ranks.checkpoint_cases import state_of
from tests.ranks.lightning_cases import Regression, loader, trainer

Ranks = Callable[[int], Pool]
TWO = {"stages": 2, "num_microbatches": 1}


class Small(Regression):
    def __init__(self) -> None:
        super().__init__()
        del self.error

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...


def fit_after_a_search(folder: str) -> set[float]:
    module = Small()
    search = LearningRateFinder(num_training_steps=5, early_stop_threshold=None)
    run = trainer(TWO, max_epochs=-1, max_steps=1, callbacks=[search], default_root_dir=folder)
    run.fit(module, loader(40))
    return {float(value) for name, value in state_of(run, module).items() if name.endswith(".step")}


def test_a_search_for_a_learning_rate_leaves_no_state(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2)(fit_after_a_search, str(tmp_path)) == [{1.0}, {1.0}]


class Counting(nn.Linear):
    """Counts batches of the stage that holds it."""

    seen = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


class Editing(Small):
    """Keeps extra state, and edits the weights on their way into a checkpoint and back."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            Counting(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), Counting(64, 3)
        ).double()
        self.net[2].requires_grad_(False)
        self.loaded: list[str] = []

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for part in (self.net[0], self.net[5]):
            part.seen += "weight" in part._parameters

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        states = checkpoint["state_dict"]
        checkpoint["state_dict"] = {k: v for k, v in states.items() if not k.startswith("net.2")}
        if "net.4.weight" in states:
            checkpoint["state_dict"]["net.4.weight"] = states["net.4.weight"] * 2
        checkpoint["state_dict"] |= {"version": torch.tensor(3), "note": "kept once"}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        states = checkpoint["state_dict"]
        self.loaded = sorted(states)
        assert int(states.pop("version")) == 3 and states.pop("note") == "kept once"
        states["net.4.weight"].div_(2)
        states["net.2.weight"], states["net.2.bias"] = torch.eye(64), torch.zeros(64)


def fit_editing(
    pipeline: dict[str, Any] | None, epochs: int, path: str | None, folder: str
) -> dict[str, Any]:
    module = Editing()
    saver = ModelCheckpoint(folder, filename=f"after{epochs}")
    run = trainer(pipeline, max_epochs=epochs, enable_checkpointing=True, callbacks=[saver])
    run.fit(module, loader(16), ckpt_path=path)
    return {"loaded": module.loaded, "seen": [module.net[0].seen, module.net[5].seen],
            "weights": {name: value.clone() for name, value in module.state_dict().items()
                        if isinstance(value, torch.Tensor)}}  # fmt: skip


def fit_editing_twice(folder: str) -> list[dict[str, Any]]:
    first = fit_editing(TWO, 2, f"{folder}/after1.ckpt", folder)
    return [first, fit_editing(TWO, 3, f"{folder}/after2.ckpt", folder)]


def test_extra_state_and_edits_of_a_state_dict_are_kept(ranks: Ranks, tmp_path: Path) -> None:
    fit_editing(None, 1, None, str(tmp_path))
    alone = [fit_editing(None, n, str(tmp_path / f"after{n - 1}.ckpt"), str(tmp_path / "one")) for n in (2,)]
    for found in ranks(2)(fit_editing_twice, str(tmp_path)):
        for epochs, entry in zip((2, 3), found, strict=True):
            assert entry["seen"] == [2 * epochs, 2 * epochs]
            assert entry["loaded"] == alone[0]["loaded"]
            assert torch.equal(entry["weights"]["net.2.weight"], torch.eye(64).double())
        for name, value in alone[0]["weights"].items():
            torch.testing.assert_close(found[0]["weights"][name], value)
    to_file(tmp_path / "after2.ckpt", tmp_path / "back.ckpt", trust=False)
    back, one = (torch.load(tmp_path / name, weights_only=False) for name in ("back.ckpt", "one/after2.ckpt"))
    assert set(back["state_dict"]) == set(one["state_dict"])
    assert back["state_dict"]["net.5._extra_state"] == {"seen": 4}
    resumed = fit_editing(None, 3, str(tmp_path / "back.ckpt"), str(tmp_path / "one"))
    for name, value in found[1]["weights"].items():
        torch.testing.assert_close(resumed["weights"][name], value)
    assert resumed["seen"] == found[1]["seen"]
