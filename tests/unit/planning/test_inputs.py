"""What `lightning-pipeline plan` makes of the user's classes."""

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_pipeline import PipelineStrategy
from tests.unit.planning.command import in_examples, refusal, run

__all__ = ["in_examples"]  # a fixture of every test here


class Item(pl.LightningModule):
    """Reads numbers off tensors while it is built, as timm's drop-path rates are."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 4)]
        self.net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return sum(self.net(part).square().mean() for part in parts_of(batch))


class Memory(Item):
    """Hands its weights to a library of another kind while it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = float(self.net[0].weight.detach().numpy().mean())


class InSetup(pl.LightningModule):
    """Makes its layers in `setup`; with `own_data`, the data too."""

    def __init__(self, own_data: bool = False) -> None:
        super().__init__()
        self.own_data = own_data

    def setup(self, stage: str) -> None:
        self.net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        if self.own_data:
            self.rows = torch.randn(12, 8)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.rows, batch_size=4)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return sum(self.net(part).square().mean() for part in parts_of(batch))


class Failing(pl.LightningModule):
    """Cannot be built."""

    def __init__(self) -> None:
        super().__init__()
        raise KeyError("vocabulary")


class Data(pl.LightningDataModule):
    """Several loaders at once, as a Trainer takes them."""

    def __init__(self, kind: str = "one") -> None:
        super().__init__()
        self.kind = kind

    def train_dataloader(self) -> Any:
        loader = torch.utils.data.DataLoader(torch.randn(12, 8), batch_size=6)
        if self.kind == "trainer":
            return [loader] * self.trainer.num_devices
        return {"one": loader, "list": [loader, loader], "dict": {"a": loader, "b": loader}, "none": []}[
            self.kind
        ]


def parts_of(batch: Any) -> list[torch.Tensor]:
    if isinstance(batch, dict):
        return list(batch.values())
    return list(batch) if isinstance(batch, list | tuple) else [batch]


def here(name: str) -> str:
    return f"{__name__}.{name}"


def test_a_module_that_reads_numbers_while_built_has_no_weights(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = run(capsys, "--model", here("Item"), "--batch=8,8", "--stages=2")
    assert "\n\nItem, 288 parameters, on 2 ranks; 8 micro-batches of a batch of 8" in text


def test_a_module_that_reads_memory_while_built_is_built_with_weights(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.warns(UserWarning, match="Memory is built with its weights, for without them it fails with"):
        text = run(capsys, "--model", here("Memory"), "--batch=8,8", "--stages=2")
    assert "\n\nMemory, 288 parameters, on 2 ranks; 8 micro-batches of a batch of 8" in text


def test_layers_and_data_made_in_setup_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--model", here("InSetup"), "--stages=2"]
    text = run(capsys, *given, "--batch=8,8")
    assert "\n\nInSetup, 288 parameters, on 2 ranks; 8 micro-batches of a batch of 8" in text
    text = run(capsys, *given, "--model.own_data=true")
    assert "\n\nInSetup, 288 parameters, on 2 ranks; 4 micro-batches of a batch of 4" in text
    module = InSetup()
    assert "InSetup, 288 parameters" in str(PipelineStrategy(2).plan(module, torch.randn(8, 8)))
    assert not hasattr(module, "net")


@pytest.mark.parametrize("kind", ["one", "list", "dict"])
def test_several_loaders_give_the_batch_that_a_trainer_would_get(
    capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    text = run(capsys, "--model", here("Item"), "--data", here("Data"), f"--data.kind={kind}", "--stages=2")
    assert "\n\nItem, 288 parameters, on 2 ranks; 6 micro-batches of a batch of 6" in text


def test_what_fails_in_the_user_s_code_is_told_in_a_line() -> None:
    given = ["--model", here("InSetup"), "--stages=2"]
    assert refusal("--model", here("Failing"), "--batch=8,8", "--stages=2") == (
        "ConfigurationError: Failing cannot be built: KeyError: 'vocabulary'"
    )
    assert refusal(*given) == (
        "ConfigurationError: train_dataloader of InSetup fails without a Trainer: AttributeError: 'InSetup' "
        "object has no attribute 'rows'; the batch's shapes will do: --batch 8,2048:int64"
    )
    assert "train_dataloader of Data fails without a Trainer: AttributeError: 'NoneType' object" in refusal(
        *given, "--data", here("Data"), "--data.kind=trainer"
    )
    assert refusal(*given, "--data", here("Data"), "--data.kind=none").endswith(
        "the train_dataloader of Data is empty"
    )
