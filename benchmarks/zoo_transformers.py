"""Tiny models of every architecture of transformers, and batches that train them."""

import inspect
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

Batch = dict[str, Any]
LENGTH, ROWS, VOCABULARY, LAYERS = 12, 2, 120, 4

_BY_NAME: list[tuple[str, int]] = [
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
    (r"(intra_bottleneck_size|true_hidden_size)$", 32),
    (r"(codebook_size)$", 64),
]  # fmt: skip
_KEPT = (
    r"num_channels", r"in_channels", r"num_attention_channels", r"conv_kernel", r"out_channels$",
    r"num_feat_extract_layers", r"chunk_size$",
)  # fmt: skip
_LEFT_OUT = ("transformers_version", "stage_names", "out_features", "out_indices", "per_layer_config")
_TOKEN = re.compile(r"(token_id|_token_index|token_ids|_id)$")


def pairs() -> list[tuple[str, str]]:
    """Every (model type, class) that an Auto class of transformers offers, language models first."""
    found: dict[tuple[str, str], None] = {}
    names = sorted(n for n in dir(modeling_auto) if n.endswith("_MAPPING_NAMES"))
    for first in ("CAUSAL_LM", "SEQ_TO_SEQ", "MASKED_LM", "IMAGE_TEXT", "IMAGE_CLASS", ""):
        for name in names:
            if first in name and not name.startswith("CONFIG"):
                for kind, classes in getattr(modeling_auto, name).items():
                    for one in classes if isinstance(classes, tuple | list) else [classes]:
                        found.setdefault((kind, one))
    return list(found)


# ---- configurations


def tiny_config(kind: str) -> Any:
    """The configuration of a model type, with everything that costs memory made small."""
    cls = CONFIG_MAPPING[kind]
    given = cls().to_dict()
    config = cls.from_dict(_shrink(given))
    for one in _with_parts(config):
        for name, value in list(vars(one).items()):
            if ("dropout" in name or name.endswith(("_pdrop", "layerdrop", "drop_path_rate", "_drop"))) and (
                isinstance(value, float)
            ):
                setattr(one, name, 0.0)
        for name in ("apply_spec_augment", "use_cache", "return_dict_in_generate"):
            if hasattr(one, name):
                setattr(one, name, False)
        if getattr(one, "pad_token_id", 0) is None:
            one.pad_token_id = 0
        _set_rope(one)
    return config


def _set_rope(config: Any) -> None:
    """Sections of a rotary embedding in three directions, which default to those of the large model."""
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict) and "head_dim" not in rope and "factor" not in rope:
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        third = int(width * rope.get("partial_rotary_factor", 1.0)) // 6
        half = int(width * rope.get("partial_rotary_factor", 1.0)) // 2
        rope["mrope_section"] = [half - 2 * third, third, third]


def _with_parts(config: Any) -> Iterator[Any]:
    yield config
    for value in list(vars(config).values()):
        if isinstance(value, transformers.PretrainedConfig):
            yield from _with_parts(value)


def _shrink(values: dict[str, Any]) -> dict[str, Any]:
    layers = [v for n, v in values.items() if isinstance(v, int) and _tiny(n, v) == LAYERS != v]
    made: dict[str, Any] = {}
    for name, value in values.items():
        if name in _LEFT_OUT or value is None:
            continue
        if isinstance(value, dict) and name not in ("id2label", "label2id"):
            made[name] = _shrink(value) if value else value
        elif isinstance(value, list | tuple) and value:
            made[name] = _shrink_list(name, list(value), layers)
        elif isinstance(value, int) and not isinstance(value, bool):
            made[name] = _tiny(name, value)
        else:
            made[name] = value
    return _consistent(made, values)


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
        return [_shrink(item) for item in value]
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
        return sorted({min(item, LAYERS - 1) for item in value})
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


# ---- batches


class Recipe:
    """Batches for one model.

    Args:
        model: Tiny.
        config: Its configuration.
    """

    def __init__(self, model: nn.Module, config: Any) -> None:
        self.model, self.config, self.head = model, config, type(model).__name__
        self._names = list(inspect.signature(model.forward).parameters)
        self._generator = torch.Generator().manual_seed(1)
        self._text = getattr(config, "text_config", None) or config.get_text_config()

    def attempts(self) -> Iterator[Callable[[], list[Batch]]]:
        """Make pairs of micro-batches to try, the fullest first; the second one has a padded tail."""
        for labels in (True, False):
            for images in (True, False):
                yield partial(self._pair, labels, images)

    def _pair(self, labels: bool, images: bool) -> list[Batch]:
        return [self._batch(padded, labels, images) for padded in (False, True)]

    def _batch(self, padded: bool, labels: bool, images: bool) -> Batch:
        batch: Batch = {}
        if images or not self._takes("input_ids"):
            batch.update(self._signals())
        if self._takes("input_ids"):
            batch.update(self._tokens(padded, "pixel_values" in batch))
        if self._takes("decoder_input_ids") and not labels:
            batch["decoder_input_ids"] = self._integers(ROWS, LENGTH)
        if labels:
            batch.update(self._labels(batch))
        return batch

    def _takes(self, name: str) -> bool:
        return name in self._names

    def _integers(self, *shape: int, high: int = 80) -> Tensor:
        return torch.randint(5, high, shape, generator=self._generator)

    def _numbers(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator)

    def _tokens(self, padded: bool, images: bool) -> Batch:
        choices = (2,) if self.head.endswith("MultipleChoice") else ()
        ids = self._integers(ROWS, *choices, LENGTH)
        marker = next(
            (
                v
                for n in ("image_token_id", "image_token_index")
                if isinstance(v := getattr(self.config, n, None), int)
            ),
            None,
        )
        if images and marker is not None:
            count = self._num_features()
            ids = torch.cat([torch.full((ROWS, count), marker), ids], -1)
        batch: Batch = {"input_ids": ids}
        eos = getattr(self._text, "eos_token_id", None)
        if isinstance(eos, int) and eos < VOCABULARY:
            ids[..., -1] = eos
        if self._takes("attention_mask"):
            mask = torch.ones_like(ids)
            if padded:
                mask[-1, ..., -3:] = 0
            batch["attention_mask"] = mask
        if self._takes("bbox"):
            batch["bbox"] = torch.tensor([1, 2, 30, 40]).expand(*ids.shape, 4).clone()
        return batch

    def _num_features(self) -> int:
        features = getattr(self.model, "get_image_features", None)
        if features is None:
            features = self.model.model.get_image_features
        with torch.no_grad():
            found: Any = features(self._signals()["pixel_values"].to(next(self.model.parameters()).dtype))
        found = getattr(found, "pooler_output", None) if hasattr(found, "pooler_output") else found
        rows: int = sum(len(one) for one in found) if found[0].dim() > 1 else len(found)
        return rows // ROWS

    def _vision(self) -> Any:
        return getattr(self.config, "vision_config", None) or self.config

    def _size(self) -> tuple[int, int]:
        size = getattr(self._vision(), "image_size", 32)
        return tuple(size) if isinstance(size, list | tuple) else (size, size)  # type: ignore[return-value]

    def _signals(self) -> Batch:
        batch: Batch = {}
        vision = self._vision()
        channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", None) or 3
        if self._takes("pixel_values"):
            video = [getattr(vision, "num_frames", 4)] if "Video" in self.head or "Vivit" in self.head else []
            batch["pixel_values"] = self._numbers(ROWS, *video, channels, *self._size())
        if self._takes("pixel_values_videos") and not self._takes("input_ids"):
            frames = getattr(vision, "num_frames", None) or getattr(vision, "frames_per_clip", 4)
            batch["pixel_values_videos"] = self._numbers(ROWS, frames, channels, *self._size())
        if self._takes("input_values"):
            if hasattr(self.config, "max_length") and hasattr(self.config, "num_mel_bins"):
                batch["input_values"] = self._numbers(ROWS, self.config.max_length, self.config.num_mel_bins)
            else:
                batch["input_values"] = self._numbers(ROWS, 1600)
        if self._takes("input_features"):
            names = ("num_mel_bins", "input_feat_per_channel", "feature_size")
            parts = list(_with_parts(self.config))
            bins = next((getattr(c, n) for n in names for c in parts if getattr(c, n, None)), 80)
            long = 2 * getattr(self.config, "max_source_positions", 32)
            batch["input_features"] = (
                self._numbers(ROWS, bins, long)
                if "Whisper" in self.head or "Moonshine" in self.head
                else self._numbers(ROWS, 64, getattr(self.config, "feature_projection_input_dim", bins))
            )
        if self._takes("past_values"):
            length = self.config.context_length
            series = getattr(self.config, "num_input_channels", None)
            batch["past_values"] = self._numbers(ROWS, length, *([series] if series else []))
        return batch

    def _labels(self, batch: Batch) -> Batch:
        head, number = self.head, getattr(self.config, "num_labels", 3)
        if self._takes("start_positions"):
            return {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([4, 5])}
        if not self._takes("labels"):
            return {}
        if re.search(r"TokenClassification|FrameClassification", head):
            ids = batch.get("input_ids")
            return (
                {"labels": torch.arange(ids.numel()).reshape(ids.shape) % number} if ids is not None else {}
            )
        if re.search(r"Classification|XVector|NextSentence|MultipleChoice", head):
            return {"labels": torch.tensor([0, 1])}
        if re.search(r"ObjectDetection|InstanceSegmentation", head):
            boxes = torch.tensor([[0.5, 0.5, 0.2, 0.3], [0.3, 0.4, 0.2, 0.2]])
            return {"labels": [{"class_labels": torch.tensor([0, 1]), "boxes": boxes} for _ in range(ROWS)]}
        if "SemanticSegmentation" in head:
            return {"labels": torch.zeros(ROWS, *self._size(), dtype=torch.long)}
        if "DepthEstimation" in head:
            return {"labels": self._numbers(ROWS, *self._size()).abs()}
        if "CTC" in head:
            return {"labels": self._integers(ROWS, 3)}
        encodes = self._takes("decoder_input_ids") or "input_ids" not in batch
        return {"labels": self._integers(ROWS, LENGTH) if encodes else batch["input_ids"].clamp(max=80)}


def build(kind: str, name: str) -> tuple[nn.Module, Recipe]:
    """A tiny model in training mode whose weights are all different from zero, and its batches."""
    cls = getattr(transformers, name)
    config = next((c for c in _with_parts(tiny_config(kind)) if isinstance(c, cls.config_class)), None)
    if config is None:
        raise ValueError(f"no {cls.config_class.__name__} in the configuration of {kind}")
    torch.manual_seed(0)
    model: nn.Module = cls(config)
    count = sum(parameter.numel() for parameter in model.parameters())
    if count > 40_000_000:
        raise ValueError(f"{count / 1e6:.0f} million parameters, though made small")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and not parameter.any():
                parameter.normal_(std=0.02)
    return model.train(), Recipe(model, config)
