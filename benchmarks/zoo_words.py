"""Models of libraries for words, diffusion and graphs, tiny: diffusers, peft, x-transformers and others."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo_cases import CASES, Case, case, classified, images, own_loss, squared, words

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

    model = UNet1DModel(
        block_out_channels=(32, 32, 64), layers_per_block=1, sample_size=64, extra_in_channels=64
    )
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


for _name in ("GCN", "GAT", "GraphSAGE", "GIN", "EdgeCNN"):
    CASES[f"torch_geometric/{_name}"] = _graph(_name)


@case("torch_geometric/graphs")
def _graphs() -> Case:
    from torch_geometric.data import Batch, Data
    from torch_geometric.nn import GCN, global_mean_pool

    class Net(nn.Module):
        """Classes of whole graphs, given as a list."""

        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = GCN(8, 16, num_layers=3, out_channels=16), nn.Linear(16, 3)

        def forward(self, graphs: list[Any]) -> Tensor:
            joined: Any = Batch.from_data_list(graphs)
            h = self.body(joined.x.to(self.head.weight.dtype), joined.edge_index)
            found: Tensor = self.head(global_mean_pool(h, joined.batch))
            return found

    def graphs() -> Any:
        ring = [torch.arange(nodes) for nodes in (5, 7)]
        edges = [torch.stack([nodes, nodes.roll(1)]) for nodes in ring]
        return [
            Data(x=torch.randn(e.shape[1], 8), edge_index=e, y=torch.tensor(len(e[0]) % 3)) for e in edges
        ]

    return Net(), lambda m, b: F.cross_entropy(m(b), torch.stack([g.y for g in b])), graphs
