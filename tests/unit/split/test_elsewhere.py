"""Reading what another stage has says what it is and where to read it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_pipeline.model.state.elsewhere import Elsewhere, ElsewhereDict, ElsewhereError, ElsewhereList


@pytest.mark.parametrize(
    "read",
    [
        torch.stack,
        torch.cat,
        sum,
        len,
        list,
        bool,
        lambda o: o[0],
        lambda o: o + [],
        lambda o: [x for x in o],
    ],
)
def test_a_list_raises_when_read_and_names_itself(read: Callable[[Any], Any]) -> None:
    with pytest.raises(ElsewhereError, match=r"attribute 'outputs' is filled .* last stage"):
        read(ElsewhereList("attribute 'outputs'"))


def test_a_list_and_a_dictionary_take_writes() -> None:
    outputs = ElsewhereList("attribute 'outputs'")
    outputs.append(1)
    outputs.extend([1, 2])
    outputs.clear()
    ElsewhereDict("attribute 'seen'")["x"] = 1


@pytest.mark.parametrize(
    "read", [float, lambda v: v + 1, lambda v: v.mean(), torch.sum, lambda v: v > 0, bool]
)
def test_a_value_raises_on_any_use(read: Callable[[Any], Any]) -> None:
    with pytest.raises(ElsewhereError, match="attribute 'loss'"):
        read(Elsewhere("attribute 'loss'"))
