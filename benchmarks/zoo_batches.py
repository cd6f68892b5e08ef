"""Batches that train a tiny model of transformers, made by the names that its `forward` takes."""

import inspect
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.zoo_configs import LENGTH, ROWS, VOCABULARY, with_parts

Batch = dict[str, Any]


class Recipe:
    """Batches for one model.

    Args:
        model: Tiny.
        config: Its configuration.
        side: Pixels of an image whose size no configuration gives.
    """

    def __init__(self, model: nn.Module, config: Any, side: int = 32) -> None:
        self.model, self.config, self.head, self.side = model, config, type(model).__name__, side
        parameters = inspect.signature(model.forward).parameters
        self._names = list(parameters)
        empty = inspect.Parameter.empty
        self._required = {
            n for n, p in parameters.items() if p.default is empty and p.kind is p.POSITIONAL_OR_KEYWORD
        }
        self._generator = torch.Generator().manual_seed(1)
        self._text = getattr(config, "text_config", None) or config.get_text_config()
        self._parts = list(with_parts(config))

    def attempts(self) -> Iterator[Callable[[], list[Batch]]]:
        """Make pairs of micro-batches to try, the fullest first; the second one has a padded tail."""
        for labels in (True, False):
            for images in (True, False) if self._takes("input_ids") else (True,):
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
        for name, make in self._others().items():
            if name in self._required or (name not in batch and self._takes(name)):
                batch[name] = make()
        if labels:
            batch.update(self._labels(batch))
        return batch

    def _takes(self, name: str) -> bool:
        return name in self._names

    def _integers(self, *shape: int, high: int = 80) -> Tensor:
        return torch.randint(5, min(high, self._vocabulary() - 1), shape, generator=self._generator)

    def _numbers(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator)

    def _vocabulary(self) -> int:
        size = getattr(self._text, "vocab_size", None)
        return size if isinstance(size, int) and size > 8 else VOCABULARY

    def _value(self, *names: str, default: int) -> int:
        """The first of these names that a configuration or a part of it has."""
        for name in names:
            for config in self._parts:
                value = vars(config).get(name)
                if isinstance(value, int) and value:
                    return value
        return default

    # ---- words

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
            ids = torch.cat([torch.full((ROWS, self._num_features()), marker), ids], -1)
        batch: Batch = {"input_ids": ids}
        eos = getattr(self._text, "eos_token_id", None)
        if isinstance(eos, int) and eos < self._vocabulary():
            ids[..., -1] = eos
        question = getattr(self.config, "question_token_id", None)
        if isinstance(question, int):
            ids[..., 3] = question
        if self._takes("attention_mask"):
            mask = torch.ones_like(ids)
            if padded:
                mask[-1, ..., -3:] = 0
            batch["attention_mask"] = mask
        if self._takes("mm_token_type_ids"):
            batch["mm_token_type_ids"] = (
                (ids == marker).long() if marker is not None else torch.zeros_like(ids)
            )
        if self._takes("bbox"):
            batch["bbox"] = torch.tensor([1, 2, 30, 40]).expand(*ids.shape, 4).clone()
        return batch

    def _num_features(self) -> int:
        if self._takes("image_grid_thw"):
            merge: int = self._value("spatial_merge_size", "merge_size", default=1)
            return 16 // merge**2
        features = getattr(self.model, "get_image_features", None)
        if features is None:
            features = self.model.model.get_image_features
        with torch.no_grad():
            found: Any = features(self._signals()["pixel_values"].to(next(self.model.parameters()).dtype))
        found = getattr(found, "pooler_output", None) if hasattr(found, "pooler_output") else found
        rows: int = sum(len(one) for one in found) if found[0].dim() > 1 else len(found)
        return rows // ROWS

    # ---- pictures, sounds, series

    def _vision(self) -> Any:
        return getattr(self.config, "vision_config", None) or self.config

    def _size(self) -> tuple[int, int]:
        for config in (self._vision(), *self._parts):
            size = vars(config).get("image_size")
            if size is not None:
                return tuple(size) if isinstance(size, list | tuple) else (size, size)  # type: ignore[return-value]
        return self.side, self.side

    def _channels(self) -> int:
        vision = self._vision()
        return getattr(vision, "num_channels", None) or getattr(vision, "in_channels", None) or 3

    def _signals(self) -> Batch:
        batch: Batch = {}
        if self._takes("image_grid_thw") and self._takes("pixel_values"):
            batch["pixel_values"] = self._numbers(ROWS * 16, self._wide())
            batch["image_grid_thw"] = torch.tensor([[1, 4, 4]] * ROWS)
        elif self._takes("pixel_values"):
            batch["pixel_values"] = self._pixels()
        if self._takes("pixel_values_videos") and (
            not self._takes("input_ids") or "pixel_values_videos" in self._required
        ):
            frames = self._value("num_frames", "frames_per_clip", default=4)
            batch["pixel_values_videos"] = self._numbers(ROWS, frames, self._channels(), *self._size())
        if self._takes("input_values"):
            batch["input_values"] = self._sound()
        if self._takes("input_features") and "input_values" not in batch:
            batch["input_features"] = self._features()
        if self._takes("past_values"):
            batch.update(self._series())
        return batch

    def _pixels(self) -> Tensor:
        lead: tuple[int, ...] = ()
        if re.search(r"Video|Vivit|Timesformer", self.head):
            lead = (self._value("num_frames", default=4),)
        elif re.search(r"LightGlue|SuperGlue|LoFTR|Idefics", self.head):
            lead = (2,) if not self.head.startswith("Idefics") else (1,)
        channels = 4 if self.head.startswith("VitMatte") else self._channels()
        return self._numbers(ROWS, *lead, channels, *self._size())

    def _sound(self) -> Tensor:
        if hasattr(self.config, "max_length") and hasattr(self.config, "num_mel_bins"):
            return self._numbers(ROWS, self.config.max_length, self.config.num_mel_bins)
        if re.search(r"Encodec|Dac|Mimi|XCodec|Xcodec|VibeVoiceAcoustic", self.head):
            return self._numbers(ROWS, 1, 1600)
        long = 8000 if re.search(r"XVector|Data2Vec|Moonshine", self.head) else 1600
        return self._numbers(ROWS, long)

    def _features(self) -> Tensor:
        bins = self._value(
            "num_mel_bins", "input_feat_per_channel", "feature_size", "input_feat_size", "n_mels", default=80
        )
        if self.head.startswith("Clap"):
            return self._numbers(ROWS, 1, 64, bins)
        long = 2 * getattr(self.config, "max_source_positions", 32)
        if self.head.startswith("VoxtralRealtime"):  # as many as there are words
            long = 8 * LENGTH
        if re.search(r"Whisper|Moonshine|AudioFlamingo|MusicFlamingo|Voxtral|Clvp|Qwen2Audio", self.head):
            return self._numbers(ROWS, bins, long)
        wide = self._value("feature_projection_input_dim", "input_dim", default=bins)
        return self._numbers(ROWS, 64, wide)

    def _series(self) -> Batch:
        lags = vars(self.config).get("lags_sequence")
        length = self.config.context_length + (max(lags) if lags else 0)
        series = getattr(self.config, "num_input_channels", None)
        batch: Batch = {"past_values": self._numbers(ROWS, length, *([series] if series else []))}
        if lags:
            ahead, wide = self.config.prediction_length, self.config.num_time_features
            batch["past_time_features"] = self._numbers(ROWS, length, wide)
            batch["past_observed_mask"] = torch.ones(ROWS, length)
            batch["future_values"] = self._numbers(ROWS, ahead)
            batch["future_time_features"] = self._numbers(ROWS, ahead, wide)
        elif self._takes("future_values") and "Prediction" in self.head:
            batch["future_values"] = self._numbers(ROWS, self.config.prediction_length, series or 1)
        return batch

    # ---- what few models take

    def _others(self) -> dict[str, Callable[[], Any]]:
        """Makers of what has one name in all models, of what must be there, and of what one family takes."""
        made: dict[str, Callable[[], Any]] = {
            "flattened_patches": partial(self._patches, 32),
            "visual_feats": lambda: self._numbers(ROWS, 5, self._value("visual_feat_dim", default=32)),
            "visual_pos": lambda: self._numbers(ROWS, 5, self._value("visual_pos_dim", default=4)),
            "input_features_mask": self._frame_mask,
            "task_inputs": lambda: self._integers(ROWS, 8),
        }
        made |= {name: make for name, make in self._needed().items() if name in self._required}
        if "query_embeds" in self._required:
            wide = self._value("encoder_hidden_size", default=32)
            made["encoder_hidden_states"] = lambda: self._numbers(ROWS, 6, wide)
        if self._takes("spatial_shapes"):
            made |= self._patched(self._value("patch_size", default=8))
        return made | self._of_family()

    def _needed(self) -> dict[str, Callable[[], Any]]:
        hidden = self._value("hidden_size", "d_model", default=32)
        return {
            "hidden_states": lambda: self._numbers(32, self._wide()),
            "grid_thw": lambda: torch.tensor([[1, 4, 4], [1, 4, 4]]),
            "qformer_input_ids": lambda: self._integers(ROWS, LENGTH),
            "query_embeds": lambda: self._numbers(ROWS, 4, hidden),
            "audio_mel": lambda: self._numbers(ROWS, 64, self._value("input_feat_size", default=128)),
            "audio_mel_mask": lambda: torch.zeros(ROWS, 64, dtype=torch.bool),
        }

    def _wide(self) -> int:
        """Numbers of one patch."""
        side = self._value("patch_size", default=8)
        return self._channels() * self._value("temporal_patch_size", default=1) * side * side

    def _of_family(self) -> dict[str, Callable[[], Any]]:
        families: dict[str, Callable[[], dict[str, Callable[[], Any]]]] = {
            "DecisionTransformer": self._decisions,
            "Idefics": lambda: {"image_attention_mask": lambda: torch.ones(ROWS, LENGTH, 1)},
            "Kosmos2": lambda: {
                "image_embeds_position_mask": partial(
                    self._first, self._value("latent_query_num", default=64)
                )
            },
            "FastSpeech2": self._spoken,
            "Sam|EdgeTam": lambda: {
                "input_points": lambda: torch.full((ROWS, 1, 1, 2), 4.0),
                "input_labels": lambda: torch.ones(ROWS, 1, 1, dtype=torch.long),
            },
            "PI0": lambda: {
                "state": lambda: self._numbers(ROWS, self._value("max_state_dim", default=32)),
                "actions": lambda: self._numbers(
                    ROWS, self._value("chunk_size", default=50), self._value("max_action_dim", default=32)
                ),
            },
            "Mask2Former|MaskFormer|OneFormer|Eomt|Videomt": lambda: {
                "mask_labels": self._masks,
                "class_labels": lambda: [torch.tensor([0, 1]) for _ in range(ROWS)],
            },
        }
        made: dict[str, Callable[[], Any]] = {}
        for family, make in families.items():
            if re.match(family, self.head):
                made |= make()
        return made

    def _decisions(self) -> dict[str, Callable[[], Any]]:
        return {
            "states": lambda: self._numbers(ROWS, 6, self.config.state_dim),
            "actions": lambda: self._numbers(ROWS, 6, self.config.act_dim),
            "rewards": lambda: self._numbers(ROWS, 6, 1),
            "returns_to_go": lambda: self._numbers(ROWS, 6, 1),
            "timesteps": lambda: torch.arange(6).expand(ROWS, 6).clone(),
        }

    def _patches(self, rows: int) -> Tensor:
        wide = self._value("patch_embed_hidden_size", default=32)
        patches = self._numbers(ROWS, rows, wide + 2)
        patches[..., 0] = torch.arange(rows) // 8 + 1
        patches[..., 1] = torch.arange(rows) % 8 + 1
        return patches

    def _patched(self, side: int) -> dict[str, Callable[[], Any]]:
        wide = 3 * side * side
        return {
            "pixel_values": lambda: self._numbers(ROWS, 16, wide),
            "pixel_attention_mask": lambda: torch.ones(ROWS, 16, dtype=torch.long),
            "spatial_shapes": lambda: torch.tensor([[4, 4]] * ROWS),
        }

    def _frame_mask(self) -> Tensor:
        features = self._features()
        return torch.ones(ROWS, max(features.shape[1:]), dtype=torch.long)

    def _first(self, count: int) -> Tensor:
        mask = torch.zeros(ROWS, LENGTH, dtype=torch.long)
        mask[:, :count] = 1
        return mask

    def _spoken(self) -> dict[str, Callable[[], Any]]:
        frames = 2 * LENGTH
        return {
            "spectrogram_labels": lambda: self._numbers(
                ROWS, frames, self._value("num_mel_bins", default=80)
            ),
            "duration_labels": lambda: torch.full((ROWS, LENGTH), 2),
            "pitch_labels": lambda: self._numbers(ROWS, LENGTH, 1),
            "energy_labels": lambda: self._numbers(ROWS, LENGTH, 1),
        }

    def _masks(self) -> list[Tensor]:
        height, width = self._size()
        masks = torch.zeros(2, height, width)
        masks[0, : height // 2] = 1
        masks[1, height // 2 :] = 1
        return [masks.clone() for _ in range(ROWS)]

    # ---- labels

    def _labels(self, batch: Batch) -> Batch:
        if self._takes("start_positions"):
            return {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([4, 5])}
        if self._takes("return_loss"):
            return {"return_loss": True}
        for name in ("next_sentence_label", "sentence_order_label"):
            if self._takes(name):
                return self._two_heads(batch, name)
        if not self._takes("labels"):
            return {}
        makers: list[tuple[str, Callable[[], Any]]] = [
            (r"TokenClassification|FrameClassification", lambda: self._by_token(batch)),
            (r"VisualQuestion|^ViltForQuestion", lambda: self._numbers(ROWS, self._number()).sigmoid()),
            (
                r"Classification|XVector|NextSentence|MultipleChoice|ImageTextRetrieval",
                lambda: torch.arange(2),
            ),
            (r"ObjectDetection|InstanceSegmentation", self._boxes),
            (r"SemanticSegmentation", lambda: torch.zeros(ROWS, *self._size(), dtype=torch.long)),
            (r"DepthEstimation", lambda: self._numbers(ROWS, *self._size()).abs()),
            (r"CTC", lambda: self._integers(ROWS, 3, high=30)),
            (r"", lambda: self._words(batch)),
        ]
        label = next(make for pattern, make in makers if re.search(pattern, self.head))()
        return {} if label is None else {"labels": label}

    def _number(self) -> int:
        number: int = getattr(self.config, "num_labels", 3)
        return number

    def _by_token(self, batch: Batch) -> Tensor | None:
        ids = batch.get("input_ids")
        return None if ids is None else torch.arange(ids.numel()).reshape(ids.shape) % self._number()

    def _boxes(self) -> list[dict[str, Tensor]]:
        boxes = torch.tensor([[0.5, 0.5, 0.2, 0.3], [0.3, 0.4, 0.2, 0.2]])
        return [{"class_labels": torch.tensor([0, 1]), "boxes": boxes} for _ in range(ROWS)]

    def _words(self, batch: Batch) -> Tensor:
        if self._takes("decoder_input_ids") or "input_ids" not in batch:
            return self._integers(ROWS, LENGTH)
        ids: Tensor = batch["input_ids"]
        return ids.clamp(max=min(80, self._vocabulary() - 1))

    def _two_heads(self, batch: Batch, name: str) -> Batch:
        both: Batch = {name: torch.tensor([0, 1])}
        if self._takes("labels") and "PreTraining" in self.head:
            both["labels"] = batch["input_ids"].clamp(max=min(80, self._vocabulary() - 1))
        return both
