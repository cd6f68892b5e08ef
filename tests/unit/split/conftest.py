"""Fixtures of the tests of the split."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def float64() -> Iterator[None]:
    """Tensors are made in double precision, so that results can be compared closely."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def no_group_is_left() -> Iterator[None]:
    """Fits in this process join one, which other tests in it are not to find."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
