"""Optimizers and schedulers do not depend on which rank held a parameter."""

import torch
from torch import nn

from lightning_pipeline.checkpoint.optimizers import (
    flat_state,
    from_numbered,
    groups_of,
    merged_groups,
    names_by_identity,
    to_numbered,
)
from lightning_pipeline.checkpoint.schedulers import schedulers_for

ORDER = ["0.weight", "0.bias", "1.weight", "1.bias"]


def adam(per_layer: bool) -> tuple[torch.optim.Optimizer, dict[int, str]]:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    named = list(module.named_parameters())
    if per_layer:
        groups = [{"params": [p], "lr": 0.1 * (i + 1)} for i, (_, p) in enumerate(named)]
    else:
        groups = [
            {"params": [p for n, p in named if n.endswith(end)], "lr": 0.1} for end in ("weight", "bias")
        ]
    optimizer = torch.optim.Adam(groups)
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return optimizer, names_by_identity(named)


def test_numbers_and_names_are_two_forms_of_one_state() -> None:
    for per_layer in (False, True):
        optimizer, names = adam(per_layer)
        groups = groups_of(optimizer, names)
        first, second = (
            [{**group, "names": [n for n in group["names"] if n[0] == layer]} for group in groups]
            for layer in "01"
        )
        if per_layer:  # a stage makes groups for its own layers only
            first, second = ([group for group in part if group["names"]] for part in (first, second))
        merged = merged_groups([first, second], ORDER)
        assert [group["names"] for group in merged] == [group["names"] for group in groups]
        numbered = to_numbered(flat_state(optimizer, names), merged)
        expected = optimizer.state_dict()
        assert [g["params"] for g in numbered["param_groups"]] == [
            g["params"] for g in expected["param_groups"]
        ]
        assert [g["lr"] for g in numbered["param_groups"]] == [g["lr"] for g in expected["param_groups"]]
        for number, state in expected["state"].items():
            assert all(torch.equal(numbered["state"][number][key], value) for key, value in state.items())
        flat = flat_state(optimizer, names)
        again = from_numbered(expected, merged)
        assert again.keys() == flat.keys()


def test_a_scheduler_with_groups_per_layer_finds_its_entries_by_name() -> None:
    stored = [
        {"lr_schedulers": [{"base_lrs": [1.0, 2.0], "last_epoch": 3}],
         "groups": [[{"names": ["a"]}, {"names": ["b"]}]]},
        {"lr_schedulers": [{"base_lrs": [3.0], "last_epoch": 3}], "groups": [[{"names": ["c"]}]]},
    ]  # fmt: skip
    found = schedulers_for(stored, [[{"names": ["a"]}, {"names": ["b"]}, {"names": ["c"]}]], [0])
    assert found == [{"base_lrs": [1.0, 2.0, 3.0], "last_epoch": 3}]
    found = schedulers_for(stored, [[{"names": ["b"]}, {"names": ["c"]}]], [0])
    assert found == [{"base_lrs": [2.0, 3.0], "last_epoch": 3}]
