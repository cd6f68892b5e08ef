"""Weights of the whole module where no rank need hold them all: moved, gathered, read and written by name."""

from lightning_pipeline.weights.absent import fetch_absent
from lightning_pipeline.weights.after_fit import gather_weights, receives_all
from lightning_pipeline.weights.save import save_weights
from lightning_pipeline.weights.staged import Staging

__all__ = ["Staging", "fetch_absent", "gather_weights", "receives_all", "save_weights"]
