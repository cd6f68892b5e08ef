"""What `units=` is advised in a refusal was tried, and works."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_pipeline.errors import PartitionError, SplitError
from lightning_pipeline.model.cut import Trials, opened, partition
from lightning_pipeline.model.trace import find_units, trace_step
from tests.unit.split.nets import WIDTH, Block, batch_of, seeded
from tests.unit.split.pipe import Module


class Chooser(nn.Module):
    """Two experts, of which one is called."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.by = by
        self.experts = nn.ModuleList(Block() for _ in range(2))

    def forward(self, h):
        if self.by == "vmap":
            return torch.func.vmap(self.experts[0])(h) + self.experts[1](h)
        if self.by == "circle":
            return self.experts[1](self.experts[0](h))
        return self.experts[int(h.sum() > 0)](h)


class Chosen(Module):
    """Two choosers, or a layer that is called again behind them."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.by = by
        self.emb = nn.Linear(WIDTH, WIDTH)
        self.one, self.other = Chooser(by), Chooser(by)
        self.head = nn.Linear(WIDTH, 2)

    def training_step(self, batch, batch_idx):
        h = self.other(self.one(self.emb(batch["x"])))
        if self.by == "circle":
            h = self.emb(h)
        return F.mse_loss(self.head(h), batch["y"])


def traced(module, units):
    return trace_step(module, "training_step", (batch_of(), 0), units=units)


def trials_of(module, stages, given=None):
    return Trials(module, stages, given, lambda units: traced(module, units))


@pytest.mark.parametrize("by", ["values", "vmap"])
@pytest.mark.parametrize("stages", [2, 3])
def test_a_module_is_named_that_can_be_kept_whole(by, stages):
    module = seeded(lambda: Chosen(by))
    units = find_units(module, at_least=stages)
    if by == "vmap":
        with pytest.raises(SplitError, match=r"torch\.func"):
            traced(module, units)
    else:
        assert traced(module, units).divided_at
    assert trials_of(module, stages).whole(units) == ("one", "other")
    assert trials_of(module, stages, ("emb",)).whole(units) == ("emb", "one", "other")
    cut = find_units(module, at_least=stages, keep_whole=["one", "other"])
    assert not traced(module, cut).divided_at


def test_nothing_is_named_where_the_stages_would_be_too_many():
    module = seeded(lambda: Chosen("values"))
    assert trials_of(module, 5).whole(find_units(module, at_least=5)) == ()


def test_finer_units_are_advised_only_where_they_are_enough():
    module = seeded(lambda: Chosen("circle"))
    trials = trials_of(module, 3)
    trace = opened(find_units(module, at_least=3), 3, lambda units: traced(module, units))
    with pytest.raises(PartitionError, match=r"at most 2 .* or split finer with units=\['one"):
        partition(trace, 3)
    with pytest.raises(
        PartitionError, match=r"has 2 units to share out.*stages_per_rank; or whole_steps=True"
    ):
        partition(trace, 3, tried=trials.finer)
