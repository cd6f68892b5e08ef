"""Tiny configurations of every model type of transformers, in steps from small to as given."""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

LENGTH, ROWS, VOCABULARY, LAYERS = 12, 2, 120, 4
RUNGS = ("values", "fields", "stages", "whole")

_BY_NAME: list[tuple[str, int]] = [
    (r"(adapter_in_dim|adapter_out_dim|adapter_input_size|condition_dim)$", 32),
    (r"(q_lora_rank|kv_lora_rank|o_lora_rank|time_step_rank|dt_rank|index_head_dim|lora_dim)$", 16),
    (r"(qk_nope_head_dim|qk_rope_head_dim|v_head_dim|qk_head_dim)$", 8),
    (r"(index_n_heads|index_topk|n_group|topk_group|num_nextn_predict_layers)$", 1),
    (r"(num_key_value_heads|num_kv_heads|n_kv_heads|num_query_groups|n_groups|mamba_n_groups)$", 2),
    (r"(first_k_dense_replace|moe_layer_start_index|num_dense_layers)$", 1),
    (r"(head_dim|attention_head_size|linear_key_head_dim|linear_value_head_dim|mamba_d_head|mamba_head_dim"
     r"|d_kv|d_head|global_head_dim|attention_key_size|head_size|kv_channels)$", 8),
    (r"(num_experts_per_tok|top_k|topk|moe_topk|moe_k|num_experts_per_token|num_selected_experts)$", 2),
    (r"(num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_moe_experts)$", 4),
    (r"(n_shared_experts|num_shared_experts|moe_num_shared_experts)$", 1),
    (r"(num|n|encoder|decoder).*heads?$|(nhead|num_attention_head|num_v_heads|mamba_num_heads)$", 4),
    (r"(num_hidden_layers|n_layers?|num_layers|encoder_layers|decoder_layers|depth|num_encoder_layers"
     r"|num_decoder_layers|num_block|num_blocks|vision_layers|n_block|layers|num_encoder_hidden_layers"
     r"|num_decoder_hidden_layers|vision_depth)$", LAYERS),
    (r"(type_vocab_size|num_codebooks|num_quantizers)$", 2),
    (r"vocab_size|^vocab.*size$|num_embeddings$", VOCABULARY),
    (r"(intermediate_size|ffn_dim|n_inner|d_ff|mlp_dim|ffn_hidden_size|feed_forward|feedforward_dim|"
     r"inner_dim|ff_dim|mlp_hidden_size|ffn_size|intermediate_dim|mlp_hidden_dim|intermediate_channels)", 64),
    (r"(max_position_embeddings|n_positions|max_source_positions|max_target_positions|max_seq_len|"
     r"max_sequence_length|n_ctx|context_length|max_2d_position_embeddings|max_length)$", 128),
    (r"(hidden_size|d_model|n_embd|embed_dim|embedding_size|embedding_dim|^dim|hidden_dim|projection_dim|"
     r"d_embed|emb_dim|out_hidden_size|projector_dim|attention_size|width|classifier_proj_size|"
     r"output_dim|fusion_hidden_size|encoder_hidden_dim|mamba_d_ssm|lru_width|latent_dim|"
     r"n_embed|channels|d_latents|num_latents|neck_hidden_size|conv_dim|query_dim)$", 32),
    (r"(image_size|img_size|input_size|vision_image_size)$", 32),
    (r"(num_queries|num_query_tokens|num_object_queries)$", 8),
    (r"(num_frames|num_mel_bins|tubelet_size)$", 0),
    (r"(window_size|sliding_window|attention_window|local_attention|window|chunk_size|mamba_chunk_size)$", 8),
    (r"(num_labels|num_classes)$", 3),
    (r"(rotary_dim)$", 8),
    (r"(latent_query_num)$", 8),
    (r"(intra_bottleneck_size|true_hidden_size)$", 32),
    (r"(codebook_size)$", 64),
]  # fmt: skip
_KEPT = (
    r"num_channels", r"in_channels", r"num_attention_channels", r"conv_kernel", r"out_channels$",
    r"num_feat_extract_layers", r"chunk_size$",
)  # fmt: skip
_LEFT_OUT = ("transformers_version", "stage_names", "per_layer_config")
_TAPS = ("out_features", "out_indices")
_TOKEN = re.compile(r"(token_id|_token_index|token_ids|_id)$")
_WIDTHS = re.compile(r"(hidden_size|dims?|channels|width|embed|depth|filters|blocks|ratios|heads)")
_RESNET = {
    "model_type": "resnet", "embedding_size": 16, "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1],
    "layer_type": "basic",
}  # fmt: skip
_LAST, _LAST_THREE = _RESNET | {"out_features": ["stage4"]}, _RESNET | {"out_indices": [2, 3, 4]}
_SERIES = {"prediction_length": 6, "context_length": 12, "lags_sequence": [1, 2, 3], "num_time_features": 2}
_EFFICIENT = {"width_coefficient": 0.5, "depth_coefficient": 0.5, "hidden_dim": 640}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
# What no rule on names makes agree, by model type.
_GIVEN: dict[str, dict[str, Any]] = {
    "align_vision_model": _EFFICIENT,
    "autoformer": _SERIES,
    "blt": {"encoder_hash_byte_group_vocab": 200},
    "bridgetower": {"num_attention_heads": 4},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "conditional_detr": {"backbone_config": _LAST},
    "dab-detr": {"backbone_config": _LAST},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_ocr2_text": {
        "mlp_layer_types": ["dense", "sparse"] * 2, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_group": 1, "n_group": 1},
    "deformable_detr": {"backbone_config": _LAST_THREE, "num_feature_levels": 3},
    "depth_anything": {"reassemble_hidden_size": 32},
    "detr": {"backbone_config": _LAST},
    "diffusion_gemma_text": {"num_global_key_value_heads": 2},
    "dots1": {
        "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    },
    "efficientnet": _EFFICIENT,
    "esm": {"vocab_size": 33, "mask_token_id": 32, "pad_token_id": 1},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0}},
    "glm5_next_text": {"index_topk": 16},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "hunyuan_vl_text": {"head_dim": 8},
    "informer": _SERIES,
    "layoutlmv3": {"coordinate_size": 6, "shape_size": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "lilt": {"hidden_size": 48},
    "ministral": {"head_dim": 8},
    "mobilevitv2": {"image_size": 64},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 8},
    "neomme": {"layer_types": ["sliding_attention", "full_attention"] * 2, "head_dim": 16},
    "perceiver": {"num_cross_attention_heads": 1},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 91, "vision_end_token_id": 92},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 91, "vision_end_token_id": 92},
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "reformer": {
        "axial_pos_shape": [3, 4], "axial_pos_embds_dim": [16, 16], "lsh_attn_chunk_length": 4,
        "local_attn_chunk_length": 4, "num_buckets": 4, "hash_seed": 1,
        "attn_layers": ["local", "lsh"] * 2,
    },
    "step3p7_text": {"sliding_window": 8},
    "swin2sr": {"embed_dim": 24, "num_heads": [2, 2], "depths": [2, 2]},
    "table-transformer": {"backbone_config": _LAST},
    "textnet": {"stem_out_channels": 16},
    "time_series_transformer": _SERIES,
    "wav2vec2-bert": {"vocab_size": 40},
    "wav2vec2-conformer": {"vocab_size": 40},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 6,
        "layers_block_type": ["linear_attention", "hybrid"] * 3,
    },
    "zamba2": {
        "num_hidden_layers": 6,
        "layers_block_type": ["linear_attention", "hybrid"] * 3,
    },
}  # fmt: skip


def tiny_config(kind: str, rung: str = "values") -> Any:
    """The configuration of a model type, with what costs memory made small.

    Args:
        kind: Model type.
        rung: How far: "values" shrinks every value of the default configuration by its name, "fields" only
            those that do not follow from others, "stages" leaves what has widths by stage as it is, and
            "whole" everything but the vocabulary.
    """
    cls = CONFIG_MAPPING[kind]
    given = cls()
    if rung == "values":
        config = cls.from_dict(_shrink(given.to_dict(), rung))
    else:
        values = _shrink(_fields(given), rung)
        values.pop("model_type", None)
        config = cls(**values)
    for one in with_parts(config):
        _still(one)
        _set_rope(one)
    return config


def with_parts(config: Any) -> Iterator[Any]:
    """A configuration and those it holds."""
    yield config
    for value in list(vars(config).values()):
        if isinstance(value, PretrainedConfig):
            yield from with_parts(value)


def _still(config: Any) -> None:
    """No random numbers, no caches."""
    for name, value in list(vars(config).items()):
        draws = "dropout" in name or name.endswith(("_pdrop", "layerdrop", "drop_path_rate", "_drop"))
        if isinstance(value, float) and (draws or name in ("mask_time_prob", "mask_feature_prob")):
            setattr(config, name, 0.0)
    for name in ("apply_spec_augment", "use_cache", "return_dict_in_generate"):
        if name in vars(config):
            setattr(config, name, False)
    if vars(config).get("image_token_id", 0) is None:
        config.image_token_id = 99
    if vars(config).get("pad_token_id", 0) is None:
        config.pad_token_id = 0


def _set_rope(config: Any) -> None:
    """Sections of a rotary embedding in three directions, which default to those of the large model."""
    rope = vars(config).get("rope_parameters")
    if not isinstance(rope, dict):
        return
    nested = [one for one in rope.values() if isinstance(one, dict)]
    for one in nested or [rope]:
        if one.get("rope_theta") is None:
            one["rope_theta"] = 10_000.0
    if not nested and "head_dim" not in rope and "factor" not in rope:
        width = vars(config).get("head_dim")
        if width is None and not hasattr(config, "num_attention_heads"):
            return
        width = width or config.hidden_size // config.num_attention_heads
        third = int(width * (rope.get("partial_rotary_factor") or 1.0)) // 6
        half = int(width * (rope.get("partial_rotary_factor") or 1.0)) // 2
        rope["mrope_section"] = [half - 2 * third, third, third]


def _fields(config: Any) -> dict[str, Any]:
    """What a configuration is made from; what follows from other values is left to follow again."""
    base = {field.name for field in dataclasses.fields(PretrainedConfig)}
    found: dict[str, Any] = {"model_type": config.model_type}
    for field in dataclasses.fields(config):
        value = vars(config).get(field.name)
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if isinstance(value, PretrainedConfig):
            found[field.name] = _fields(value)
        elif field.name not in base and default is not None and default is not dataclasses.MISSING:
            found[field.name] = default
    for name in _TAPS:
        if vars(config).get("_" + name) is not None:
            found[name] = vars(config)["_" + name]
    return found


def _shrink(values: dict[str, Any], rung: str) -> dict[str, Any]:  # noqa: C901 - one case a line
    kept = rung == "whole" or (rung == "stages" and _is_staged(values))
    layers = [v for n, v in values.items() if isinstance(v, int) and _tiny(n, v) == LAYERS != v]
    made: dict[str, Any] = {}
    for name, value in values.items():
        if name in _LEFT_OUT or value is None or (rung == "values" and name in _TAPS):
            continue
        if isinstance(value, dict) and name not in ("id2label", "label2id") and all(map(_is_name, value)):
            made[name] = _shrink(value, rung) if value else value
        elif kept or (name in _TAPS and _is_staged(values)):
            made[name] = _tiny(name, value) if _is_count(value) and _is_vocabulary(name) else value
        elif name == "out_indices" and not _is_staged(values):
            made[name] = list(range(LAYERS + 1 - len(value), LAYERS + 1))
        elif name == "out_features" and not _is_staged(values):
            continue
        elif isinstance(value, list | tuple) and value:
            made[name] = _shrink_list(name, list(value), layers) if rung != "stages" else value
        elif _is_count(value):
            made[name] = _tiny(name, value)
        else:
            made[name] = value
    if not kept:
        made = _consistent(made, values)
    for name, value in _GIVEN.get(str(values.get("model_type")), {}).items():
        part = isinstance(value, dict) and "model_type" not in value  # of a configuration; else all of it
        made[name] = made.get(name, {}) | value if part else value
    return made


def _is_name(key: Any) -> bool:
    return isinstance(key, str)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_vocabulary(name: str) -> bool:
    return "vocab" in name or bool(_TOKEN.search(name))


def _is_staged(values: dict[str, Any]) -> bool:
    """Whether widths or depths are given stage by stage."""
    return any(
        isinstance(value, list | tuple)
        and len(value) > 1
        and all(map(_is_count, value))
        and _WIDTHS.search(name)
        for name, value in values.items()
    )


def _tiny(name: str, value: int) -> int:
    if any(re.search(kept, name) for kept in _KEPT):
        return value
    if _TOKEN.search(name):
        return value if value < VOCABULARY else 90 + value % 25
    if name in ("patch_size", "vision_patch_size", "spatial_patch_size"):
        return min(value, 8)
    for pattern, small in _BY_NAME:
        if re.search(pattern, name):
            return min(value, small) if small else value
    return value


def _shrink_list(name: str, value: list[Any], layers: list[int]) -> list[Any]:
    if all(isinstance(item, dict) for item in value):
        return [_shrink(item, "values") for item in value]
    if len(value) in layers and len(value) > LAYERS:
        return value[:LAYERS]
    if all(isinstance(item, int) and not isinstance(item, bool) for item in value):
        return _shrink_numbers(name, value)
    return value


def _shrink_numbers(name: str, value: list[int]) -> list[int]:
    if name == "mrope_section":
        return [2, 1, 1]
    if "depth" in name or name in ("num_blocks", "layers") or "head" in name:
        return [min(item, 2) for item in value]
    if re.search(r"(hidden_size|dims?|channels|width|embed)", name) and max(value) >= 32:
        order = sorted(set(value))
        return [16 * (order.index(item) + 1) for item in value]
    if name in ("image_size", "img_size"):
        return [32 for _ in value]
    if _TOKEN.search(name):
        return [_tiny(name, item) for item in value]
    if re.search(r"(layers|indexes|indices|layer_ids|vision_feature_layer)", name):
        inside = {min(item, LAYERS - 1) for item in value}
        return sorted(inside) if len(inside) == len(value) or len(value) > LAYERS else list(range(len(value)))
    return value


def _consistent(made: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Put right what must agree with something else."""
    heads = given.get("num_attention_heads")
    if heads is not None and given.get("num_key_value_heads", heads) == heads:
        made.update(
            {"num_key_value_heads": made["num_attention_heads"]} if "num_key_value_heads" in given else {}
        )
    for expand, width, count in (
        ("expand", "head_dim", "num_heads"),
        ("mamba_expand", "mamba_d_head", "mamba_n_heads"),
        ("mamba_expand", "mamba_head_dim", "mamba_num_heads"),
        ("expand", "mamba_head_dim", "mamba_num_heads"),
    ):
        if {expand, width, count} <= set(made) and isinstance(made[width], int):
            made[width] = int(made[expand] * made["hidden_size"]) // made[count]
    return made
