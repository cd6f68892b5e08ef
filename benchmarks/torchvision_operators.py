"""Names of operators that torchvision wants to see at its import, where its binary does not fit this torch.

A wheel for CUDA beside a torch without it: the Python parts are enough for most models.
"""

import torch


def _declare() -> torch.library.Library:
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


try:
    import torchvision  # noqa: F401
except ImportError:
    DECLARED = None
except RuntimeError:
    DECLARED = _declare()  # kept: what a library declares is gone with it
