"""What an operation on placeholders gives has the form of its real result, where it is remembered too."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_pipeline.model.tensors import PlaceholderMode
from lightning_pipeline.model.tensors.operations import is_placeholder, storage_key

WEIGHT = nn.Parameter(torch.randn(5, 6))
OPERATIONS: dict[str, Callable[[Tensor], Any]] = {
    "linear": lambda h: F.linear(h, WEIGHT),
    "product with a view of a weight": lambda h: h @ WEIGHT.t(),
    "sum with a number": lambda h: h + 1,
    "sum with a float": lambda h: h.long() + 1.0,
    "comparison": lambda h: h > 0,
    "mean": lambda h: h.mean(),
    "mean over rows": lambda h: h.mean(0, keepdim=True),
    "other type": lambda h: h.double(),
    "same type": lambda h: h.float(),
    "first row": lambda h: h[0],
    "column": lambda h: h[:, 2],
    "last rows": lambda h: h[2:],
    "transposed": lambda h: h.T,
    "other shape": lambda h: h.reshape(6, 4),
    "other shape of what is not contiguous": lambda h: h.T.reshape(4, 6),
    "view of a view": lambda h: h[1:].view(-1)[3:],
    "expanded": lambda h: h[:, :1].expand(4, 6),
    "contiguous": lambda h: h.T.contiguous(),
    "contiguous already": lambda h: h.contiguous(),
    "detached": lambda h: h.detach(),
    "joined": lambda h: torch.cat([h, h.double()]),
    "stacked": lambda h: torch.stack([h, h], 1),
    "norm": lambda h: F.layer_norm(h, (6,)),
    "convolution": lambda h: F.conv1d(h[:, None], WEIGHT[:2, None, :3]),
    "like it": torch.zeros_like,
    "in place": lambda h: h.clone().add_(1),
}


def form(tensor: Tensor, of: Tensor) -> Any:
    shared = storage_key(tensor) == storage_key(of)
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.requires_grad, shared


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_form_is_that_of_the_real_result_twice(name: str, gradients: bool) -> None:
    mode, real = PlaceholderMode(), torch.randn(4, 6, requires_grad=gradients) * 1
    with torch.set_grad_enabled(gradients):
        expected = form(OPERATIONS[name](real), real)
        for _ in range(3):
            placeholder = mode.like(real)
            result = OPERATIONS[name](placeholder)
            assert is_placeholder(result)
            assert form(result, placeholder) == expected


def test_shapes_that_do_not_fit_are_raised_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A run ahead of the micro-batches may end so, on shapes of a trace: with an error of torch's on the screen."""
    mode, torchs = PlaceholderMode(), logging.getLogger("torch._subclasses.fake_tensor")
    torchs.addHandler(caplog.handler)
    try:
        with pytest.raises(RuntimeError, match="reduction dim"):
            mode.like(torch.ones(3, 4)) @ mode.like(torch.ones(3, 4))
    finally:
        torchs.removeHandler(caplog.handler)
    assert not caplog.records
