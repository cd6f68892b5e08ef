"""The programs of a rank's stages, and a loss over the whole batch, for which the last runs its end once.

For such a loss each micro-batch runs on the last stage up to the last call of its units. When the last one
has, their outputs are joined, and the step runs once more with the whole batch and with these in the units'
place. The backward begins there; what it leaves at the joined tensors is cut again, and each micro-batch goes
on from its rows.
"""

import warnings
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeline.errors import PlaceholderError, SplitError
from lightning_pipeline.model.cut import Microbatch, StepRoutes, TracedOutput, ValueKey, liveness_of
from lightning_pipeline.model.rehearsal import RouteFinder
from lightning_pipeline.model.replay import Replay, StageProgram, StageView, Step, Table
from lightning_pipeline.model.state import AsOne, StepState
from lightning_pipeline.model.tensors import (
    PlaceholderMode,
    TensorSpec,
    cut_in_blocks,
    is_placeholder,
    joined_in_blocks,
    sample_dimension,
    tensors_in,
)
from lightning_pipeline.model.trace import Trace, UnitPatches
from lightning_pipeline.wire import Stage, Values

Outputs = dict[tuple[int, int], TracedOutput]
"""By unit and number of the call."""
_EVERYWHERE = -1  # instead of a dimension: the same in every micro-batch


def units_over_batch(
    trace: Trace, stage_of: Sequence[int], last: int, part: Outputs, whole: Outputs
) -> frozenset[int]:
    """Units of the last stage that one device runs on the whole batch, for they compare its samples.

    These are units that return something else than rows for samples, such as a loss or a matrix of
    similarities, and all that read from them. What depends on no other unit and has the same shape for
    every batch, such as a temperature, may be made for each micro-batch.

    Args:
        trace: Of the step.
        stage_of: The stage of each unit.
        last: The last stage.
        part: What calls return for a micro-batch.
        whole: What they return for the whole batch.
    """
    found: set[int] = set()
    for call in trace.calls:
        if stage_of[call.unit] != last:
            continue
        before = {trace.calls[tag.call].unit for tag in call.reads if tag.kind == "value"}
        pairs = zip(part[call.unit, call.nth][1], whole[call.unit, call.nth][1], strict=False)
        by_rows = all(
            sample_dimension(one, all_) is not None or (one.shape == all_.shape and not before)
            for one, all_ in pairs
        )
        if not by_rows or before & found:
            found.add(call.unit)
    return frozenset(found)


class OverBatch(Stage):
    """The last stage, for the executor.

    Args:
        first: Runs the stage's units for each micro-batch.
        tail: Runs the rest of the step for the batch; numbered as one stage more.
    """

    def __init__(self, first: StageProgram, tail: StageProgram) -> None:
        self._first, self._tail = first, tail
        self._stage_of = list(first.view.stage_of)
        self._later: dict[tuple[str, int], frozenset[int]] = {}
        self._ways: dict[tuple[tuple[str, int], frozenset[int]], StepRoutes] = {}
        self._given: dict[int, Values] = {}
        self._gradients: dict[int, list[Tensor | None]] | None = None
        self._dimensions: list[tuple[int, int]] = []
        self._has_warned = False
        self._table: Table = ()
        first.ends_itself = True
        tail.replay_kind = BatchReplay

    @property
    def index(self) -> int:
        """Position in model order."""
        return self._first.index

    def forget(self, stage_of: Sequence[int]) -> None:
        """The module has changed.

        Args:
            stage_of: The stage of each unit that there is now.
        """
        self._stage_of = list(stage_of)
        self._later.clear()
        self._ways.clear()

    # ---- a batch

    def begin(
        self, step: Step, whole: Microbatch, finder: RouteFinder, state: StepState | None
    ) -> frozenset[int]:
        """Take on a batch; units of the stage that run once for all of it.

        Args:
            step: With the micro-batches.
            whole: Arguments for the whole batch.
            finder: Of its way through the model.
            state: Where the step leaves something behind.

        Raises:
            SplitError: A micro-batch takes another way.
        """
        (route,) = finder.routes(step.ways, [whole], step.seeds.microbatch)
        if any(one is not route for one in step.routes):
            raise SplitError(
                f"a micro-batch takes another way through the model than the whole batch in {step.name}: "
                "with loss_over_batch=True all have to call the same units"
            )

        def outputs(arguments: Microbatch) -> Outputs:
            return finder.outputs(route, arguments, partial(step.seeds.microbatch, 0))

        first, tail, batches = self._first, self._tail, step.microbatches
        self._outputs = outputs(whole)
        key = (step.name, route.number)
        if key not in self._later and len(batches) > 1:
            part = outputs(batches[0])
            self._later[key] = units_over_batch(route.trace, self._stage_of, first.index, part, self._outputs)
        later = self._later.get(key, frozenset())
        stage_of = [tail.index if unit in later else stage for unit, stage in enumerate(self._stage_of)]
        if (key, later) not in self._ways:
            live = liveness_of(route.trace, stage_of, tail.index + 1)
            longer = replace(route, liveness=live, goes_on=(False,) * (tail.index + 1))
            self._ways[key, later] = StepRoutes(longer, [])
        ways = self._ways[key, later]
        first.view.stage_of, tail.view.stage_of = stage_of, list(stage_of)
        meets = ways.base.liveness.meets_later_calls[first.index]
        parts = [outputs(batch) if meets else {} for batch in batches]
        first.begin(replace(step, ways=ways, routes=[ways.base] * len(batches), later_outputs=parts))
        self._step = replace(
            step, ways=ways, routes=[ways.base], microbatches=[whole], split_backward=False,
            later_outputs=[{}], results={}, losses={}, parts={},
        )  # fmt: skip
        tail.state = None if state is None else AsOne(state)
        tail.begin(self._step)
        table: Table = tuple(
            (unit, nth, structure, tuple(specs), ())
            for (unit, nth), (structure, specs) in self._outputs.items()
            if stage_of[unit] < tail.index
        )
        if self._table != table:
            self._table = table
        self._given.clear()
        self._gradients = None
        return later

    def end(self) -> None:
        """Let go of the batch."""
        self._first.view.stage_of = list(self._stage_of)
        self._tail.end()
        self._given.clear()
        self._gradients = None

    @property
    def step(self) -> Step:
        """The batch as one micro-batch, with what came out."""
        return self._step

    # ---- the executor's actions

    def forward(self, microbatch: int, incoming: Values | None) -> None:
        """Run the units for a micro-batch; after the last of them the end of the step. See `wire.Stage`."""
        first = self._first
        if first.view.own_calls or incoming is None:
            given = first.forward(microbatch, incoming) if first.view.own_calls else Values([], ())
            assert given is not None, "the tail comes after it"
            self._given[microbatch] = given
        else:
            self._given[microbatch] = incoming
        if len(self._given) == self._number:
            self._run_tail()

    @property
    def _number(self) -> int:
        return len(self._first.view.current_step().microbatches)

    def _run_tail(self) -> None:
        given = [self._given.pop(number) for number in range(self._number)]
        empty = [values.empty for values in given]
        if any(empty) and not all(empty):
            raise SplitError(
                f"{self._step.name} returned None for micro-batch {empty.index(True)} before any unit ran, "
                "and not for others: with loss_over_batch=True it has to decide so for the whole batch"
            )
        if any(empty):
            self._gradients = {
                number: [None] * len(self._tail.view.incoming) for number in range(self._number)
            }
            self._tail.forward(0, Values([], (), empty=True))
            return
        self._tail.view.lost_states = any(_leaves_states(values.table) for values in given)
        self._tail.forward(0, Values(self._join([values.tensors for values in given]), self._table))

    def _join(self, parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        self._dimensions = []
        joined = []
        for key, *tensors in zip(self._tail.view.incoming, *parts, strict=True):
            dimension = self._dimension(key, tensors)
            blocks = self._step.trace.blocks.get(key, 1)
            with torch.no_grad():
                is_one = dimension == _EVERYWHERE
                tensor = tensors[0] if is_one else joined_in_blocks(tensors, dimension, blocks)
            needs_grad = torch.is_grad_enabled() and any(one.requires_grad for one in tensors)
            joined.append(tensor.detach().requires_grad_(needs_grad))
            self._dimensions.append((dimension, blocks))
        self._sizes = [[tensor.shape for tensor in one] for one in parts]
        self._warn_of_order()
        return joined

    def _warn_of_order(self) -> None:
        unknown = {
            self._first.view.unit_name(key[0])
            for key in self._tail.view.incoming
            if key in self._step.trace.unordered
        }
        if unknown and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"units {sorted(unknown)} return other rows than one for each sample, in an order that is "
                "not seen: with loss_over_batch=True those of the next micro-batch stand behind them. Where "
                "views of the samples are joined (`torch.cat([view, other_view])`) one device has another "
                "order: give a layer one view at a time, or return the views of a sample side by side"
            )

    def _dimension(self, key: ValueKey, tensors: Sequence[Tensor]) -> int:
        unit, nth, leaf = key
        whole = self._outputs[unit, nth][1][leaf]
        if len(tensors) == 1:
            return _EVERYWHERE
        found = {sample_dimension(TensorSpec.of(tensor), whole) for tensor in tensors}
        dimension = found.pop() if len(found) == 1 else None
        if dimension is not None and sum(t.shape[dimension] for t in tensors) == whole.shape[dimension]:
            return dimension
        if all(t.shape == whole.shape and torch.equal(t, tensors[0]) for t in tensors):
            return _EVERYWHERE
        raise SplitError(
            f"unit {self._first.view.unit_name(unit)!r} returns a tensor of shape {tuple(tensors[0].shape)} "
            f"for a micro-batch and {tuple(whole.shape)} for the whole batch, which is no row for each "
            f"sample, and the end of {self._step.name} reads it: with loss_over_batch=True only rows of "
            "samples can be joined. Return what it is computed from, and compute it after the "
            "last unit, or choose a partition with this unit on the last stage, which runs such units on the "
            "whole batch"
        )

    def backward_input(
        self, microbatch: int, gradients: Sequence[Tensor | None] | None
    ) -> list[Tensor | None] | None:
        """Before the first, run the graph of the end of the step. See `wire.Stage`."""
        if self._gradients is None:
            self._gradients = self._cut(self._tail.backward(0, None) or [])
        received = self._gradients.pop(microbatch)
        if not self._first.view.own_calls:
            return received if self._first.index else None
        return self._first.backward_input(microbatch, received)

    def backward_weight(self, microbatch: int) -> None:
        """See `wire.Stage`."""
        self._first.backward_weight(microbatch)

    def _cut(self, gradients: Sequence[Tensor | None]) -> dict[int, list[Tensor | None]]:
        """The gradients at the joined tensors, by micro-batch."""
        found: dict[int, list[Tensor | None]] = {}
        starts = [0] * len(gradients)
        for microbatch, shapes in enumerate(self._sizes):
            mine: list[Tensor | None] = []
            for number, (gradient, shape) in enumerate(zip(gradients, shapes, strict=True)):
                dimension, blocks = self._dimensions[number]
                if gradient is None or (dimension == _EVERYWHERE and microbatch):
                    mine.append(None)
                elif dimension == _EVERYWHERE:
                    mine.append(gradient)
                else:
                    length = shape[dimension]
                    part = cut_in_blocks(gradient, dimension, blocks, starts[number], length)
                    mine.append(part.contiguous())
                    starts[number] += length
            found[microbatch] = mine
        return found


def _leaves_states(table: Any) -> bool:
    """Whether a unit left generators that the user has seeded."""
    return any(states for *_, states in table)


class BatchReplay(Replay):
    """The end of the step for the whole batch.

    Random numbers that the step draws before its last unit are each micro-batch's own: a value made of them
    here would be another than the units saw, and nothing may read it.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._left = len(self._returned)
        self._host: int | None = None if self._view.host_random else self._seeds.host_place()
        self._drawn = False

    def _answer(self, unit: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        earlier = self._view.stage_of[unit] < self._view.index
        self._left -= earlier
        if earlier and not self._left and self._host not in (None, self._seeds.host_place()):
            self._drawn = True
            raise self._refuse("numpy's or Python's random numbers are drawn between units")
        if earlier and self._view.lost_states:
            self._seeds.lose(again=False)
        return super()._answer(unit, args, kwargs)

    def random(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A random call between units."""
        result = super().random(func, args, kwargs)
        for tensor in tensors_in(result) if self._left else ():
            if not is_placeholder(tensor):
                self._drawn = True
                self.taint.add(tensor)
        return result

    def _refuse(self, reason: str, more: str = "") -> PlaceholderError:
        if self._drawn:
            reason += (
                ". With loss_over_batch=True, what is drawn between units is drawn for each micro-batch, and "
                "the end of the step, which runs once for the batch, cannot read it: draw it in a unit that "
                "returns it, in a hook such as on_after_batch_transfer, or after the last unit"
            )
        return super()._refuse(reason, more)


class Programs:
    """What runs the stages of this rank.

    Args:
        root: The LightningModule.
        patches: The patched units.
        mode: Of placeholders.
        stage_of: The stage of each unit.
        stages: Those of this rank.
        num_stages: How many there are.
        loss_over_batch: Whether what follows the last unit runs once for all micro-batches.

    Attributes:
        has_last_stage: Whether losses, logs and outputs arrive here.
        end: The number of the stage, or of one more, that runs the end of steps.
        over_batch: The last stage, where that end runs once for the batch.
    """

    def __init__(
        self, root: nn.Module, patches: UnitPatches, mode: PlaceholderMode, stage_of: list[int],
        stages: Sequence[int], num_stages: int, *, loss_over_batch: bool,
    ) -> None:  # fmt: skip
        last = num_stages - 1
        self.has_last_stage, self.end = last in stages, num_stages if loss_over_batch else last

        def program(stage: int) -> StageProgram:
            view = StageView(stage, root, stage_of, patches, mode, is_last=stage == self.end)
            return StageProgram(view, patches)

        self._last = last
        self._programs = {stage: program(stage) for stage in stages}
        self.over_batch: OverBatch | None = None
        if loss_over_batch and self.has_last_stage:
            self.over_batch = OverBatch(self._programs[last], program(num_stages))
        for stage, one in self._programs.items():
            one.counts = stage == max(self._programs) and self.over_batch is None

    def __iter__(self) -> Iterator[StageProgram]:
        return iter(self._programs.values())

    def __getitem__(self, stage: int) -> StageProgram:
        return self._programs[stage]

    @property
    def here(self) -> Collection[int]:
        """The stages of this rank."""
        return self._programs.keys()

    @property
    def first_view(self) -> StageView:
        """What the first of them is handed."""
        return next(iter(self)).view

    @property
    def last_view(self) -> StageView:
        """What the last of them is handed."""
        return self._programs[max(self._programs)].view

    def executed(self, stage: int) -> StageProgram | OverBatch:
        """One of them, for the executor."""
        over_batch = self.over_batch
        return over_batch if stage == self._last and over_batch is not None else self._programs[stage]

    def waiting(self, stage: int) -> tuple[int, int]:
        """Micro-batches of one of them that wait for a backward, and for its W."""
        return self._programs[stage].num_saved, self._programs[stage].num_waiting

    def changed(self, modules: list[nn.Module], stage_of: Sequence[int]) -> None:
        """The module has changed.

        Args:
            modules: All there are now.
            stage_of: The stage of each unit that there is now.
        """
        for program in self:
            program.view.modules, program.view.stage_of = modules, list(stage_of)

    def stop(self) -> None:
        """Let go of a batch, after an error too."""
        for program in self:
            program.end()
        if self.over_batch is not None:
            self.over_batch.end()
