"""Runs of a step without any unit: which it calls, what one device divides by, which samples it mixes."""

from lightning_pipeline.model.rehearsal.as_one import Heard
from lightning_pipeline.model.rehearsal.rehearsals import Rehearsals
from lightning_pipeline.model.rehearsal.routes import RouteFinder

__all__ = ["Heard", "Rehearsals", "RouteFinder"]
