"""What a step leaves behind on this rank: which rules put it together, found out once for each step."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from lightning_pipeline.data import merge_outputs
from lightning_pipeline.errors import SplitError
from lightning_pipeline.model.cut import Partition
from lightning_pipeline.model.replay.probe import Question, Rules, rules_of
from lightning_pipeline.model.state import (
    CHAINED,
    AttributeGuards,
    Merge,
    Rule,
    StepState,
    is_absent,
    unmerged,
    usual,
)
from lightning_pipeline.model.tensors import ModuleState
from lightning_pipeline.model.trace import (
    Effect,
    Kept,
    Owner,
    Standing,
    Trace,
    UnitPatches,
    step_function,
)

MicrobatchArguments = tuple[tuple[Any, ...], dict[str, Any]]


class LeftBehind:
    """Makes for each batch the state that its step carries, with the rules of the step.

    Args:
        root: The LightningModule.
        cut: Its partition.
        patches: The units' `forward`.
        stages: Those of this rank.
        traced: Traces a step with the arguments of a micro-batch.
        guards: What stands for attributes of other stages.
        others: What a step may change beside the module.
        quiet: Inside, nothing is logged or measured and no random number is used up.

    Attributes:
        not_tried: By step, what it leaves behind where no run on made-up values could tell how, and why not.
        doubtful: By step, states that it works out from their last value once for each micro-batch.
    """

    def __init__(
        self, root: nn.Module, cut: Partition, patches: UnitPatches, stages: Sequence[int], *,
        traced: Callable[[str, MicrobatchArguments], Trace],
        guards: AttributeGuards,
        others: Callable[[], Sequence[Owner]],
        quiet: Callable[[], AbstractContextManager[None]],
    ) -> None:  # fmt: skip
        self._root, self._cut, self._patches, self._stages = root, cut, patches, stages
        self._has_last_stage = cut.num_stages - 1 in stages
        self._traced, self._guards, self._others, self._quiet = traced, guards, others, quiet
        self._rules: dict[str, dict[str, Rule | None]] = {}
        self.doubtful: dict[str, list[str]] = {}
        self.not_tried: dict[str, str] = {}

    def new_state(
        self, trace: Trace, microbatches: Sequence[MicrobatchArguments], sizes: Sequence[int], merge: Merge
    ) -> StepState | None:
        """For one batch; None where the step leaves nothing behind.

        Args:
            trace: Of the step.
            microbatches: Arguments of each.
            sizes: Samples of each.
            merge: Merges one value per micro-batch.
        """
        if not trace.effects:
            return None
        if len(microbatches) > 1 and trace.step not in self.doubtful:
            rules = self._find_rules(trace, microbatches, sizes, merge)
            states = {effect.place.label for effect in trace.effects if effect.deep}
            wrong = [label for label, rule in rules.items() if rule is unmerged and label in states]
            self._rules[trace.step] = {**rules, **dict.fromkeys(wrong, CHAINED)}
            self.doubtful[trace.step] = sorted(wrong)
            if len(self._stages) > 1:
                self._refuse_chains(trace)
        return StepState(
            trace.effects, self._rules.setdefault(trace.step, {}), sizes,
            is_last=self._has_last_stage, step=trace.step,
        )  # fmt: skip

    def forget(self, step: str) -> None:
        """The step was seen to leave more behind: find the rules once more."""
        self._rules.pop(step, None)
        self.doubtful.pop(step, None)

    def _refuse_chains(self, trace: Trace) -> None:
        """Each stage of a rank would need what the micro-batch before left on that stage."""
        rules = self._rules[trace.step]
        names = [
            effect.place.label
            for effect in trace.effects
            if not (effect.from_units or is_absent(effect))
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
        self, trace: Trace, microbatches: Sequence[MicrobatchArguments], sizes: Sequence[int], merge: Merge
    ) -> dict[str, Rule | None]:
        here = [e for e in trace.effects if not is_absent(e)]
        effects = [e for e in here if self._has_last_stage or not e.from_units]
        if not effects:
            return {}
        question = [(part, size) for part, size in zip(microbatches[:2], sizes, strict=False)]
        try:
            (one, first), (other, second) = question
            whole, back = (
                merge_outputs([one, other], [first, second]),
                merge_outputs([other, one], [second, first]),
            )
            parts = [(part, self._traced(trace.step, part)) for part in (one, other, whole)]
            asked = Question(parts[0], parts[1], parts[2], (back, parts[2][1]), (first, second))
            with self._guards.lifted():
                found = self._try_out(effects, asked, merge)
        except Exception as error:  # the user's code, on made-up values: then the usual rules must do
            names = ", ".join(repr(effect.place.label) for effect in effects)
            self.not_tried[trace.step] = f"{names}: {type(error).__name__}: {error}"
            return {effect.place.label: unmerged if effect.deep else usual for effect in effects}
        late = [e.place.label for e in effects if e.from_units]
        self._refuse_late({label: found.readers.get(label, set()) for label in late}, trace)
        return found.by_place

    def _try_out(self, effects: Sequence[Effect], asked: Question, merge: Merge) -> Rules:
        """The rules, with everything as it is left as it is."""
        function = step_function(self._root, asked.whole[1].step)
        kept = [(e.place, Kept.of(e.place.get(), deep=e.deep)) for e in effects]
        saved, outside = ModuleState(self._root), Standing(self._others())
        try:
            return rules_of(effects, asked, function, self._patches, merge, self._quiet)
        finally:
            saved.restore()
            outside.restore()
            for place, value in kept:
                value.give_back(place)
