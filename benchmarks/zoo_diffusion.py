"""More models of diffusers, tiny: transformers of images, videos and sounds, and autoencoders."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.zoo_cases import Case, case, squared


def _case(name: str, arguments: Callable[[], dict[str, Any]], **options: Any) -> None:
    """Add a model of diffusers by the name of its class."""

    @case(f"diffusers/{name}")
    def make() -> Case:
        import diffusers

        model = getattr(diffusers, name)(**options)
        with torch.no_grad():
            for parameter in model.parameters():
                if not parameter.any():
                    parameter.normal_(std=0.02)
        return model, squared, arguments


def _video(channels: int = 4, frames: int = 2, side: int = 8) -> Tensor:
    """Channels before frames."""
    return torch.randn(2, channels, frames, side, side)


def _noised(**more: Callable[[], Any]) -> Callable[[], dict[str, Any]]:
    """Arguments with a time for each sample."""
    return lambda: {"timestep": torch.tensor([3, 7])} | {name: make() for name, make in more.items()}


def _text(width: int = 16, length: int = 5) -> Callable[[], Tensor]:
    return lambda: torch.randn(2, length, width)


_HEADS: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 3}

_case(
    "PriorTransformer",
    _noised(
        hidden_states=lambda: torch.randn(2, 16),
        proj_embedding=lambda: torch.randn(2, 16),
        encoder_hidden_states=_text(16, 5),
    ),
    **_HEADS,
    embedding_dim=16,
    num_embeddings=5,
    additional_embeddings=4,
)
_case(
    "CogVideoXTransformer3DModel",
    _noised(hidden_states=lambda: torch.randn(2, 2, 4, 8, 8), encoder_hidden_states=_text()),
    **_HEADS,
    in_channels=4,
    out_channels=4,
    time_embed_dim=8,
    text_embed_dim=16,
    sample_width=8,
    sample_height=8,
    sample_frames=5,
    max_text_seq_length=5,
)
_case(
    "WanTransformer3DModel",
    _noised(hidden_states=_video, encoder_hidden_states=_text()),
    num_attention_heads=2,
    attention_head_dim=12,
    num_layers=3,
    in_channels=4,
    out_channels=4,
    text_dim=16,
    freq_dim=16,
    ffn_dim=32,
    rope_max_seq_len=32,
)
_case(
    "SanaTransformer2DModel",
    _noised(hidden_states=lambda: torch.randn(2, 4, 8, 8), encoder_hidden_states=_text()),
    **_HEADS,
    in_channels=4,
    out_channels=4,
    num_cross_attention_heads=2,
    cross_attention_head_dim=8,
    cross_attention_dim=16,
    caption_channels=16,
    sample_size=8,
)
_case(
    "LTXVideoTransformer3DModel",
    _noised(
        hidden_states=lambda: torch.randn(2, 8, 4),
        encoder_hidden_states=_text(),
        encoder_attention_mask=lambda: torch.ones(2, 5, dtype=torch.bool),
        num_frames=lambda: 2,
        height=lambda: 2,
        width=lambda: 2,
    ),
    **_HEADS,
    in_channels=4,
    out_channels=4,
    cross_attention_dim=16,
    caption_channels=16,
)
_case(
    "AuraFlowTransformer2DModel",
    _noised(hidden_states=lambda: torch.randn(2, 4, 8, 8), encoder_hidden_states=_text()),
    sample_size=8,
    num_mmdit_layers=2,
    num_single_dit_layers=2,
    attention_head_dim=8,
    num_attention_heads=2,
    joint_attention_dim=16,
    caption_projection_dim=16,
    pos_embed_max_size=64,
)
_case(
    "LatteTransformer3DModel",
    _noised(hidden_states=_video, encoder_hidden_states=_text()),
    num_attention_heads=2,
    attention_head_dim=8,
    num_layers=3,
    in_channels=4,
    out_channels=4,
    cross_attention_dim=16,
    sample_size=8,
    patch_size=2,
    caption_channels=16,
    num_embeds_ada_norm=1000,
    norm_type="ada_norm_single",
    norm_elementwise_affine=False,
    video_length=2,
)
_case(
    "MochiTransformer3DModel",
    _noised(
        hidden_states=_video,
        encoder_hidden_states=_text(),
        encoder_attention_mask=lambda: torch.ones(2, 5, dtype=torch.bool),
    ),
    **_HEADS,
    in_channels=4,
    pooled_projection_dim=16,
    text_embed_dim=16,
    time_embed_dim=8,
)
_case(
    "AllegroTransformer3DModel",
    _noised(hidden_states=_video, encoder_hidden_states=_text()),
    **_HEADS | {"attention_head_dim": 24},
    sample_height=8,
    sample_width=8,
    sample_frames=2,
    cross_attention_dim=48,
    caption_channels=16,
)
_case(
    "UVit2DModel",
    lambda: {
        "input_ids": torch.randint(0, 30, (2, 8, 8)),
        "encoder_hidden_states": torch.randn(2, 5, 16),
        "pooled_text_emb": torch.randn(2, 16),
        "micro_conds": torch.rand(2, 5),
    },
    hidden_size=32,
    cond_embed_dim=16,
    micro_cond_encode_dim=8,
    micro_cond_embed_dim=40,
    encoder_hidden_size=16,
    vocab_size=33,
    codebook_size=32,
    in_channels=16,
    block_out_channels=16,
    num_res_blocks=1,
    block_num_heads=2,
    num_hidden_layers=3,
    num_attention_heads=2,
    intermediate_size=48,
    sample_size=8,
)
_case(
    "AutoencoderTiny",
    lambda: {"sample": torch.randn(2, 3, 16, 16)},
    encoder_block_out_channels=(8, 8),
    decoder_block_out_channels=(8, 8),
    num_encoder_blocks=(1, 2),
    num_decoder_blocks=(2, 1),
)
_case(
    "AutoencoderKLTemporalDecoder",
    lambda: {"sample": torch.randn(4, 3, 16, 16), "num_frames": 2},
    block_out_channels=(32, 32),
    down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
)
_case(
    "ControlNetModel",
    _noised(
        sample=lambda: torch.randn(2, 4, 8, 8),
        encoder_hidden_states=_text(),
        controlnet_cond=lambda: torch.randn(2, 3, 16, 16),
    ),
    block_out_channels=(16, 32),
    layers_per_block=1,
    norm_num_groups=8,
    cross_attention_dim=16,
    attention_head_dim=4,
    down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    conditioning_embedding_out_channels=(8, 16),
)
_case(
    "UNetSpatioTemporalConditionModel",
    _noised(
        sample=lambda: torch.randn(2, 2, 4, 8, 8),
        encoder_hidden_states=_text(16, 1),
        added_time_ids=lambda: torch.rand(2, 3),
    ),
    in_channels=4,
    block_out_channels=(32, 32),
    down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
    up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
    addition_time_embed_dim=8,
    projection_class_embeddings_input_dim=24,
    layers_per_block=1,
    cross_attention_dim=16,
    num_attention_heads=2,
)
