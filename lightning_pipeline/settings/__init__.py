"""Arguments, checked."""

from lightning_pipeline.settings.choices import INTEGRITY, Copying
from lightning_pipeline.settings.names import KnownArguments
from lightning_pipeline.settings.problems import Problems, refusal_of_early_backwards
from lightning_pipeline.settings.reading import read_settings
from lightning_pipeline.settings.values import Settings

__all__ = [
    "INTEGRITY",
    "Copying",
    "KnownArguments",
    "Problems",
    "Settings",
    "read_settings",
    "refusal_of_early_backwards",
]
