"""What runs of a step to find something out leave: nothing, not even in what a graph says of a tensor it keeps."""

import pytest
import torch
from torch import nn

from lightning_pipeline.model.tensors import ModuleState, WritesSeen, WritesUndone
from tests.ranks.lightning_cases import FEATURES, TARGETS, Regression, assert_same, fit

pytestmark = pytest.mark.usefixtures("no_group_is_left")

WAYS = {
    "Interleaved1F1B": {"stages": 1, "stages_per_rank": 2, "schedule": "Interleaved1F1B"},
    "1F1B": {"stages": 1, "schedule": "1F1B"},
}


class WeighsTargets(Regression):
    """Weights in a buffer, which the loss's graph keeps, and a matching that reads numbers, as detectors have."""

    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.tensor([0.1, 1.0, 2.0], dtype=torch.float64))

    def loss(self, batch):
        made = self.net(batch[0])
        for sample in range(len(made)):
            if int(made[sample].argmax()) == 1:
                made = made * 1.0
        return (self.weight * (made - batch[1]) ** 2).mean()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("microbatches", [1, 2, 3])
def test_a_buffer_in_a_graph_is_as_it_was_kept(way, microbatches):
    found = fit({**WAYS[way], "num_microbatches": microbatches}, WeighsTargets)
    assert_same(found, fit(None, WeighsTargets))


def kept_by_a_graph(buffer):
    at = torch.ones(TARGETS, dtype=torch.float64, requires_grad=True)
    return at, (at * buffer).sum()


def test_a_module_is_put_back_for_the_graphs_that_keep_its_buffers():
    module = nn.BatchNorm1d(TARGETS).double()
    at, loss = kept_by_a_graph(module.running_var)
    state = ModuleState(module)
    module.running_var.mul_(2)
    state.restore()
    loss.backward()
    torch.testing.assert_close(at.grad, torch.ones(TARGETS, dtype=torch.float64))


@pytest.mark.parametrize("make", [lambda buffer: WritesUndone(), lambda buffer: WritesSeen([buffer])])
def test_written_memory_is_put_back_for_the_graphs_that_keep_it(make):
    buffer = torch.ones(TARGETS, dtype=torch.float64)
    at, loss = kept_by_a_graph(buffer)
    undone = make(buffer)
    with undone:
        buffer.mul_(FEATURES)
    undone.restore()
    loss.backward()
    torch.testing.assert_close(at.grad, torch.ones(TARGETS, dtype=torch.float64))
