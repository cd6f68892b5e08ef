"""A layer's time, known: it sleeps on the way forward and back."""

import time
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def sleep(seconds: float) -> None:
    """Sleep; a test that keeps its own time puts another function here."""
    time.sleep(seconds)


class Nap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, forward_seconds: float, backward_seconds: float) -> Tensor:
        ctx.seconds = backward_seconds
        if not isinstance(tensor, FakeTensor):  # a trace is no run
            sleep(forward_seconds)
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        sleep(ctx.seconds)
        return gradient, None, None
