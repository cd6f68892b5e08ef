"""State goes into an optimizer as torch's own load_state_dict would put it there."""

import pytest
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


@pytest.mark.parametrize("flags", [{}, {"fused": True}, {"capturable": True}], ids=str)
def test_state_goes_where_torch_would_put_it(flags: dict[str, bool]) -> None:
    parameter = nn.Parameter(
        torch.empty(2, device="meta", dtype=torch.float16)
    )  # a device that is not the CPU
    names = {id(parameter): "w"}
    plain, ours = (torch.optim.Adam([parameter]) for _ in range(2))
    for optimizer in (plain, ours):
        optimizer.param_groups[0].update(flags)
    step, average = torch.tensor(3.0, dtype=torch.float64), torch.ones(2)
    state = plain.state_dict()
    state["state"] = {0: {"step": step, "exp_avg": average}}
    plain.load_state_dict(state)
    flat = {f"param_groups.w.{k}": v for k, v in state["param_groups"][0].items() if k != "params"}
    fill(ours, names, {**flat, "state.w.step": step, "state.w.exp_avg": average})
    for key, value in plain.state[parameter].items():
        found = ours.state[parameter][key]
        assert (found.device, found.dtype) == (value.device, value.dtype), key
