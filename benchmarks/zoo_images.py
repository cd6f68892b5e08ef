"""Models of libraries for pictures, tiny: timm, lightly and others."""

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
