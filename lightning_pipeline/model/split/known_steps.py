"""The kinds of steps that have been traced, and what is in doubt of them. Others are traced later."""

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_pipeline.data import signature_of
from lightning_pipeline.errors import SplitError
from lightning_pipeline.model.cut import Liveness, Microbatch, Partition, backward_edges, states_by_stage
from lightning_pipeline.model.places import Owner, index_of
from lightning_pipeline.model.random import MicrobatchSeeds
from lightning_pipeline.model.tensors import PlaceholderMode
from lightning_pipeline.model.trace import Call, Trace, UnitPatches, circumstances, plain_leaves, trace_step
from lightning_pipeline.registry import named_parameters_of

_RECENT = 4  # traces of a batch that are kept beside those of the known steps


@dataclass(frozen=True)
class Doubts:
    """What may not be one device's in a batch of a step, as this rank has it.

    Attributes:
        states: That the step works out from their last value once for each micro-batch: no rule is known.
        has_unknown: Whether it leaves numbers of which nobody knows what they are of the batch's.
        untried: What it leaves behind where no run on made-up values could tell how, and why not.
        decided_by: Sums over samples by which it decides when it has added those of a micro-batch.
        sums_read: Sums over samples of which it makes a plain number (`float(self.seen)`) after adding.
        decides_apart: Whether micro-batches have decided differently by what is in them.
        are_units_apart: Whether that matters to what units are given, or to their flags.
        ended_early: Whether what comes at its end was not seen, for it needs values.
        mixed: Lines at which it mixes the samples of a micro-batch, and by which operation.
        at_end: Whether all of them come after the last unit.
        in_part: The same lines, where micro-batches get their samples of some of what it mixes.
        values: Lines at which it mixes samples of what units gave, on the last stage, and by which function.
        padded: Units of this rank that give micro-batches less padding, which has a part in what follows.
        padded_inside: Units of this rank whose own forward counts such padding.
        units: Units of this rank whose own forward mixes samples, by their names and classes.
        seeded_at: Where the step draws for samples from a generator of its own; empty: nowhere.
        numbers: Those that give a number of all samples which is no mean: whether it is a sum.
    """

    states: Sequence[str]
    has_unknown: bool
    untried: str | None
    decided_by: Sequence[str]
    sums_read: Sequence[str]
    decides_apart: bool
    are_units_apart: bool
    ended_early: bool
    mixed: Mapping[str, str]
    at_end: bool
    in_part: Mapping[str, str]
    values: Mapping[str, str]
    padded: Sequence[str]
    padded_inside: Sequence[str]
    units: Sequence[str]
    seeded_at: str
    numbers: Mapping[str, bool]

    @property
    def mixes(self) -> bool:
        """Whether the step mixes samples of the batch, or decides by all of them."""
        return bool(self.mixed) or self.decides_apart


class KnownSteps:
    """What is known of each step of a module that is cut.

    Args:
        root: The LightningModule.
        cut: Its partition.
        later: Traces that were made when the module was whole.
        patches: The patched units.
        mode: Of placeholders.
        context: Makes the precision's context for one forward.
        sinks: Gives the methods that take values away, such as `log`.
        others: Gives what a step may change beside the module.
        lifted: Makes a context in which attributes of other stages may be read.
        aside: Makes one in which a run of a step gives loggers nothing.
        device: Where the steps run.
    """

    def __init__(
        self, root: nn.Module, cut: Partition, later: Sequence[Trace], *, patches: UnitPatches,
        mode: PlaceholderMode, context: Callable[[], AbstractContextManager[Any]],
        sinks: Callable[[], Sequence[str]], others: Callable[[], Sequence[Owner]],
        aside: Callable[[], AbstractContextManager[None]],
        lifted: Callable[[], AbstractContextManager[None]], device: torch.device,
    ) -> None:  # fmt: skip
        self._root, self._cut, self._patches, self._mode = root, cut, patches, mode
        self._context, self._sinks, self._others, self._lifted = context, sinks, others, lifted
        self._aside = aside
        self._device = device
        self._known: dict[str, tuple[Trace, Liveness]] = {}
        self._recent: deque[Trace] = deque(maxlen=_RECENT)
        self._seen_again: set[str] = set()
        if not cut.trace.is_made_up:
            self._known[cut.trace.step] = cut.trace, cut.liveness()
        for trace in later:
            with suppress(SplitError):  # one that cannot be cut is run whole when it comes, see `refusal`
                self._know(trace)

    def __contains__(self, step: str) -> bool:
        return step in self._known

    def __getitem__(self, step: str) -> Trace:
        return self._known[step][0]

    def reads_gradients(self, step: str) -> bool:
        """Whether a step, if it is known, reads `.grad` of weights."""
        return step in self._known and self[step].reads_gradients

    def forget(self) -> list[Trace]:
        """Trace each step anew when it comes, as the module has changed; returns the traces there were."""
        traces = self.traces
        self._known.clear()
        self._recent.clear()
        self._seen_again.clear()
        return traces

    @property
    def traces(self) -> list[Trace]:
        """Those of all steps."""
        return [trace for trace, _ in self._known.values()]

    def of(self, step: str, microbatch: Microbatch, *, again: bool) -> tuple[Trace, Liveness]:
        """What is known of a step, which is traced if need be.

        Args:
            step: Name of the user's method.
            microbatch: Arguments and keyword arguments of the first one.
            again: Whether a trace could not see all of the step that it may see now: what it leaves behind is
                looked at again, once.
        """
        trace, liveness = self._known.get(step) or self._know(self.traced(step, microbatch))
        if (trace.ended_early or again) and step not in self._seen_again:
            self._seen_again.add(step)
            anew = self.traced(step, microbatch)
            trace.effects, trace.unit_attributes = anew.effects, anew.unit_attributes
            alike = anew.path == trace.path
            trace.tail |= {tag for tag in anew.tail if tag.kind == "state" or (alike and trace.ended_early)}
            trace.tensors_read = anew.tensors_read
            trace.late_states = sorted({*trace.late_states, *anew.late_states})
            trace.state_units = {**anew.state_units, **trace.state_units}
            self._known[step] = trace, liveness = trace, self._cut.liveness(trace)
        return trace, liveness

    def traced(
        self, step: str, microbatch: Microbatch, seeds: MicrobatchSeeds | None = None,
        seen: Sequence[Call] = (), *, costs: bool = True, opposite: bool = True,
    ) -> Trace:  # fmt: skip
        """Trace a step, whether it is known or not.

        Args:
            step: Name of the user's method.
            microbatch: Arguments and keyword arguments.
            seeds: Its random numbers.
            seen: Calls that are known beside those of the known steps.
            costs: See `trace_step`.
            opposite: Likewise.
        """
        like, _ = self._known.get(step, (None, None))
        with self._lifted(), self._aside():
            found = trace_step(
                self._root, step, *microbatch, units=self._cut.trace.units, patches=self._patches,
                mode=self._mode, forward_context=self._context, sinks=self._sinks(), others=self._others(),
                seen=[*seen, *(call for trace in self.traces for call in trace.calls)],
                device=self._device, seeds=seeds, like=like, costs=costs, opposite=opposite,
            )  # fmt: skip
        if seeds is None and (opposite or not (found.asked or found.compares)):
            self._recent.append(found)
        return found

    def traced_like(self, step: str, microbatch: Microbatch, *, outputs_alone: bool = False) -> Trace:
        """A trace with a micro-batch of this form: an earlier one where that shows the same, or a new one.

        What a new one costs is not noted.

        It shows the same where the step reads no value and no random number, and the module holds numbers
        and forms as then. What the step leaves behind may be more by now.

        Args:
            step: Name of the user's method.
            microbatch: Arguments and keyword arguments.
            outputs_alone: Whether no more is wanted than what units return.
        """
        with self._lifted():
            now = _asked(microbatch), circumstances(self._root, self._others())
        for trace in (*self._recent, *self.traces):
            then = (trace.arguments, trace.leaves, trace.index), trace.circumstances
            if trace.step == step and not (trace.steered or trace.ended_early) and then == now:
                return trace
        return self.traced(step, microbatch, costs=False, opposite=not outputs_alone)

    def forget_recent(self) -> None:
        """A batch is over: what stood when its step was traced is not to be held any longer."""
        self._recent.clear()

    def refusal(self, step: str, microbatch: Microbatch) -> SplitError | None:
        """Why a step of evaluation cannot be cut; None where it can.

        That of one device decides by values of the whole batch, and has no gradients that parts of it add up
        to: where each micro-batch would decide by its own, or which units are called may follow from them,
        the step is not cut.

        Args:
            step: Name of the user's method.
            microbatch: Arguments and keyword arguments of the first one.
        """
        try:
            if step not in self._known:
                self._know(self.traced(step, microbatch))
        except SplitError as error:
            return error
        line = self[step].divided_at
        if not line:
            return None
        return SplitError(
            f"a value computed by the model steers the code at {line}, before other units may be called: of "
            "each part of the batch it may be another one, and which units are called may follow from it"
        )

    def lacks(
        self, step: str, needed: Mapping[str, Sequence[int]], stage_of: Sequence[int]
    ) -> dict[str, set[int]]:
        """Parameters that a known step reads on stages that have no copy, by name, with these stages.

        Args:
            step: Name of the user's method.
            needed: The stages that have each parameter and buffer, by name.
            stage_of: The stage of each unit that there is now.
        """
        readers = states_by_stage(self[step], stage_of, self._cut.num_stages, held=needed)
        parameters = {name for name, _ in named_parameters_of(self._root, remove_duplicate=False)}
        found = {name: stages - set(needed[name]) for name, stages in readers.items() if name in parameters}
        return {name: stages for name, stages in found.items() if stages}

    def _know(self, trace: Trace) -> tuple[Trace, Liveness]:
        wrong = backward_edges(trace, self._cut.stage_of)
        if wrong:
            source, reader = wrong[0]
            raise SplitError(
                f"in {trace.step} the output of {source!r} flows into {reader!r}, which is on an earlier "
                "stage: choose a partition that keeps them together, or in this order"
            )
        self._known[trace.step] = (trace, self._cut.liveness(trace))
        return self._known[trace.step]


def _asked(microbatch: Microbatch) -> tuple[Hashable, Hashable, int | None]:
    """Shapes of a micro-batch, numbers and strings in it, and the index of the batch."""
    args, kwargs = microbatch
    return signature_of(args, kwargs), plain_leaves(args, kwargs), index_of(args)
