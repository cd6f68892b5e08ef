"""Steps that are not cut: every rank runs them whole, and units are called by message.

A loop over tokens that ends early, a branch on what a layer gave, a backward in the middle of the step: what
no pipeline of micro-batches can run, all ranks run together on the whole batch. The code between the units
runs on every rank, on real values; each unit runs where it is. So the result is that of one device, and the
stages work one after the other. A step that is cut, and was traced late, gets what it reads before its batch.
"""

import pickle
import zlib
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_pipeline._lightning import NO_LOSS
from lightning_pipeline.data import random_states, set_random_states
from lightning_pipeline.errors import SplitError
from lightning_pipeline.hooks.metrics import SharedMetrics
from lightning_pipeline.model.cut import Microbatch
from lightning_pipeline.model.split import SplitModel
from lightning_pipeline.model.state import Meeting
from lightning_pipeline.model.trace import step_function
from lightning_pipeline.ranks import Company, Outlet


class LockSteps:
    """Runs steps that are not cut.

    Args:
        module: The LightningModule.
        refusal: Why a step, with the arguments of its first micro-batch, cannot be cut; None where it can.
        meeting: Of the ranks, while code of the user's runs.
        metrics: Those of the module.
        replica: The ranks that hold the module together.
        from_last: From the rank of the last stage to the others.
        context: Makes the precision's context for a step.
        keeps: Whether this rank gets predictions.
    """

    def __init__(
        self, module: LightningModule, refusal: Callable[[str, Microbatch], SplitError | None],
        meeting: Meeting, metrics: SharedMetrics, replica: Company, from_last: Outlet,
        context: Callable[[], AbstractContextManager[Any]], *, keeps: bool,
    ) -> None:  # fmt: skip
        self._module, self._refusal, self._meeting, self._metrics = module, refusal, meeting, metrics
        self._keeps = keeps
        self._replica, self._from_last, self._context = replica, from_last, context
        self._decided: dict[str, bool] = {}

    def takes(self, step: str, first: Callable[[], Sequence[Any]]) -> bool:
        """Whether a step of evaluation cannot be cut; decided on its first batch, by all ranks.

        Args:
            step: Its name.
            first: Gives the arguments of its first micro-batch.
        """
        if step not in self._decided:
            microbatch: Microbatch = tuple(first()), {}
            with self._meeting.aside():  # of a hook that runs it, such as a search for a learning rate
                error = self._refusal(step, microbatch)
            refused = self._replica.any_of(f"looking at {step}", error is not None)[0]
            if refused:
                rank_zero_warn(
                    f"{step} cannot be cut into stages, so every rank runs it on whole batches, and layers "
                    f"of other stages are called by message, one after the other: {error}"
                )
            self._decided[step] = refused
        return self._decided[step]

    def run(self, step: str, args: Sequence[Any], *, backward_follows: bool = False) -> Any:
        """Run a step; all ranks of the replica call.

        Args:
            step: Its name.
            args: Of the whole batch.
            backward_follows: Whether Lightning runs one through the loss, which stays in its graph then.

        Returns:
            What the step returned, on every rank.
        """
        self._draw_alike()
        with self._meeting.hook(), self._metrics.in_whole_step(), self._context():
            output = step_function(self._module, step)(*args)
            if backward_follows and output is None:
                return NO_LOSS
            return self._meeting.whole_in_graph(output) if backward_follows else self._meeting.whole(output)

    def batch(self, step: str, args: Sequence[Any]) -> "UncutBatch":
        """A batch of such a step.

        Args:
            step: Its name.
            args: Of the whole batch.
        """
        follows = step == "training_step" and self._module.automatic_optimization
        return UncutBatch(self, step, args, keeps=self._keeps, backward_follows=follows)

    def _draw_alike(self) -> None:
        """Code between the units draws the same random numbers on all ranks."""
        place = zlib.crc32(pickle.dumps(random_states()))
        found = self._replica.numbers("comparing random states", [place])
        if any(one != found[0] for one in found):
            set_random_states(self._from_last.share(random_states))


class UncutBatch:
    """One batch on its way through a step that every rank runs.

    Args:
        steps: Runs it.
        step: Name of the user's method.
        args: Its arguments.
        keeps: Whether this rank gets predictions.
        backward_follows: Whether Lightning runs a backward through the loss of the step.

    Attributes:
        around: Made around the step.
    """

    def __init__(
        self, steps: LockSteps, step: str, args: Sequence[Any], *, keeps: bool, backward_follows: bool
    ) -> None:  # fmt: skip
        self._steps, self._step, self._args, self._keeps = steps, step, args, keeps
        self._backward_follows = backward_follows
        self.around: Callable[[], AbstractContextManager[None]] = nullcontext

    def train(self) -> Any:
        """Run a training step, in which the user's backwards are; what it returns is on every rank."""
        with self.around():
            return self._steps.run(self._step, self._args, backward_follows=self._backward_follows)

    def evaluate(self) -> Any:
        """Run a step of validation or test, and have what it returns on all ranks; of predict on the last."""
        with self.around():
            output = self._steps.run(self._step, self._args)
        return None if self._step == "predict_step" and not self._keeps else output


class Reads:
    """Brings to stages what they were not known to read when the module was cut.

    That is what hooks have made of several stages' weights (`self.old = {n: p.clone() for n, p in ...}`), and
    the weights of other stages that a step reads which was traced only now, for it reads what hooks set.

    Args:
        split: This rank's stages of it.
        meeting: Completes values of several stages.
        gather: Collects an object of each pipeline rank; told for what.
        spread: Gives more stages copies of parameters, by name; all ranks call.
    """

    def __init__(
        self, split: SplitModel, meeting: Meeting, gather: Callable[[Any, str], list[Any]],
        spread: Callable[[Mapping[str, Set[int]]], None],
    ) -> None:  # fmt: skip
        self._split, self._meeting, self._gather, self._spread = split, meeting, gather, spread
        # The step that the module was cut by lacks nothing, unless hooks are yet to set what ends it early.
        traces = [trace for trace in split.known.traces if trace.step == split.cut.trace.step]
        self._looked_at = {trace.step: trace for trace in traces if not trace.ended_early}

    def bring(self, step: str, first: Callable[[], Sequence[Any]]) -> None:
        """All ranks call this before a batch.

        Args:
            step: Name of the user's method.
            first: Gives the arguments of its first micro-batch.
        """
        known, settled = self._split.known, set[str]()
        while step not in known or known[step] is not self._looked_at.get(step):
            microbatch: Microbatch = tuple(first()), {}
            with self._meeting.aside():
                try:
                    known.of(step, microbatch, again=False)
                except SplitError:
                    return  # it is raised where the batch begins, and told there
            self._looked_at[step] = known[step]
            self._come(step, settled)
        with self._meeting.aside():
            self._meeting.settle(known[step].tensors_read)

    def _come(self, step: str, settled: set[str]) -> None:
        """A step was traced when the module was cut already: bring what it lacks, and have it traced anew.

        What was settled before is not waited for again: if it is not whole then, it is refused when read.
        """
        places = {place.label: place for place in self._split.known[step].tensors_read}
        own = self._meeting.incomplete(places.values()), self._split.lacks(step)
        told = self._gather(own, f"looking at what {step} reads")
        labels = {label for found, _ in told for label in found}
        with self._meeting.aside():
            self._meeting.settle(place for label, place in sorted(places.items()) if label in labels)
        wider: dict[str, set[int]] = {}
        for _, found in told:
            for name, stages in found.items():
                wider.setdefault(name, set()).update(stages)
        if wider:
            self._spread(wider)
        elif labels - settled:
            self._split.changed()
        settled |= labels
