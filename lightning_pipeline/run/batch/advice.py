"""What a run says of its batches, once of each kind."""

import warnings
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_pipeline.model.split import Doubts
from lightning_pipeline.run.batch.differences import Difference

_HOOKS = {
    "training_step": "on_train_batch_end",
    "validation_step": "on_validation_batch_end",
    "test_step": "on_test_batch_end",
    "predict_step": "on_predict_batch_end",
}


class Advice:
    """Warnings of one batch.

    Args:
        step: Name of the user's method.
        number: Micro-batches of the batch.
        warned: Of what a warning has been given in this run.
        has_others: Whether other ranks hold stages, too.
    """

    def __init__(self, step: str, number: int, warned: set[Hashable], *, has_others: bool) -> None:
        self._step, self._number = step, number
        self._warned, self._has_others = warned, has_others

    def say(self, kind: Hashable, text: str, *, of_this_rank: bool = False) -> None:
        """Warn, once a run of each kind; of what other ranks may not know, on this one."""
        if kind not in self._warned:
            self._warned.add(kind)
            (warnings.warn if of_this_rank else rank_zero_warn)(text)

    def not_cut(self, refusal: Exception) -> None:
        """The batch cannot be split, and those before it could."""
        self.say(
            ("not cut", self._step),
            f"a batch of {self._step} is one micro-batch, and the stages work one after the other, for it "
            f"cannot be cut as those before it: {refusal}",
        )

    def unsplit(self, batch: Any) -> None:
        """The batch has nothing to split."""
        self.say(
            "batch",
            f"a batch of type {type(batch).__name__} has no tensor and no list to split, so it is "
            "one micro-batch, and the stages work one after the other: override `split_batch(batch, "
            "num_microbatches)` on the LightningModule",
        )

    def of_loss(self, mine: float, theirs: float | None, lines: Sequence[str]) -> None:
        """The loss is another one for the batch as one."""
        kind = ("loss as one", self._step)
        if kind not in self._warned:
            self._warned.add(kind)
            reads = f"; it reads numbers at {', '.join(lines)}" if lines else ""
            warnings.warn(
                f"what {self._step} returns for a batch is {theirs:.6g} where the code between units runs "
                f"once for all of it, as on one device, and {mine:.6g} from its {self._number} "
                "micro-batches: its loss is made of what each micro-batch has otherwise, so that gradients "
                f"are not those of one device{reads}. Work it out in on_after_batch_transfer, or use "
                "PipelineStrategy(loss_over_batch=True, schedule='GPipe')"
            )

    def of_writes(self) -> None:
        """Loggers are given what micro-batches have otherwise."""
        self.say(
            ("writes", self._step),
            f"{self._step} gives a logger by itself (`self.logger.log_metrics`, `self.logger.experiment`) "
            f"what each of a batch's {self._number} micro-batches has otherwise, and the batch could not be "
            "looked at as one: numbers are means by samples. Use self.log, or write in "
            f"{_HOOKS.get(self._step, 'the hook after the batch')}",
        )

    def of_returned(self, found: Sequence[Difference]) -> None:
        """What the step returns is."""
        kind = ("returned as one", self._step)
        if kind not in self._warned:
            self._warned.add(kind)
            parts = ", ".join(
                f"{f'entry {one.name}' if one.name else 'it'} has {one.theirs} there and {one.mine} here"
                for one in found
            )
            warnings.warn(
                f"what {self._step} returns for a batch is something else where the code between units runs "
                f"once for all of it, as on one device, than from its {self._number} micro-batches: "
                f"{parts}. It mixes what the model gives for several samples (`h - h.mean(0)`, "
                f"`h.softmax(0)`): return the model's values as they are, and work it out in "
                f"{_HOOKS.get(self._step, 'the hook after the batch')}, which is given the whole batch's, "
                "or override merge_outputs(outputs, sizes)"
            )

    def of_values(self, mixed: Mapping[str, str]) -> None:
        """Values of units are mixed before another unit."""
        kind = ("values", self._step)
        if mixed and kind not in self._warned:
            self._warned.add(kind)
            lines = ", ".join(f"{name} at {line}" for line, name in mixed.items())
            warnings.warn(
                f"{self._step} mixes what layers gave for several samples of the batch before another layer "
                f"({lines}), as manifold mixup does, and each of {self._number} micro-batches mixes "
                "its own samples, so that numbers are not those of one device: use num_microbatches=1, or "
                "mix samples in on_after_batch_transfer, before the first layer"
            )

    def of_padding(self, units: Sequence[str], inside: Sequence[str]) -> None:
        """Padding has a part in what later units are given, or in what they make of it."""
        made_by = [f"what {self._step} makes of it"] if units else []
        made_by += [f"the forward of {', '.join(inside)}"] if inside else []
        kind = ("padding", self._step)
        if made_by and kind not in self._warned:
            self._warned.add(kind)
            giver = ", ".join(units) or "a layer"
            warnings.warn(
                f"in {self._step} {giver} gives as much for each sample as the longest that it is given "
                f"has, and {' and '.join(made_by)} goes by the padding, too (a mean, a softmax without a "
                f"mask): each of {self._number} micro-batches is as wide as its own longest sample, so that "
                "numbers are not those of one device. Leave padding out by a mask, or let the layer give the "
                "width of what it is given (`pad_packed_sequence(..., total_length=x.shape[1])`)"
            )

    def of_seeds(self, line: str) -> None:
        """The step draws for its samples from seeds of its own."""
        if line:
            self.say(
                ("seeds", self._step),
                f"{self._step} draws for each sample from a generator that it has seeded or made itself, or "
                f"that the module does not keep ({line}): each of {self._number} micro-batches begins with "
                "the same seed, or goes on from the one before. The numbers are those of one device that "
                "runs the same micro-batches, and not of one that draws for the whole batch. Draw in "
                "on_after_batch_transfer, or use num_microbatches=1",
            )

    def of_units(self, units: Sequence[str]) -> None:
        """Units mix samples."""
        new = [unit for unit in units if ("unit", self._step, unit) not in self._warned]
        if new:
            self._warned |= {("unit", self._step, unit) for unit in new}
            warnings.warn(
                f"in {self._step} the forward of {', '.join(new)} mixes the samples that it is given, as "
                "`h - h.mean(0)`, a deviation over the batch and experts with a capacity do. It is given "
                f"each of {self._number} micro-batches by itself, so that numbers are not those of "
                "one device: use num_microbatches=1, or write the layer so that a sample's output follows "
                "from this sample. loss_over_batch=True does not change it. If statistics of fewer samples "
                "are what you want, as each replica has its own under DDP, leave it so"
            )

    def of_left(self, names: Sequence[str]) -> None:
        """The batch as one leaves another number."""
        kind = ("left as one", self._step)
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(
                f"{self._step} leaves another number in {_listed(names)} than one device, where "
                "the code between units runs once for the whole batch: it is put together from those of "
                f"{self._number} micro-batches. Work it out in on_train_batch_end from what the step "
                "returns, or use self.log or a torchmetrics object"
            )

    def of_more(self, names: Sequence[str]) -> None:
        """The batch as one logs what no micro-batch does."""
        self.say(
            ("more", self._step),
            f"{self._step} logs {_listed(names)} for a batch of so many samples, and for none of its "
            f"{self._number} micro-batches (`if len(x) > 4: self.log(...)`): batches before, or all, are "
            "without it. Log it in on_train_batch_end or its like, or in each micro-batch",
        )

    def without_loss(self) -> None:
        """No micro-batch has a loss."""
        self.say(
            "loss",
            f"{self._step} returned no loss for any of a batch's {self._number} micro-batches, so "
            "that no stage ran a backward and this batch trains nothing: return the loss, or a "
            "dictionary with 'loss', unless that was on purpose",
        )

    def some_without_loss(self, without: int) -> None:
        """Some micro-batches have no loss."""
        self.say(
            "some losses",
            f"{self._step} returned no loss for {without} of a batch's {self._number} micro-batches, and the "
            "batch trains on the others: one device returns one for all of it, or none, as where a loss is "
            "not finite. From now on such batches are looked at as one, and left out where they have none",
        )

    def whole(self, total: int) -> None:
        """The batch is not cut."""
        self.say(
            "rows",
            f"a batch of {total} samples is one micro-batch, for {self._step} has left rows of another "
            "number of samples in an attribute, and may read them: use `drop_last=True`, or delete what "
            "no later batch reads in `on_train_batch_end`",
        )

    def written_apart(self) -> None:
        """The batch is another one here."""
        self.say(
            ("written apart", self._step),
            f"{self._step} writes a tensor of the batch in place that is too large to be told to this rank, "
            "after units of other stages: hooks here find it as it came, and so do batches that a loader "
            "keeps. Work it out in on_after_batch_transfer, or keep what is written apart from the batch",
            of_this_rank=True,
        )

    def unforeseen(self, names: Sequence[str], doubts: Doubts) -> None:
        """The step has changed what no trace shows."""
        step = self._step
        if names and doubts.ended_early and (self._number > 1 or self._has_others):
            self.say(
                ("unforeseen", step),
                f"{step} has changed {_listed(names)} after a line that needs values where the step is run "
                "without any (a sparse tensor of what layers gave, a file of it), so that it was "
                f"not seen: it is done once for each of {self._number} micro-batches, on the last stage. Do "
                "it before such a line, or in on_train_batch_end or another hook, which every rank runs",
            )
        elif names and (self._number > 1 or self._has_others):
            where = "on the last stage alone, and " if self._has_others else ""
            self.say(
                ("unforeseen", step),
                f"{step} has changed {_listed(names)} {where}for each micro-batch by itself, as if "
                "something decided so that nobody sees: a value that the model computes (`if loss < 0.1`), a "
                "list that the number of a step is the index of, how much an object holds, the clock. Decide "
                "by what it returns, in on_train_batch_end or another hook, which every rank runs",
            )

    def divided(self, divided: Sequence[str]) -> None:
        """The step has changed something for some micro-batches alone."""
        step = self._step
        if divided:
            self.say(
                ("divided", step),
                f"{step} has changed {_listed(divided)} for some micro-batches of a batch and "
                "not for others, as values that the model computes decide (`if loss < 0.1`), where one "
                "device decides once for the batch: decide by what it returns, in a hook such as "
                "on_train_batch_end",
            )

    def divided_gradients(self, divided: Sequence[str]) -> None:
        """Likewise what a backward reads, such as whether a weight is frozen."""
        step = self._step
        if divided:
            self.say(
                ("divided gradients", step),
                f"{step} has set {_listed(divided)} in some micro-batches of a batch and not in others, as "
                "values that the model computes decide (`if loss < 0.1`), and gradients of this batch are "
                "those of each micro-batch's decision, where one device decides once for the batch. Decide "
                "in a hook such as on_train_batch_end, by what the step returns",
            )

    def of_effects(self, doubts: Doubts) -> None:
        """Of what a step leaves behind, where it may not be what one device leaves."""
        step = self._step
        if doubts.untried is not None:
            self.say(
                ("untried", step),
                f"what {step} leaves behind is made from its micro-batches as returned values are, means by "
                "samples and rows joined; whether one device would leave the same could not be tried out. "
                f"This concerns {doubts.untried}",
            )

    def of_counts(self, sums: Sequence[str]) -> None:
        """What the step does goes by a sum to which it has added."""
        step = self._step
        if sums:
            self.say(
                ("counts", step),
                f"{step} adds up {_listed(sums)} over samples and decides by the sum (`if "
                "self.seen + len(x) <= size`): each micro-batch decides by what it has added itself, one "
                "device by the whole batch. Decide before adding, or in on_train_batch_end",
            )

    def of_states(self, states: Sequence[str]) -> None:
        """Numbers that follow from the ones before."""
        step, number = self._step, self._number
        if states and number > 1:
            self.say(
                ("doubtful", step),
                f"{step} works out {_listed(states)} from the value before, once for each of "
                f"{number} micro-batches, and no rule puts their results together to what one "
                "device has: use self.log or a torchmetrics object, or update it in on_train_batch_end",
            )

    def of_kept(self) -> None:
        """The step logs what it has written, and the batch was not looked at as one."""
        self.say(
            ("kept", self._step),
            f"{self._step} logs what it has written before for each of {self._number} micro-batches, and "
            "could not be run once more for the batch as one, which has another number there: what is logged "
            "is put together from the micro-batches. Log it in on_train_batch_end, which sees what the batch "
            "leaves",
        )

    def _mixes(self, lines: Mapping[str, str]) -> str:
        places = ", ".join(f"{name} at {line}" for line, name in lines.items())
        return (
            f"{self._step} mixes samples of the batch with each other, or goes by a number of all of them or "
            f"by their place ({places}), and each of {self._number} micro-batches has its own. Where "
            "partners are drawn (mixup by a permutation) that draws them from fewer samples; otherwise the "
            "numbers are not those of one device, unless the step puts the samples back in order: do "
            "it in on_after_batch_transfer, which sees the batch"
        )

    def of_numbers(self, numbers: Mapping[str, bool]) -> None:
        """Units of this rank give a number of all samples: a loss, or a value beside their output.

        Args:
            numbers: By name, whether it is the sum over samples, and not the mean by them either.
        """
        step = self._step
        for unit, sums in numbers.items() if self._number > 1 else ():
            what = (
                f"a sum over its samples. That is one device's where {step} divides it by what counts; where "
                "it is the loss itself, use PipelineStrategy(loss_weighting='sum')"
                if sums
                else "a number of all its samples that is no mean of theirs, such as a quotient by what "
                f"counts, a contrast or a root, and each of {self._number} micro-batches gives that of its "
                "own. Work it out between the layers, where it is followed, or use loss_over_batch=True, "
                "whole_steps=True or num_microbatches=1; where the loss is divided by what counts, override "
                "`microbatch_weight(batch)`"
            )
            self.say(("number", step, unit), f"{unit} gives {step} {what}")

    def in_part(self, mixed: Mapping[str, str], *, is_compared: bool) -> None:
        """Where micro-batches have their own of some of what is mixed, and no look at the batch compares."""
        kind = "mixed", self._step
        if mixed and kind not in self._warned:
            self._warned.add(kind)
            if not is_compared:
                warnings.warn(self._mixes(mixed))

    def of_samples(self, doubts: Doubts, *, later: bool) -> None:
        """Of what a step makes of several samples, of which a micro-batch has fewer.

        Args:
            doubts: Of the batch.
            later: Whether the batch as one will tell what comes of mixing at the end of the step.
        """
        if self._number > 1:
            self.of_units(doubts.units)
            self.of_values({} if doubts.mixed else doubts.values)
            self.of_padding(doubts.padded, doubts.padded_inside)
            self.of_seeds(doubts.seeded_at)
        if self._number > 1 and not later:
            self.of_mixing(doubts)

    def of_mixing(self, doubts: Doubts) -> None:
        """The step mixes samples, or decides by all of them."""
        step, number = self._step, self._number
        if doubts.mixed:
            self.say(("mixed", step), self._mixes(doubts.mixed))
        if doubts.decides_apart:
            self.say(
                ("apart", step),
                f"{step} decides by what is in the batch (`if x.sum() > 0`), and the {number} micro-batches "
                "of one have decided differently, where one device decides once for all of its samples: "
                "decide in on_after_batch_transfer, or sample by sample with torch.where",
            )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
