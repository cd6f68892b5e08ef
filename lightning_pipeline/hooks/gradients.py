"""A batch's gradients: what hooks see of them, and how they survive Lightning's zeroing before backward."""

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.autograd import Function

from lightning_pipeline import _lightning
from lightning_pipeline.errors import SplitError
from lightning_pipeline.registry import named_parameters_of

Hooks = dict[int, Callable[[Any], Any]]
_MODULE, _NONE = "module ", (0, 0)


@contextmanager
def without_hooks(weights: Iterable[Tensor]) -> Iterator[None]:
    """Inside, `register_hook` of these has registered nothing: `autograd.grad` calls such hooks, too."""
    hooks = [weight._backward_hooks for weight in weights if weight._backward_hooks]
    held = [dict(one) for one in hooks]
    for one in hooks:
        one.clear()
    try:
        yield
    finally:
        for one, calls in zip(hooks, held, strict=True):
            one.update(calls)


def zeroed_unseen(trainer: Trainer, batch_idx: int) -> Collection[int]:
    """Parameters whose `.grad` Lightning zeroes after this training step, no code of the user's in between.

    Those that no optimizer steps keep what they have, and get more in each batch.

    Args:
        trainer: In its training.
        batch_idx: Of the batch.

    Returns:
        By `id`.
    """
    if batch_idx % trainer.accumulate_grad_batches:
        return ()
    hooks = ("on_before_zero_grad", "optimizer_zero_grad")
    own = [_lightning.is_overridden(hook, trainer.lightning_module) for hook in hooks]
    if any(own) or _lightning.callbacks_with("on_before_zero_grad", trainer):
        return ()
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    return {id(parameter) for group in groups for parameter in group["params"]}


class SetAside:
    """Fresh gradients, kept out of `.grad` from the end of a step until `backward`.

    Lightning runs training_step, then zero_grad, then backward. The schedule has run all backwards by the
    time training_step returns. So what a step adds is taken out of `.grad`, zero_grad does to the rest what
    it wants, and backward puts it back, on top of what accumulation left. What was there and is looked at
    stays in `.grad` until the first backward of the batch; if the user's step reads it, from then on, too.
    """

    def __init__(self) -> None:
        self._before: list[tuple[Tensor, Tensor | None]] = []
        self._fresh: list[tuple[Tensor, Tensor]] = []
        self._own: dict[int, Tensor | None] | None = None
        self._given = set[int]()
        self._waits = self._is_read = self._has_dropped = False

    def begin(
        self, parameters: Iterable[Tensor], *, drop: Collection[int] = (), is_read: bool = False
    ) -> None:
        """Remember what is in `.grad` before a step.

        Args:
            parameters: All that the step may give a gradient.
            drop: By `id`, those of which what was there is freed: nobody looks before Lightning zeroes it.
                Of others the step holds the gradients of the one before beside its own.
            is_read: Whether the user's step is known to read `.grad`; see `note_read`.
        """
        assert not self._before, "the step before was ended or cancelled"
        self._fresh, self._own = [], None
        self._before = [(one, None if id(one) in drop else one.grad) for one in parameters]
        self._waits, self._is_read, self._has_dropped = True, is_read, bool(drop)
        for parameter, gradient in self._before if drop else ():
            parameter.grad = gradient
        if drop and all(gradient is None for _, gradient in self._before):
            self._clear()

    def note_read(self) -> bool:
        """The user's step reads `.grad`.

        Returns:
            Whether what was there before the batch is there still.
        """
        self._is_read = True
        if not self._before:
            return True
        return not self._has_dropped and (self._waits or self._own is not None)

    def _clear(self) -> None:
        """Before the first backward: nothing in `.grad`, or what was there where the step reads it."""
        self._waits = False
        if self._is_read:
            self._own = {}
            return
        for parameter, _ in self._before:
            parameter.grad = None

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Around a backward, and around what looks at its gradients: those of this step are in `.grad`."""
        if self._waits:
            self._clear()
        own, self._own = self._own, None
        if own is None:
            yield
            return
        for parameter, _ in self._before:
            parameter.grad = own.get(id(parameter))
        try:
            yield
        finally:
            for parameter, gradient in self._before:
                own[id(parameter)], parameter.grad = parameter.grad, gradient
            self._own = own

    def end(self) -> None:
        """Take the step's gradients out and put back what was there before it."""
        with self.accumulating():
            self._fresh = [
                (parameter, parameter.grad) for parameter, _ in self._before if parameter.grad is not None
            ]
        self._given = {id(parameter) for parameter, _ in self._fresh}
        self.cancel()

    def cancel(self) -> None:
        """Put back what was there before the step, and drop what it made."""
        for parameter, gradient in self._before:
            parameter.grad = gradient
        self._before, self._own, self._waits = [], None, False

    def totals(self) -> list[tuple[Tensor, Tensor]]:
        """At the end of a step, parameters and what `.grad` will be: what was there and the step's own."""
        found = []
        with self.accumulating():
            own_of = {id(parameter): parameter.grad for parameter, _ in self._before}
        for parameter, before in self._before:
            own = own_of[id(parameter)]
            total = own if before is None else before if own is None else before + own
            if total is not None:
                found.append((parameter, total))
        return found

    def held(self) -> list[tuple[Tensor, Tensor]]:
        """Parameters and the gradients of theirs that are not in `.grad` now."""
        before = [] if self._waits else self._before
        if (own := self._own) is not None:  # what was there is in `.grad`
            before = [(parameter, own.get(id(parameter))) for parameter, _ in before]
        aside = [(parameter, gradient) for parameter, gradient in before if gradient is not None]
        return [*aside, *self._fresh]

    def as_of(self, loss: Tensor) -> Tensor:
        """A loss whose backward adds the step's gradients to `.grad`: `put_back` adds none then.

        Args:
            loss: Of the step.

        Returns:
            The same number. What is made of it (a multiple, a sum with a penalty) has the gradients that
            follow from that.
        """
        fresh, self._fresh = self._fresh, []
        parameters, gradients = [one for one, _ in fresh], [one for _, one in fresh]
        anchor = torch.zeros((), requires_grad=True)  # of a stage that trains nothing
        found: Tensor = _Made.apply(  # type: ignore[no-untyped-call]
            loss.detach(), gradients, anchor, *parameters
        )
        return found

    def put_back(self) -> Collection[int]:
        """Add the step's gradients to `.grad`.

        Returns:
            The parameters, by `id`, that the step has given any.
        """
        for parameter, gradient in self._fresh:
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.add_(gradient)
        self._fresh = []
        return self._given


class _Made(Function):
    """A loss whose gradients are known."""

    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, gradients: list[Tensor], anchor: Tensor, *parameters: Tensor
    ) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise SplitError(
                "backward(create_graph=True) asks for gradients of gradients, and those of stages are "
                "numbers: use whole_steps=True, where every rank runs the step on whole batches, which is "
                "slower"
            )
        (by,) = gradients
        made = [one if by == 1 else one * by.to(one.device, one.dtype) for one in ctx.gradients]
        return None, None, None, *made


def _called(hook: Callable[[Any], Any], gradient: Tensor) -> Any:
    """What a hook returns that autograd would have called once for each micro-batch.

    Raises:
        SplitError: One of `register_multi_grad_hook`, which asks for the backward that is running.
    """
    try:
        return hook(gradient)
    except AssertionError as error:
        if "inside a backward call" not in str(error):
            raise
        raise SplitError(
            "register_multi_grad_hook waits for several gradients of one backward, and here each stage has "
            "its own, of each micro-batch: do it in on_after_backward or on_before_optimizer_step, which see "
            "the gradients of the whole batch and of all stages"
        ) from error


class GradientHooks:
    """Hooks of the user on gradients of parameters: called once a batch, with what the whole batch gives.

    Autograd would call them for each micro-batch, with its part. What is no sum of parts (clipping, a norm, a
    histogram, an optimizer that steps in the backward) would be something else then.

    Args:
        parameters: Those of the module that are here.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = list(parameters)[::-1]  # about in the order of a backward
        self._changing: list[tuple[Tensor, Hooks]] = []
        self._after: list[tuple[Tensor, Hooks]] = []
        self._has_changed = self._has_warned = False

    def warn_of_scaling(self) -> None:
        """Gradients are multiplied after hooks have seen them."""
        if self._has_changed and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "the loss is divided by what the step decides (a mean over the samples that the model finds "
                "hard, another accumulate_grad_batches), which is known when all micro-batches have run: "
                "what `register_hook` on a parameter was given is divided by about as much, and what it "
                "makes of it is corrected afterwards. Use on_after_backward, which sees the gradients of the "
                "whole batch"
            )

    @contextmanager
    def put_off(self) -> Iterator[None]:
        """Around the backwards of a batch. Hooks that the step itself registers are called in them."""
        # Filled by `register_hook` and `register_post_accumulate_grad_hook`, read by autograd as they are.
        changing = [(p, p._backward_hooks) for p in self._parameters if p._backward_hooks]
        after: list[tuple[Any, Any]] = [
            (p, hooks) for p in self._parameters if (hooks := p._post_accumulate_grad_hooks)
        ]
        self._changing = [(parameter, dict(hooks)) for parameter, hooks in changing]
        self._after = [(parameter, dict(hooks)) for parameter, hooks in after]
        kept = [(hooks, dict(hooks)) for _, hooks in (*changing, *after)]
        for hooks, _ in kept:
            hooks.clear()
        try:
            yield
        finally:
            for hooks, before in kept:
                new = dict(hooks)
                hooks.clear()
                hooks.update({**before, **new})

    def forget(self) -> None:
        """A backward of the project's own comes, which calls them."""
        self._changing, self._after = [], []

    def change(self) -> None:
        """After the backwards, with the batch's gradients in `.grad`: what `register_hook` was given."""
        called, self._changing = self._changing, []
        self._has_changed = bool(called)
        for parameter, hooks in called:
            for hook in hooks.values():
                changed = None if parameter.grad is None else _called(hook, parameter.grad)
                if changed is not None:
                    parameter.grad = changed

    def after(self, given: Collection[int]) -> None:
        """With those of the batches before added: what `register_post_accumulate_grad_hook` was given.

        Args:
            given: The parameters, by `id`, that the batch has given a gradient.
        """
        called, self._after = self._after, []
        for parameter, hooks in called:
            for hook in hooks.values() if id(parameter) in given and parameter.grad is not None else ():
                hook(parameter)


class HooksElsewhere:
    """Hooks on gradients that some ranks have registered, and not the one that has the parameter.

    One that all ranks register is called where the parameter is. One that a rank registers alone, such as
    code for global rank 0 that watches a model, is called there, with the gradient sent to it. Which there
    are all ranks agree on in the first batch, and anew after a batch in which one has others.

    Args:
        module: Lists the whole module's parameters.
        originals: For what stands for a parameter of another stage, by `id`, the parameter.
        holders: The pipeline ranks that hold a parameter, by name; the first one counts.
        gather: Gives an object of each pipeline rank, told for what.
        send: Gives every rank of this replica the tensor of one, a pipeline rank.
        rank: This pipeline rank.
        num_ranks: Of the pipeline.
        modules: Those that run on one pipeline rank, by name, and which that is. A hook on one that the rank
            has not is said to be called nowhere.
    """

    def __init__(
        self, module: nn.Module, originals: Mapping[int, Tensor], holders: Callable[[str], Sequence[int]],
        gather: Callable[[Any, str], list[Any]], send: Callable[[str, Tensor, int], None],
        rank: int, num_ranks: int, modules: Mapping[str, tuple[nn.Module, int]],
    ) -> None:  # fmt: skip
        self._module, self._originals, self._holders = module, originals, holders
        self._modules = modules
        self._on_modules = [
            (
                name,
                (
                    part._forward_hooks,
                    part._forward_pre_hooks,
                    part._backward_hooks,
                    part._backward_pre_hooks,
                ),
            )
            for name, (part, _) in modules.items()
        ]
        self._gather, self._send, self._rank, self._num_ranks = gather, send, rank, num_ranks
        self._agreed: dict[str, tuple[int, int]] | None = None
        self._now: dict[str, tuple[int, int]] = {}
        self._asked: list[tuple[str, int, list[int]]] = []
        self._served: set[str] = set()
        self._parameters: dict[str, Tensor] = {}

    def _registered(self, parameter: Tensor) -> tuple[list[Any], list[Any]]:
        """What was given to `register_hook` and to `register_post_accumulate_grad_hook`."""
        both: tuple[list[Any], list[Any]] = ([], [])
        for tensor in (self._originals.get(id(parameter)), parameter):
            if tensor is not None and (tensor._backward_hooks or tensor._post_accumulate_grad_hooks):
                both[0].extend((tensor._backward_hooks or {}).values())
                both[1].extend((tensor._post_accumulate_grad_hooks or {}).values())
        return both

    def look(self) -> None:
        """After the backwards of a batch: note which hooks this rank has."""
        if not self._parameters:
            self._parameters = dict(named_parameters_of(self._module))
        self._now = {
            name: (len(hooks[0]), len(hooks[1]))
            for name, parameter in self._parameters.items()
            if any(hooks := self._registered(parameter))
        }
        for name, kinds in self._on_modules:
            if any(kinds):
                self._now[f"{_MODULE}{name}"] = len(kinds[0]) + len(kinds[1]), len(kinds[2]) + len(kinds[3])

    def has_changed(self) -> bool:
        """Whether this rank had other hooks in the last batch than were agreed on."""
        return self._agreed is not None and self._now != self._agreed

    def agree(self) -> None:
        """Find out who has which; all ranks of the replica call.

        Raises:
            SplitError: What one rank has registered cannot be called there.
        """
        first, self._agreed = self._agreed is None, self._now
        told: list[dict[str, tuple[int, int]]] = self._gather(self._now, "comparing hooks on gradients")
        self._asked = []
        for name in self._parameters if any(one != told[0] for one in told) else ():
            holders = self._holders(name)
            counts = [one.get(name, (0, 0)) for one in told]
            own = [max(counts[holder][kind] for holder in holders) for kind in (0, 1)]
            alone = [
                [rank for rank, count in enumerate(counts) if rank not in holders and count[kind] > own[kind]]
                for kind in (0, 1)
            ]
            if alone[1] or (alone[0] and own[0]):
                raise self._refusal(name, alone[1] or alone[0], changes=bool(alone[0] and own[0]))
            if alone[0]:
                self._asked.append((name, holders[0], alone[0]))
        new = {name for name, *_ in self._asked} - self._served
        self._served |= new
        if new:
            ranks = sorted({rank for _, _, asking in self._asked for rank in asking})
            missed = "" if first else ", from the next batch on"
            rank_zero_warn(
                f"pipeline rank {', '.join(map(str, ranks))} has registered hooks on the gradients of "
                f"{len(new)} parameters that are on other stages, and their ranks have not: these gradients "
                f"are sent there in each batch{missed}. Where every rank registers a hook, it is called on "
                "the rank that has the parameter, and nothing is sent"
            )
        self._say_uncalled(told)

    def _say_uncalled(self, told: list[dict[str, tuple[int, int]]]) -> None:
        """Warn of hooks on modules that some ranks have, and not the one that runs the module."""
        names = {
            name: ranks
            for name, (_, holder) in self._modules.items()
            if (key := f"{_MODULE}{name}") not in self._served
            and (
                ranks := [
                    rank
                    for rank, one in enumerate(told)
                    if one.get(key, _NONE) > told[holder].get(key, _NONE)
                ]
            )
        }
        self._served |= {f"{_MODULE}{name}" for name in names}
        if names:
            first, ranks = next(iter(names.items()))
            rank_zero_warn(
                f"pipeline rank {', '.join(map(str, ranks))} alone has registered a hook on module {first!r}"
                f"{f' and {len(names) - 1} others' if len(names) > 1 else ''}, which pipeline rank "
                f"{self._modules[first][1]} runs: it is not called. Register it on every rank; it is called "
                "on the one that runs the module"
            )

    def _refusal(self, name: str, ranks: Sequence[int], *, changes: bool) -> SplitError:
        how = "register_hook" if changes else "register_post_accumulate_grad_hook"
        what = f"a hook with {how} that cannot be called there, on the gradient"
        return SplitError(
            f"pipeline rank {', '.join(map(str, ranks))} alone has registered {what} of {name!r}, which is "
            f"on pipeline rank {self._holders(name)[0]}: register it on all ranks; it is called where the "
            "parameter is"
        )

    def show(self, *, by_hand: bool = False) -> None:
        """With the gradients of a batch in `.grad`: call those that were agreed on; all ranks call.

        Args:
            by_hand: Whether the user has called the backward, so that `.grad` may have more in it.

        Raises:
            SplitError: One of them changes the gradient, or cannot be called.
        """
        if self._num_ranks == 1:
            return
        self.look()
        if self._agreed is None:
            self.agree()
        for name, _, ranks in self._asked if by_hand else ():
            raise self._refusal(name, ranks, changes=True)
        for holder in sorted({holder for _, holder, _ in self._asked}):
            asked = [(name, ranks) for name, of, ranks in self._asked if of == holder]
            tensors = [self._parameters[name] for name, _ in asked]
            for (name, ranks), gradient in zip(asked, self._sent(tensors, holder), strict=True):
                if gradient is not None and self._rank in ranks:
                    for hook in self._registered(self._parameters[name])[0]:
                        if _called(hook, gradient) is not None:
                            raise self._refusal(name, [self._rank], changes=True)

    def _sent(self, parameters: Sequence[Tensor], holder: int) -> list[Tensor | None]:
        """The gradients of a rank's parameters, on every rank; None where there is none."""
        what, is_here = "gradients for hooks", self._rank == holder
        device = parameters[0].device
        there = torch.zeros(len(parameters), device=device)
        if is_here:
            there += torch.tensor([float(p.grad is not None) for p in parameters], device=device)
        self._send(what, there, holder)
        found: list[Tensor | None] = []
        for parameter, exists in zip(parameters, there.tolist(), strict=True):
            if not exists:
                found.append(None)
                continue
            own = parameter.grad if is_here else None
            if own is None:
                own = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            gradient = (own.to_dense() if own.layout is not torch.strided else own).contiguous()
            self._send(what, gradient, holder)
            found.append(gradient)
        return found
