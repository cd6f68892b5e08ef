"""Units of other stages, called by message: `pl_module(x)` in a hook, `generate`, steps that cannot be cut.

Code that all ranks run, such as a hook, may call any unit. Where it does, the ranks of the replica meet, and
each says what it is at: it calls this unit with these arguments, it tells the others values, or it has come
to the end of the hook. The rank that has the unit runs it, once for all that call it alike, and they get what
it gave. A rank at the end of the hook answers calls of the others until all have come there, so that code for
one rank alone, as under `rank_zero_only`, has the whole model too.

So every rank that calls runs the code between the units itself, on real values, and random numbers that a
unit draws move on all of them. Where all ranks call, gradients flow through: in the backward they meet again.
"""

import pickle
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeline import data
from lightning_pipeline._torch import in_a_transform
from lightning_pipeline.errors import SplitError, StageFailedError
from lightning_pipeline.hooks.call_values import (
    Answer,
    Before,
    Modes,
    Packed,
    Values,
    arrived,
    checksum,
    portable,
    refusal_of_others,
)
from lightning_pipeline.hooks.gradients import without_hooks
from lightning_pipeline.model.split import OutsideSteps
from lightning_pipeline.model.state import Meeting
from lightning_pipeline.model.tensors import is_placeholder, user_line
from lightning_pipeline.model.trace import Runner, UnitPatches
from lightning_pipeline.ranks import Company
from lightning_pipeline.registry import parameters_of
from lightning_pipeline.schedules import Plan

_END, _READ, _MEET, _CALL, _BACKWARD = range(5)
_DOES = {
    _END: "has come to the end of the hook",
    _READ: "reads values of other stages",
    _MEET: "is in a collective of the strategy",
    _CALL: "calls a unit",
    _BACKWARD: "runs a backward",
}
Told = dict[int, tuple[int, int, int]]
"""By global rank: what it is at, the unit or call, and a number that differs where arguments do."""


@dataclass
class _Failed:
    """A call that raised."""

    error: BaseException
    where: str

    def portable(self, rank: int) -> "_Failed":
        """As it is sent: not every exception can be pickled."""
        text = traceback.format_exception_only(self.error)[-1].strip()
        try:
            error = pickle.loads(pickle.dumps(self.error))
        except Exception:  # whatever its pickling does, the text is there
            error = StageFailedError(f"{self.where} failed on global rank {rank}: {text}")
        error.add_note(f"This was {self.where} on global rank {rank}.")
        return _Failed(error, self.where)


@dataclass
class _Given:
    """What a unit gave on the rank that has it.

    Attributes:
        answer: For the callers.
        random: Where the random numbers stand afterwards; None: where they stood.
        inputs: What gradients flow to: tensors among the arguments, then parameters.
    """

    answer: Answer
    random: tuple[Any, ...] | None
    inputs: list[Tensor]


class RemoteUnits:
    """Answers calls of units outside of steps.

    Args:
        root: The LightningModule.
        patches: Of the units.
        idle: Answers where the ranks do not meet: own units run, those of other stages raise.
        holder: The global rank that has a unit.
        company: The ranks of the replica, in a group of their own.
        device: Of this rank.
        copied: Gives parameters of this rank, by `id`, of which other ranks have a copy.
    """

    inside = False

    def __init__(
        self, root: nn.Module, patches: UnitPatches, idle: Runner, holder: Callable[[int], int],
        company: Company, device: torch.device, copied: Callable[[], set[int]],
    ) -> None:  # fmt: skip
        self._root, self._patches, self._idle, self._holder = root, patches, idle, holder
        self._company, self._device = company, device
        self._values = Values(root)
        self._copied = copied
        self._answering = self._in_backward = False
        self._place = 0
        self._meeting: Meeting | None = None

    def join(self, meeting: Meeting) -> None:
        """Inside its hooks, answer.

        Args:
            meeting: Completes values of several stages among arguments.
        """
        self._meeting = meeting

    @property
    def _is_open(self) -> bool:
        """Whether this rank is at a place that all ranks come to."""
        return bool(self._place) or (self._meeting is not None and self._meeting.is_inside)

    # ---- where the ranks meet

    @contextmanager
    def place(self) -> Iterator[None]:
        """Around code that every rank comes to, if not all run the same of it; at its end they wait."""
        self._place += 1
        try:
            yield
            self.end()
        finally:
            self._place -= 1

    def end(self) -> None:
        """The code of the user's has ended on this rank: answer the others until it has on all."""
        self._until_all(_END)

    def tell(self, what: str, value: Any) -> dict[int, Any]:
        """An object of every rank, by global rank; those that call units first are answered.

        Args:
            what: For messages.
            value: Of this rank.
        """
        self._until_all(_READ)
        return self._company.gather(what, value)

    def meet(self) -> None:
        """A collective comes next, if this is in a hook; ranks that call units first are answered."""
        if self._is_open:
            self._until_all(_MEET)

    def come(self) -> None:
        """A collective comes next, outside of hooks too: a rank that is in one yet learns of it at once."""
        self._until_all(_MEET)

    def _until_all(self, kind: int) -> None:
        if len(self._company.ranks) == 1 or self._answering:
            return
        with nullcontext() if self._meeting is None else self._meeting.aside():
            while True:
                told = self._round(kind)
                kinds = {found for found, _, _ in told.values()}
                if kinds == {kind}:
                    return
                if _CALL not in kinds:
                    raise self._refusal(told)
                self._turn(told, None)

    def _round(self, kind: int, number: int = 0, digest: int = 0) -> Told:
        what = "a hook, where ranks call units of each other"
        found = self._company.numbers(what, [kind, number, digest])
        whole = [(int(one[0]), int(one[1]), int(one[2])) for one in found]
        return dict(zip(self._company.ranks, whole, strict=True))

    def _refusal(self, told: Told) -> SplitError:
        lines = "; ".join(f"global rank {rank} {_DOES[kind]}" for rank, (kind, _, _) in told.items())
        return SplitError(
            f"the ranks are not at the same place of a hook: {lines}. All ranks must run collectives, "
            "backward and what reads weights of other stages; one rank alone may call the module. Let all "
            "ranks do it, or use `with trainer.strategy.whole_model() as module:`, which all enter "
            f"[at {user_line(self._root)}]"
        )

    # ---- a call

    def call(self, unit: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call of a unit. See `Runner`."""
        apart = len(self._company.ranks) == 1 or self._answering
        if apart or self._meeting is None or not self._is_open:
            if self._in_backward and self._holder(unit) != self._company.rank:
                raise SplitError(
                    f"{self._name(unit)} is called by a region of torch.utils.checkpoint that one rank's "
                    "backward runs again: let each region hold layers of one stage, or take "
                    f"use_reentrant=True [at {user_line(self._root)}]"
                )
            return self._idle.call(unit, args, kwargs)
        if in_a_transform():
            raise SplitError(
                f"{self._name(unit)} is called under torch.func (vmap, grad, ...), which cannot be split "
                f"[at {user_line(self._root)}]"
            )
        value = self._meeting.whole_in_graph((args, kwargs))
        with self._aside():
            given = self._values.pack(value, self._name(unit))
            digest = given.digest() ^ self._flows(unit, given)
            while True:
                told = self._round(_CALL, unit, digest)
                answered, result = self._turn(told, given)
                if answered:
                    return result

    @contextmanager
    def _aside(self) -> Iterator[None]:
        assert self._meeting is not None, "a call is answered inside a hook"
        with self._meeting.aside():
            self._answering = True
            try:
                yield
            finally:
                self._answering = False

    def _name(self, unit: int) -> str:
        return f"unit {self._patches.units[unit].name!r}"

    def _parameters(self, unit: int) -> list[nn.Parameter]:
        return [one for one in parameters_of(self._patches.units[unit].module) if one.requires_grad]

    def _flows(self, unit: int, given: Packed) -> bool:
        """Whether what a unit gives has a gradient."""
        inputs = any(tensor.requires_grad for tensor in given.tensors)
        return torch.is_grad_enabled() and (inputs or bool(self._parameters(unit)))

    def _turn(self, told: Told, own: Packed | None) -> tuple[bool, Any]:
        """Answer the first of the calls that ranks wait in, together with those that are alike.

        Args:
            told: What the ranks are at.
            own: Arguments of this rank's call, if it waits in one.

        Returns:
            Whether this rank's call was answered, and the output.
        """
        first = next(one for one in told.values() if one[0] == _CALL)
        callers = [rank for rank, one in told.items() if one == first]
        unit, rank, owner = first[1], self._company.rank, self._holder(first[1])
        given = own if rank in callers else None
        made: _Given | _Failed | None = None
        if owner not in callers:
            sent = self._company.share(self._name(unit), lambda: self._request(unit, own), callers[0])
            if rank == owner:
                made = self._answer_request(unit, sent)
        elif rank == owner:
            assert given is not None, "the owner of the unit calls it"
            made = self._run(unit, given)
        if callers != [owner]:
            reply = self._company.share(
                f"what {self._name(unit)} gave", lambda: _portable_reply(made, rank), owner
            )
            made = made if rank == owner else _arrived_reply(reply, self._device)
        if rank not in callers:
            return False, None
        assert made is not None, "the owner has answered"
        assert given is not None, "this rank calls"
        if isinstance(made, _Failed):
            raise made.error
        if made.random is not None:
            self._draw_from(made.random)
        together = len(callers) == len(self._company.ranks)
        new = self._with_gradients(unit, given, made, owner, together=together)
        return True, self._values.apply(made.answer, new, given, self._patches.units[unit].module)

    def _request(self, unit: int, given: Packed | None) -> tuple[Any, ...]:
        assert given is not None, "the caller has arguments"
        modes = Modes(self._patches.units[unit].module)
        return given.sent(self._name(unit)), portable(given.tensors), modes, self._random()

    def _answer_request(self, unit: int, sent: tuple[Any, ...]) -> _Given | _Failed:
        """Run a unit for another rank, and leave this one's modes and random numbers as they are."""
        skeleton, tensors, modes, random = sent
        module, before = self._patches.units[unit].module, self._random()
        answering, self._answering = self._answering, True
        try:
            self._draw_from(random)
            with modes.entered(module):
                return self._run(unit, Packed(skeleton, arrived(tensors, self._device), [], []))
        finally:
            self._answering = answering
            self._draw_from(before)

    def _run(self, unit: int, given: Packed) -> _Given | _Failed:
        """Run an own unit on copies of what it is given."""
        name, module, before = self._name(unit), self._patches.units[unit].module, self._random()
        flows = self._flows(unit, given)
        leaves = [_leaf(tensor) if flows else tensor for tensor in given.tensors]
        try:
            own = [one.clone() if one.requires_grad else one for one in leaves]  # it may change them in place
            value = self._values.unpack(given, own)
            copied = self._values.pack(value, name)
            then = Before(copied, self._values.reach(module, given))
            output = self._patches.run_alone(unit, *value)
            answer = self._values.answer(output, copied, then, name)
        except Exception as error:  # told to the callers, which raise it
            return _Failed(error, name)
        after = self._random()
        inputs = [leaf for leaf in leaves if leaf.requires_grad] if flows else []
        inputs += self._parameters(unit)
        refused = refusal_of_others(answer.made, inputs, self._root, name) if flows else None
        if refused is not None:
            return _Failed(refused, name)
        return _Given(answer, after if after != before else None, inputs)

    def _random(self) -> tuple[Any, ...]:
        """Where random numbers stand."""
        on_device = self._device.type == "cuda"
        return data.random_states(), torch.cuda.get_rng_state(self._device).tolist() if on_device else None

    def _draw_from(self, states: tuple[Any, ...]) -> None:
        host, device = states
        data.set_random_states(host)
        if device is not None:
            torch.cuda.set_rng_state(torch.tensor(device, dtype=torch.uint8), self._device)

    # ---- gradients

    def _with_gradients(
        self, unit: int, given: Packed, made: _Given, owner: int, *, together: bool
    ) -> list[Tensor]:
        """New tensors as the caller gets them: gradients flow from them to what the unit was given."""
        answer = made.answer
        plain = [tensor.detach() if tensor.requires_grad else tensor for tensor in answer.made]
        if not (any(answer.flows) and self._flows(unit, given)):
            return plain
        inputs = [tensor for tensor in given.tensors if tensor.requires_grad]
        own, weights = made if owner == self._company.rank else None, self._parameters(unit)
        passage = _Passage(self, unit, owner, own, inputs, weights, together)
        flowing = [number for number, flows in enumerate(answer.flows) if flows]
        given_out = [plain[number] for number in flowing]
        through = _Through.apply(passage, given_out, *passage.held)  # type: ignore[no-untyped-call]
        passage.roots = [answer.made[number] for number in flowing]
        for number, tensor in zip(flowing, through, strict=True):
            plain[number] = tensor
        return plain

    def backward(self, passage: "_Passage", gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The backward of a call that all ranks made: it runs where the unit is."""
        name = self._name(passage.unit)
        if not passage.together:
            raise SplitError(
                f"a backward goes through {name}, which not all ranks called with the same arguments: all "
                "ranks must call it alike, or call it under torch.no_grad()"
            )
        if self._answering or not self._is_open:
            raise SplitError(f"a backward through {name} runs after the hook that called it has ended")
        gradients = self._complete_gradients(passage, gradients)
        twice = torch.is_grad_enabled()
        with self._aside():
            marks = [
                g is None or number in passage.of_weights or checksum(g) for number, g in enumerate(gradients)
            ]
            digest = zlib.crc32(repr([twice, *marks]).encode())
            told = self._round(_BACKWARD, passage.unit, digest)
            if len(set(told.values())) != 1:
                raise self._refusal(told)
            found = self._company.share(
                f"the backward of {name}", lambda: self._gradients_of(passage, gradients), passage.owner
            )
        here = self._gradients_here(passage, found)
        if twice:
            here = self._with_second_gradients(passage, gradients, here, [flows for _, flows in found])
        passage.own, passage.seeds = None, ()
        self._note_names(passage, here)
        return here

    def _complete_gradients(
        self, passage: "_Passage", gradients: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        """The same gradients on all ranks, where weights of other stages have a part in them."""
        name = self._name(passage.unit)
        assert self._meeting is not None, "a call is answered inside a hook"
        at_owner = passage.of_weights
        told = [None if number in at_owner else gradient for number, gradient in enumerate(gradients)]
        whole: Sequence[Tensor | None] = self._meeting.whole(tuple(told))
        if any(gradient is not None and is_placeholder(gradient) for gradient in whole):
            raise SplitError(
                f"the gradient that comes to {name} goes by weights of another stage in a way that is not "
                "followed: run that backward by itself, or scale by a number that on_train_batch_end has read"
            )
        changed = any(one is not other for one, other in zip(whole, told, strict=True))
        if changed and any(gradient is not None and gradient.requires_grad for gradient in told):
            raise SplitError(
                f"a backward with create_graph=True comes to {name} with a gradient that goes by weights of "
                "another stage, and these cannot be differentiated again: read the weights in a unit, or "
                "keep both in one with PipelineStrategy(units=[...])"
            )
        return [gradients[number] if number in at_owner else one for number, one in enumerate(whole)]

    def _gradients_of(self, passage: "_Passage", gradients: Sequence[Tensor | None]) -> Any:
        """On the rank of the unit: gradients that others need, or which there are; which of them flow on."""
        assert passage.made is not None, "this rank ran the unit"
        twice = torch.is_grad_enabled()
        if any(gradient is not None and is_placeholder(gradient) for gradient in gradients):
            raise SplitError(
                f"a gradient of weights' gradients of {self._name(passage.unit)} goes by weights of another "
                "stage: keep both in one unit with PipelineStrategy(units=[...])"
            )
        passage.seeds = [None if g is None else _leaf(g) if twice else g for g in gradients]
        pairs = [(r, g) for r, g in zip(passage.roots, passage.seeds, strict=True) if g is not None]
        passage.own = [None] * len(passage.made.inputs)
        asked = [number for number, one in enumerate(passage.made.inputs) if one.requires_grad]
        if pairs and asked:  # else all were frozen since
            roots, seeds = zip(*pairs, strict=True)
            inputs = [passage.made.inputs[number] for number in asked]
            with self._in_own_backward(passage.weights):
                found = torch.autograd.grad(
                    roots, inputs, seeds, retain_graph=True, create_graph=twice, allow_unused=True
                )
            for number, one in zip(asked, found, strict=True):
                passage.own[number] = one
        sent, copied = list[Any](), self._copied()
        for number, (held, gradient) in enumerate(zip(passage.held, passage.own, strict=True)):
            needed = number < len(passage.given) or id(held) in copied
            value = portable([gradient])[0] if needed and gradient is not None else gradient is not None
            sent.append((value, gradient is not None and gradient.requires_grad))
        return sent

    @contextmanager
    def _in_own_backward(self, weights: Sequence[nn.Parameter]) -> Iterator[None]:
        """Inside, hooks on gradients of weights are not called: they are when these come to the weights."""
        self._in_backward = True
        try:
            with without_hooks(weights):
                yield
        finally:
            self._in_backward = False

    def _gradients_here(self, passage: "_Passage", found: list[Any]) -> list[Tensor | None]:
        """Without a graph: this rank's own, those that were sent, and what stands for weights' elsewhere."""
        if passage.own is not None:
            return [gradient if gradient is None else gradient.detach() for gradient in passage.own]
        here: list[Tensor | None] = []
        for held, (sent, _) in zip(passage.held, found, strict=True):
            if isinstance(sent, bool):
                here.append(torch.empty_like(held) if sent else None)  # stands for another stage's
            else:
                here.append(arrived([sent], self._device)[0].detach())
        return here

    def _with_second_gradients(
        self, passage: "_Passage", gradients: Sequence[Tensor | None], here: list[Tensor | None],
        flows: Sequence[bool],
    ) -> list[Tensor | None]:  # fmt: skip
        """New tensors, from which gradients flow to the unit's arguments and weights and to what came back.

        Args:
            passage: Of the call, whose backward has run with a graph.
            gradients: That came back, as this rank has them.
            here: What was made of them.
            flows: Which of these have a graph on the rank of the unit.
        """
        flowing = [number for number, flow in enumerate(flows) if flow]
        if not flowing:
            return here
        given = [*(g for g in gradients if g is not None and g.requires_grad), *passage.given]
        made, roots = None, list[Tensor]()
        if passage.made is not None:
            assert passage.own is not None, "the gradients were just worked out"
            seeds = [seed for seed in passage.seeds if seed is not None and seed.requires_grad]
            made = replace(passage.made, inputs=[*seeds, *passage.made.inputs])
            roots = [one for number in flowing if (one := passage.own[number]) is not None]
        again = _Passage(
            self, passage.unit, passage.owner, made, given, passage.weights, passage.together, roots
        )  # fmt: skip
        weights_from = len(passage.given)
        again.of_weights = {place for place, number in enumerate(flowing) if number >= weights_from}
        plain = [one for number in flowing if (one := here[number]) is not None]
        for number, tensor in zip(flowing, _Through.apply(again, plain, *again.held), strict=True):  # type: ignore[no-untyped-call]
            here[number] = tensor
        return here

    def _note_names(self, passage: "_Passage", gradients: Sequence[Tensor | None]) -> None:
        """Gradients of weights, which code may ask for by themselves, come from these on all ranks."""
        assert self._meeting is not None, "a call is answered inside a hook"
        for held, gradient in zip(passage.held, gradients, strict=True):
            if gradient is not None and isinstance(held, nn.Parameter):
                self._meeting.sources.note(gradient, self._meeting.sources.of(held))


@dataclass
class _Passage:
    """A call that gradients flow through.

    Attributes:
        units: Who answers.
        unit: That was called.
        owner: The global rank that has it.
        made: What it gave, on that rank.
        given: Of this rank: tensors among the arguments.
        weights: Of this rank: the unit's parameters that required gradients at the call, or stand-ins.
        together: Whether all ranks made the call.
        roots: What the unit gave, on its rank in the graph of its own.
        own: On that rank, the gradients that were just worked out.
        seeds: On that rank, what they were worked out from.
        of_weights: Places among its outputs of gradients of the unit's weights, which have values there only.
    """

    units: RemoteUnits
    unit: int
    owner: int
    made: _Given | None
    given: list[Tensor]
    weights: list[nn.Parameter]
    together: bool
    roots: Sequence[Tensor] = ()
    own: list[Tensor | None] | None = None
    seeds: Sequence[Tensor | None] = ()
    of_weights: Set[int] = frozenset()

    @property
    def held(self) -> list[Tensor]:
        """What gradients flow to."""
        return [*self.given, *self.weights]


class _Through(torch.autograd.Function):
    """What a unit gave, on every rank; its backward runs on one."""

    @staticmethod
    def forward(ctx: Any, passage: _Passage, given: list[Tensor], *held: Tensor) -> tuple[Tensor, ...]:
        ctx.passage = passage
        ctx.set_materialize_grads(False)
        return tuple(given)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        return None, None, *ctx.passage.units.backward(ctx.passage, gradients)


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_() if tensor.requires_grad else tensor


def _portable_reply(made: _Given | _Failed | None, rank: int) -> Any:
    assert made is not None, "the owner has run the unit"
    return made.portable(rank) if isinstance(made, _Failed) else (made.answer.portable(), made.random)


def _arrived_reply(reply: Any, device: torch.device) -> "_Given | _Failed":
    if isinstance(reply, _Failed):
        return reply
    answer, random = reply
    return _Given(Answer.arrived(answer, device), random, [])


def answer_calls(
    module: nn.Module, split: OutsideSteps, placement: Plan, ranks: Sequence[int], company: Company,
    device: torch.device,
) -> RemoteUnits:  # fmt: skip
    """From now on ranks answer each other's calls of units in hooks.

    Args:
        module: The LightningModule.
        split: This rank's stages of it.
        placement: Which pipeline rank holds which stage.
        ranks: Global ranks of the replica, by pipeline rank.
        company: Those ranks, in a group that is used for nothing else.
        device: Of this rank.
    """

    def made(patches: Any, idle: Any, stage_of: Sequence[int]) -> RemoteUnits:
        def holder(unit: int) -> int:
            return ranks[placement.rank_of(stage_of[unit])]

        return RemoteUnits(module, patches, idle, holder, company, device, copied)

    def copied() -> set[int]:
        found = (one for one in split.shared if len({*map(placement.rank_of, one.stages)}) > 1)
        return {id(one.parameter) for one in found}

    return split.answer_calls(made)
