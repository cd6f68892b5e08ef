"""What rehearsals draw: one of the whole batch draws for each sample what its micro-batch draws for it."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_pipeline.model.tensors import is_placeholder, tensors_in

_BY_ELEMENT_NAMES = (
    "rand randn rand_like randn_like randint randint_like bernoulli bernoulli_ normal normal_ uniform_",
    "random_ exponential_ cauchy_ geometric_ log_normal_ dropout dropout1d dropout2d dropout3d alpha_dropout",
    "poisson",
)
_BY_ELEMENT: frozenset[Any] = frozenset(
    function
    for names in _BY_ELEMENT_NAMES
    for name in names.split()
    for owner in (torch, F, Tensor)
    if (function := getattr(owner, name, None)) is not None
)
_SIZES_ALONE = (torch.rand, torch.randn)
_LIKE = (torch.rand_like, torch.randn_like, torch.randint_like)
Kinds = frozenset[tuple[int, ...]]
"""First sizes of tensors: of the whole batch, then of each micro-batch."""


def seed_torch(seed: int) -> None:
    """Seed torch's generators for a rehearsal.

    Where there is no accelerator, the CPU's alone: `torch.manual_seed` notes for each kind of device that it
    will have to be seeded, with the stack that asks, in a list that grows.
    """
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


class _Draw(NamedTuple):
    func: Any
    numbers: tuple[Any, ...]  # bounds and the like
    result: Tensor
    in_place: bool
    of_tensors: bool  # it may be made of values of the micro-batch


class Draws:
    """What one rehearsal draws between units."""

    def __init__(self) -> None:
        self.draws: list[_Draw] = []
        self.host: list[int] = []
        self.host_drawn = False

    @property
    def any(self) -> bool:
        """Whether anything was drawn whose values are known here."""
        return bool(self.draws) or self.host_drawn

    def drawn(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """A random function was called."""
        for tensor in tensors_in(result):
            if not is_placeholder(tensor):
                numbers = [*args, *kwargs.values()] if func not in _SIZES_ALONE else []
                kept = tuple(number for number in numbers if isinstance(number, int | float))
                in_place = any(arg is tensor for arg in args)
                of_tensors = any(isinstance(arg, Tensor) for arg in args)
                self._add(_Draw(func, kept, tensor, in_place, of_tensors))

    def _add(self, draw: _Draw) -> None:
        self.draws.append(draw._replace(result=draw.result.detach().clone()))

    def host_at(self, seeded: int, now: int) -> None:
        """Where numpy's and Python's generators stand, before they are seeded anew."""
        self.host.append(now)
        self.host_drawn = self.host_drawn or seeded != now


class JoinedDraws(Draws):
    """What a rehearsal of the whole batch draws: what the micro-batches did, each for its samples.

    Args:
        parts: Draws of the micro-batches.
        number: The micro-batch whose draws stand for those that are made once, whatever the samples.
        kinds: How many samples there are.
    """

    def __init__(self, parts: Sequence[Draws], number: int, kinds: Kinds) -> None:
        super().__init__()
        self._parts, self._number, self._kinds = parts, number, kinds
        self._unclear = ""
        self.once = any(part.host_drawn for part in parts)

    def _add(self, draw: _Draw) -> None:
        position = len(self.draws)
        super()._add(draw)
        theirs = [part.draws[position] for part in self._parts if position < len(part.draws)]
        if len(theirs) < len(self._parts) or any(one.func is not draw.func for one in theirs):
            self._doubt(draw.func)
        elif all(one.result.shape == draw.result.shape for one in theirs):
            self._same(draw, theirs[self._number])
        else:
            self._join(draw, theirs)

    def _same(self, draw: _Draw, theirs: _Draw) -> None:
        """A number for all samples."""
        self.once = True
        if torch.equal(draw.result, theirs.result):
            return
        if draw.of_tensors and not draw.in_place and draw.func not in _LIKE:
            self._doubt(draw.func)
        else:
            self._put(draw, theirs.result)

    def _join(self, draw: _Draw, theirs: Sequence[_Draw]) -> None:
        results = [one.result for one in theirs]
        dimension = self._sample_dimension(draw.result, results)
        if dimension is None:
            self._doubt(draw.func)
        elif draw.func is torch.randperm:
            starts = [0, *itertools.accumulate(len(result) for result in results)]
            self._put(draw, torch.cat([r + start for r, start in zip(results, starts, strict=False)]))
        elif draw.func in _BY_ELEMENT and all(one.numbers == draw.numbers for one in theirs):
            self._put(draw, torch.cat(results, dimension))
        else:
            self._doubt(draw.func)

    def _sample_dimension(self, whole: Tensor, results: Sequence[Tensor]) -> int | None:
        """The one that counts samples; None where another differs."""
        if any(result.dim() != whole.dim() for result in results):
            return None
        sizes = list(zip(whole.shape, *(result.shape for result in results), strict=True))
        uneven = [number for number, size in enumerate(sizes) if len(set(size)) > 1]
        return uneven[0] if len(uneven) == 1 and sizes[uneven[0]] in self._kinds else None

    @staticmethod
    def _put(draw: _Draw, value: Tensor) -> None:
        with torch.no_grad():
            draw.result.copy_(value)

    def _doubt(self, func: Any) -> None:
        self._unclear = self._unclear or getattr(func, "__name__", str(func))

    def unclear(self) -> str:
        """What cannot be said of the whole batch, once the rehearsal is over: the function that drew it."""
        mine = self._parts[self._number]
        if not self._unclear and any(len(part.draws) != len(self.draws) for part in self._parts):
            self._unclear = "a random function that is called once a sample, or not for each micro-batch"
        if not self._unclear and self.once and mine.host != self.host:
            self._unclear = "numpy or Python"
        return self._unclear
