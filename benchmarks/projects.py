"""Runs Lightning projects that nobody here wrote, unchanged but for the strategy, and on one device.

    pip install requests torchvision pytorch-forecasting gluonts mlcolvar
    git clone --depth 1 --branch 2.6.5 https://github.com/Lightning-AI/pytorch-lightning
    python benchmarks/projects.py pytorch-lightning/examples/pytorch

Modules, callbacks and command lines are those of the projects; data are made up in the projects' shapes, for
nothing is downloaded, dropout is off, whose draws are a pipeline's own, and numbers are float64, so that what
differs is no rounding. Weights and logged values after training are compared. `--only` names projects.
"""

import argparse
import importlib.util
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.demos.boring_classes import Net
from lightning.pytorch.demos.lstm import LightningLSTM
from lightning.pytorch.demos.transformer import LightningTransformer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipeline import PipelineStrategy

sys.path.insert(0, str(Path(__file__).parent))
from library_projects import Project, libraries


def imported(path: Path) -> ModuleType:
    """A project's script as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, "a file of Python"
    assert spec.loader is not None, "a file of Python"
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def images(count: int = 48, size: int = 16) -> DataLoader[Any]:
    """Made-up MNIST."""
    drawn = torch.Generator().manual_seed(1)
    x = torch.rand(count, 1, 28, 28, generator=drawn)
    return DataLoader(TensorDataset(x, torch.randint(10, (count,), generator=drawn)), batch_size=size)


def text(words: int, count: int = 32, size: int = 8, length: int = 12) -> DataLoader[Any]:
    """Made-up WikiText2."""
    drawn = torch.Generator().manual_seed(2)
    tokens = torch.randint(words, (count, length + 1), generator=drawn)
    return DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=size)


class _Mnist(pl.LightningDataModule):
    """With the attributes that the examples' callbacks read."""

    def __init__(self) -> None:
        super().__init__()
        self.mnist_val = images().dataset

    def train_dataloader(self) -> DataLoader[Any]:
        return images()

    def val_dataloader(self) -> DataLoader[Any]:
        return images()


class Digits(pl.LightningModule):
    """What Lightning's introduction makes of `demos.boring_classes.Net`."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.nll_loss(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adadelta(self.parameters(), lr=1.0)


def projects(examples: Path) -> dict[str, Callable[[], Project]]:
    """By name."""
    basics = examples / "basics"

    def autoencoder() -> Project:
        script = imported(basics / "autoencoder.py")
        sampler = [script.ImageSampler()] if script._TORCHVISION_AVAILABLE else []
        return script.LitAutoEncoder, lambda: {"datamodule": _Mnist()}, {"callbacks": sampler}

    def classifier() -> Project:
        script = imported(basics / "backbone_image_classifier.py")
        return lambda: script.LitClassifier(script.Backbone()), lambda: {"datamodule": _Mnist()}, {}

    def transformer() -> Project:
        script = imported(basics / "transformer.py")
        return (
            lambda: script.LanguageModel(vocab_size=50),
            lambda: {"train_dataloaders": text(50), "val_dataloaders": text(50)},
            {"gradient_clip_val": 0.25},
        )

    def profiled(automatic: bool) -> Project:
        script = imported(basics / "profiler_example.py")
        pictures = TensorDataset(torch.rand(8, 3, 64, 64), torch.randint(1000, (8,)))
        return (
            lambda: script.ModelToProfile(automatic_optimization=automatic),
            lambda: {"train_dataloaders": DataLoader(pictures, batch_size=4)},
            {},
        )

    def demo_transformer() -> Project:
        return lambda: LightningTransformer(50), lambda: {"train_dataloaders": text(50)}, {}

    def demo_lstm() -> Project:
        return lambda: LightningLSTM(50), lambda: {"train_dataloaders": text(50)}, {}

    def digits() -> Project:
        return Digits, lambda: {"train_dataloaders": images()}, {}

    return {
        "examples: autoencoder": autoencoder,
        "examples: image classifier": classifier,
        "examples: language model": transformer,
        "examples: profiler, automatic": lambda: profiled(True),
        "examples: profiler, manual": lambda: profiled(False),
        "demos: Transformer": demo_transformer,
        "demos: LSTM": demo_lstm,
        "demos: Net": digits,
    }


def trained(project: Project, stages: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights and logged values of a short run."""
    make, data, options = project
    pl.seed_everything(1, verbose=False)
    module = make()
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        if isinstance(getattr(part, "dropout", None), float):
            part.dropout = 0.0
    strategy = "auto" if stages == 0 else PipelineStrategy(stages=stages, start_method="fork")
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            accelerator="cpu", devices=max(1, stages), strategy=strategy, max_epochs=2,
            default_root_dir=folder, precision="64-true", **options,
        )  # fmt: skip
        trainer.fit(module, **data())
    return {name: p.detach() for name, p in module.state_dict().items()}, dict(trainer.callback_metrics)


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> str:
    """The largest, as a share of the largest value of its tensor, and what has it if it is no rounding."""
    assert found.keys() == expected.keys(), f"{sorted(found)} instead of {sorted(expected)}"
    shares = {
        name: float((found[name].double() - value.double()).abs().max()) / max(1e-6, float(value.abs().max()))
        for name, value in expected.items()
    }
    if not shares:
        return "nothing"
    apart = [name for name, share in shares.items() if share > 1e-6]
    names = f" ({len(apart)} of {len(shares)}: {', '.join(apart[:6])})" if apart else ""
    return f"{max(shares.values()):.1e}{names}"


def compared(project: Callable[[], Project], stages: int) -> str:
    """One cell of the table."""
    try:
        given = project()
    except ModuleNotFoundError as error:
        return f"not run: {error}"
    try:
        expected, found = trained(given, 0), trained(given, stages)
    except Exception as error:  # a project that does not run is a row of the table
        traceback.print_exc()
        return f"{type(error).__name__}: {str(error).splitlines()[0][:110]}"
    return f"weights {difference(found[0], expected[0])}, logged {difference(found[1], expected[1])}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("examples", type=Path, help="the folder `examples/pytorch` of Lightning's repository")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--only", nargs="+", default=[""], help="parts of names")
    options = parser.parse_args()
    torch.set_num_threads(1)
    examples = options.examples.resolve()
    os.chdir(tempfile.mkdtemp())
    Path("data").mkdir()  # where the demos look for their text
    Path("data/wikitext-2.txt").write_text(" ".join(f"word{n % 50}" for n in range(5000)))
    for name, project in {**projects(examples), **libraries()}.items():
        if any(part in name for part in options.only):
            print(f"| {name} | {compared(project, options.stages)} |", flush=True)


if __name__ == "__main__":
    main()
