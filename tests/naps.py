"""A layer's time, known: it sleeps on the way forward and back."""

import time
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


class Nap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, forward_seconds: float, backward_seconds: float) -> Tensor:
        ctx.seconds = backward_seconds
        if not isinstance(tensor, FakeTensor):  # a trace is no run
            time.sleep(forward_seconds)
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        time.sleep(ctx.seconds)
        return gradient, None, None
