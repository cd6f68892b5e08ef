"""Small values that a hook works out from tensors of several stages: completed over the ranks.

Every rank runs the same hooks on the same module, with placeholders for what other stages have. So all
ranks come to the same operation at the same place. Where it needs what no single rank has, or where its
result is a number, which a placeholder cannot be, they meet: each tells what it has, and all go on with the
operation for real. Which operations these are follows from where their operands come from, alike on every
rank: a norm of one gradient stays where that is, a norm over all is worked out by all.
"""

import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.overrides import TorchFunctionMode

from lightning_pipeline._torch import (
    ONE_BY_ONE,
    DisableTorchFunctionSubclass,
    FakeTensor,
    TorchDispatchMode,
    current_function_mode,
    disable_current_modes,
    pop_function_mode,
    push_function_mode,
    tree_flatten,
    tree_unflatten,
)
from lightning_pipeline.errors import PipelineError, SplitError
from lightning_pipeline.model.places import Place
from lightning_pipeline.model.state.absent import AbsentTensors
from lightning_pipeline.model.state.given_parts import GivenParts, is_part
from lightning_pipeline.model.state.sources import NOTHING, Names, Sources
from lightning_pipeline.model.tensors import (
    GRADIENT,
    SET_DATA,
    TensorSpec,
    filled_by,
    is_placeholder,
    items_of,
    map_tensors,
    tensors_held,
    tensors_in,
    user_line,
    written_tensors,
)
from lightning_pipeline.patching import all_undone, patched
from lightning_pipeline.registry import parameters_of

UNTOLD = 2**20
"""Elements that ranks tell each other for one operation without a word."""

Gather = Callable[[str, Any], list[Any]]
_VALUE_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# Read a tensor's memory without an operation that could be seen.
_READS = {
    torch.tensor, torch.as_tensor, torch.asarray, Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.item,
    Tensor.__float__, Tensor.__int__, Tensor.__bool__, Tensor.__index__, Tensor.__complex__,
    Tensor.__format__, Tensor.__reduce_ex__,
}  # fmt: skip
# Made anew whenever somebody looks, so that they are compared by `==`.
_SET: Any = [SET_DATA, cast(Any, Tensor).grad.__set__]


_aten = torch.ops.aten
_FILLED: dict[Any, float | None] = {
    _aten.ones_like.default: 1, _aten.zeros_like.default: 0, _aten.full_like.default: None
}  # fmt: skip
"""What makes a tensor in the form of another one, with this number, or the one that it is given."""


_MIRRORED = {_aten.lt.Tensor: _aten.gt.Tensor, _aten.le.Tensor: _aten.ge.Tensor}
_SYMMETRIC = {_aten.eq.Tensor, _aten.ne.Tensor}


class Meeting:
    """Watches what user code outside of steps does with the module's tensors, and completes it.

    Args:
        absent: What stands for other stages' tensors.
        sources: Of the real tensors.
        holders: The pipeline ranks that hold each tensor, by name; without those that all hold.
        num_ranks: Of the pipeline.
        gather: Collects an object of each pipeline rank; told for what.
        enter: Called before code of a hook runs, to show it what a step has made.
        leave: Called after code of a hook that ran to its end.
        compare: Called when a hook asks for a gradient, with what tells all ranks an object.
    """

    def __init__(
        self, absent: AbsentTensors, sources: Sources, holders: Mapping[str, frozenset[int]],
        num_ranks: int, gather: Gather, enter: Callable[[], None], leave: Callable[[], None],
        compare: Callable[[Callable[[Any], list[Any]]], None],
    ) -> None:  # fmt: skip
        self._compare = compare
        self._parts = GivenParts()
        self._absent, self.sources, self._holders = absent, sources, holders
        self._everyone = frozenset(range(num_ranks))
        self._gather, self._enter, self._leave = gather, enter, leave
        self._inside = self._has_warned = self._tells = False
        self._late: list[tuple[Tensor, Callable[[Any], None]]] = []
        self._modes = _Operations(self), _Reads(self)

    def hook(self) -> AbstractContextManager[None]:
        """Around code of the user that every rank runs; what it left for `later` is done at its end."""
        self._enter()
        return self._settling() if self._inside else self._watched()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        self._inside = True
        self._parts.begin()
        try:
            with (
                self._modes[0],
                self._modes[1],
                patched(Tensor, {"__reduce_ex__": self._pickling(Tensor.__reduce_ex__)}),
                patched(FakeTensor, {"tolist": Tensor.tolist}),  # its own reads number by number
                patched(clip_grad, ONE_BY_ONE),
                self._settling(),
            ):
                yield
            self._leave()
        finally:
            self._inside = False

    @property
    def is_inside(self) -> bool:
        """Whether code of the user runs that every rank comes to."""
        return self._inside

    def _pickling(self, original: Callable[[Tensor, Any], Any]) -> Callable[[Tensor, Any], Any]:
        """Plain tensors are pickled past every mode; here a rank that has one meets those that lack it."""

        def reduce(tensor: Tensor, protocol: Any) -> Any:
            asked = not self._tells and current_function_mode() is self._modes[1]
            return original(self.whole(tensor, any_size=True) if asked else tensor, protocol)

        return reduce

    def aside(self) -> AbstractContextManager[None]:
        """Inside a hook: around what is no code of the user's, such as a step."""
        return self._unwatched() if self._inside else nullcontext()

    @contextmanager
    def _unwatched(self) -> Iterator[None]:
        with ExitStack() as stack:
            self._set(False)
            stack.callback(self._set, True)
            stack.enter_context(disable_current_modes())
            if current_function_mode() is self._modes[1]:  # no mode of the user's is above it
                stack.callback(push_function_mode, pop_function_mode())
            yield
            self._enter()

    def changed(self) -> None:
        """The module has new gradients, or its optimizers new state."""
        self.sources.forget()
        with self.aside():
            pass

    def _set(self, inside: bool) -> None:
        self._inside = inside

    # ---- one operation

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, with what it needs of other ranks."""
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if self._parts:
            self._parts.check(tensors_in((args, kwargs)), written_tensors(func, args, kwargs))
        named = any(self._names(tensor) for tensor in tensors_in((args, kwargs)))
        if not named:
            return func(*args, **kwargs)
        func, args = self._as_on_all_ranks(func, args)
        if func in _FILLED and args[0].numel() == 1:  # such as what a backward begins with: all ranks know it
            number = _FILLED[func]
            value: Any = args[1] if number is None else number
            return torch.full(
                args[0].shape, value, dtype=kwargs.get("dtype") or args[0].dtype, device=args[0].device
            )
        if func._schema.name.startswith("aten::_foreach_"):
            return self._each(func, args, kwargs)
        if func is _aten._amp_foreach_non_finite_check_and_unscale_.default:
            return self._unscale(func, *args)
        if func._schema.name == "aten::equal":
            return self._equal(*args)
        return self._one(func, args, kwargs)

    def _as_on_all_ranks(self, func: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """A comparison in one order: Python asks the operand that is a placeholder first, whichever it is."""
        if func in _MIRRORED:
            return _MIRRORED[func], args[::-1]
        if func in _SYMMETRIC:
            return func, tuple(sorted(args, key=lambda operand: sorted(self._names(operand))))
        return func, args

    def _one(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        written = list(written_tensors(func, args, kwargs))
        if self._must_meet(func, args, kwargs, written):
            args, kwargs = self._completed(str(func), (args, kwargs), written)
        names = self._union(tensors_in((args, kwargs)))
        result = func(*args, **kwargs)
        for tensor in (*tensors_in(result), *written):
            self.sources.note(tensor, names)
        return result

    def _names(self, tensor: Tensor) -> Names:
        return frozenset(name for name in self.sources.of(tensor) if name in self._holders)

    def _union(self, tensors: Iterable[Tensor]) -> Names:
        return frozenset().union(*map(self._names, tensors))

    def _who(self, names: Names) -> frozenset[int]:
        """The ranks that have all of these."""
        return self._everyone.intersection(*(self._holders[name] for name in names))

    def _must_meet(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[Tensor]
    ) -> bool:
        names = self._union(tensors_in((args, kwargs)))
        if _VALUE_TAGS & set(func.tags):
            return True
        into = self._union(written)
        if not written:
            return not self._who(names)
        return not self._who(into) <= self._who(names)  # a tensor of all ranks is written by all

    def _each(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation on lists: on each position by itself, and on those that are all here at once."""
        size = len(args[0])

        def at(positions: list[int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            def part(value: Any) -> Any:
                listed = isinstance(value, list | tuple) and len(value) == size
                return [value[position] for position in positions] if listed else value

            return tuple(map(part, args)), {key: part(value) for key, value in kwargs.items()}

        together: list[int] = []
        results: dict[int, Any] = {}
        for position in range(size):
            own, options = at([position])
            written = list(written_tensors(func, own, options))
            here = not any(map(is_placeholder, tensors_in((own, options))))
            if here and not self._must_meet(func, own, options, written):
                together.append(position)
            else:
                results[position] = self._one(func, own, options)
        if together:
            own, options = at(together)
            found = func(*own, **options)
            for number, position in enumerate(together):
                results[position] = None if found is None else [found[number]]
                one, its = at([position])
                names = self._union(tensors_in((one, its)))
                for tensor in (*tensors_in(results[position]), *written_tensors(func, one, its)):
                    self.sources.note(tensor, names)
        values = [results[position] for position in range(size)]
        return None if all(value is None for value in values) else [value[0] for value in values]

    def _unscale(self, func: Any, gradients: list[Tensor], found: Tensor, factor: Tensor) -> None:
        """What a `GradScaler` of the user's does to gradients: each rank its own, and all find alike."""
        func([gradient for gradient in gradients if not is_placeholder(gradient)], found, factor)
        found.fill_(max(self._tell(("gradients that are not finite", []), found.item())))

    def _equal(self, one: Tensor, other: Tensor) -> bool:
        """Whether two tensors are equal, told by checksums of their values."""
        if one is other or one.shape != other.shape or one.dtype != other.dtype:
            return one is other
        said = "equal", [(side, sorted(self._names(tensor))) for side, tensor in enumerate((one, other))]
        own = [None if is_placeholder(tensor) else _checksum(tensor) for tensor in (one, other)]
        first, second = (
            next((known[side] for known in self._tell(said, own) if known[side] is not None), None)
            for side in (0, 1)
        )
        return first == second

    # ---- meeting

    def later(self, value: Tensor, use: Callable[[Any], None]) -> None:
        """Use a value that is complete on every rank: at once, or with others at the end of the hook.

        Args:
            value: That every rank comes with.
            use: Called with it.
        """
        if self._inside and self._names(value):
            self._late.append((value.detach().clone(), use))
        else:
            use(value)

    @contextmanager
    def _settling(self) -> Iterator[None]:
        before, self._late = self._late, []
        try:
            yield
            if self._late:
                values = self._completed("self.log", [value for value, _ in self._late], [])
                for value, (_, use) in zip(values, self._late, strict=True):
                    use(value)
        finally:
            self._late = before

    def asks_gradient(self, tensor: Tensor) -> None:
        """A hook asks for `.grad`, which may be None on the stage that has the tensor."""
        if self._inside and self._names(tensor):
            with disable_current_modes(), DisableTorchFunctionSubclass():
                self._compare(lambda own: self._tell(("which gradients there are", []), own))

    def told(self, what: str, own: Any) -> list[Any] | None:
        """What each rank has, where code of a hook asks for what is not all here; None outside of hooks.

        Args:
            what: That is, in words.
            own: What this rank has.
        """
        if not self._inside or self._tells:
            return None
        with disable_current_modes(), DisableTorchFunctionSubclass():
            return self._tell((what, []), own)

    def watch_gradients(self, parameters: Iterable[Tensor]) -> Callable[[], None]:
        """From now on a backward gives a weight its gradient for real, also where that follows from others.

        Args:
            parameters: Those that are listed; the same ones on all ranks.

        Returns:
            The undoing.
        """
        watched = [parameter for parameter in parameters if parameter.requires_grad]
        return all_undone([one.register_hook(partial(self._arrives, one)).remove for one in watched])

    def _arrives(self, parameter: Tensor, gradient: Tensor | None) -> Tensor | None:
        """A gradient as the ranks have it that have the weight; None for one that was frozen since."""
        if gradient is None:
            return None
        names = self._names(parameter) if self._inside else NOTHING
        if self._inside and not self._who(names) <= self._who(self._names(gradient)):
            gradient = self.whole(gradient, any_size=True)
        if names and is_placeholder(parameter) and not is_placeholder(gradient):
            return self._absent.make(next(iter(names)), TensorSpec.of(gradient)._replace(requires_grad=False))
        return gradient

    def assigned(self, tensor: Tensor, value: Any) -> Any:
        """What this rank gives a tensor of the module as its `.data` or `.grad`: `tensor.data = value`.

        The ranks that have the tensor get the value for real, the others one that stands for it.
        """
        names = self._names(tensor) if self._inside else NOTHING
        if not names or not isinstance(value, Tensor):
            return value
        if not self._who(names) <= self._who(self._names(value)):
            value = self.whole(value)
        if not is_placeholder(value) and is_part(value):
            value = self._parts.copy(value)  # the vector would count as this tensor's, on this rank alone
        if is_placeholder(tensor) and not is_placeholder(value):
            value = self._absent.make(next(iter(names)), TensorSpec.of(value)._replace(requires_grad=False))
        return value

    def whole(self, value: Any, *, any_size: bool = False) -> Any:
        """A value with the tensors in it complete on every rank; every rank calls this.

        Args:
            value: Any nesting.
            any_size: Whether it may be larger than two of the module's largest tensors.
        """
        if not self._inside or not self._union(tensors_in(value)):
            return value
        return self._completed("value", value, [], any_size=any_size)

    def whole_in_graph(self, value: Any) -> Any:
        """As `whole`; what had a graph has it still, so that gradients flow on to each rank's own part of it.

        Args:
            value: Any nesting.
        """
        found = self.whole(value)
        if found is value or not torch.is_grad_enabled():
            return found
        own, spec = tree_flatten(value)
        pairs = zip(own, tree_flatten(found)[0], strict=True)
        return tree_unflatten([_with_value(leaf, whole) for leaf, whole in pairs], spec)

    def incomplete(self, places: Iterable[Place]) -> list[str]:
        """Labels of attributes that hold tensors which only some stages have, as hooks have left them.

        Args:
            places: The attributes.
        """
        return [place.label for place in places if any(map(self._derived, tensors_held(place.get())))]

    def settle(self, places: Iterable[Place]) -> None:
        """Complete these tensors on all ranks, before a step that reads them between its units.

        Args:
            places: The attributes; the same ones, in the same order, on every rank.
        """
        for place in places:
            value = place.get()
            found = [tensor for tensor in tensors_held(value) if self._derived(tensor)]
            if not found:
                continue
            told = self._completed("what a hook has left for the step", found, [], any_size=True)
            by_id = {id(tensor): whole for tensor, whole in zip(found, told, strict=True)}
            filled = _filled(value, by_id)
            if filled is not value:
                place.put(filled)

    def _derived(self, tensor: Tensor) -> bool:
        return bool(self._names(tensor)) and not self.sources.is_listed(tensor)

    def _completed(self, what: str, value: Any, written: list[Tensor], *, any_size: bool = False) -> Any:
        with disable_current_modes(), DisableTorchFunctionSubclass():
            return self._complete(what, value, written, any_size)

    def _complete(self, what: str, value: Any, written: list[Tensor], any_size: bool) -> Any:
        """What this rank lacks comes from those that have it; the result is alike on all, and of none."""
        leaves, spec = tree_flatten(value)
        wanted = {
            place: leaf
            for place, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor) and self._names(leaf) and not any(leaf is one for one in written)
        }
        names = self._union(wanted.values())
        if not any_size:
            self._weigh(sum(leaf.numel() for leaf in wanted.values()), names)
        said = what, [(place, sorted(self._names(leaf))) for place, leaf in wanted.items()]
        own = {place: leaf.detach().clone() for place, leaf in wanted.items() if not is_placeholder(leaf)}
        for known in self._tell(said, {place: leaf.cpu() for place, leaf in own.items()}):
            for place, leaf in known.items():
                own.setdefault(place, leaf.to(wanted[place].device))
        missing = [name for place, leaf in wanted.items() if place not in own for name in self._names(leaf)]
        if missing:
            raise self._absent.refusal(set(missing), "is on no rank at once, and is needed")
        return tree_unflatten([own.get(place, leaf) for place, leaf in enumerate(leaves)], spec)

    def _weigh(self, size: int, names: Names) -> None:
        """Two layers' weights find room on every rank, and are said; the whole model may not."""
        if size <= UNTOLD:
            return
        largest = max((tensor.numel() for tensor in parameters_of(self._absent.root)), default=0)
        if size > 2 * max(largest, UNTOLD):
            raise self._absent.refusal(set(names), "is used together with what this one has, and is large,")
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"a hook uses {' and '.join(map(repr, sorted(names)[:2]))} together, which are on different "
                f"stages: {size:,} values are told between the ranks each time that it runs "
                f"[at {user_line(self._absent.root)}]",
                stacklevel=2,
            )

    def _tell(self, said: tuple[str, list[tuple[int, list[str]]]], own: Any) -> list[Any]:
        line = user_line(self._absent.root)
        before, self._tells = self._tells, True
        try:
            parts = self._gather(f"reading {_text(said)} in a hook [at {line}]", _Told(said, line, own))
        except PipelineError:
            raise
        except RuntimeError as error:
            raise SplitError(
                f"{_text(said)} is read here, and not on all ranks: every rank must run the hook alike, over "
                f"parameters() or the optimizer's groups: {error} [at {line}]"
            ) from error
        finally:
            self._tells = before
        told = [
            part if isinstance(part, _Told) else _Told(("something else", []), "elsewhere", None)
            for part in parts
        ]
        if any(part.said != said for part in told):
            places = "; ".join(
                f"pipeline rank {rank}: {_text(part.said)} [at {part.line}]" for rank, part in enumerate(told)
            )
            raise SplitError(
                "a hook reads values that are on other stages, and is not at the same place on all ranks. "
                f"Every rank must run it alike, over parameters() or the optimizer's groups: {places}"
            )
        return [part.own for part in told]


class _Told(NamedTuple):
    """What a rank tells in a meeting: what is met for, the user's line, and what it has."""

    said: tuple[str, list[tuple[int, list[str]]]]
    line: str
    own: Any


class _Operations(TorchDispatchMode):
    def __init__(self, meeting: Meeting) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._meeting = meeting

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._meeting.operation(func, args, kwargs or {})


class _Reads(TorchFunctionMode):
    """Completes what is read past the operations, and keeps track of copies, which are made of memory."""

    def __init__(self, meeting: Meeting) -> None:
        super().__init__()
        self._meeting = meeting

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _READS:
            args, kwargs = self._meeting.whole((args, kwargs))
        elif func == GRADIENT:
            self._meeting.asks_gradient(args[0])
        elif func in _SET:
            func(args[0], self._meeting.assigned(*args))
            self._meeting.sources.forget()  # the tensor has other memory now
            return None
        elif func is Tensor.__deepcopy__:
            with disable_current_modes():
                result = func(*args, **kwargs)  # type: ignore[no-untyped-call]
            self._meeting.sources.note(result, self._meeting.sources.of(args[0]))
            return result
        return func(*args, **kwargs)


class _WithValue(torch.autograd.Function):
    """A tensor in the graph of this rank, with the value of all, in which other stages have a part."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def _with_value(own: Any, whole: Any) -> Any:
    if own is whole or not isinstance(own, Tensor) or not own.requires_grad:
        return whole
    return _WithValue.apply(own, whole)  # type: ignore[no-untyped-call]


def _filled(value: Any, told: Mapping[int, Tensor], depth: int = 8) -> Any:
    """The same with other tensors in the place of some, by their `id`; containers stay the same ones."""
    if isinstance(value, Tensor):
        return told.get(id(value), value)
    held = filled_by(value) if depth else None
    if held is None or isinstance(held, tuple):
        return map_tensors(lambda tensor: told.get(id(tensor), tensor), value)
    changed = {
        key: new for key, item in items_of(held) if (new := _filled(item, told, depth - 1)) is not item
    }
    if isinstance(held, set):
        held.difference_update([item for key, item in enumerate(list(held)) if key in changed])
        held.update(changed.values())
    else:
        for key, item in changed.items():
            held[key] = item
    return value


def _checksum(tensor: Tensor) -> str:
    values = (tensor.detach() + 0).cpu().contiguous().flatten().view(torch.uint8)  # -0.0 is 0.0
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()


def _text(said: tuple[str, list[tuple[int, list[str]]]]) -> str:
    what, places = said
    names = sorted({name for _, found in places for name in found})
    return f"{what} of {', '.join(map(repr, names[:4]))}" if names else what
