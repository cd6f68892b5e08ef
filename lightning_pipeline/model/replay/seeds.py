"""Random numbers that do not depend on how many stages there are.

Each random call between units draws from a state made of (seed, step, micro-batch, replica, number of the
draw), and each unit call from one that has the call's own number: a draw on a placeholder, or a unit that
runs elsewhere, then changes nothing for the others.
"""

import random
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_pipeline.model.tensors import Generators, random_state_kept

_MASK = (1 << 63) - 1
_UNIT_DRAWS = 1 << 40  # numbers of unit calls, apart from those of draws between units

RANDOM_FUNCTIONS: frozenset[Any] = frozenset(
    function
    for owner, names in (
        (torch, "rand randn randint randperm rand_like randn_like randint_like bernoulli multinomial normal "
                "poisson binomial rrelu rrelu_ dropout dropout_ alpha_dropout alpha_dropout_ feature_dropout "
                "feature_alpha_dropout _sample_dirichlet _standard_gamma native_dropout"),
        (F, "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout rrelu gumbel_softmax "
            "scaled_dot_product_attention multi_head_attention_forward fractional_max_pool2d"),
        (Tensor, "bernoulli bernoulli_ multinomial normal_ uniform_ random_ exponential_ "
                 "cauchy_ geometric_ log_normal_"),
    )
    for name in names.split()
    if (function := getattr(owner, name, None)) is not None
)  # fmt: skip


def mix(*numbers: int) -> int:
    """One well spread 63-bit number from several. Source: the finaliser of splitmix64."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state ^ (number & _MASK)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


def seed_torch(seed: int) -> None:
    """Seed torch's generators, the current CUDA device's too where CUDA is in use."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)


class StepSeeds:
    """The random state of one batch: set for each micro-batch, put back at the end."""

    def __init__(self, modules: Sequence[nn.Module], key: Sequence[int]) -> None:
        self._key = mix(*key)
        self._generators = Generators(modules)
        self._kept: AbstractContextManager[None] = random_state_kept(self._generators)
        self._kept.__enter__()

    def microbatch(self, microbatch: int) -> "MicrobatchSeeds":
        """Seed everything for one micro-batch."""
        return MicrobatchSeeds(mix(self._key, microbatch), self._generators)

    def close(self) -> None:
        """Put back the states from before the batch."""
        self._kept.__exit__(None, None, None)


class MicrobatchSeeds:
    """The draws of one micro-batch."""

    def __init__(self, key: int, generators: Generators) -> None:
        self._key = key
        self._generators = generators
        self._draws = 0
        self.host()
        seed_torch(key)

    def host(self, *call: int) -> None:
        """Seed numpy and Python, on entry and after calls where a unit was seen to draw from them."""
        seed = mix(self._key, *call)
        random.seed(seed)
        numpy.random.seed(seed & 0xFFFFFFFF)
        self._generators.seed_host(seed)

    def draw(self, generator: torch.Generator | None = None) -> None:
        """Seed for the next random call between units."""
        self._draws += 1
        seed = mix(self._key, self._draws)
        if generator is not None:
            generator.manual_seed(seed)
        else:
            seed_torch(seed)

    def unit(self, number: int, nth: int) -> None:
        """Seed for a call of a unit."""
        seed = mix(self._key, _UNIT_DRAWS + number, nth)
        seed_torch(seed)
        self._generators.seed_torch(seed)
