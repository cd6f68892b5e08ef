"""What loading draws from: the random states of the process, and generators that loaders hold."""

import pickle
import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch

_DEPTH = 4  # data sets in data sets that are looked at


def random_states() -> tuple[Any, ...]:
    """The states that code outside a step draws from: torch's on the CPU, numpy's and Python's."""
    return torch.get_rng_state().numpy().tobytes(), _bare(numpy.random.get_state()), random.getstate()


def _bare(state: Any) -> tuple[Any, ...]:
    name, keys, *rest = state
    return (name, keys.tobytes(), *rest)


def set_random_states(states: tuple[Any, ...]) -> None:
    """Continue from what `random_states` gave."""
    torch_state, (name, keys, *rest), python = states
    torch.set_rng_state(torch.frombuffer(bytearray(torch_state), dtype=torch.uint8))
    numpy.random.set_state((name, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))
    random.setstate(python)


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Leave all random states as they were, those of the current CUDA device too."""
    host, python = numpy.random.get_state(), random.getstate()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            numpy.random.set_state(host)
            random.setstate(python)


@contextmanager
def seeded(*key: int) -> Iterator[None]:
    """Draw from a state that the key decides, and leave all random states as they were."""
    seed = zlib.crc32(repr(key).encode())
    with random_states_kept():
        torch.manual_seed(seed)
        numpy.random.seed(seed)
        random.seed(seed)
        yield


def holders_of(loader: Any) -> list[Any]:
    """A loader, and what it asks: samplers, what collates, and its data down to the first."""
    batches, collate = getattr(loader, "batch_sampler", None), getattr(loader, "collate_fn", None)
    collate = getattr(collate, "__self__", collate)  # a method's object
    holders = [loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None), collate]
    data = loader
    for _ in range(_DEPTH):  # `Subset` and its like hold another
        data = getattr(data, "dataset", None)
        holders.append(data)
    held = {id(one): one for one in holders if isinstance(getattr(one, "__dict__", None), dict)}
    return list(held.values())


def loader_parts(loader: Any) -> list[Any]:
    """Samplers of a loader, its data, and what collates, as far as it has them."""
    names = ("sampler", "batch_sampler", "collate_fn", "dataset")
    return [part for name in names if (part := getattr(loader, name, None)) is not None]


def generators_of(loader: Any) -> list[Any]:
    """Generators that a loader, its samplers and its data hold as attributes: torch's, numpy's, Python's.

    Each once, in a fixed order.
    """
    values = (value for holder in holders_of(loader) for value in vars(holder).values())
    kinds = (torch.Generator, numpy.random.Generator, numpy.random.RandomState, random.Random)
    return list({id(value): value for value in values if isinstance(value, kinds)}.values())


def state_of(generator: Any) -> bytes:
    """Where a generator stands; equal states are equal bytes."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return pickle.dumps(generator.getstate())
    if isinstance(generator, numpy.random.RandomState):
        return pickle.dumps(generator.get_state())
    return pickle.dumps(generator.bit_generator.state)


def set_state(generator: Any, state: bytes) -> None:
    """Let a generator go on from what `state_of` gave."""
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif isinstance(generator, random.Random):
        generator.setstate(pickle.loads(state))
    elif isinstance(generator, numpy.random.RandomState):
        generator.set_state(pickle.loads(state))
    else:
        generator.bit_generator.state = pickle.loads(state)


def put_back(attributes: dict[str, Any], before: dict[str, Any]) -> None:
    """Give an object the attributes that it had."""
    for name in attributes.keys() - before.keys():
        del attributes[name]
    attributes.update(before)


@contextmanager
def loader_kept(loader: Any) -> Iterator[None]:
    """Leave the loader, its samplers, what collates and its data as they were: attributes and generators."""
    states = [(one, state_of(one)) for one in generators_of(loader)]
    attributes = [(vars(holder), dict(vars(holder))) for holder in holders_of(loader)]
    try:
        yield
    finally:
        for now, before in attributes:
            put_back(now, before)
        for one, state in states:
            set_state(one, state)
