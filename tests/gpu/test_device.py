"""The GPU that the other tests here rely on."""

import torch


def test_a_cuda_device_adds() -> None:
    one = torch.ones(3, device="cuda")
    assert (one + one).sum().item() == 6
