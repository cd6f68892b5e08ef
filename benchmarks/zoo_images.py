"""Models of libraries for pictures, tiny: timm, torchvision, lightly and others."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo_cases import CASES, Case, case, classified, images

# ---- timm: one of a family


SIDES = {
    "tiny_vit_5m_224": 224,
    "gcvit_xxtiny": 224,
    "crossvit_9_240": 240,
    "halonet26t": 256,
}  # which take no other, in pixels
TIMM = {
    "vit_tiny_patch16_224": {"depth": 4, "img_size": 64},
    "deit_tiny_patch16_224": {"depth": 4, "img_size": 64},
    "resnet18": {},
    "resnetv2_18": {},
    "convnext_atto": {},
    "mobilenetv3_small_050": {},
    "efficientnet_lite0": {},
    "mixer_s32_224": {"img_size": 64},
    "swin_tiny_patch4_window7_224": {
        "depths": (1, 1, 1, 1),
        "img_size": 64,
        "window_size": 4,
        "embed_dim": 24,
        "num_heads": (1, 2, 4, 8),
    },
    "pvt_v2_b0": {},
    "poolformer_s12": {},
    "regnetx_002": {},
    "dla46_c": {},
    "hrnet_w18_small": {},
    "ghostnet_050": {"drop_rate": 0.0},
    "densenet121": {},
    "levit_128s": {"img_size": 64},
    "beit_base_patch16_224": {
        "depth": 3,
        "embed_dim": 48,
        "num_heads": 4,
        "img_size": 64,
    },
    "cait_xxs24_224": {"depth": 3, "img_size": 64},
    "fastvit_t8": {},
    "mobilevit_xxs": {},
    "repvgg_a0": {},
    "xcit_nano_12_p16_224": {"depth": 3, "img_size": 64},
    "eva02_tiny_patch14_224": {"depth": 3, "img_size": 56},
    "edgenext_xx_small": {},
    "efficientvit_b0": {},
    "efficientvit_m0": {"img_size": 64},
    "fasternet_t0": {},
    "hardcorenas_a": {},
    "hgnetv2_b0": {},
    "inception_next_atto": {},
    "lcnet_035": {},
    "mambaout_femto": {},
    "caformer_s18": {},
    "gmlp_ti16_224": {"img_size": 64},
    "resmlp_12_224": {"img_size": 64},
    "mobilenetv4_conv_small_035": {},
    "mobilevitv2_050": {},
    "nf_regnet_b0": {},
    "pit_ti_224": {"img_size": 64},
    "repghostnet_050": {},
    "repvit_m1": {},
    "resnest14d": {},
    "rexnet_100": {},
    "selecsls42": {},
    "legacy_seresnet18": {},
    "skresnet18": {},
    "shvit_s1": {},
    "starnet_s1": {},
    "swiftformer_xs": {},
    "tiny_vit_5m_224": {},
    "ese_vovnet19b_slim_dw": {},
    "cs3darknet_focus_s": {},
    "convit_tiny": {"depth": 4, "img_size": 64},
    "crossvit_9_240": {},
    "coat_tiny": {"img_size": 64},
    "halonet26t": {},
    "botnet26t_256": {"img_size": 64},
    "volo_d1_224": {"img_size": 64},
    "twins_pcpvt_small": {"depths": (1, 1, 1, 1), "img_size": 64},
    "visformer_tiny": {"img_size": 64},
    "swinv2_tiny_window8_256": {
        "depths": (1, 1, 1, 1),
        "img_size": 64,
        "window_size": 4,
        "embed_dim": 24,
        "num_heads": (1, 2, 4, 8),
    },
    "mvitv2_tiny": {"img_size": 64},
    "davit_tiny": {},
    "focalnet_tiny_srf": {},
    "gcvit_xxtiny": {},
    "hiera_tiny_224": {"img_size": (64, 64)},
    "res2net50_14w_8s": {},
    "dpn48b": {},
    "tresnet_m": {},
    "sequencer2d_s": {"layers": (1, 1, 1, 1), "img_size": 64},
}


def _timm(name: str, options: dict[str, Any]) -> Callable[[], Case]:
    def build() -> Case:
        import timm

        model: Any = timm.create_model(name, pretrained=False, num_classes=3, **options)
        side = SIDES.get(name, options.get("img_size", 64))
        return model, classified, images(side if isinstance(side, int) else side[0])

    return build


for _name, _options in TIMM.items():
    CASES[f"timm/{_name}"] = _timm(_name, _options)

# ---- torchvision: its Python parts, as a wheel without a fitting binary gives them

TORCHVISION = (
    "resnet18",
    "squeezenet1_1",
    "shufflenet_v2_x0_5",
    "mobilenet_v2",
    "mnasnet0_5",
    "googlenet",
    "regnet_y_400mf",
    "efficientnet_b0",
    "densenet121",
    "alexnet",
    "mobilenet_v3_small",
    "efficientnet_v2_s",
    "convnext_tiny",
    "resnext50_32x4d",
    "wide_resnet50_2",
    "regnet_x_400mf",
)


def _torchvision(name: str) -> Callable[[], Case]:
    def build() -> Case:
        import torchvision

        options = {"init_weights": False, "aux_logits": False} if name == "googlenet" else {}
        return torchvision.models.get_model(name, num_classes=3, **options), classified, images()

    return build


for _name in TORCHVISION:
    CASES[f"torchvision/{_name}"] = _torchvision(_name)


@case("torchvision/vit")
def _vit() -> Case:
    from torchvision.models import VisionTransformer

    return VisionTransformer(32, 8, 3, 4, 32, 64, num_classes=3), classified, images(32)


def _segments(name: str) -> Callable[[], Case]:
    def build() -> Case:
        import torchvision

        model = torchvision.models.get_model(name, num_classes=3, weights=None, weights_backbone=None)
        return model, lambda m, b: m(b[0])["out"].pow(2).mean(), images(rows=2)

    return build


for _name in ("deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large", "fcn_resnet50"):
    CASES[f"torchvision/{_name}"] = _segments(_name)


def _video(name: str) -> Callable[[], Case]:
    def build() -> Case:
        import torchvision

        model = torchvision.models.get_model(name, num_classes=3, weights=None)
        frames, side = (16, 224) if name == "s3d" else (8, 32)
        return model, classified, lambda: (torch.randn(2, 3, frames, side, side), torch.tensor([0, 2]))

    return build


for _name in ("mc3_18", "r2plus1d_18", "s3d"):
    CASES[f"torchvision/{_name}"] = _video(_name)


def _detection(name: str) -> Callable[[], Case]:
    def build() -> Case:
        import torchvision

        few: dict[str, Any] = {"score_thresh": 0.0, "detections_per_img": 8, "topk_candidates": 20}
        if "rcnn" in name:
            few = {"rpn_pre_nms_top_n_train": 20, "box_batch_size_per_image": 8}
        model = torchvision.models.get_model(
            name, num_classes=3, weights=None, weights_backbone=None, min_size=64, max_size=64, **few
        )

        def loss(model: nn.Module, batch: Any) -> Tensor:
            found, boxes, labels = batch
            targets = [{"boxes": b, "labels": k} for b, k in zip(boxes, labels, strict=True)]
            return torch.stack(list(model(list(found), targets).values())).sum()

        def batch() -> Any:
            boxes = torch.tensor([[4.0, 4.0, 40.0, 44.0], [10.0, 20.0, 60.0, 60.0]]).expand(2, 2, 4)
            return torch.rand(2, 3, 64, 64), boxes.clone(), torch.tensor([[1, 2], [2, 1]])

        return model, loss, batch

    return build


for _name in ("retinanet_resnet50_fpn", "fcos_resnet50_fpn", "fasterrcnn_mobilenet_v3_large_320_fpn"):
    CASES[f"torchvision/{_name}"] = _detection(_name)


@case("torchvision/raft_small")
def _raft() -> Case:
    import torchvision

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return torch.stack([flow.pow(2).mean() for flow in model(*batch, num_flow_updates=2)]).sum()

    return (
        torchvision.models.get_model("raft_small", weights=None),
        loss,
        lambda: (
            torch.randn(1, 3, 128, 128),
            torch.randn(1, 3, 128, 128),
        ),
    )


# ---- images


def _segmentation(kind: str) -> Callable[[], Case]:
    def build() -> Case:
        import segmentation_models_pytorch as smp

        model = getattr(smp, kind)(encoder_name="resnet18", encoder_weights=None, classes=3)
        return model, lambda m, b: m(b[0]).pow(2).mean(), images(64, rows=2)

    return build


for _name in (
    "Unet",
    "FPN",
    "Linknet",
    "PSPNet",
    "UPerNet",
    "MAnet",
    "DeepLabV3",
    "DeepLabV3Plus",
    "Segformer",
):
    CASES[f"segmentation_models_pytorch/{_name}"] = _segmentation(_name)


def _backbone() -> Any:
    layers = [
        nn.Conv2d(3, 8, 3, 2, 1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, 2, 1),
        nn.BatchNorm2d(16),
    ]
    return nn.Sequential(*layers, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def _metric(make: Callable[[Any], Any]) -> Callable[[], Case]:
    def build() -> Case:
        from pytorch_metric_learning import losses

        class Net(nn.Module):
            """An embedding and a loss, which may have weights."""

            def __init__(self) -> None:
                super().__init__()
                self.backbone, self.head, self.criterion = _backbone(), nn.Linear(16, 8), make(losses)

        return Net(), lambda m, b: m.criterion(m.head(m.backbone(b[0])), b[1]), images(32, rows=6)

    return build


for _name, _metric_loss in {
    "triplet": lambda losses: losses.TripletMarginLoss(),
    "ArcFace": lambda losses: losses.ArcFaceLoss(3, 8),
    "ProxyAnchor": lambda losses: losses.ProxyAnchorLoss(3, 8),
    "NTXent": lambda losses: losses.NTXentLoss(),
}.items():
    CASES[f"pytorch-metric-learning/{_name}"] = _metric(_metric_loss)


def _two_views() -> Any:
    return torch.randn(4, 3, 32, 32), torch.randn(4, 3, 32, 32)


@case("lightly/SimCLR")
def _simclr() -> Case:
    from lightly.loss import NTXentLoss
    from lightly.models.modules import SimCLRProjectionHead

    class Net(nn.Module):
        """A backbone, its projection and the loss."""

        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.head, self.criterion = (
                _backbone(),
                SimCLRProjectionHead(16, 16, 8),
                NTXentLoss(),
            )

    def loss(model: Any, batch: Any) -> Tensor:
        first, second = (model.head(model.backbone(view)) for view in batch)
        found: Tensor = model.criterion(first, second)
        return found

    return Net(), loss, _two_views


@case("lightly/SimSiam")
def _simsiam() -> Case:
    from lightly.loss import NegativeCosineSimilarity
    from lightly.models.modules import SimSiamPredictionHead, SimSiamProjectionHead

    class Net(nn.Module):
        """A backbone with two heads."""

        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.projection = _backbone(), SimSiamProjectionHead(16, 16, 8)
            self.prediction, self.criterion = SimSiamPredictionHead(8, 4, 8), NegativeCosineSimilarity()

    def loss(model: Any, batch: Any) -> Tensor:
        first, second = (model.projection(model.backbone(view)) for view in batch)
        found: Tensor = model.criterion(model.prediction(first), second.detach())
        return found

    return Net(), loss, _two_views


@case("lightly/BarlowTwins")
def _barlow() -> Case:
    from lightly.loss import BarlowTwinsLoss
    from lightly.models.modules import BarlowTwinsProjectionHead

    class Net(nn.Module):
        """A backbone, its projection and the loss."""

        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.head = _backbone(), BarlowTwinsProjectionHead(16, 16, 8)
            self.criterion = BarlowTwinsLoss()

    def loss(model: Any, batch: Any) -> Tensor:
        first, second = (model.head(model.backbone(view)) for view in batch)
        found: Tensor = model.criterion(first, second)
        return found

    return Net(), loss, _two_views


class _WithTeacher(nn.Module):
    """A student and its average, each a backbone and a projection."""

    def __init__(self, head: Callable[[], nn.Module], criterion: nn.Module, predictor: Any = None) -> None:
        super().__init__()
        self.backbone, self.head = _backbone(), head()
        self.teacher_backbone, self.teacher_head = copy.deepcopy(self.backbone), head()
        self.teacher_head.load_state_dict(self.head.state_dict())
        self.teacher_backbone.requires_grad_(False)
        self.teacher_head.requires_grad_(False)
        self.criterion, self.predictor = criterion, predictor


@case("lightly/BYOL")
def _byol() -> Case:
    from lightly.loss import NegativeCosineSimilarity
    from lightly.models.modules import BYOLPredictionHead, BYOLProjectionHead
    from lightly.models.utils import update_momentum

    def loss(model: Any, batch: Any) -> Tensor:
        update_momentum(model.backbone, model.teacher_backbone, m=0.9)
        update_momentum(model.head, model.teacher_head, m=0.9)
        first, second = batch
        predicted = model.predictor(model.head(model.backbone(first)))
        with torch.no_grad():
            target = model.teacher_head(model.teacher_backbone(second))
        found: Tensor = model.criterion(predicted, target)
        return found

    net = _WithTeacher(
        lambda: BYOLProjectionHead(16, 16, 8), NegativeCosineSimilarity(), BYOLPredictionHead(8, 16, 8)
    )
    return net, loss, _two_views


@case("lightly/MoCo")
def _moco() -> Case:
    from lightly.loss import NTXentLoss
    from lightly.models.modules import MoCoProjectionHead
    from lightly.models.utils import update_momentum

    def loss(model: Any, batch: Any) -> Tensor:
        update_momentum(model.backbone, model.teacher_backbone, m=0.9)
        update_momentum(model.head, model.teacher_head, m=0.9)
        first, second = batch
        query = model.head(model.backbone(first))
        with torch.no_grad():
            key = model.teacher_head(model.teacher_backbone(second))
        found: Tensor = model.criterion(query, key)
        return found

    return (
        _WithTeacher(lambda: MoCoProjectionHead(16, 16, 8), NTXentLoss(memory_bank_size=(16, 8))),
        loss,
        _two_views,
    )


@case("lightly/SwaV")
def _swav() -> Case:
    from lightly.loss import SwaVLoss
    from lightly.models.modules import SwaVProjectionHead, SwaVPrototypes

    class Net(nn.Module):
        """A backbone, its projection and prototypes."""

        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.head = _backbone(), SwaVProjectionHead(16, 16, 8)
            self.prototypes, self.criterion = SwaVPrototypes(8, n_prototypes=6), SwaVLoss()

    def loss(model: Any, batch: Any) -> Tensor:
        model.prototypes.normalize()
        views = [F.normalize(model.head(model.backbone(view)), dim=1) for view in batch]
        found: Tensor = model.criterion([model.prototypes(view) for view in views], [])
        return found

    return Net(), loss, _two_views


@case("lightly/DINO")
def _dino() -> Case:
    from lightly.loss import DINOLoss
    from lightly.models.modules import DINOProjectionHead
    from lightly.models.utils import update_momentum

    def loss(model: Any, batch: Any) -> Tensor:
        update_momentum(model.backbone, model.teacher_backbone, m=0.9)
        update_momentum(model.head, model.teacher_head, m=0.9)
        with torch.no_grad():
            targets = [model.teacher_head(model.teacher_backbone(view)) for view in batch]
        found: Tensor = model.criterion(
            targets, [model.head(model.backbone(view)) for view in batch], epoch=1
        )
        return found

    net = _WithTeacher(lambda: DINOProjectionHead(16, 16, 8, 12), DINOLoss(output_dim=12))
    for module in net.modules():
        if "weight_g" in module._parameters:  # made anew in each forward; as it is, no copy can be made
            module.weight = module.weight.detach()  # type: ignore[union-attr]
    return net, loss, _two_views
