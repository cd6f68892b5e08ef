"""Random numbers of a micro-batch: the same for any number of stages, in a batch that is cut or whole."""

from lightning_pipeline.model.random.draws import Draws, JoinedDraws, Kinds, seed_torch
from lightning_pipeline.model.random.generators import (
    RANDOM_FUNCTIONS,
    Generators,
    host_draws,
    is_generator,
    random_state_kept,
    set_state,
    state_of,
)
from lightning_pipeline.model.random.seeds import (
    MicrobatchSeeds,
    SeedsOfStart,
    States,
    StepSeeds,
    generators_in,
)

__all__ = [
    "RANDOM_FUNCTIONS",
    "Draws",
    "Generators",
    "JoinedDraws",
    "Kinds",
    "MicrobatchSeeds",
    "SeedsOfStart",
    "States",
    "StepSeeds",
    "generators_in",
    "host_draws",
    "is_generator",
    "random_state_kept",
    "seed_torch",
    "set_state",
    "state_of",
]
