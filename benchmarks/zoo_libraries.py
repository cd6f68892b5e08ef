"""Models of libraries that people train with Lightning, tiny, over stages against one process.

    python -m benchmarks.zoo_libraries --records libraries.jsonl  # what is not in there yet
    python -m benchmarks.zoo_libraries --records libraries.jsonl --only timm
    python -m benchmarks.zoo_libraries --records libraries.jsonl --run false --page docs/models.md

Nothing of these is a dependency: a library that is not installed is left out and said so. A case is a
function that gives a model, a loss of (model, batch), and what makes a batch; `@case("library/name")` adds
one.
"""

import json
import time
import warnings
from collections import Counter
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jsonargparse import auto_cli
from torch import Tensor, nn

from benchmarks import torchvision_operators  # noqa: F401  # before Lightning, which imports torchvision
from benchmarks.zoo import limited
from benchmarks.zoo_compare import Arguments, alone, compared, has_drawn, short
from benchmarks.zoo_page import told, write_page
from lightning_pipeline.model.tensors.structure import map_tensors

Loss = Callable[[nn.Module, Any], Tensor]
Case = tuple[nn.Module, Loss, Callable[[], Any]]
CASES: dict[str, Callable[[], Case]] = {}
BEGIN = "<!-- written by benchmarks/zoo_libraries.py -->"
PACKAGES = {
    "timm": "timm",
    "torchvision": "torchvision",
    "diffusers": "diffusers",
    "peft": "peft",
    "sentence-transformers": "sentence-transformers",
    "open_clip": "open_clip_torch",
    "torch_geometric": "torch_geometric",
    "x-transformers": "x-transformers",
    "segmentation_models_pytorch": "segmentation-models-pytorch",
    "pytorch-metric-learning": "pytorch-metric-learning",
    "lightly": "lightly",
}


class Step(nn.Module):
    """A model and its loss as a LightningModule has them."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self._loss = model, loss

    def log(self, name: str, value: Any) -> None:
        """Takes nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss of a micro-batch."""
        return self._loss(self.model, batch)


def case(name: str) -> Callable[[Callable[[], Case]], Callable[[], Case]]:
    """Add a case under `library/name`."""

    def add(function: Callable[[], Case]) -> Callable[[], Case]:
        CASES[name] = function
        return function

    return add


# ---- losses and batches


def classified(model: nn.Module, batch: Any) -> Tensor:
    """Of images and their classes."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def squared(model: nn.Module, batch: Any) -> Tensor:
    """Mean square of everything that a model returns."""
    out = model(**batch) if isinstance(batch, dict) else model(*batch)
    found: list[Tensor] = []
    map_tensors(lambda t: found.append(t) or t, dict(out) if hasattr(out, "keys") else out)  # type: ignore[func-returns-value]
    return torch.stack([t.pow(2).mean() for t in found if t.is_floating_point() and t.requires_grad]).sum()


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    """What a model returns as `loss`."""
    loss: Tensor = model(**batch).loss
    return loss


def images(side: int = 64, rows: int = 4, classes: int = 3) -> Callable[[], Any]:
    """Makes images and classes."""
    return lambda: (torch.randn(rows, 3, side, side), torch.randint(0, classes, (rows,)))


def words(rows: int = 2, length: int = 10) -> Any:
    """Makes ids, which are their own labels."""
    ids = torch.randint(5, 90, (rows, length))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


# ---- timm: one of a family


TIMM = {
    "vit_tiny_patch16_224": {"depth": 4, "img_size": 64},
    "deit_tiny_patch16_224": {"depth": 4, "img_size": 64},
    "resnet18": {},
    "resnetv2_18": {},
    "convnext_atto": {},
    "mobilenetv3_small_050": {},
    "efficientnet_lite0": {},
    "mixer_s32_224": {"num_blocks": 4, "img_size": 64},
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
}


def _timm(name: str, options: dict[str, Any]) -> Callable[[], Case]:
    def build() -> Case:
        import timm

        model: Any = timm.create_model(name, pretrained=False, num_classes=3, **options)
        return model, classified, images(options.get("img_size", 64))

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


@case("torchvision/deeplabv3_mobilenet_v3_large")
def _deeplab() -> Case:
    import torchvision

    model = torchvision.models.get_model(
        "deeplabv3_mobilenet_v3_large", num_classes=3, weights=None, weights_backbone=None
    )
    return model, lambda m, b: m(b[0])["out"].pow(2).mean(), images()


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


# ---- diffusers


@case("diffusers/UNet2DModel")
def _unet2d() -> Case:
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=16,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    return model, squared, lambda: {"sample": torch.randn(2, 3, 16, 16), "timestep": torch.tensor([3, 7])}


@case("diffusers/UNet2DConditionModel")
def _unet_condition() -> Case:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=8,
        cross_attention_dim=16,
        attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )
    return (
        model,
        squared,
        lambda: {
            "sample": torch.randn(2, 4, 16, 16),
            "timestep": torch.tensor([3, 7]),
            "encoder_hidden_states": torch.randn(2, 5, 16),
        },
    )


@case("diffusers/UNet1DModel")
def _unet1d() -> Case:
    from diffusers import UNet1DModel

    model = UNet1DModel(block_out_channels=(16, 16, 32), layers_per_block=1, sample_size=64)
    return model, squared, lambda: {"sample": torch.randn(2, 2, 64), "timestep": torch.tensor([3, 7])}


@case("diffusers/DiTTransformer2DModel")
def _dit() -> Case:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        num_layers=3,
        sample_size=8,
        norm_num_groups=4,
    )
    return (
        model,
        squared,
        lambda: {
            "hidden_states": torch.randn(2, 4, 8, 8),
            "timestep": torch.tensor([3, 7]),
            "class_labels": torch.tensor([1, 2]),
        },
    )


@case("diffusers/PixArtTransformer2DModel")
def _pixart() -> Case:
    from diffusers import PixArtTransformer2DModel

    model = PixArtTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        num_layers=3,
        sample_size=8,
        cross_attention_dim=16,
        caption_channels=12,
        norm_num_groups=4,
        use_additional_conditions=False,
    )
    return (
        model,
        squared,
        lambda: {
            "hidden_states": torch.randn(2, 4, 8, 8),
            "timestep": torch.tensor([3, 7]),
            "encoder_hidden_states": torch.randn(2, 5, 12),
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        },
    )


@case("diffusers/SD3Transformer2DModel")
def _sd3() -> Case:
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=3,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        caption_projection_dim=16,
        pooled_projection_dim=12,
        out_channels=4,
    )
    return (
        model,
        squared,
        lambda: {
            "hidden_states": torch.randn(2, 4, 8, 8),
            "timestep": torch.tensor([3.0, 7.0]),
            "encoder_hidden_states": torch.randn(2, 5, 16),
            "pooled_projections": torch.randn(2, 12),
        },
    )


@case("diffusers/FluxTransformer2DModel")
def _flux() -> Case:
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=12,
        axes_dims_rope=(4, 4, 8),
    )
    return (
        model,
        squared,
        lambda: {
            "hidden_states": torch.randn(2, 9, 4),
            "timestep": torch.tensor([0.3, 0.7]),
            "encoder_hidden_states": torch.randn(2, 5, 16),
            "pooled_projections": torch.randn(2, 12),
            "img_ids": torch.randn(9, 3),
            "txt_ids": torch.zeros(5, 3),
        },
    )


@case("diffusers/AutoencoderKL")
def _vae() -> Case:
    from diffusers import AutoencoderKL

    model = AutoencoderKL(
        block_out_channels=(8, 16),
        norm_num_groups=4,
        latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    )
    return model, squared, lambda: {"sample": torch.randn(2, 3, 16, 16)}


@case("diffusers/VQModel")
def _vq() -> Case:
    from diffusers import VQModel

    model = VQModel(
        block_out_channels=(8, 16),
        norm_num_groups=4,
        latent_channels=3,
        num_vq_embeddings=16,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    )
    return model, squared, lambda: {"sample": torch.randn(2, 3, 16, 16)}


# ---- peft over tiny transformers


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=99,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            use_cache=False,
            pad_token_id=0,
        )
    )


def _peft(make: Callable[[], Any]) -> Callable[[], Case]:
    def build() -> Case:
        from peft import get_peft_model

        model = get_peft_model(_llama(), make())
        for parameter in model.parameters():
            if parameter.requires_grad and not parameter.any():
                nn.init.normal_(parameter, std=0.02)
        return model, own_loss, words

    return build


def _lora(**options: Any) -> Callable[[], Any]:
    def make() -> Any:
        from peft import LoraConfig

        return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **options)

    return make


def _other(name: str, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        import peft

        return getattr(peft, name)(task_type="CAUSAL_LM", **options)

    return make


_QV = ["q_proj", "v_proj"]
for _name, _make in {
    "LoRA": _lora(),
    "DoRA": _lora(use_dora=True),
    "rsLoRA": _lora(use_rslora=True),
    "prompt tuning": _other("PromptTuningConfig", num_virtual_tokens=4),
    "prefix tuning": _other("PrefixTuningConfig", num_virtual_tokens=4),
    "p-tuning": _other("PromptEncoderConfig", num_virtual_tokens=4, encoder_hidden_size=16),
    "AdaLoRA": _other("AdaLoraConfig", target_modules=_QV, init_r=6, target_r=4, total_step=100),
    "IA3": _other("IA3Config", target_modules=[*_QV, "down_proj"], feedforward_modules=["down_proj"]),
    "LoHa": _other("LoHaConfig", target_modules=_QV, r=4),
}.items():
    CASES[f"peft/{_name}"] = _peft(_make)

# ---- words and graphs


@case("sentence-transformers/mean pooling")
def _sentences() -> Case:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Normalize, Pooling
    from transformers import BertConfig, BertModel

    class Words(nn.Module):
        """A transformer as that library calls it: features in, features with more entries out."""

        def __init__(self) -> None:
            super().__init__()
            self.auto_model = BertModel(
                BertConfig(
                    vocab_size=99,
                    hidden_size=32,
                    num_hidden_layers=4,
                    num_attention_heads=4,
                    intermediate_size=64,
                    hidden_dropout_prob=0.0,
                    attention_probs_dropout_prob=0.0,
                )
            )

        def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
            out = self.auto_model(input_ids=features["input_ids"], attention_mask=features["attention_mask"])
            features["token_embeddings"] = out.last_hidden_state
            return features

    model = SentenceTransformer(modules=[Words(), Pooling(32), Normalize()], device="cpu")

    def loss(model: nn.Module, batch: Any) -> Tensor:
        first, second = (
            model({"input_ids": ids, "attention_mask": torch.ones_like(ids)})["sentence_embedding"]
            for ids in batch
        )
        return F.cross_entropy(first @ second.T * 20, torch.arange(len(first)))

    return model, loss, lambda: (torch.randint(5, 90, (4, 8)), torch.randint(5, 90, (4, 8)))


@case("x-transformers/decoder")
def _x_decoder() -> Case:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    inner = TransformerWrapper(
        num_tokens=99, max_seq_len=32, attn_layers=Decoder(dim=32, depth=4, heads=4, rotary_pos_emb=True)
    )
    return AutoregressiveWrapper(inner), lambda m, b: m(b[0]), lambda: (torch.randint(0, 99, (2, 12)),)


@case("x-transformers/encoder, alibi")
def _x_encoder() -> Case:
    from x_transformers import Encoder, TransformerWrapper

    model = TransformerWrapper(
        num_tokens=99,
        max_seq_len=32,
        attn_layers=Encoder(dim=32, depth=4, heads=4, alibi_pos_bias=True, alibi_num_heads=2),
    )
    return model, lambda m, b: m(b[0]).pow(2).mean(), lambda: (torch.randint(0, 99, (2, 12)),)


@case("x-transformers/ViT")
def _x_vit() -> Case:
    from x_transformers import Encoder, ViTransformerWrapper

    model = ViTransformerWrapper(
        image_size=32, patch_size=8, num_classes=3, attn_layers=Encoder(dim=32, depth=4, heads=4)
    )
    return model, classified, images(32)


@case("open_clip/CLIP")
def _clip() -> Case:
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    model = CLIP(
        32,
        CLIPVisionCfg(layers=3, width=32, head_width=8, patch_size=8, image_size=32),
        CLIPTextCfg(context_length=12, vocab_size=99, width=32, heads=4, layers=3),
    )

    def loss(model: nn.Module, batch: Any) -> Tensor:
        image, text, scale = model(*batch)[:3]
        logits = scale * image @ text.T
        target = torch.arange(len(image))
        return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2

    return model, loss, lambda: (torch.randn(4, 3, 32, 32), torch.randint(1, 90, (4, 12)))


def _graph(kind: str) -> Callable[[], Case]:
    def build() -> Case:
        import torch_geometric.nn as gnn

        model = getattr(gnn.models, kind)(in_channels=8, hidden_channels=16, num_layers=4, out_channels=3)
        edges = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]])
        return model, lambda m, b: m(b[0], b[1]).pow(2).mean(), lambda: (torch.randn(10, 8), edges)

    return build


for _name in ("GCN", "GAT", "GraphSAGE", "GIN", "PNA", "EdgeCNN")[:4]:
    CASES[f"torch_geometric/{_name}"] = _graph(_name)

# ---- images


def _segmentation(kind: str) -> Callable[[], Case]:
    def build() -> Case:
        import segmentation_models_pytorch as smp

        model = getattr(smp, kind)(encoder_name="resnet18", encoder_weights=None, classes=3)
        return model, lambda m, b: m(b[0]).pow(2).mean(), images(64, rows=2)

    return build


for _name in ("Unet", "FPN", "Linknet", "PSPNet", "UPerNet"):
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


# ---- running them


def run_case(name: str) -> dict[str, Any]:
    """What becomes of one model on 2 and 3 stages."""
    record: dict[str, Any] = {"name": name}
    try:
        torch.manual_seed(0)
        model, loss, make = CASES[name]()
        module, batches, expected, draws = _trains(model, loss, make)
    except ImportError as error:
        return record | {"outcome": "not run", "why": f"not installed: {short(error)}"}
    except Exception as error:
        return record | {"outcome": "not run", "why": short(error)}
    return record | compared(module, batches, expected, draws)


def _trains(model: nn.Module, loss: Loss, make: Callable[[], Any]) -> Any:
    failed: Exception = ValueError("no batch")
    made = [make(), make()]
    for dtype in (torch.float64, torch.float32):
        module = Step(model.to(dtype), loss).train()
        batches: list[Arguments] = [((_cast(batch, dtype), 0), {}) for batch in made]
        try:
            expected = alone(module, batches)
        except Exception as error:
            failed = error
        else:
            return module, batches, expected, has_drawn()
    raise failed


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)


def text(known: dict[str, dict[str, Any]]) -> str:
    """One line for each library, and what is not equal."""
    lines = ["| library | tried | equal | otherwise | not in one process here |", "|---|---|---|---|---|"]
    for library in dict.fromkeys(name.partition("/")[0] for name in known):
        own = {n.partition("/")[2]: r for n, r in known.items() if n.startswith(f"{library}/")}
        counts = Counter(record["outcome"] for record in own.values())
        names = [[n for n, r in own.items() if r["outcome"] == "equal"]]
        names.append([n for n, r in own.items() if r["outcome"] not in ("equal", "not run")])
        names.append([n for n, r in own.items() if r["outcome"] == "not run"])
        try:
            title = f"{library} {version(PACKAGES[library])}"
        except PackageNotFoundError:
            title = library
        lines.append(
            f"| {title} | {len(own)} | {counts['equal']}: {', '.join(names[0])} | {', '.join(names[1])} | "
            f"{', '.join(names[2])} |"
        )
    rest = [f"* {n}, {r['outcome']}: {told(r)}" for n, r in known.items() if r["outcome"] != "equal"]
    return "\n".join([*lines, *(["", *rest] if rest else [])])


def main(
    records: Path = Path("libraries.jsonl"),
    only: str = "",
    again: list[str] | None = None,
    run: bool = True,
    seconds: int = 60,
    page: Path | None = None,
) -> None:
    """Run what is not recorded yet and print a table.

    Args:
        records: One line for each case; what is in there is not run again.
        only: Part of a case's name.
        again: Outcomes that are run again.
        run: Whether anything is run.
        seconds: Longest CPU time for a case.
        page: Is given the table, between two marks.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    lines = records.read_text().splitlines() if records.exists() else []
    known = {record["name"]: record for record in map(json.loads, lines)}
    for name in CASES if run else ():
        if only not in name or (name in known and known[name]["outcome"] not in (again or ())):
            continue
        start = time.process_time()
        try:
            with limited(seconds):
                known[name] = run_case(name)
        except TimeoutError as error:
            known[name] = {"name": name, "outcome": "slow", "why": str(error)}
        known[name]["cpu_s"] = round(time.process_time() - start, 1)
        print(name, known[name]["outcome"], known[name].get("why", "")[:150], flush=True)
        with records.open("a") as file:
            file.write(json.dumps(known[name]) + "\n")
    shown = text({name: known[name] for name in CASES if name in known})
    print(shown)
    if page is not None:
        write_page(page, shown, BEGIN)


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
