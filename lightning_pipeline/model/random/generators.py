"""Who draws random numbers: functions of torch, and generators that modules own as attributes."""

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

_KINDS = frozenset({torch.Generator, numpy.random.Generator, numpy.random.RandomState, random.Random})


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


class Generators:
    """The generators that a module tree holds, each once.

    Args:
        modules: Where to look; None has none.
    """

    def __init__(self, modules: Iterable[nn.Module] | None) -> None:
        attributes = [module.__dict__ for module in modules or ()]
        # By type: isinstance with torch.Generator runs Python code, 20 ms for the attributes of 32 layers.
        kinds = set(map(type, chain.from_iterable(map(dict.values, attributes))))
        kinds = {kind for kind in kinds if not _KINDS.isdisjoint(kind.__mro__)}
        found = (value for held in attributes if kinds for value in held.values() if type(value) in kinds)
        self._all = list({id(value): value for value in found}.values())

    def states(self) -> list[Any]:
        """Where each of them stands."""
        return [state_of(generator) for generator in self._all]

    def restore(self, states: list[Any]) -> None:
        """Put them back."""
        for generator, state in zip(self._all, states, strict=True):
            set_state(generator, state)

    def host_states(self) -> list[Any]:
        """The same without torch's."""
        return [state_of(generator) for generator in self._all if not isinstance(generator, torch.Generator)]

    def seed_host(self, seed: int) -> None:
        """Seed numpy's and Python's alike."""
        for generator in self._all:
            if not isinstance(generator, torch.Generator):
                _seed(generator, seed)

    @property
    def of_torch(self) -> list[torch.Generator]:
        """Torch's."""
        return [generator for generator in self._all if isinstance(generator, torch.Generator)]


def host_draws(generators: Generators) -> str:
    """Where numpy's and Python's generators stand in their blocks, and those of a module but for torch's."""
    host: Any = numpy.random.get_state(legacy=False)
    return str((host["state"]["pos"], random.getstate()[1][-1], generators.host_states()))


class RandomState:
    """Where torch, numpy, Python and some generators stand now.

    Args:
        generators: Of the user's; `None`: the global ones alone.
    """

    def __init__(self, generators: Generators | None = None) -> None:
        devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else range(0)
        self._torch = torch.get_rng_state()
        self._cuda = [(device, torch.cuda.get_rng_state(device)) for device in devices]
        self._numpy, self._python = numpy.random.get_state(), random.getstate()
        self._generators, self._own = generators, [] if generators is None else generators.states()

    def restore(self) -> None:
        """Let them stand there again."""
        torch.set_rng_state(self._torch)
        for device, state in self._cuda:
            torch.cuda.set_rng_state(state, device)
        numpy.random.set_state(self._numpy)
        random.setstate(self._python)
        if self._generators is not None:
            self._generators.restore(self._own)


@contextmanager
def random_state_kept(generators: Generators | None = None) -> Iterator[None]:
    """Restore torch's, numpy's and Python's random state, and that of `generators`, on exit."""
    state = RandomState(generators)
    try:
        yield
    finally:
        state.restore()


def is_generator(value: Any) -> bool:
    """Whether it draws random numbers: torch's, NumPy's and Python's own, and classes made of these."""
    return not _KINDS.isdisjoint(type(value).__mro__)


def state_of(generator: Any) -> Any:
    """Where a generator stands."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, numpy.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def set_state(generator: Any, state: Any) -> None:
    """Let it stand there."""
    if isinstance(generator, numpy.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, numpy.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    else:
        generator.seed(seed if isinstance(generator, random.Random) else seed & 0xFFFFFFFF)
