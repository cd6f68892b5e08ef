"""What the pages of the documentation take for granted: files, and names of Python; made by ranks."""

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pipeline import PipelineStrategy
from tests.pages import ROOT, blocks
from tests.pool import Pool


class Small(LightningModule):
    """What the reader of a page has."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, batch: Tensor) -> Tensor:
        for block in self.blocks:
            batch = block(batch).relu()
        return batch

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        result: Tensor = self(batch).square().mean()
        return result

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Wrapped(Small):
    """Weights whose names begin with `model.`."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"layers": self.blocks})
        del self.blocks

    def forward(self, batch: Tensor) -> Tensor:
        for block in self.model["layers"]:  # type: ignore[union-attr]
            batch = block(batch).relu()
        return batch


def names() -> dict[str, Any]:
    """Of Python: a module, its data, a Trainer."""
    torch.manual_seed(0)
    module, batch = Small(), torch.randn(16, 8)
    data = DataLoader(batch, batch_size=8)  # type: ignore[arg-type]
    trainer = Trainer(accelerator="cpu", devices=1, strategy=PipelineStrategy(stages=1), logger=False)
    return {
        "__name__": "page", "Trainer": Trainer, "PipelineStrategy": PipelineStrategy, "torch": torch,
        "LightningModule": LightningModule, "Tensor": Tensor, "module": module, "model": module,
        "self": module, "batch": batch, "datamodule": data, "loader": data, "val_loader": data,
        "trainer": trainer, "total_batch_size": 64,
    }  # fmt: skip


def names_of_large_models() -> dict[str, Any]:
    """Likewise, for a GPT."""
    data = DataLoader(torch.arange(128).reshape(8, 16) % 64, batch_size=4)  # type: ignore[arg-type]
    return names() | {"config": _config(), "loader": data, "val_loader": data}


def names_with_a_hugging_face_model() -> dict[str, Any]:
    """Likewise; the module has one of `transformers`."""
    from transformers import AutoModelForCausalLM, GPT2LMHeadModel

    found = names()
    found["self"].model = GPT2LMHeadModel(_config())
    return found | {"AutoModelForCausalLM": AutoModelForCausalLM}


def names_of_a_package() -> dict[str, Any]:
    """Likewise; what a page calls the reader's package can be imported."""
    import sys
    from types import ModuleType

    from lightning_pipeline.schedules import GPipe

    schedules = ModuleType("my_package.schedules")
    schedules.FillDrain = GPipe  # type: ignore[attr-defined]
    sys.modules |= {"my_package": ModuleType("my_package"), "my_package.schedules": schedules}
    return names()


NAMES: dict[str, Callable[[], dict[str, Any]]] = {
    "docs/howto/large-models.md": names_of_large_models,
    "docs/howto/fit.md": names_with_a_hugging_face_model,
    "docs/tutorials/transformers.md": names_with_a_hugging_face_model,
    "docs/writing-a-schedule.md": names_of_a_package,
}


def _config() -> Any:
    from transformers import GPT2Config

    return GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=4, n_head=2)


def make_files(folder: Path, ranks: Callable[[int], Pool]) -> None:
    """All files that pages take for granted."""
    shutil.copytree(
        ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__", "[!g]*_out")
    )
    ranks(2)(save_a_run, str(folder), group=False, timeout=240.0)
    shutil.copytree(folder / "run.ckpt", folder / "epoch=3-step=2000.ckpt")
    ranks(1)(save_for_other_tools, str(folder), group=False, timeout=240.0)
    (script,) = [
        block.text for block in blocks("docs/quickstart.md", "python") if block.ranks and not block.how
    ]
    assert "devices=2, strategy=PipelineStrategy(stages=2)" in script
    sizes = 'devices=int(os.environ["WORLD_SIZE"]), strategy=PipelineStrategy(stages="auto")'
    script = script.replace("torch.randn(2048,", "torch.randn(128,")
    (folder / "train.py").write_text(
        "import os\n" + script.replace("devices=2, strategy=PipelineStrategy(stages=2)", sizes)
    )
    (vit,) = [block.text for block in blocks("docs/tutorials/vision.md", "python")]
    begin, end = vit.split("seed_everything(0)\n")
    (folder / "vit.py").write_text(
        begin + 'if __name__ == "__main__":\n    ' + end.replace("\n", "\n    ").rstrip()
    )
    (llama,) = [block.text for block in blocks("docs/plan.md", "python") if "class Llama" in block.text]
    for large, small in (
        ("8192", "32"),
        ("28672", "64"),
        ("80", "8"),
        ("64", "4"),
        ('"num_key_value_heads": 8', '"num_key_value_heads": 2'),
    ):
        assert large in llama
        llama = llama.replace(large, small)
    (folder / "examples/models.py").write_text(llama)


def save_a_run(folder: str) -> None:
    """`run.ckpt` and `llama-7b`, of a fit on these ranks."""
    with contextlib.chdir(folder):
        torch.manual_seed(0)
        trainer = Trainer(
            accelerator="cpu", devices=2, strategy=PipelineStrategy(stages=2), max_epochs=1, logger=False,
            enable_checkpointing=False,
        )  # fmt: skip
        trainer.fit(Wrapped(), names()["loader"])
        trainer.save_checkpoint("run.ckpt")
        trainer.strategy.save_weights("llama-7b", prefix="model.")  # type: ignore[attr-defined]
        if trainer.is_global_zero:
            Path("llama-7b/config.json").write_text(json.dumps({"model_type": "llama"}))


def save_for_other_tools(folder: str) -> None:
    """`fsdp.ckpt` as Lightning's FSDP writes it, and `gpt2-folder` as `save_pretrained` does."""
    from transformers import GPT2LMHeadModel

    with contextlib.chdir(folder):
        dcp.save({"model": Small().state_dict()}, checkpoint_id="fsdp.ckpt", no_dist=True)
        torch.save({}, "fsdp.ckpt/meta.pt")
        for run in ("one", "two"):
            torch.save(Small().double().state_dict(), f"{run}.pt")
        GPT2LMHeadModel(_config()).save_pretrained("gpt2-folder", max_shard_size="20KB")
