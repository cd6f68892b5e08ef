"""The bytes of `meta.pt`: what a checkpoint holds beside tensors."""

import io
from collections.abc import Mapping
from typing import Any

import torch


def as_bytes(meta: Mapping[str, Any]) -> bytes:
    """What `meta.pt` will hold."""
    buffer = io.BytesIO()
    torch.save(dict(meta), buffer)
    return buffer.getvalue()
