"""What the choice of units, and what a step leaves behind, may depend on beside shapes.

Numbers in the batch, attributes, numbers that change between batches, such as `trainer.global_step`, and what
is answered where code reads a value that nobody knows yet.
"""

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import sha256
from itertools import islice
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_pipeline.model.mixing import Picked
from lightning_pipeline.model.places import Effect, Memory, Numbers, Owner, Place
from lightning_pipeline.model.tensors import Tag, TagStore, filled_by, items_of, result_dtypes

SCALAR_READS = ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero")
_MOST_OPPOSITE, _OTHERWISE_EACH, _ENDLESS = 20, 100, 20_000
_MUCH = 1e4  # more than most numbers that losses are compared with, and no long loop where code counts to it
_aten = torch.ops.aten
_PLAIN = frozenset({bool, int, str})
_CHOSEN_BY = _PLAIN | {type(None)}
_SIZED = frozenset({list, dict, set, deque})
_SHORT = 32  # up to here each length is a state of its own
_STATED = frozenset({*_PLAIN, float, complex, bytes, type(None)})
_UPDATES = "_update_count"  # where a metric counts its updates
_METHODS = frozenset({FunctionType, MethodType, partial})  # a split module has some in the place of its own
_HOOK_NOW = "_current_fx_name"  # where Lightning notes which hook runs
_MANY = 1000


class Assumed(NamedTuple):
    """What a trace takes for granted of values that it does not have.

    Attributes:
        constants: What depends on the shapes of placeholders alone has its values (`zeros_like(h)`).
        holds: What is answered where code asks whether something holds.
        few: Of values of which code asks for those that differ, all are alike; else no two are.
    """

    constants: bool = False
    holds: bool = False
    few: bool = False


NOTHING_ASSUMED = Assumed()


def numbers_beside(others: Iterable[Owner]) -> Iterator[Place]:
    """Places of numbers that a step may read beside the module."""
    for owner in others:
        if isinstance(owner, Numbers):
            for key in owner.read():
                yield owner.place(key)


def updates_of_metrics(root: nn.Module) -> list[Place]:
    """Places of the numbers of updates that metrics count: new ones each batch."""
    metrics = [(name, module) for name, module in root.named_modules() if isinstance(module, Metric)]
    return [Owner(vars(metric), f"{name}.").place(_UPDATES) for name, metric in metrics]


def numbers_changed(effects: Iterable[Effect]) -> Iterator[Place]:
    """Places of numbers that a step changes itself, those in dictionaries too; flags are known otherwise."""
    for effect in effects:
        value = effect.place.get()
        if type(value) is dict:
            inside = Owner(value, f"{effect.place.label}.")
            yield from (inside.place(key) for key, one in value.items() if type(one) in (int, float))
        elif type(value) in (int, float) and type(effect.place.owner) is not Memory:
            yield effect.place


def plain_leaves(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable:
    """Numbers and strings of a micro-batch, without the index of the batch."""
    found: list[Hashable] = []
    _add_plain((args[:1], args[2:], dict(kwargs)), found)
    return tuple(found)


def _add_plain(value: Any, found: list[Hashable]) -> None:
    if isinstance(value, str | int | float):
        found.append(value)
    elif isinstance(value, list | tuple):  # before mappings, which take longer to tell
        for item in value if len(value) <= 1000 else ():
            _add_plain(item, found)
    elif type(value) is not Tensor and isinstance(value, Mapping):
        for item in value.values():
            _add_plain(item, found)


def plain_state(root: nn.Module, modules: Iterable[nn.Module], left_out: set[tuple[int, Any]]) -> Hashable:
    """Flags, whole numbers, strings, lengths and what is None: code between units may choose by these.

    Beside them stand the epoch and what runs. Validation before training (the Trainer's sanity check) and
    within it are two things that may run. Left out is what `updates_of_metrics` has.

    Args:
        root: The LightningModule.
        modules: Those whose attributes it may read.
        left_out: What the step itself changes: which `vars`, by its id, and the name.
    """
    running = getattr(getattr(root, "_trainer", None), "state", None)
    found: list[Hashable] = [getattr(root, "current_epoch", 0), getattr(running, "stage", None)]
    for module in modules:
        held = vars(module)
        plain = [pair for pair in held.items() if type(pair[1]) in _CHOSEN_BY]
        own, but = id(held), _UPDATES if isinstance(module, Metric) else None
        found += [pair for pair in plain if pair[0] != but and (own, pair[0]) not in left_out]
    found.append(len(vars(root)))  # one may stand before what is None in the class
    sized = [(name, len(value)) for name, value in vars(root).items() if type(value) in _SIZED]
    found += [  # of a long one the binary digits, for it may grow for ever
        (name, length if length <= _SHORT else _SHORT + length.bit_length())
        for name, length in sized
        if (id(vars(root)), name) not in left_out
    ]
    return tuple(found)


def circumstances(root: nn.Module, others: Iterable[Owner]) -> str:
    """What a trace may depend on beside its batch: numbers and forms of tensors that the module holds, modes.

    Two that are equal say that nothing has changed which a step can choose by without reading a value; to
    take one trace for two steps, that has to be asked of the trace.

    Args:
        root: The LightningModule.
        others: What the step may change beside it; the numbers there count too.

    Returns:
        A digest of them: there are some for each module, and traces stay.
    """
    found: list[Any] = [_form(getattr(root, name, 0)) for name in ("current_epoch", "global_step")]
    found += [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), result_dtypes()]
    found += [(place.label, _form(place.get())) for place in numbers_beside(others)]
    for module in root.modules():
        found += [
            (name, _form(value))
            for name, value in vars(module).items()
            if name != _HOOK_NOW and type(value) not in _METHODS
        ]
    return sha256(repr(found).encode(errors="backslashreplace")).hexdigest()


def _form(value: Any, depth: int = 3) -> Any:
    """A number itself, the shape of a tensor, what is in a container or plain object, else the type."""
    kind = type(value)
    if kind in _STATED:
        return kind, value
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.requires_grad
    held = filled_by(value) if depth else None
    if held is None:
        return kind
    items = islice(items_of(held), _MANY)
    return kind, len(held), *((_form(key, 0), _form(item, depth - 1)) for key, item in items)


def _all_of(*packets: Any) -> frozenset[Any]:
    return frozenset(getattr(packet, name) for packet in packets for name in packet.overloads())


def _asked(name: str) -> frozenset[Tag]:
    return frozenset({Tag("effect", name=name)})


_FINITE, _NOT_FINITE, _ALL, _ANY = map(_asked, ("is finite", "is not finite", "of all", "of any"))
_GUARDS = {
    **dict.fromkeys((torch.isfinite, Tensor.isfinite), _FINITE),
    **dict.fromkeys((torch.isnan, Tensor.isnan, torch.isinf, Tensor.isinf), _NOT_FINITE),
    **dict.fromkeys(_all_of(_aten.isnan, _aten.isinf), _NOT_FINITE),
    **dict.fromkeys(_all_of(_aten.all, _aten._is_all_true), _ALL),
    **dict.fromkeys(_all_of(_aten.any, _aten._is_any_true), _ANY),
}
_OPPOSITE = {_FINITE: _NOT_FINITE, _NOT_FINITE: _FINITE, _ALL: _ANY, _ANY: _ALL}
_NEGATIONS = _all_of(_aten.logical_not, _aten.bitwise_not)
_COMBINED = _all_of(_aten.bitwise_and, _aten.bitwise_or, _aten.logical_and, _aten.logical_or)


def makes_guard(func: Any) -> bool:
    """Whether an operation may make what `Guesses` notes, which each run has its own of."""
    return func in _GUARDS or func in _NEGATIONS or func in _COMBINED


class Guesses:
    """The answers of one run.

    What holds of all values is taken to hold, and what is asked of any is not, as an assertion wants it. What
    asks for numbers that are not finite finds none, with opposite answers too: what a step does then may be
    to end the process. Now and then an answer is another one, so that loops end which go on for as long as
    something holds, or until it does.

    Args:
        holds: What is answered where code asks whether something else holds.
        fraction: The number where there may be a fraction.
        opposite: Whether to answer the other way: the first times, for a loop may go on while something
            holds.
        extreme: The number where there may be a fraction, the first times; None for what `fraction` says.

    Attributes:
        asked: Whether code has asked for anything else.
        compares: Whether code has read a number that it may compare with others.
        picked: Tensors of as many samples as values say.
    """

    def __init__(
        self, *, holds: bool = False, fraction: float = 1.0, opposite: bool = False,
        extreme: float | None = None,
    ) -> None:  # fmt: skip
        self._holds, self._fraction, self._extreme = holds, fraction, extreme
        self._others_left = _MOST_OPPOSITE if opposite or extreme is not None else 0
        self._guards, self.picked = TagStore(), Picked(sets=True)
        self._reads, self.asked, self.compares = 0, False, False

    @property
    def are_endless(self) -> bool:
        """Whether code has read so many numbers that it may never end."""
        return self._reads >= _ENDLESS

    def note(self, func: Any, operands: Iterable[Tensor], results: Iterable[Tensor]) -> None:
        """An operation or function has run, which may make what a guard asks.

        Args:
            func: It.
            operands: Tensors it was called with.
            results: Tensors it has made.
        """
        guard = _GUARDS.get(func)
        if makes_guard(func):
            kinds = {self._guards.of(operand) for operand in operands}
            known = kinds.pop() if len(kinds) == 1 else frozenset()
            if guard is None:
                guard = _OPPOSITE.get(known) if func in _NEGATIONS else known
            elif known in (_FINITE, _NOT_FINITE):
                guard = known
        if guard:
            for tensor in results:
                self._guards.replace(tensor, guard)

    def note_function(self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        """The same for a function that torch puts together of several operations.

        Args:
            func: It.
            args: Its arguments.
            kwargs: Likewise.
            result: What it has given.
        """
        self.picked.note(func, args, kwargs, result)
        if func in _GUARDS and isinstance(result, Tensor):
            self._guards.replace(result, _GUARDS[func])

    def asks_if_finite(self, tensor: Tensor) -> bool:
        """Whether a tensor says no more than whether numbers are finite."""
        return self._guards.of(tensor) in (_FINITE, _NOT_FINITE)

    def answer(self, func: Any, tensor: Tensor) -> bool | int | float:
        """The number in a tensor.

        Args:
            func: The operation that reads it, one of `SCALAR_READS`.
            tensor: A placeholder.
        """
        self._reads += 1
        otherwise = self._reads % _OTHERWISE_EACH == 0
        if func._schema.name == SCALAR_READS[0] and tensor.dtype is not torch.bool:
            return self._number(is_whole=not tensor.dtype.is_floating_point, otherwise=otherwise)
        guard = self._guards.of(tensor)
        if self.asks_if_finite(tensor):
            return guard == _FINITE
        self.asked = True
        if self._others_left and self._extreme is None:
            self._others_left -= 1
            otherwise = not otherwise
        return (guard == _ALL if guard else self._holds) is not otherwise

    def _number(self, *, is_whole: bool, otherwise: bool) -> int | float:
        self.compares |= not is_whole
        if is_whole:
            return 0 if otherwise else 1
        if self._others_left and self._extreme is not None:
            self._others_left -= 1
            return self._extreme
        return 0.0 if otherwise else self._fraction


def other_answers(*, asked: bool, compares: bool) -> list[Mapping[str, Any]]:
    """What `Guesses` may be told to answer beside the usual, so that code takes the other side of a choice.

    Args:
        asked: Whether it asks whether something holds.
        compares: Whether it reads numbers.
    """
    extremes = [{"extreme": _MUCH}, {"extreme": -_MUCH}]
    return [*([{"opposite": True}] if asked else []), *(extremes if compares else [])]


def is_tensor_read(func: Any) -> bool:
    """Whether a function gives Python what is in a tensor, past the operations."""
    return func in _READS


_READS = {Tensor.tolist, Tensor.numpy, Tensor.__array__}
