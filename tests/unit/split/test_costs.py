"""What the trace says that layers cost and stages hold."""

import torch
from torch import Tensor, nn

from lightning_pipeline.model.cut.partitioning import partition
from lightning_pipeline.model.trace import trace_step
from lightning_pipeline.model.trace.units import find_units
from tests.unit.split.pipe import Module


class Recurrent(Module):
    """A parameter of the root's own, and a fused LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(8))
        self.embed = nn.Linear(8, 8)
        self.lstm = nn.LSTM(8, 16, batch_first=True)
        self.head = nn.Linear(16, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.head(self.lstm(self.embed(batch) + self.offset)[0]).mean()


def test_a_fused_lstm_costs_two_operations_for_each_weight_and_time_step() -> None:
    module = Recurrent()
    trace = trace_step(module, "training_step", (torch.randn(4, 5, 8), 0), {}, units=find_units(module))
    flops = {trace.units[call.unit].name: call.flops for call in trace.calls}
    assert flops["lstm"] == 2 * (4 * 5) * (64 * 8 + 64 * 16)


def test_the_table_of_stages_counts_parameters_outside_units_too() -> None:
    module = Recurrent()
    trace = trace_step(module, "training_step", (torch.randn(4, 5, 8), 0), {}, units=find_units(module))
    cut = partition(trace, 2, how=["lstm"])
    rest = sum(p.numel() for part in (module.lstm, module.head) for p in part.parameters())
    assert [row.num_parameters for row in cut.table().rows] == [8 * 8 + 8, 8 + rest]
