"""Tiny models of every architecture of transformers, under every head."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

from benchmarks.zoo_batches import Recipe
from benchmarks.zoo_compare import COMPILED
from benchmarks.zoo_configs import RUNGS, tiny_config, with_parts

LARGEST = 40_000_000
VARIANTS = (
    "dropout",
    "checkpointing",
    "router losses",
    "hidden states",
    "eager",
    "sdpa",
    "evaluation",
    *COMPILED,
)


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


def offers(kind: str, variant: str) -> bool:
    """Whether a variant means something for a model type."""
    if variant != "router losses":
        return True
    return any("output_router_logits" in vars(part) for part in with_parts(CONFIG_MAPPING[kind]()))


def builds(kind: str, name: str, variant: str = "") -> Iterator[Callable[[], tuple[nn.Module, Recipe]]]:
    """Ways to build a model, the smallest first."""
    for rung in RUNGS:
        yield partial(build, kind, name, rung, variant)


def build(kind: str, name: str, rung: str = "values", variant: str = "") -> tuple[nn.Module, Recipe]:
    """A tiny model in training mode whose weights are all different from zero, and its batches."""
    cls = getattr(transformers, name)
    config = _config(cls, kind, rung)
    _vary(config, variant)
    if "LMHead" in name and "is_decoder" in vars(config):
        config.is_decoder = True
    if rung in ("stages", "whole"):
        with torch.device("meta"):
            _check_size(cls(config))
    torch.manual_seed(0)
    model: nn.Module = cls(config)
    _check_size(model)
    for module in model.modules():
        if isinstance(module, nn.Dropout) and variant != "dropout":
            module.p = 0.0
    if variant == "checkpointing":
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and not parameter.any():
                parameter.normal_(std=0.02)
    return model.train(), Recipe(model, config, side=32 if rung == "values" else 64)


def _vary(config: Any, variant: str) -> None:
    """Set what a variant sets in a configuration."""
    for part in with_parts(config):
        if variant == "router losses" and "output_router_logits" in vars(part):
            part.output_router_logits = True
        if variant == "dropout":
            for option, value in list(vars(part).items()):
                if "dropout" in option and isinstance(value, float):
                    setattr(part, option, 0.1)
    if variant == "hidden states":
        config.output_hidden_states = True
    if variant in ("eager", "sdpa"):
        config._attn_implementation = variant


def _check_size(model: nn.Module) -> None:
    count = sum(parameter.numel() for parameter in model.parameters())
    if count > LARGEST:
        raise ValueError(f"{count / 1e6:.0f} million parameters, though made small")


def _config(cls: Any, kind: str, rung: str) -> Any:
    """The part of the type's configuration that a class takes."""
    given = tiny_config(kind, rung)
    config = next((c for c in with_parts(given) if isinstance(c, cls.config_class)), None)
    if config is None and re.search(r"ForCausalLM|ForConditionalGeneration", cls.__name__):
        return given  # a class that serves a type of another name takes its values by name
    if config is None:
        return tiny_config(cls.config_class.model_type, rung)
    return config
