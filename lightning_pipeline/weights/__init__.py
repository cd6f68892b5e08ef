"""Weights of the whole module where no rank need hold them all: moved, gathered, read and written by name."""

from lightning_pipeline.weights.absent import fetch_absent, is_whole
from lightning_pipeline.weights.after_fit import gather_weights, receives_all
from lightning_pipeline.weights.save import save_weights

__all__ = ["fetch_absent", "gather_weights", "is_whole", "receives_all", "save_weights"]
