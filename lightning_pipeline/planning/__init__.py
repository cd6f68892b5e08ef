"""What a pipeline would do and need, and what would make it faster. No Lightning here."""

from lightning_pipeline.planning.assumptions import Assumptions
from lightning_pipeline.planning.forecast import Forecast

__all__ = ["Assumptions", "Forecast"]
