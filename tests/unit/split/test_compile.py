"""Compiled units compute, on their stage, what they compute uncompiled on one device."""

import pytest
import torch
import torch._dynamo.backends.debugging
import torch.nn.functional as F
from torch import nn

from tests.unit.split.nets import WIDTH, Block, batch_of, seeded
from tests.unit.split.pipe import Module, alone, assert_same, piped

ran: list[None] = []


def noted(graph, inputs):
    """As aot_eager, which traces and differentiates as inductor does; notes each run of the forward."""
    compiled = torch._dynamo.backends.debugging.aot_eager(graph, inputs)

    def run(*args):
        ran.append(None)
        return compiled(*args)

    return run


class Compiled(Module):
    """Four layers; which of them, or what in them, is compiled is chosen by name."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.emb = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 2)
        if how == "modules":
            self.layers = nn.ModuleList(torch.compile(layer, backend=noted) for layer in self.layers)
        elif how == "in place":
            for layer in self.layers:
                layer.compile(backend=noted)

    def __deepcopy__(self, memo):
        """A module that is copied is compiled no more."""
        copied = seeded(lambda: Compiled(self.how))
        copied.load_state_dict(self.state_dict())
        return copied

    def training_step(self, batch, batch_idx):
        h = self.emb(batch["x"])
        for layer in self.layers:
            h = layer(h)
        loss = F.mse_loss(self.head(h), batch["y"])
        self.log("loss", loss)
        return loss


@pytest.mark.parametrize("how", ["modules", "in place"])
def test_compiled_units_equal_uncompiled_ones(how):
    torch._dynamo.reset()
    module, plain = seeded(lambda: Compiled(how)), seeded(lambda: Compiled(""))
    ran.clear()
    mine = piped(module, batch_of())
    assert len(ran) >= 4 * 2, "four layers, two micro-batches"
    theirs = alone(plain, batch_of())
    mine.gradients = {name.replace("_orig_mod.", ""): value for name, value in mine.gradients.items()}
    assert_same(mine, theirs)
