"""The search behind `Auto`: orders of forwards and backwards, and weight gradients put into their gaps."""

from lightning_pipeline.schedules.search.auto import Auto

__all__ = ["Auto"]
