"""Weights of the whole module where no rank need hold them all: moved, gathered, read and written by name."""

from lightning_pipeline.weights.absent import fetch_absent
from lightning_pipeline.weights.after_fit import gather_weights, receives_all
from lightning_pipeline.weights.convert import Format, convert, plan_conversion, unfinished, written_bytes
from lightning_pipeline.weights.files import holds_weights_only, open_weights, prefix_for
from lightning_pipeline.weights.load import fillers, load_weights
from lightning_pipeline.weights.save import save_weights
from lightning_pipeline.weights.staged import Staging
from lightning_pipeline.weights.whole import gathered

__all__ = [
    "Format",
    "Staging",
    "convert",
    "fetch_absent",
    "fillers",
    "gather_weights",
    "gathered",
    "holds_weights_only",
    "load_weights",
    "open_weights",
    "plan_conversion",
    "prefix_for",
    "receives_all",
    "save_weights",
    "unfinished",
    "written_bytes",
]
