"""What one device divides losses and logged values by, from runs of a step without units."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_pipeline.errors import SplitError
from lightning_pipeline.model.cut import Microbatch, UnclearSizesError
from lightning_pipeline.model.loss import Follower, Guess, Observer, Whole, rehearsed, told_apart
from lightning_pipeline.model.random import Draws
from lightning_pipeline.model.rehearsal.routes import RouteFinder
from lightning_pipeline.model.rehearsal.worth import Worth
from lightning_pipeline.model.replay import Step, WholeBatch
from lightning_pipeline.model.state import Apart, CannotRepeatError
from lightning_pipeline.model.tensors import tensors_in
from lightning_pipeline.model.trace import UnitPatches

_GUESSES = (
    (0.7310585786300049, 1.0, 0),
    (0.6428571428571137, 0.5, 1),
)  # numbers that no micro-batch has by chance
_FAR = ((97.31058578630049, 0.25, 97), (-97.31058578630049, 0.25, 97))  # beyond most bounds


class _UnknownWholeError(Exception):
    """The whole batch cannot be traced, though its micro-batches may be."""


class Divisors:
    """What one device divides losses and logged values by, where that is not the number of samples.

    Args:
        root: The LightningModule.
        rehearse: Runs a step on the last stage of this rank; see `DryRuns.rehearse`.
        patches: The patched units.
        finder: Of ways through the model.
        apart: Inside, a run of a step leaves nothing behind.
        silent: Inside, a run of a step tells nobody anything.
        noted: Inside that, what the step of a whole batch gives to metrics is noted.
        alone: Inside, runs of a step by this rank alone leave nothing behind.
        quiet: Inside that, runs on made-up values log nothing, and keep random states; told whether metrics
            answer by copies.
    """

    def __init__(
        self, root: nn.Module, rehearse: Callable[..., None], patches: UnitPatches, finder: RouteFinder,
        apart: Apart,
        silent: Callable[[], AbstractContextManager[None]],
        noted: Callable[[], AbstractContextManager[None]],
        alone: Callable[[str], AbstractContextManager[None]],
        quiet: Callable[[bool], AbstractContextManager[None]],
    ) -> None:  # fmt: skip
        self._root, self._run, self._finder = root, rehearse, finder
        self._worth = Worth(root, patches, finder.outputs, alone, quiet)
        self._apart, self._silent, self._noted = apart, silent, noted
        self._followers: dict[str, Follower] = {}
        self._bounds: set[str] = set()  # steps of which is known what goes by values of units

    def follow(self, step: Step, whole: WholeBatch) -> None:
        """A batch begins: find out, or have it found out while its micro-batches run.

        Args:
            step: The batch.
            whole: Its arguments as one, and what its micro-batches are of it.
        """
        arguments, fractions, step.scale, is_weighed = whole
        follower = step.follower = self._followers.setdefault(step.name, Follower(self._root, step.name))
        tensors = list(tensors_in(arguments))

        def rehearse() -> list[Whole] | str:
            try:
                wholes = self._rehearsed(step, arguments, tensors)
            except CannotRepeatError as iterator:
                return f"takes from {iterator}"
            except _UnknownWholeError as error:
                return f"cannot be traced for the batch as a whole ({error})"
            for seen in wholes if step.trace.draws_unseen else ():
                seen.unclear = "a function that is not known to"
            return wholes

        if not is_weighed:
            follower.warn_of_losses(step.trace.losses_inside, tensors)
        tried = partial(self._worth.of, step, arguments, fractions)  # by each micro-batch's own numbers
        by_values = any(route.trace.follows_values for route in step.routes)
        tries = (lambda by_metrics: None) if step.mixing else tried
        follower.begin(
            fractions, tensors, rehearse, tries, by_values=by_values,
            is_torn=step.name in self._finder.torn, called=step.called, is_weighed=is_weighed,
            mixes=bool(step.mixing),
        )  # fmt: skip

    def _rehearsed(self, step: Step, arguments: Any, tensors: list[Tensor]) -> list[Whole]:
        """What was seen for each micro-batch; twice, where something was made up that it goes by."""
        parts = [arguments] if step.mixing else step.microbatches  # whose draws are the batch's own

        def runs(guess: Guess, *, anew: bool) -> list[Whole]:
            rehearse = partial(self._rehearse, step, anew=anew)
            return rehearsed(arguments, parts, rehearse, lambda: Observer(tensors, guess))

        def tried(guess: Guess) -> list[Whole]:
            try:
                return runs(guess, anew=False)
            except UnclearSizesError:
                return runs(guess, anew=True)

        def run(guess: Guess) -> list[Whole]:
            found = tried(guess)
            if guess.counts_apart and not all(whole.is_at_end for whole in found):
                few = replace(guess, few=True)  # else more values differ than there may be classes
                other = tried(few)
                guess.made |= few.made
                found = other if all(whole.is_at_end for whole in other) else found
            return found * len(step.microbatches) if step.mixing else found

        first, second = (Guess(*given) for given in _GUESSES)
        wholes = run(first)
        if first.made:
            others = zip(wholes, run(second), strict=False)
            for whole, other in {id(one): (one, two) for one, two in others}.values():
                told_apart(whole, other)
            for given in () if step.name in self._bounds else _FAR:
                run(Guess(*given))  # for what it logs
            self._bounds.add(step.name)
        return wholes

    def _rehearse(
        self, step: Step, batch: Microbatch, number: int, observer: Observer, draws: Draws, *, anew: bool
    ) -> None:  # fmt: skip
        """Run the step once without units, and leave nothing behind.

        Raises:
            CannotRepeatError: It takes from an iterator.
            UnclearSizesError: Nobody knows what a unit returns, if it is not traced `anew`.
            _UnknownWholeError: It calls units with shapes of which nobody here knows what comes out.
        """
        seeds = partial(step.seeds.microbatch, number)
        (route,) = self._finder.routes(step.ways, [batch], lambda _: seeds())
        with self._apart.running(step.name) as outside:
            try:
                outputs = self._finder.outputs(route, batch, seeds, anew=anew)
            except SplitError as error:  # what is wrong with the micro-batches, too, they raise
                raise _UnknownWholeError(error) from error
            outside.check()
            noted = nullcontext if any(batch is part for part in step.microbatches) else self._noted
            with self._silent(), noted():
                self._run(batch, outputs if anew else outputs.strict(), number, observer, draws)
