"""A save compares what the ranks write with what they hold."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_pipeline.checkpoint.contents import (
    flat_state,
    groups_of,
    names_by_identity,
    to_numbered,
)
from lightning_pipeline.checkpoint.contents.lost import kept_by_optimizers, refuse_losses
from lightning_pipeline.checkpoint.run import Checkpoints, Holdings, Options
from lightning_pipeline.errors import CheckpointError, CheckpointWriteError
from lightning_pipeline.ranks import Numbering


def stepped() -> tuple[nn.Module, torch.optim.Optimizer]:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return module, optimizer


def told(
    module: nn.Module, optimizer: torch.optim.Optimizer, written: str, owned: str = ""
) -> dict[str, Any]:
    names = names_by_identity(module.named_parameters())
    own = {identity: name for identity, name in names.items() if name.startswith(written)}
    states = [name for name in names.values() if name.startswith(owned)]
    kept = kept_by_optimizers([flat_state(optimizer, own)])
    return {"owned": states, "given": [], "groups": [groups_of(optimizer, names)], "kept": kept}


def test_what_one_of_the_ranks_writes_is_not_lost() -> None:
    module, optimizer = stepped()
    order = [name for name, _ in module.named_parameters()]
    refuse_losses([told(module, optimizer, "0."), told(module, optimizer, "1.")], order)


def test_state_and_parameters_that_nobody_writes_are_named() -> None:
    module, optimizer = stepped()
    order = [name for name, _ in module.named_parameters()]
    with pytest.raises(CheckpointWriteError, match=r"state of optimizer 0: 1\.bias, 1\.weight\. Nothing"):
        refuse_losses([told(module, optimizer, "0.")], order)
    with pytest.raises(CheckpointWriteError, match=r"parameters: 0\.weight, 0\.bias\. Nothing"):
        refuse_losses([told(module, optimizer, "", owned="1.")], order)


def test_an_optimizer_that_the_users_hook_takes_out_is_not_missed() -> None:
    module, optimizer = stepped()
    refuse_losses([told(module, optimizer, "nothing")], [])


def test_state_that_is_in_no_group_is_not_left_out_of_one_file() -> None:
    module, optimizer = stepped()
    names = names_by_identity(module.named_parameters())
    groups = [{"names": ["0.weight", "0.bias", "1.weight"], "options": {}}]
    with pytest.raises(CheckpointError, match=r"state of 1\.bias, which none of its parameter groups lists"):
        to_numbered(flat_state(optimizer, names), groups)


def holdings(module: nn.Module, optimizer: torch.optim.Optimizer) -> Holdings:
    tensors = dict(module.named_parameters())
    return Holdings(
        tensors=tensors, optimizers=[optimizer], names=names_by_identity(tensors.items()), schedulers=[0],
        order=list(tensors), parameters=set(tensors), owned=set(tensors), extra=set(),
        load_extra=lambda values: None, position=lambda: None, topology={},
    )  # fmt: skip


def checkpoints(one_file: bool = False) -> Checkpoints:
    return Checkpoints(Options("off", False, False, timedelta(seconds=5), one_file), Numbering(1, 1), None)


@pytest.mark.parametrize("one_file", [False, True])
def test_a_save_that_would_lose_state_writes_nothing(tmp_path: Path, one_file: bool) -> None:
    module, optimizer = stepped()
    held = holdings(module, optimizer)
    written = {identity: name for identity, name in held.names.items() if name != "1.bias"}
    states = [flat_state(optimizer, written)]
    dumped = {"state_dict": held.tensors, "optimizer_states": states, "lr_schedulers": []}
    with pytest.raises(CheckpointWriteError, match=r"state of optimizer 0: 1\.bias"):
        checkpoints(one_file).save(tmp_path / "a.ckpt", dumped, held)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("edits", "rates", "epoch"),
    [
        ({}, [0.5, 0.5], 3),
        ({"last_epoch": 0}, [0.5, 0.5], 0),
        ({"base_lrs": [0.25, 0.125]}, [0.25, 0.125], 3),
    ],
)
def test_what_the_user_edits_of_schedulers_stays_where_a_hook_adds_a_group(
    tmp_path: Path, edits: dict[str, Any], rates: list[float], epoch: int
) -> None:
    module, optimizer = stepped()
    held = holdings(module, optimizer)
    states, saved = [flat_state(optimizer, held.names)], [{"base_lrs": [0.5], "last_epoch": 3}]
    dumped = {"state_dict": held.tensors, "optimizer_states": states, "lr_schedulers": saved}
    checkpoints().save(tmp_path / "a.ckpt", dumped, held)

    later = torch.optim.Adam(module[0].parameters())
    loading = checkpoints()
    restored, _ = loading.load(
        tmp_path / "a.ckpt", holdings(module, later), strict=True, training=True, edited=True
    )
    restored["lr_schedulers"][0].update(edits)  # in on_load_checkpoint
    loading.apply(restored["state_dict"], holdings(module, later))
    restored["optimizer_states"] = [{}]
    later.add_param_group({"params": list(module[1].parameters())})  # in on_fit_start
    loading.apply_optimizers(restored, holdings(module, later))
    assert restored["lr_schedulers"] == [{"base_lrs": rates, "last_epoch": epoch}]


@pytest.mark.parametrize("one_file", [False, True])
def test_another_modules_weights_and_optimizers_are_refused_in_one_error(
    tmp_path: Path, one_file: bool
) -> None:
    module, optimizer = stepped()
    held = holdings(module, optimizer)
    states = [flat_state(optimizer, held.names)]
    checkpoints(one_file).save(
        tmp_path / "a.ckpt",
        {"state_dict": held.tensors, "optimizer_states": states, "lr_schedulers": []},
        held,
    )
    other = nn.Sequential(*module, nn.Linear(2, 2))
    with pytest.raises(CheckpointError) as told:
        checkpoints().load(
            tmp_path / "a.ckpt",
            holdings(other, torch.optim.Adam(other.parameters())),
            strict=True,
            training=True,
        )
    assert "missing: 2.bias, 2.weight" in str(told.value)
    wrong = "its parameter groups have [4] parameters, this run's have [6]"
    assert (wrong if one_file else "missing in the optimizers: optimizer_0.2.bias") in str(told.value)
