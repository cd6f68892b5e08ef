"""What a run of a step without units gives to units, and what of the batch alone meets values of theirs."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_pipeline._torch import DisableTorchFunction
from lightning_pipeline.model.mixing.calls import FORM, Functions, Run, target_of
from lightning_pipeline.model.mixing.meetings import Meetings, may_be_of_batch, picks
from lightning_pipeline.model.random import RANDOM_FUNCTIONS, MicrobatchSeeds
from lightning_pipeline.model.tensors import is_placeholder, tensors_in, user_line
from lightning_pipeline.registry import parameters_of


class UnitCall(NamedTuple):
    """What a unit was given.

    Attributes:
        unit: Its number.
        line: Where in the user's code it was called.
        values: The tensors that no unit has made, and the numbers; None for others.
        drawn: Places of those that random numbers have a part in.
    """

    unit: int
    line: str
    values: list[Any]
    drawn: frozenset[int] = frozenset()


class Reached(Functions):
    """One run of a step, of which is noted what units are given and what functions give.

    Args:
        root: The LightningModule.
        elsewhere: Parameters and buffers that some ranks do not have.

    Attributes:
        units: The calls of units.
        results: What functions gave, with the line and how many calls of units there had been.
        meetings: Values of units with what is of the batch alone.
    """

    def __init__(self, root: nn.Module, elsewhere: Iterable[Tensor] = ()) -> None:
        self._root = root
        self.units: list[UnitCall] = []
        self.results: list[tuple[Any, Any, str, int]] = []
        self.meetings = Meetings()
        self._sure = True  # no number was read of what some ranks do not have
        self._elsewhere: dict[int, Any] = {id(one): one for one in elsewhere}
        """These, what units gave and what is made of it, held: no identity comes twice."""
        self._picked: dict[int, Tensor] = {}  # samples of which values say how many
        self._numbers: dict[int, Tensor] = {}  # of rows, in order
        self._drawn: dict[int, Tensor] = {}  # and what is made of it

    def unit(self, number: int, given: Any, seeds: MicrobatchSeeds) -> None:
        """A unit is called."""
        floats = [one for part in (given[0], given[1].values()) for one in part if type(one) is float]
        tensors = list(tensors_in(given))
        with DisableTorchFunction():  # no function of the step's is among them
            values = [*map(self._kept, tensors), *(floats if self._sure else ())]
        self.meetings.called.append(number)
        self.meetings.leave(tensors)
        drawn = frozenset(place for place, one in enumerate(tensors) if id(one) in self._drawn)
        self.units.append(UnitCall(number, user_line(self._root), values, drawn))

    def call(self, func: Any, args: Any, kwargs: Any, run: Run) -> Any:
        """A function is called."""
        tensors, line = list(tensors_in((args, kwargs))), user_line(self._root)
        of_units = [one for one in tensors if self._is_of_units(one)]
        values = [(one, self._value(one)) for one in _each(args, kwargs) if not self._is_of_units(one)]
        result = run(func, args, kwargs)
        target = target_of(func, args)
        made = [*tensors_in(result), *(() if target is None else (target,))]
        is_form = not made and getattr(func, "__name__", "") in FORM
        if any(self._is_elsewhere(one) for one in of_units) and not is_form:
            self._elsewhere.update({id(one): one for one in made})
            self._sure = self._sure and bool(made)
        self.meetings.called.append(func)
        drawn = [one for one in tensors if id(one) in self._drawn]
        alone = func in RANDOM_FUNCTIONS or any(not self._is_of_units(one) for one in drawn)
        if drawn or alone:
            self._drawn.update((id(one), one) for one in made)
        if of_units:
            self.meetings.together(func, args, of_units, result, values, line, len(self.units), drawn=alone)
        else:
            self._note_picked(func, args, tensors, result)
            self.meetings.alone(func, args, result, values, line, len(self.units))
        if isinstance(result, Tensor):
            self.results.append((func, self._kept(result), line, len(self.units)))
        return result

    def end(self, result: Any) -> None:
        """The step has returned this."""
        self.meetings.leave(tensors_in(result))

    def _is_elsewhere(self, one: Any) -> bool:
        return id(one) in self._elsewhere or (isinstance(one, Tensor) and is_placeholder(one))

    def _is_of_units(self, one: Any) -> bool:
        return self._is_elsewhere(one) or (isinstance(one, Tensor) and one.requires_grad)

    def _note_picked(self, func: Any, args: Any, tensors: list[Tensor], result: Any) -> None:
        rows = {one.shape[:1] for one in tensors if id(one) in self._picked and one.dim()}
        numbers = func is torch.arange or any(id(one) in self._numbers for one in tensors)
        for one in tensors_in(result):
            if picks(func, args) or one.shape[:1] in rows:
                self._picked[id(one)] = one
            if numbers and one.dtype is not torch.bool and not one.is_floating_point():
                self._numbers[id(one)] = one

    def _value(self, one: Any) -> Any:
        if not isinstance(one, Tensor):
            return one if self._sure else None
        return None if id(one) in self._picked or id(one) in self._numbers else self._kept(one)

    def _kept(self, tensor: Tensor) -> Tensor | None:
        """A copy, where every rank has it: not of what is made of weights, which one stage alone may have."""
        plain = tensor.layout is torch.strided and not is_placeholder(tensor)
        return tensor.detach().clone() if plain and id(tensor) not in self._elsewhere else None


class AsGiven(Functions):
    """One run of a step, of which is noted whether it takes the batch and its states as they stand.

    It does where each function gives one tensor, and all that values of units meet, or that units are
    given, are arguments and states themselves. Whatever is exchanged in the batch, nothing else differs then,
    and a micro-batch has its rows of the batch's.

    Args:
        root: The LightningModule.
        elsewhere: Parameters and buffers that some ranks do not have.
        batch: The arguments of the step, and of these the keyword ones.
    """

    def __init__(
        self, root: nn.Module, elsewhere: Iterable[Tensor], batch: tuple[tuple[Any, ...], dict[str, Any]]
    ) -> None:
        self._given = {id(one): one for one in tensors_in(batch)}
        self._of_units = {id(one): one for one in elsewhere}
        self._states = {id(one) for one in (*parameters_of(root), *root.buffers())}
        self._apart: dict[int, Tensor] = {}  # what is made of the batch alone, held: no identity comes twice
        self._is_so = all(map(_is_of_tensors, (*batch[0][:1], *batch[1].values())))
        self._ended = False

    @property
    def is_so(self) -> bool:
        """Whether it does, up to the end of the step."""
        return self._is_so and self._ended

    def unit(self, number: int, given: Any, seeds: MicrobatchSeeds) -> None:
        """A unit is called."""
        self._is_so = self._is_so and all(map(self._is_known, tensors_in(given)))

    def call(self, func: Any, args: Any, kwargs: Any, run: Run) -> Any:
        """A function is called."""
        tensors = list(tensors_in((args, kwargs)))
        of_units = [one for one in tensors if self._is_of_units(one)]
        so_far, self._is_so = self._is_so, False  # what raises may be caught, and tell something
        result = run(func, args, kwargs)
        made, target = list(tensors_in(result)), target_of(func, args)
        one = isinstance(result, Tensor)  # of several, such as rows, the number tells something
        self._is_so = so_far and one and (target is None or self._is_of_units(target))
        if of_units:
            self._of_units.update((id(one), one) for one in made)
            numbers = [one for one in _each(args, kwargs) if not isinstance(one, Tensor)]
            has_rows = any(one.dim() for one in (*of_units, *made))
            self._is_so = self._is_so and all(map(self._is_known, tensors))
            self._is_so = self._is_so and not (has_rows and may_be_of_batch(func, numbers))
        else:
            self._apart.update((id(one), one) for one in made)
        return result

    def end(self, result: Any) -> None:
        """The step has returned this."""
        self._ended = True

    def _is_of_units(self, one: Tensor) -> bool:
        return id(one) in self._of_units or is_placeholder(one) or one.requires_grad

    def _is_known(self, one: Tensor) -> bool:
        known = id(one) in self._given or id(one) in self._states
        return (known or self._is_of_units(one)) and id(one) not in self._apart


def _is_of_tensors(value: Any) -> bool:
    """Whether it has nothing but tensors, so that no list is as long as there are samples."""
    if isinstance(value, Mapping):
        return all(map(_is_of_tensors, value.values()))
    return all(map(_is_of_tensors, value)) if type(value) in (list, tuple) else isinstance(value, Tensor)


def _each(args: Any, kwargs: Any) -> Iterator[Any]:
    """Tensors and numbers of a call."""
    for value in (*args, *kwargs.values()):
        for one in value if isinstance(value, list | tuple) else (value,):
            if isinstance(one, Tensor | int | float) and not isinstance(one, bool):
                yield one
