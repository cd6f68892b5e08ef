"""State goes into an optimizer as torch's own load_state_dict would put it there."""

import torch
from torch import nn

from lightning_pipeline.checkpoint.optimizers import fill, flat_state, names_by_identity


def stepped() -> tuple[nn.Linear, torch.optim.Optimizer, dict[int, str]]:
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return layer, optimizer, names_by_identity(layer.named_parameters())


def test_state_that_is_not_stored_is_cleared() -> None:
    layer, optimizer, names = stepped()
    fresh = torch.optim.Adam(layer.parameters())
    fill(optimizer, names, flat_state(fresh, names))
    assert not optimizer.state
