"""A batch's gradients: what hooks see of them, and how they survive Lightning's zeroing before backward."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor

from lightning_pipeline import _lightning
from lightning_pipeline.errors import SplitError

Hooks = dict[int, Callable[[Any], Any]]


def zeroed_unseen(trainer: Trainer, batch_idx: int) -> bool:
    """Whether Lightning zeroes `.grad` after this training step with no code of the user's in between.

    Args:
        trainer: In its training.
        batch_idx: Of the batch.
    """
    if batch_idx % trainer.accumulate_grad_batches:
        return False
    hooks = ("on_before_zero_grad", "optimizer_zero_grad")
    own = [_lightning.is_overridden(hook, trainer.lightning_module) for hook in hooks]
    return not any(own) and not _lightning.callbacks_with("on_before_zero_grad", trainer)


class SetAside:
    """Fresh gradients, kept out of `.grad` from the end of a step until `backward`.

    Lightning runs training_step, then zero_grad, then backward. The schedule has run all backwards by the
    time training_step returns. So what a step adds is taken out of `.grad`, zero_grad does to the rest what
    it wants, and backward puts it back, on top of what accumulation left.
    """

    def __init__(self) -> None:
        self._before: list[tuple[Tensor, Tensor | None]] = []
        self._fresh: list[tuple[Tensor, Tensor]] = []

    def begin(self, parameters: Iterable[Tensor], *, drop: bool = False) -> None:
        """Clear `.grad` for a step and remember what was there.

        Args:
            parameters: All that the step may give a gradient.
            drop: Free what was there: nobody looks before Lightning zeroes it. Otherwise the step holds the
                gradients of the one before beside its own.
        """
        assert not self._before, "the step before was ended or cancelled"
        self._fresh = []
        self._before = [(parameter, None if drop else parameter.grad) for parameter in parameters]
        for parameter, _ in self._before:
            parameter.grad = None

    def end(self) -> None:
        """Take the step's gradients out and put back what was there before it."""
        self._fresh = [
            (parameter, parameter.grad) for parameter, _ in self._before if parameter.grad is not None
        ]
        self.cancel()

    def cancel(self) -> None:
        """Put back what was there before the step, and drop what it made."""
        for parameter, gradient in self._before:
            parameter.grad = gradient
        self._before = []

    def totals(self) -> list[tuple[Tensor, Tensor]]:
        """At the end of a step, parameters and what `.grad` will be: what was there and the step's own."""
        found = []
        for parameter, before in self._before:
            own = parameter.grad
            total = own if before is None else before if own is None else before + own
            if total is not None:
                found.append((parameter, total))
        return found

    def held(self) -> list[tuple[Tensor, Tensor]]:
        """Parameters and the gradients of theirs that are not in `.grad` now."""
        before = [(parameter, gradient) for parameter, gradient in self._before if gradient is not None]
        return [*before, *self._fresh]

    def put_back(self) -> None:
        """Add the step's gradients to `.grad`."""
        for parameter, gradient in self._fresh:
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.add_(gradient)
        self._fresh = []


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

    def change(self) -> None:
        """After the backwards, with the batch's gradients in `.grad`: what `register_hook` was given."""
        called, self._changing = self._changing, []
        for parameter, hooks in called:
            for hook in hooks.values():
                changed = None if parameter.grad is None else _called(hook, parameter.grad)
                if changed is not None:
                    parameter.grad = changed

    def after(self) -> None:
        """With those of the batches before added: what `register_post_accumulate_grad_hook` was given."""
        called, self._after = self._after, []
        for parameter, hooks in called:
            for hook in hooks.values() if parameter.grad is not None else ():
                hook(parameter)
