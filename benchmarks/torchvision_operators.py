"""Operators of torchvision in Python, where its binary does not fit this torch.

A wheel for CUDA beside a torch without it: the Python parts are enough for most models; detectors also need
the suppression of overlapping boxes and the pooling of regions, of which torchvision has a version in Python.
"""

import sys

import torch
from torch import Tensor


def _declare() -> torch.library.Library:
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def _nms(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Indices of the boxes that no better one overlaps too much, the best first."""
    from torchvision.ops import box_iou

    order = scores.argsort(descending=True, stable=True)
    overlaps = box_iou(boxes[order], boxes[order]) > iou_threshold
    kept = torch.ones_like(order, dtype=torch.bool)
    for index in range(len(order)):
        if kept[index]:
            kept[index + 1 :] &= ~overlaps[index, index + 1 :]
    return order[kept]


def _give() -> None:
    """Let torchvision find its operators."""
    DECLARED.impl("nms", _nms, "CPU")
    torchvision.extension._has_ops = lambda: True
    pooling = sys.modules["torchvision.ops.roi_align"]  # of that name `torchvision.ops` has a function
    pooling._roi_align = pooling._roi_align.__wrapped__  # as it is written, and not compiled


try:
    import torchvision
except ImportError:
    DECLARED = None
except RuntimeError:
    DECLARED = _declare()  # kept: what a library declares is gone with it
    import torchvision

    _give()


def installed() -> bool:
    """Whether there is a torchvision."""
    return "torchvision" in sys.modules
