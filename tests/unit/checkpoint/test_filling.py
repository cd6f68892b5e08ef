"""State goes into an optimizer as torch's own load_state_dict would put it there."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipeline.checkpoint.contents.optimizers import fill, flat_state, names_by_identity, to_numbered
from lightning_pipeline.checkpoint.save import write
from lightning_pipeline.errors import CheckpointError, CheckpointWriteError
from tests.checkpoint_parts import alone, load, part_of, same, stage, values


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


def nested_state(parameter: Tensor) -> dict[Any, Any]:
    return {"GG": [parameter.detach().clone(), None], "Q": {0: {"a.b": (torch.ones(2), 3)}}, "plain": [1, (2.0, "x")],
            "empty": {}}  # fmt: skip


def test_state_and_options_in_containers_come_back(tmp_path: Path) -> None:
    tensors, optimizer, names = stage(1)
    for parameter in tensors.values():
        optimizer.state[parameter].update(nested_state(parameter))
    optimizer.param_groups[0]["extra"] = {"k": 1, 2: [torch.ones(1)]}
    part = part_of(1)
    part.state["optimizer_0"] = flat_state(optimizer, names)
    staged = part.staged()
    kept = tensors["layer0.bias"].detach().clone()
    for parameter in tensors.values():
        optimizer.state[parameter]["GG"][0].zero_()  # training goes on
        optimizer.state[parameter]["plain"].clear()
    write(staged, tmp_path / "a.ckpt", alone(), "sha256")
    filled_tensors, filled, go = load(tmp_path / "a.ckpt", into=2)
    go()
    found = list(filled.state.values())[1]
    assert torch.equal(found["GG"][0], kept) and found["GG"][1] is None
    assert torch.equal(found["Q"][0]["a.b"][0], torch.ones(2)) and found["Q"][0]["a.b"][1] == 3
    assert found["plain"] == [1, (2.0, "x")] and found["empty"] == {} and float(found["step"]) == 1
    assert filled.param_groups[0]["extra"] == {"k": 1, 2: [torch.ones(1)]}
    flat = flat_state(filled, names_by_identity(filled_tensors.items()))
    numbered = to_numbered(flat, [{"names": list(tensors), "options": {}}])["state"][1]
    assert torch.equal(numbered["GG"][0], kept) and numbered["Q"][0]["a.b"][1] == 3


def test_state_that_no_checkpoint_can_hold_is_refused() -> None:
    tensors, optimizer, names = stage(1)
    optimizer.state[tensors["layer0.bias"]]["Q"] = {"kind": object()}
    with pytest.raises(
        CheckpointWriteError, match=r"Adam keeps a object in a container in its state of layer0\.bias"
    ):
        flat_state(optimizer, names)
    _, optimizer, names = stage(1)
    optimizer.state["k"] = {"steps": 3}  # type: ignore[index]
    with pytest.raises(CheckpointWriteError, match="Adam keeps state of no parameter, 'k'"):
        flat_state(optimizer, names)


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
