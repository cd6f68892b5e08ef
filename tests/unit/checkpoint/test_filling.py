"""State goes into an optimizer as torch's own load_state_dict would put it there."""

from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_pipeline.checkpoint.optimizers import fill, flat_state, names_by_identity
from lightning_pipeline.checkpoint.save import write
from lightning_pipeline.errors import CheckpointError
from tests.checkpoint_parts import alone, load, part_of, same, values


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


def test_misfits_of_state_are_listed_with_the_others(tmp_path: Path) -> None:
    part = part_of(1)
    part.state["optimizer_0"].update({
        "state.layer0.weight.exp_avg": torch.zeros(3),
        "state.layer0.bias.exp_avg_sq": torch.zeros(8, dtype=torch.float64),
    })  # fmt: skip
    part.state["model"]["layer0.bias"] = torch.zeros(4)
    write(part, tmp_path / "a.ckpt", alone(), "sha256")
    tensors, optimizer, go = load(tmp_path / "a.ckpt", into=2)
    before = values(tensors, optimizer)
    with pytest.raises(CheckpointError) as caught:
        go()
    for told in (
        r"wrong shape: layer0.bias ((4,) stored, (8,) here), "
        "optimizer_0.state.layer0.weight.exp_avg ((3,) stored, (8, 8) here)",
        "wrong dtype: optimizer_0.state.layer0.bias.exp_avg_sq (torch.float64 stored, torch.float32 here)",
    ):
        assert told in str(caught.value)
    assert same(values(tensors, optimizer), before)
