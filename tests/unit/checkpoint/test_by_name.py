"""Optimizers and schedulers do not depend on which rank held a parameter."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from lightning_pipeline.checkpoint.contents.groups import groups_of_file, whole_groups
from lightning_pipeline.checkpoint.contents.optimizers import (
    flat_state,
    from_numbered,
    groups_of,
    misplaced,
    names_by_identity,
    to_numbered,
)
from lightning_pipeline.checkpoint.contents.schedulers import schedulers_for

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
        merged = whole_groups([first, second], ORDER)
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


def part(*names: str, **options: float) -> list[dict[str, Any]]:
    return [{"names": list(names), "options": options}]


def test_a_group_of_several_stages_is_in_the_order_that_all_parts_are_in() -> None:
    for whole in (ORDER, ORDER[::-1], ["0.bias", "1.weight", "1.bias", "0.weight"]):
        parts = [part(*(n for n in whole if n[0] == layer)) for layer in "01"]
        if whole == ["0.bias", "1.weight", "1.bias", "0.weight"]:
            with pytest.raises(ValueError, match=r"in no order that fits all stages.*stages=1"):
                whole_groups(parts, ORDER)
        elif whole == ORDER:
            assert whole_groups(parts, ORDER)[0]["names"] == whole
        else:  # [bias, weight] on both: backwards, or by name
            with pytest.raises(ValueError, match=r"reverse order of the module or by name.*stages=1"):
                whole_groups(parts, ORDER)
            backwards = whole_groups(
                parts, ORDER, None, lambda groups, names=whole: groups[0]["names"] == names
            )
            assert backwards[0]["names"] == whole


def test_groups_that_every_stage_has_are_those_of_a_file_by_position() -> None:
    late_first = [part() + part("0.weight", "0.bias"), part("1.weight", "1.bias") + part()]
    found = whole_groups(late_first, ORDER, [2, 2])
    assert [group["names"] for group in found] == [ORDER[2:], ORDER[:2]]


def test_replicas_and_shared_parameters_count_once_in_the_order() -> None:
    first, last = part("0.weight", "0.bias"), part("1.weight", "1.bias", "0.weight")  # tied: its second place
    assert whole_groups([first, last, first, last], ORDER)[0]["names"] == ORDER
    layers = [[*part("0.weight", lr=1.0)], [*part("1.weight", lr=2.0), *part("0.weight", lr=1.0)]]
    assert [g["names"] for g in whole_groups(layers, ORDER)] == [["0.weight"], ["1.weight"]]


def file_of(named: list[tuple[str, torch.Tensor]], with_names: bool) -> dict[str, Any]:
    optimizer = torch.optim.Adam(named if with_names else [p for _, p in named])
    for name, parameter in named:
        optimizer.state[parameter] = {"exp_avg": torch.full_like(parameter, ORDER.index(name))}
    return optimizer.state_dict()


def test_a_files_shapes_and_names_tell_its_order() -> None:
    sizes = dict(zip(ORDER, [(2, 3), (2,), (4, 2), (4,)], strict=True))
    named = {name: torch.zeros(size) for name, size in sizes.items()}
    fits = partial(misplaced, torch.optim.Adam([torch.zeros(1)]), sizes)
    mixed = [ORDER[i] for i in (2, 0, 3, 1)]
    for given, ours in [(ORDER[::-1], ORDER[::-1]), (sorted(ORDER), ORDER[::-1]), (ORDER, ORDER)]:
        parts = [part(*(n for n in ours if n[0] == layer)) for layer in "01"]
        state = file_of([(name, named[name]) for name in given], with_names=False)
        found = from_numbered(state, groups_of_file(state, parts, ORDER, fits))
        assert {n: float(found[f"state.{n}.exp_avg"].max()) for n in ORDER} == dict(
            zip(ORDER, range(4), strict=True)
        )
    state = file_of([(name, named[name]) for name in mixed], with_names=True)
    found = from_numbered(state, groups_of_file(state, [part(*ORDER[:2]), part(*ORDER[2:])], ORDER, fits))
    assert float(found["state.1.bias.exp_avg"].max()) == 3
    del state["param_groups"][0]["param_names"]
    with pytest.raises(ValueError, match="no order that fits all stages by what these hold and by shape"):
        groups_of_file(state, [part(*ORDER[:2]), part(*ORDER[2:])], ORDER, fits)
    with pytest.raises(ValueError, match=r"parameter groups have \[4\] parameters, this run's have \[2\]"):
        groups_of_file(state, [part(*ORDER[:2])], ORDER, fits)
