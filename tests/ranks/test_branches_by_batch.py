"""What a number of the batch decides once for it on one device, is decided so for each micro-batch."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.branch_programs import outcome_of, random_branches
from tests.pool import Pool
from tests.ranks.lightning_cases import assert_same, trainer, weights
from tests.ranks.wrong_cases import WIDTH, Layer

Ranks = Callable[[int], Pool]
DECIDES = ["eval", "frozen", "set", "scale", "detach", "no grad", "factor", "skip", "another"]
KEEPS = ["nothing", "list", "nested", "default", "lists"]


BY: dict[str, Callable[[Tensor], bool]] = {
    "flag": lambda x: bool(x[0, 0] > 0),
    "number": lambda x: x[:, 0].sum().item() > 0,
    "array": lambda x: bool(x[:, 0].numpy().sum() > 0),
    "list": lambda x: sum(x[:, 0].tolist()) > 0,
    "places": lambda x: len(torch.nonzero(x[:, 0] > 0)) > 3,
    "rows": lambda x: x[x[:, 0] > 0].shape[0] > 3,
    "picked later": lambda x: x[x[:, 0] > 0.5][:, 1].abs().size(0) >= 3,
    "elements": lambda x: torch.masked_select(x, x > 0.5).numel() > 7,
    "repeated": lambda x: len(x.repeat_interleave((x[:, 0] > 0).long(), dim=0)) > 3,
}


class Branches(pl.LightningModule):
    """Whether the first sample, or a sum, is positive decides about a layer, or about what it is given."""

    def __init__(self, decides: str, keeps: str, *, by: str = "flag") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.decides, self.keeps, self.by = decides, keeps, by
        self.layers = nn.ModuleList(Layer() for _ in range(5)).double()
        self.items: list[Tensor] = []
        self.nested: dict[str, Any] = {"rows": [], "means": {"all": []}}
        self.default: dict[str, list[Tensor]] = defaultdict(list)
        self.lists: list[list[Tensor]] = [[], []]

    def keep(self, h: Tensor) -> None:
        if self.keeps == "list":
            self.items.append(h)
        elif self.keeps == "nested":
            self.nested["rows"].append(h)
            self.nested["means"]["all"].append(h.mean())
        elif self.keeps == "default":
            self.default["rows"].append(h)
        elif self.keeps == "lists":
            for one in self.lists:
                one.append(h)
        elif self.keeps == "length":
            self.items.append(h[: len(self.items)])

    def stand(self, *, chosen: bool) -> None:
        """Flags and numbers of layers."""
        if self.decides == "eval":
            self.layers[3].train(not chosen)
        elif self.decides == "frozen":
            self.layers[2].requires_grad_(not chosen)
        elif self.decides == "set":
            self.layers[2].linear.weight.requires_grad = not chosen
        elif self.decides == "scale":
            self.layers[2].scale = 0.5 if chosen else 1.0

    def second(self, h: Tensor, *, chosen: bool) -> Tensor:
        """The second layer, or another."""
        if self.decides == "no grad":
            with torch.set_grad_enabled(not chosen):
                return self.layers[1](h)
        if self.decides == "skip":
            return self.layers[1](h) if chosen else h
        if self.decides == "another":
            return self.layers[1 if chosen else 2](h)
        if self.decides == "detach" and chosen:
            h = h.detach()
        h = self.layers[1](h)
        return h * 0.5 if self.decides == "factor" and chosen else h

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        chosen = self.by in BY and BY[self.by](x)
        h = self.layers[0](x)
        if self.by == "hidden rows":
            chosen = len(h[x[:, 0] > 0]) > 3
        self.keep(h.detach())
        self.stand(chosen=chosen)
        h = self.second(h, chosen=chosen)
        for layer in self.layers[2:]:
            h = layer(h)
        loss = F.mse_loss(h, y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(3)
        x, y = (torch.randn(24, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
        return DataLoader(TensorDataset(x, y), batch_size=8)


def kept(module: Branches) -> list[Tensor]:
    nested = [*module.nested["rows"], *module.nested["means"]["all"], *module.lists[0], *module.lists[1]]
    return [*module.items, *nested, *module.default["rows"]]


def fit_branches(pipeline: dict[str, Any] | None, decides: str, keeps: str, *, by: str = "flag") -> Any:
    module, run = Branches(decides, keeps, by=by), trainer(pipeline, max_epochs=2)
    run.fit(module)
    logs = {name: float(value) for name, value in run.callback_metrics.items()}
    if run.global_rank == 0:  # the last stage
        flat = (torch.cat([one.new_tensor(one.shape), one.flatten()]) for one in kept(module))
        logs |= {f"kept {nth}": float(one @ torch.arange(len(one)).to(one)) for nth, one in enumerate(flat)}
    return weights(module), logs


@pytest.mark.parametrize("keeps", KEEPS)
@pytest.mark.parametrize("decides", DECIDES)
def test_branches_are_those_of_one_device(decides: str, keeps: str) -> None:
    pipeline = {"stages": 1, "num_microbatches": 2}
    assert_same(fit_branches(pipeline, decides, keeps), fit_branches(None, decides, keeps))


@pytest.mark.parametrize("decides", DECIDES)
def test_branches_by_a_number_that_is_read_are_those_of_one_device(decides: str) -> None:
    pipeline = {"stages": 1, "num_microbatches": 2}
    found, expected = (fit_branches(one, decides, "nothing", by="number") for one in (pipeline, None))
    assert_same(found, expected)


@pytest.mark.parametrize("decides", DECIDES)
@pytest.mark.parametrize("schedule", ["ZBH1", "1F1B"])
def test_branches_are_those_of_one_device_on_several_ranks(ranks: Ranks, schedule: str, decides: str) -> None:
    expected = fit_branches(None, decides, "nested")
    pipeline = {"stages": 2, "num_microbatches": 4, "schedule": schedule}
    last, first = ranks(2)(fit_branches, pipeline, decides, "nested")
    assert_same(last, expected)
    assert_same(first, (expected[0], {name: expected[1][name] for name in first[1]}))


@pytest.mark.parametrize("by", ["places", "rows", "picked later", "elements", "repeated", "hidden rows"])
@pytest.mark.parametrize("decides", ["detach", "frozen", "scale"])
def test_branches_by_how_many_a_mask_picks_are_those_of_one_device(decides: str, by: str) -> None:
    pipeline = {"stages": 1, "num_microbatches": 2}
    found, expected = (fit_branches(one, decides, "nested", by=by) for one in (pipeline, None))
    assert_same(found, expected)


@pytest.mark.parametrize("decides", [one for one in DECIDES if one not in ("detach", "factor")])
def test_branches_that_are_not_followed_are_warned_of(decides: str) -> None:
    with pytest.warns(UserWarning, match="decides by what is in the batch"):
        fit_branches({"stages": 1, "num_microbatches": 2}, decides, "length")


@pytest.mark.parametrize("by", ["array", "list"])
@pytest.mark.parametrize("decides", ["eval", "detach", "factor", "no grad"])
def test_branches_by_an_array_or_a_list_are_warned_of(decides: str, by: str) -> None:
    with pytest.warns(UserWarning, match="mixes samples of the batch"):
        fit_branches({"stages": 1, "num_microbatches": 2}, decides, "nothing", by=by)


@pytest.mark.parametrize(
    ("seed", "kind"),
    [
        (2005, "equal"), (2036, "equal"), (100, "equal"), (49, "warned"), (1055, "equal"), (2039, "equal"),
        (3002, "warned"), (97, "equal"),
    ],
)  # fmt: skip
def test_random_branches_that_were_wrong_or_ended_in_an_error(seed: int, kind: str) -> None:
    assert outcome_of(random_branches(seed), None).partition(":")[0] == kind


class FrozenAfterwards(Branches):
    """Freezes its first layer when all layers have been called: the backward and the next batch find it so."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x, y), h = batch, batch[0]
        for layer in self.layers:
            h = layer(h)
        loss = F.mse_loss(h, y)
        self.layers[0].requires_grad_(not BY[self.by](x))
        self.log("loss", loss)
        return loss


def fit_frozen(pipeline: dict[str, Any] | None, by: str) -> Any:
    module, frozen = FrozenAfterwards("frozen", "nothing", by=by), list[bool]()
    run = trainer(pipeline, max_epochs=2)
    ends = pl.callbacks.LambdaCallback(
        on_train_batch_end=lambda *_: frozen.append(module.layers[0].linear.weight.requires_grad)
    )
    run.callbacks.append(ends)
    run.fit(module)
    logs = {name: float(value) for name, value in run.callback_metrics.items()}
    return weights(module), logs | {f"frozen {nth}": float(one) for nth, one in enumerate(frozen)}


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("by", [*BY])
def test_what_is_frozen_after_its_last_call_is_that_of_one_device(ranks: Ranks, by: str, parts: int) -> None:
    expected = fit_frozen(None, by)
    pipeline = {"stages": 2, "num_microbatches": parts}
    for found in ranks(2)(fit_frozen, pipeline, by):
        assert_same(found, expected)


def test_what_an_array_of_the_batch_decides_is_foreseen_by_its_numbers() -> None:
    assert_same(fit_frozen({"stages": 1, "num_microbatches": 2}, "array"), fit_frozen(None, "array"))
