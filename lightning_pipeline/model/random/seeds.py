"""Random numbers that do not depend on how many stages there are, and seeds of the user's own.

Between units each generator stands at a mark, a seed made of (seed, step, micro-batch, replica, number of
the draw), and draws from there; afterwards it stands at the next one. A unit draws from a seed made of the
mark and the unit's number. So a draw on a placeholder, or a unit that runs elsewhere, changes nothing for
the others, and code that keeps a generator's state and puts it back, such as activation checkpointing, draws
the same again.

A generator that stands at no mark was seeded by the user. It is left alone, and its state travels with what
units return.
"""

import pickle
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch
from torch import nn

from lightning_pipeline.model.random.generators import Generators, RandomState

_MASK = (1 << 63) - 1
_UNIT_DRAWS = 1 << 40  # apart from the numbers of generators
_BACKWARD_DRAWS = 1 << 41
_BLOCKS = 500  # of 624 draws each, between two seeds

States = tuple[bytes | None, ...]
"""Of the generators of a micro-batch, where the user has seeded them."""


def mix(*numbers: int) -> int:
    """One well spread 63-bit number from several. Source: the finaliser of splitmix64."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = _mixed_in(state, number)
    return state


def _mixed_in(state: int, number: int) -> int:
    """What `mix` gives for some numbers and one more, from what it gives for those."""
    state = (state ^ (number & _MASK)) * 0xBF58476D1CE4E5B9 & _MASK
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
    return state ^ (state >> 31)


class StepSeeds:
    """The random state of one batch: set for each micro-batch, put back at the end.

    Attributes:
        one_host: Whether numpy and Python give all micro-batches the same between units.
    """

    def __init__(self, modules: Sequence[nn.Module], key: Sequence[int]) -> None:
        self._key = mix(*key)
        self._generators = Generators(modules)
        self._before = RandomState(self._generators)  # no open context: one that is dropped ends by itself
        self.one_host = False

    def microbatch(self, microbatch: int) -> "MicrobatchSeeds":
        """Seed everything for one micro-batch."""
        host = mix(self._key, 0) if self.one_host else None
        return MicrobatchSeeds(mix(self._key, microbatch), self._generators, host)

    def close(self) -> None:
        """Put back the states from before the batch."""
        self._before.restore()


def _default_generators() -> list[torch.Generator]:
    cuda = torch.cuda.is_initialized()
    return [torch.default_generator, *([_cuda_generator()] if cuda else [])]


def _cuda_generator() -> torch.Generator:
    found: torch.Generator = torch.cuda.default_generators[torch.cuda.current_device()]
    return found


class MicrobatchSeeds:
    """The draws of one micro-batch.

    Args:
        key: Its seed.
        generators: Those that there are.
        host: The seed of numpy and Python, where that is another one.
    """

    def __init__(self, key: int, generators: Generators, host: int | None = None) -> None:
        self._key, self._host_key = key, key if host is None else host
        self._generators = generators
        defaults = _default_generators()
        self._all = [*defaults, *generators.of_torch]
        self._defaults = range(len(defaults))
        self._last = [(0, 0)] * len(self._all)  # seed and number of the last mark of each
        self._mixed = mix(key)
        self._mixed_by_number = [mix(key, number) for number in range(len(self._all))]
        self._lost: dict[int, bytes] = {}
        self.host()
        for number in range(len(self._all)):
            self._mark(number, 1)

    def host(self, *call: int) -> None:
        """Seed numpy and Python, on entry and after calls where a unit was seen to draw from them."""
        self._host(mix(self._host_key, *call))

    def _host(self, seed: int) -> None:
        random.seed(seed)
        numpy.random.seed(seed & 0xFFFFFFFF)
        self._generators.seed_host(seed)
        self._host_seed = seed

    def host_in_unit(self, *call: int) -> None:
        """A unit is called that may draw from them: there, a micro-batch has numbers of its own."""
        if self._host_key != self._key and not self.host_is_users():
            self._host(mix(self._key, _UNIT_DRAWS, *call))

    def host_is_users(self) -> bool:
        """Whether numpy or Python stands where no draw leads from the last seed: the user has seeded it."""
        return not _draws_lead_here(self._host_seed)

    def host_place(self) -> int:
        """Where numpy and Python stand, as a number to compare."""
        return hash(
            pickle.dumps((random.getstate(), numpy.random.get_state(), self._generators.host_states()))
        )

    # ---- marks

    def _seed_of_mark(self, number: int, count: int) -> int:
        """The lower half seeds all generators, the upper half tells what it is. Users' seeds are short."""
        return count << 32 | _mixed_in(self._mixed_by_number[number], count) & 0xFFFFFFFF

    def _mark(self, number: int, count: int) -> None:
        seed, last = self._last[number]
        if last != count:
            seed = self._seed_of_mark(number, count)
        self._last[number] = seed, count
        self._all[number].manual_seed(seed)

    def _count(self, number: int) -> int | None:
        """Which mark a generator stands at; None where the user has seeded it."""
        seed = self._all[number].initial_seed()
        if seed == self._last[number][0]:
            return self._last[number][1]
        count = seed >> 32
        if not count or count >= 1 << 31 or self._seed_of_mark(number, count) != seed:
            return None
        self._last[number] = seed, count
        return count

    def place(self) -> Any:
        """Where torch's generator of the CPU stands: what a recomputation starts from."""
        return self._count(0) or _state(self._all[0])

    def at_mark(self) -> bool:
        """Whether torch's generator of the CPU stands where code between units draws."""
        return self._count(0) is not None

    # ---- draws between units

    def drawing(self, generator: torch.Generator | None = None) -> list[tuple[int, int]]:
        """A random call between units comes: which generators are at marks, and at which."""
        if generator is None or generator is self._all[0]:
            numbers: Any = self._defaults
        else:
            numbers = [number for number, one in enumerate(self._all) if one is generator]
        return [(number, count) for number in numbers if (count := self._count(number)) is not None]

    def drawn(self, before: list[tuple[int, int]]) -> None:
        """It is done."""
        for number, count in before:
            self._mark(number, count + 1)

    # ---- calls of units

    def enter(self, unit: int) -> "list[tuple[int, int] | None]":
        """Seed for a call of a unit. Generators that the user has seeded go on from where they are.

        Args:
            unit: Its number.

        Returns:
            For each generator the mark at which it stood and the seed that it got.
        """
        entered: list[tuple[int, int] | None] = []
        for number, generator in enumerate(self._all):
            count = self._count(number)
            if count is None:
                entered.append(None)
            else:
                seed = _mixed_in(_mixed_in(self._mixed, _UNIT_DRAWS + unit), count)
                generator.manual_seed(seed)
                entered.append((count, seed))
        return entered

    def leave(
        self, entered: "list[tuple[int, int] | None]", given: list[torch.Generator],
        *, again: bool, host: bool = False,
    ) -> States:  # fmt: skip
        """The call is over: back to the marks.

        Args:
            entered: What `enter` returned.
            given: Generators that are arguments of the unit.
            again: Whether the step calls the unit several times: the next draws are to be others.
            host: Whether units draw from numpy or Python.

        Returns:
            The states of generators that the user has seeded, and `None` for the others; then of those that
            the unit was given; last of numpy's and Python's, where the user has seeded these. Empty where
            that is all of them.
        """
        states: list[bytes | None] = []
        for number, at in enumerate(entered):
            if at is not None and self._all[number].initial_seed() == at[1]:
                self._mark(number, at[0] + again)
                states.append(None)
            else:
                states.append(_state(self._all[number]))
        states += map(_state, given)
        if host and self.host_is_users():
            states.append(pickle.dumps((random.getstate(), numpy.random.get_state())))
        return tuple(states) if any(states) else ()

    def follow(self, states: States, given: Sequence[torch.Generator] = (), *, again: bool) -> None:
        """A unit was called on another stage: do what `leave` did there."""
        if len(states) > len(self._all) + len(given):
            host, states = states[-1], states[:-1]
            assert host is not None, "the state of numpy and Python comes last where the user has seeded them"
            python, of_numpy = pickle.loads(host)
            random.setstate(python)
            numpy.random.set_state(of_numpy)
        for generator, state in zip((*self._all, *given), states, strict=False):
            if state is not None:
                generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        for number in range(len(self._all)) if again else ():
            count = self._count(number)
            if count is not None:
                self._mark(number, count + 1)

    def lose(self, *, again: bool) -> None:
        """A unit of a later stage was called: where it leaves the user's generators is not known."""
        for number in range(len(self._all)):
            if self._count(number) is None:
                self._lost[number] = _state(self._all[number])
        self.follow((), again=again)

    def lost(self) -> bool:
        """Whether a generator stands where it would not on one device."""
        lost = self._lost.items()
        return bool(lost) and any(_state(self._all[number]) == state for number, state in lost)

    def backward(self, stage: int) -> None:
        """Before a backward: hooks draw from here, and what is recomputed without its random state."""
        for number in self._defaults:
            self._all[number].manual_seed(mix(self._key, _BACKWARD_DRAWS, stage))


class SeedsOfStart:
    """Tells what a step draws from seeds of its own.

    Args:
        generators: Of the module, when the step begins.
    """

    def __init__(self, generators: Generators) -> None:
        known = (torch.default_generator, *generators.of_torch)
        self._seeds = {id(one): (one, one.initial_seed()) for one in known}

    def are_other(self, generator: torch.Generator | None) -> bool:
        """Whether a generator was made or seeded since, or is none of the module's; `None`: torch's own."""
        one = torch.default_generator if generator is None else generator
        known = self._seeds.get(id(one))
        return known is None or one.initial_seed() != known[1]


def generators_in(args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Generator]:
    """The generators among the arguments of a unit."""
    values = (*args, *kwargs.values()) if kwargs else args
    return [value for value in values if type(value) is torch.Generator]


def _draws_lead_here(seed: int) -> bool:
    """Whether numpy's and Python's generators, seeded alike, come by draws alone to where they stand now."""
    python, own = random.Random(seed), numpy.random.RandomState(seed & 0xFFFFFFFF)

    def block_of(generator: Any) -> list[int]:
        block: list[int] = generator.get_state()[1].tolist()
        return block

    return _leads(
        lambda: python.getstate()[1][:-1], lambda: python.getrandbits(32 * 624), random.getstate()[1][:-1]
    ) and _leads(lambda: block_of(own), lambda: own.bytes(4 * 624), block_of(numpy.random))


def _leads(block: Callable[[], Any], draw: Callable[[], Any], now: Any) -> bool:
    """Whether drawing comes to a block of 624 numbers."""
    for _ in range(_BLOCKS):
        if block() == now:
            return True
        draw()
    return False


def _state(generator: torch.Generator) -> bytes:
    return bytes(generator.get_state().numpy())
