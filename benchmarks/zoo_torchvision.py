"""Every model builder of torchvision: classification, segmentation, detection, video, optical flow.

The models are as their builders give them, with three classes and small pictures. Above 100 million
parameters one of each family is compared by its numbers; the others are traced without weights and cut.
"""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import torchvision_operators
from benchmarks.zoo_cases import CASES, Case, case, classified, images

WITHOUT_WEIGHTS = frozenset(
    f"torchvision/{name}"
    for name in (
        "regnet_y_32gf", "regnet_y_128gf", "vgg11_bn", "vgg13", "vgg13_bn", "vgg16", "vgg16_bn", "vgg19",
        "vgg19_bn", "vit_l_16", "vit_h_14",
    )
)  # fmt: skip
_SIDES = {"inception_v3": 299, "quantized_inception_v3": 299, "maxvit_t": 224, "vit_h_14": 56}


def _build(name: str, **options: Any) -> nn.Module:
    from torchvision.models import get_model

    model: nn.Module = get_model(name, num_classes=3, weights=None, **options)
    return model


# ---- one of each kind


def _classifier(name: str) -> Case:
    options: dict[str, Any] = {}
    side = _SIDES.get(name, 64)
    if "googlenet" in name or "inception" in name:
        options["init_weights"] = False  # which takes minutes
    if name.startswith("vit"):
        options["image_size"] = side
    return _build(name, **options), _by_every_head, images(side, rows=2 if side > 96 else 4)


def _by_every_head(model: nn.Module, batch: Any) -> Tensor:
    """The cross-entropy of what a classifier gives, and of its auxiliary heads where it has some."""
    pictures, labels = batch
    found = model(pictures)
    heads = [found] if isinstance(found, Tensor) else [head for head in found if head is not None]
    return torch.stack([F.cross_entropy(head, labels) for head in heads]).sum()


def _segmenter(name: str) -> Case:
    model = _build(name, weights_backbone=None)
    return model, lambda m, b: m(b[0])["out"].pow(2).mean(), images(rows=2)


def _of_video(name: str) -> Case:
    frames, side = (16, 224) if name == "s3d" else (8, 64) if name.startswith(("mvit", "swin")) else (8, 32)
    batch = (2, 3, frames, side, side)
    with patch("torchvision.models.video.mvit.MViT", _small_mvit):  # its builders know one size
        return _build(name), classified, lambda: (torch.randn(batch), torch.tensor([0, 2]))


def _small_mvit(**options: Any) -> nn.Module:
    from torchvision.models.video import MViT

    return MViT(**options | {"spatial_size": (64, 64), "temporal_size": 8})


def _detector(name: str) -> Case:
    if name.startswith("ssd"):
        few: dict[str, Any] = {}
    else:
        few = {"score_thresh": 0.0, "detections_per_img": 8, "topk_candidates": 20}
        if "rcnn" in name:
            few = {"rpn_pre_nms_top_n_train": 20, "box_batch_size_per_image": 4}
        few |= {"min_size": 64, "max_size": 64}

    def loss(model: nn.Module, batch: Any) -> Tensor:
        pictures, *each = batch
        names = ("boxes", "labels", "masks" if name.startswith("mask") else "keypoints")
        targets = [dict(zip(names, found, strict=False)) for found in zip(*each, strict=True)]
        return torch.stack(list(model(list(pictures), targets).values())).sum()

    rows = 1 if name == "ssd300_vgg16" else 2  # which makes every picture 300 pixels wide

    def batch() -> Any:
        boxes = torch.tensor([[4.0, 4.0, 40.0, 44.0], [10.0, 20.0, 60.0, 60.0]]).expand(rows, 2, 4)
        given = [torch.rand(rows, 3, 64, 64), boxes.clone(), torch.tensor([[1, 2], [2, 1]])[:rows]]
        if name.startswith("mask"):
            given.append((torch.rand(rows, 2, 64, 64) > 0.5).to(torch.uint8))
        if name.startswith("keypoint"):
            given[-1] = torch.ones(rows, 2, dtype=torch.long)
            given.append(torch.cat([torch.rand(rows, 2, 17, 2) * 30 + 10, torch.ones(rows, 2, 17, 1)], -1))
        return tuple(given)

    return _build(name, weights_backbone=None, **few), loss, batch


def _of_flow(name: str) -> Case:
    from torchvision.models import get_model

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return torch.stack([flow.pow(2).mean() for flow in model(*batch, num_flow_updates=2)]).sum()

    size = (1, 3, 128, 128)
    return get_model(name, weights=None), loss, lambda: (torch.randn(size), torch.randn(size))


_KINDS: dict[str, Callable[[str], Case]] = {
    "segmentation": _segmenter,
    "detection": _detector,
    "video": _of_video,
    "optical_flow": _of_flow,
}


# ---- all of them


def _builder(name: str) -> Callable[[], Case]:
    def build() -> Case:
        from torchvision.models import get_model_builder

        package = get_model_builder(name).__module__.removeprefix("torchvision.models.").partition(".")[0]
        return _KINDS.get(package, _classifier)(name)

    return build


@case("torchvision/vit")
def _vit() -> Case:
    from torchvision.models import VisionTransformer

    return VisionTransformer(32, 8, 3, 4, 32, 64, num_classes=3), classified, images(32)


if torchvision_operators.installed():
    from torchvision.models import list_models

    for _name in list_models():
        CASES[f"torchvision/{_name}"] = _builder(_name)
