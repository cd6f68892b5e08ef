"""What a step leaves behind on this rank: which rules put it together, found out once for each step."""

import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_pipeline.data import merge_outputs
from lightning_pipeline.errors import SplitError
from lightning_pipeline.model.cut import Partition, StepRoutes, TracedOutput
from lightning_pipeline.model.places import (
    MADE_PLAIN,
    MISSING,
    ClassOwner,
    Effect,
    Expression,
    Guard,
    Kept,
    Owner,
    Place,
    Standing,
    Surroundings,
    grown_in,
    metrics_of,
)
from lightning_pipeline.model.rules import (
    CHAINED,
    Gathered,
    Merge,
    Question,
    Rows,
    Rule,
    Rules,
    Runs,
    StartRows,
    at_end,
    rows_by_shape,
    rules_of,
    same,
    summed,
    unmerged,
    usual,
    values_at_end,
)
from lightning_pipeline.model.state import AttributeGuards, InUnits, StepState, is_absent, values_kept
from lightning_pipeline.model.tensors import ModuleState, Versions
from lightning_pipeline.model.trace import Trace, UnitPatches, step_function

_log = logging.getLogger(__name__)
_MOST_TRIES = 16  # batches in which something is looked for that those before have not shown
MicrobatchArguments = tuple[tuple[Any, ...], dict[str, Any]]
_AsOne = Callable[[MicrobatchArguments], tuple[Trace, dict[tuple[int, int], TracedOutput]]]


class _Earlier(NamedTuple):
    """What was known of a step before it was seen to leave more behind."""

    rules: Mapping[str, Rule | None] = MappingProxyType({})
    doubtful: Sequence[str] = ()
    idle: Set[str] = frozenset()


class LeftBehind:
    """Makes for each batch the state that its step carries, with the rules of the step.

    Args:
        root: The LightningModule.
        cut: Its partition.
        patches: The units' `forward`.
        stages: Those of this rank.
        traced: Traces a step with the arguments of a micro-batch.
        traced_like: Gives a trace with arguments of this form, which may be an earlier one.
        guards: What stands for attributes of other stages.
        others: What a step may change beside the module.
        quiet: Inside, nothing is logged or measured and no random number is used up.
        part_of: What a number of the micro-batch that runs is of the batch's, where that is followed.
        stage_of: The stage of each unit, of those too that come later.
        device: Of the run.

    Attributes:
        in_units: What units keep of their own.
        not_tried: By step, what it leaves behind where no run on made-up values could tell how, and why not.
        doubtful: By step, states that it works out from their last value once for each micro-batch.
        decided_by: By step, sums over samples by which it decides when it has added those of a micro-batch.
        sums_read: By step, those of which it makes plain numbers then, to be logged as a rule.
        told_at_end: Steps that log what they have written where it is worked out at the end of the batch.
    """

    def __init__(
        self, root: nn.Module, cut: Partition, patches: UnitPatches, stages: Sequence[int], *,
        traced: Callable[[str, MicrobatchArguments], Trace],
        traced_like: Callable[[str, MicrobatchArguments], Trace],
        guards: AttributeGuards,
        others: Callable[[], Sequence[Owner]],
        quiet: Callable[[], AbstractContextManager[None]],
        part_of: Callable[[Any], Any],
        stage_of: Sequence[int],
        device: torch.device,
    ) -> None:  # fmt: skip
        self._root, self._cut, self._patches, self._stages = root, cut, patches, stages
        self._has_last_stage = cut.num_stages - 1 in stages
        self._traced, self._traced_like = traced, traced_like
        self._guards, self._others, self._quiet, self._part_of = guards, others, quiet, part_of
        self._rules: dict[str, dict[str, Rule | None]] = {}
        self.in_units = InUnits(root, patches.units, stage_of, stages, guards, device)
        patches.around_alone = self.in_units.around
        self._by_rows: dict[str, tuple[Place, Rows]] = {}  # of all steps
        self._rows_at: dict[str, int] = {}
        self._reads: dict[str, dict[str, bool]] = {}
        self._around: Surroundings | None = None
        self._glue_modules: list[tuple[str, nn.Module]] = []
        self._earlier: dict[str, _Earlier] = {}
        self._rings: dict[str, set[str]] = {}
        self.doubtful: dict[str, list[str]] = {}
        self._doubted: dict[str, frozenset[str]] = {}
        self._idle: dict[str, set[str]] = {}  # places that no run on made-up values has changed
        self._tries: Counter[str] = Counter()
        self._as_one = False  # whether the batch is known as one
        self.decided_by: dict[str, list[str]] = {}
        self.sums_read: dict[str, list[str]] = {}
        self.not_tried: dict[str, str] = {}
        self.told_at_end: set[str] = set()

    def new_state(
        self, trace: Trace, microbatches: Sequence[MicrobatchArguments], sizes: Sequence[int], merge: Merge,
        ways: StepRoutes | None = None,
        whole: MicrobatchArguments | None = None,
        as_one: _AsOne | None = None,
        left: Mapping[str, Any] | None = None, mended: bool = False,
    ) -> StepState | None:  # fmt: skip
        """For one batch; None where the step leaves nothing behind.

        Args:
            trace: Of the step.
            microbatches: Arguments of each.
            sizes: Samples of each.
            merge: Merges one value per micro-batch.
            ways: Of the step, which know what code between units has decided by numbers that change.
            whole: Arguments of the batch as one.
            as_one: Its trace, and what units return for it.
            left: What the batch as one leaves, by label, where that is known before it runs.
            mended: Whether micro-batches are given their part of what the step mixes.
        """
        step, several = trace.step, len(microbatches) > 1
        at_once, self._as_one = None, whole is not None
        if several:
            self._know(trace, microbatches, sizes, merge, mended=mended)
            if whole is not None and as_one is not None and self._leaves_at_end(trace):
                try:
                    at_once = Gathered(whole, *as_one(whole), sizes)
                except SplitError:  # the batch as one cannot be traced, though its micro-batches may be
                    if at_end in self._rules[step].values():
                        raise
                if step not in self.doubtful:  # the batch as one leaves more
                    self._know(trace, microbatches, sizes, merge, mended=mended)
            self._look_at_counts(step, () if ways is None else ways.decisions)
            if len(self._stages) > 1:
                self._refuse_chains(trace, left or {})
        own = {effect.place.label for effect in trace.effects} | {p.label for _, p in trace.unit_attributes}
        beside = [found for label, found in self._by_rows.items() if several and label not in own]
        if not (trace.effects or beside):
            return None
        state = StepState(
            trace.effects, self._rules.setdefault(step, {}), sizes,
            is_last=self._has_last_stage, step=step, beside=beside, left=left or {}, part_of=self._part_of,
        )  # fmt: skip
        if state.waits and at_once is not None:
            state.gathered, state.work_out = at_once, partial(self._work_out, trace)
        return state

    def _know(
        self, trace: Trace, microbatches: Sequence[MicrobatchArguments], sizes: Sequence[int], merge: Merge,
        *, mended: bool,
    ) -> None:  # fmt: skip
        """Find the rules of a step, if they are not known."""
        step = trace.step
        if step in self.doubtful:
            self._know_idle(trace, microbatches, sizes, merge, mended=mended)
            return
        rules = self._find_rules(trace, microbatches, sizes, merge, mended=mended)
        before = self._earlier.pop(step, _Earlier())  # found in a batch that leaves them behind
        idle = self._idle.get(step, set())
        for label in before.rules.keys() & (idle - before.idle):  # this batch shows nothing of them
            rules[label] = before.rules[label]
            idle.discard(label)
        known = {label: rule for label, rule in before.rules.items() if rule not in (usual, unmerged, same)}
        for label, rule in known.items():
            found = rules.get(label)
            if found is not at_end and not (rule is at_end and found is CHAINED and label in rules):
                rules[label] = rule
        states = {effect.place.label for effect in trace.effects if effect.deep}
        wrong = [label for label, rule in rules.items() if rule is unmerged and label in states]
        self._rules[step] = {**rules, **dict.fromkeys(wrong, CHAINED)}
        doubts = {*wrong, *before.doubtful, *self._doubted.pop(step, ())}
        self.doubtful[step] = sorted(label for label in doubts if self._rules[step].get(label) is not at_end)

    def _leaves_at_end(self, trace: Trace) -> bool:
        """Whether the last stage may work out at the end of a batch what the step leaves."""
        rules = self._rules[trace.step].values()
        return any(e.deep and e.from_units for e in trace.effects) or any(rule is at_end for rule in rules)

    def _work_out(self, trace: Trace, gathered: Gathered) -> dict[str, Any]:
        """On the last stage, after a batch: what no rule puts together, from what units gave."""
        effects = [e for e in trace.effects if not is_absent(e)]
        try:
            with self._guards.lifted(), self._left_as_it_is(effects):
                function = step_function(self._root, trace.step)
                around = Surroundings.of_attributes(self._find_glue_modules())
                run = Runs(effects, function, self._patches, self._quiet, lambda batch: nullcontext())
                found, known = run([(gathered.whole, gathered.values())]), {e.place.identity for e in effects}
                more = [(p, p.get()) for p in around.look() if p.identity not in known]
        except Exception as error:
            names = ", ".join(repr(effect.place.label) for effect in effects)
            raise SplitError(
                f"what {trace.step} leaves behind ({names}) is worked out by a run of the code between units "
                f"on the whole batch, which raised {type(error).__name__}: {error}. Change it in a hook such "
                "as on_train_batch_end, or use num_microbatches=1"
            ) from error
        for place, value in more:  # such as a flag that is set where a queue is full
            place.put(value)
        return found

    def doubts(self, step: str) -> Sequence[str]:
        """States of which no rule is known, in a batch too in which the step did more."""
        return self.doubtful.get(step) or self._earlier.get(step, _Earlier()).doubtful

    def _look_at_counts(self, step: str, decided: Collection[Expression]) -> None:
        """Sums over samples by which the step decides once it has added its own: each micro-batch its part.

        What begins anew at a length, such as the place in a ring, is that of micro-batches in their order.
        """
        rules = self._rules[step]
        counts = {label for label, rule in rules.items() if rule is summed}
        rings = {label for one in decided for label in grown_in(one, within="mod") if label in counts}
        if len(self._stages) == 1:
            rules.update(dict.fromkeys(rings, CHAINED))
            self._rings.setdefault(step, set()).update(rings)
        found = {label for one in decided for label in grown_in(one)} & (
            counts | self._rings.get(step, set())
        )
        compared = [one for one in decided if one[0] not in ("mod", *MADE_PLAIN)]
        read = [one for one in decided if one[0] in MADE_PLAIN]
        for known, made in ((self.decided_by, compared), (self.sums_read, read)):
            labels = known.setdefault(step, [])
            labels += sorted((found & {label for one in made for label in grown_in(one)}) - set(labels))

    # ---- what no run without values shows

    def watch(self, trace: Trace) -> None:
        """A batch begins, of which something may be left behind that no run without values has shown."""
        self._around, self._versions = None, Versions(None)
        if self._has_last_stage:
            self._glue_modules = self._glue_modules or self._find_glue_modules()
            others = [one for one in self._others() if trace.ended_early or isinstance(one, ClassOwner)]
            self._around = Surroundings.of_attributes(self._glue_modules, beside=others)
        if self._has_last_stage and trace.ended_early:
            self._versions = Versions(self._root)

    def _find_glue_modules(self) -> list[tuple[str, nn.Module]]:
        apart = [*(unit.module for unit in self._patches.units), *metrics_of(self._root)]
        inside = {id(part) for module in apart for part in module.modules()}
        return [(name, module) for name, module in self._root.named_modules() if id(module) not in inside]

    def unforeseen(self, known: Collection[Hashable], labels: Collection[str]) -> list[str]:
        """What the batch has changed and no run of the step without values does: attributes, weights.

        Args:
            known: Identities of places that are known to change.
            labels: Of these places.
        """
        around, self._around = self._around, None
        found = around.look() if around is not None else []
        written = [name for name in self._versions.written() if name not in labels]
        return [*(place.label for place in found if place.identity not in known), *written]

    # ---- rows of samples, from batch to batch

    def left(self, trace: Trace, total: int) -> None:
        """After a batch: what it has left by rows has those of this batch.

        Args:
            trace: Of the step.
            total: Samples of the batch.
        """
        rules = {**self._rules.get(trace.step, {}), **self.in_units.rows(trace.step)}
        places = [effect.place for effect in trace.effects] + [place for _, place in trace.unit_attributes]
        for place in places:
            rule = rules.get(place.label)
            if isinstance(rule, Rows):
                self._by_rows[place.label] = place, rule
            if place.label in self._by_rows:
                self._rows_at[place.label] = total

    def fits(self, trace: Trace, total: int) -> bool:
        """Whether what a step carries on has a row for each sample of a batch.

        Where it does not, one device does something else than with rows that fit, such as beginning anew,
        and micro-batches could not tell.

        Args:
            trace: Of the step.
            total: Samples of the batch.
        """
        inside = {place.label for _, place in trace.unit_attributes}  # their values are on one rank only
        own = inside | {effect.place.label for effect in trace.effects}
        return all(
            rows == total or (label not in inside and _is_nothing(self._by_rows[label][0].get()))
            for label, rows in self._rows_at.items()
            if label in own
        )

    @contextmanager
    def begun(
        self, number: int | None, sizes: Sequence[int], changed: Callable[[Any], Any] = lambda value: value
    ) -> Iterator[None]:
        """Inside, what was left by rows is cut for a micro-batch.

        Args:
            number: Which; None: the whole batch.
            sizes: Samples of each.
            changed: Makes of that what is to stand there.
        """
        held = []
        for place, rule in self._by_rows.values() if len(sizes) > 1 else ():
            kept = Kept.of(place.get())
            if kept.value is MISSING or isinstance(kept.value, Guard):
                continue
            held.append((place, kept))
            value = kept.value
            if number is not None:
                value = rule.cut(value, sum(sizes[:number]), sizes[number], sum(sizes))
            place.put(changed(value))
        try:
            yield
        finally:
            for place, kept in held:
                kept.give_back(place)

    def read_early(self, trace: Trace, state: StepState, batch: MicrobatchArguments) -> set[str]:
        """On the last stage, after a batch: large values in it that the next one reads on other stages.

        Found by tracing the step once more, with what stands there now and as the next batch. Where that
        fails all of them are.

        Args:
            trace: Of the step.
            state: Of the batch, settled.
            batch: Its arguments, not split.

        Returns:
            Labels.
        """
        known = self._reads.setdefault(trace.step, {})
        new = [label for label in state.large() if label not in known]
        if new:
            known.update(dict.fromkeys(new, True))
            args = tuple(value + 1 if type(value) is int else value for value in batch[0])
            try:
                again = self._traced(trace.step, (args, batch[1]))
            except SplitError as error:
                _log.debug("%s is not traced again: %s", trace.step, error)
            else:
                stage_of, last = self._cut.stage_of, self._cut.num_stages - 1
                before = [call.index for call in again.calls if stage_of[call.unit] != last]
                end = 1 + max(before, default=-1)
                early = {e.place.label for e in again.effects if e.read_at is not None and e.read_at <= end}
                early |= self._rows_in_containers(again)
                known.update({label: label in early for label in new})
        return {label for label, is_read in known.items() if is_read}

    def _rows_in_containers(self, trace: Trace) -> set[str]:
        """What early code may take items of for units of the last stage, without a look at them."""
        rules = self._rules.get(trace.step, {})
        labels = {e.place.label for e in trace.effects if isinstance(e.place.get(), list | deque | dict)}
        return {label for label in labels if isinstance(rules.get(label), Rows)}

    def forget(self, step: str, *, keeps: bool = True) -> None:
        """The step was seen to leave more behind: find the rules for that.

        Args:
            step: Name of the user's method.
            keeps: Whether those that are known hold on: the batch that shows more may not leave these behind.
        """
        self._glue_modules = []
        self.in_units.forget(step)
        known = _Earlier(self._rules.pop(step, {}), self.doubtful.pop(step, []), self._idle.pop(step, set()))
        if keeps and known.rules:
            self._earlier[step] = known

    def _refuse_chains(self, trace: Trace, known: Collection[str]) -> None:
        """Each stage of a rank would need what the micro-batch before left on that stage."""
        rules = self._rules[trace.step]
        names = [
            effect.place.label
            for effect in trace.effects
            if not (effect.from_units or is_absent(effect) or effect.place.label in known)
            and rules.get(effect.place.label, unmerged) is CHAINED
        ]
        if names:
            raise SplitError(
                f"{trace.step} changes {', '.join(map(repr, names))} outside the units, for each micro-batch "
                "from what the one before left, and with several stages on a rank would do so once for each: "
                "use stages_per_rank=1, or change it in a hook such as on_train_batch_end"
            )

    def _refuse_late(self, readers: Mapping[str, set[int]], trace: Trace) -> None:
        """The last stage alone has what the micro-batch before left there."""
        for label, units in readers.items():
            early = [unit for unit in units if self._cut.stage_of[unit] != self._cut.num_stages - 1]
            if early:
                raise SplitError(
                    f"{trace.step} changes {label!r} from what the model returns, and in the next "
                    f"micro-batch gives it to unit {self._patches.units[early[0]].name!r}, on another stage: "
                    "change it in a hook such as on_train_batch_end, or use num_microbatches=1"
                )

    def _find_rules(
        self, trace: Trace, microbatches: Sequence[MicrobatchArguments], sizes: Sequence[int], merge: Merge,
        *, mended: bool,
    ) -> dict[str, Rule | None]:  # fmt: skip
        here = [e for e in trace.effects if not is_absent(e)]
        inside = [place for _, place in trace.unit_attributes]
        start = StartRows([*(e.place for e in here), *inside], sum(sizes))
        keep = any(sizes[0] in shape for shapes in trace.unit_shapes.values() for shape in shapes)
        keep |= bool(self.in_units.tried(trace))
        while True:
            # What stands at the first batch every rank has to cut, so that it is tried out on all.
            effects = [e for e in here if self._has_last_stage or start or not e.from_units]
            if not (effects or keep):
                return {}
            asked, in_units = None, dict[str, Rows]()
            try:
                asked, in_units = self._question(trace, microbatches[:2], sizes[:2], start)
                asked = replace(asked, mended=mended)
                found = self._found(effects, asked, merge, start)
            except Exception as error:  # the user's code, on made-up values: then the usual rules must do
                if start:
                    start.wrong(start.rules)
                    continue
                names = ", ".join(repr(effect.place.label) for effect in effects)
                if effects:
                    self.not_tried[trace.step] = f"{names}: {type(error).__name__}: {error}"
                if asked is not None:  # the last stage alone may be here, and all know the same of units
                    self._know_units(trace, in_units, asked, merge, start, keep=keep)
                return {effect.place.label: unmerged if effect.deep else usual for effect in effects}
            wrong = [
                label
                for label, rows in start.rules.items()
                if not _is_like(found.by_place.get(label, in_units.get(label)), rows)
            ]
            if not wrong:
                break
            start.wrong(wrong)
        self._know_units(trace, in_units, asked, merge, start, keep=keep)
        late = [e.place.label for e in effects if e.from_units]
        self._refuse_late({label: found.readers.get(label, set()) for label in late}, trace)
        self._doubted[trace.step] = found.doubted
        self._idle[trace.step] = set(found.idle)
        return found.by_place

    def _know_idle(
        self, trace: Trace, microbatches: Sequence[MicrobatchArguments], sizes: Sequence[int], merge: Merge,
        *, mended: bool,
    ) -> None:  # fmt: skip
        """Find the rules of places that the batches before have left as they were, if this one does not."""
        labels = self._idle.get(trace.step, set())
        here = [e for e in trace.effects if not is_absent(e)]
        effects = [e for e in here if self._has_last_stage or not e.from_units]
        if not labels & {e.place.label for e in effects} or self._tries[trace.step] >= _MOST_TRIES:
            return
        self._tries[trace.step] += 1
        start = StartRows([], sum(sizes))
        try:
            asked, _ = self._question(trace, microbatches[:2], sizes[:2], start)
            found = self._found(effects, replace(asked, mended=mended), merge, start)
        except Exception as error:  # the user's code, on made-up values
            _log.debug("%s does not run on made-up values: %s", trace.step, error)
            return
        known = {label: found.by_place[label] for label in labels - found.idle if label in found.by_place}
        self._rules[trace.step].update(known)
        labels -= known.keys()

    def _question(
        self, trace: Trace, microbatches: Sequence[MicrobatchArguments], sizes: Sequence[int],
        start: StartRows,
    ) -> tuple[Question, dict[str, Rows]]:  # fmt: skip
        """What to run, and the rules for what units keep of their samples; alike on all ranks."""
        (one, other), (first, second) = microbatches, sizes
        whole, back = _as_one(one, other, first, second), _as_one(other, one, second, first)
        parts = []
        ahead, behind = (0, first), (first, second)
        for part, pieces in ((one, [ahead]), (other, [behind]), (whole, [ahead, behind])):
            with start.of(pieces):
                parts.append((part, (self._traced if start else self._traced_like)(trace.step, part)))
        twice = _as_one(one, one, first, first) if first == second else None
        asked = Question(
            parts[0], parts[1], parts[2], (back, parts[2][1]), (first, second),
            twice=twice, blocks=trace.blocks,
        )  # fmt: skip
        carried = trace.carried(filled=True)
        in_units = rows_by_shape(*(part.unit_shapes for _, part in parts))
        by_identity = {place.label: place.identity for _, place in trace.unit_attributes}
        in_units = {label: rows for label, rows in in_units.items() if by_identity.get(label) not in carried}
        return asked, in_units

    def _found(self, effects: Sequence[Effect], asked: Question, merge: Merge, start: StartRows) -> Rules:
        """The rules for what is left between units."""
        if not effects:
            return Rules({}, {})
        with self._guards.lifted():
            return self._try_out(effects, asked, merge, start)

    def _know_units(
        self, trace: Trace, by_shape: dict[str, Rows], asked: Question, merge: Merge, start: StartRows, *,
        keep: bool,
    ) -> None:  # fmt: skip
        """Let units use the rules for what they keep. By shape those are found that all ranks find."""
        rules = {**by_shape, **self._try_units(trace, by_shape, asked, merge, start)}
        self.in_units.know(trace, rules, by_shape if keep else {})

    def _try_units(
        self, trace: Trace, known: Collection[str], asked: Question, merge: Merge, start: StartRows
    ) -> dict[str, Rule | None]:
        """The rules for what units of this rank keep beside their samples; these run for it."""
        tried = [(unit, place) for unit, place in self.in_units.tried(trace) if place.label not in known]
        parts = [part.unit_numbers for _, part in (asked.one, asked.other, asked.whole)]
        ran = {
            call.unit for _, part in (asked.one, asked.other, asked.whole) for call in part.calls if call.ran
        }
        found: dict[str, Rule | None] = {}
        for unit, place in tried:
            values = [part.get(place.label, MISSING) for part in parts]
            if unit not in ran and MISSING not in values and values[0] == values[1] == values[2]:
                found[place.label] = same
        left = [(u, p) for u, p in tried if p.label not in found and self.in_units.is_here(u)]
        if not left:
            return found
        units = {unit for unit, _ in left}
        asked = replace(asked, really=frozenset(units))
        try:
            with self._guards.lifted(), values_kept([self._patches.units[unit].module for unit in units]):
                rules = self._try_out([Effect(place) for _, place in left], asked, merge, start).by_place
        except Exception as error:  # the user's code, on made-up values
            _log.debug("units of %s do not run on made-up values: %s", trace.step, error)
            rules = {}
        return found | {place.label: rules.get(place.label, unmerged) for _, place in left}

    def _try_out(self, effects: Sequence[Effect], asked: Question, merge: Merge, start: StartRows) -> Rules:
        """The rules, with everything as it is left as it is."""
        function, trace = step_function(self._root, asked.whole[1].step), asked.whole[1]
        if self._as_one:
            asked = replace(asked, given=values_at_end(trace) if self._has_last_stage else frozenset())
        known = {effect.place.identity for effect in effects}
        aside = [e for e in trace.effects if e.from_units and e.place.identity not in known]
        aside = [] if self._has_last_stage else [e for e in aside if not is_absent(e)]
        with self._left_as_it_is([*effects, *aside]):
            found = rules_of(effects, asked, function, self._patches, merge, self._quiet, start, aside)
        if found.are_told:
            self.told_at_end.add(trace.step)
        return found

    @contextmanager
    def _left_as_it_is(self, effects: Sequence[Effect]) -> Iterator[None]:
        kept = [(e.place, Kept.of(e.place.get(), deep=e.deep)) for e in effects]
        saved, outside = ModuleState(self._root), Standing(self._others())
        try:
            yield
        finally:
            saved.restore()
            outside.restore()
            for place, value in kept:
                value.give_back(place)


def _as_one(
    one: MicrobatchArguments, other: MicrobatchArguments, first: int, second: int
) -> MicrobatchArguments:
    """Arguments of two micro-batches as one; an index of the batch is that of both, whatever its value."""

    def joined(value: Any, more: Any) -> Any:
        is_index = type(value) is int and value == more
        return value if is_index else merge_outputs([value, more], [first, second])

    args = tuple(joined(*pair) for pair in zip(one[0], other[0], strict=True))
    return args, {key: joined(value, other[1][key]) for key, value in one[1].items()}


def _is_nothing(value: Any) -> bool:
    return value is None or value is MISSING


def _is_like(rule: Rule | None, rows: Rows) -> bool:
    return isinstance(rule, Rows) and rule.dims == rows.dims
