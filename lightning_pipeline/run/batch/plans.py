"""The plans of a run, and into how many micro-batches a batch goes."""

from lightning_pipeline.errors import ScheduleError
from lightning_pipeline.schedules import ForwardOnly, Plan, Schedule
from lightning_pipeline.schedules.plans import training_plan
from lightning_pipeline.settings import refusal_of_early_backwards

_MICROBATCHES_PER_RANK = 4  # with equal stages the bubble is then at most a fifth


class Plans:
    """The plans of a run, one per number of micro-batches, worked out when first needed.

    Args:
        schedule: The rule for training.
        num_ranks: Ranks of the pipeline.
        over_batch: Whether the last stage has to finish all forwards before its first backward.
    """

    def __init__(self, schedule: Schedule, num_ranks: int, *, over_batch: bool = False) -> None:
        self._over_batch = over_batch
        self.schedule, self.num_ranks = schedule, num_ranks
        self._forward = ForwardOnly(like=schedule)
        self._made: dict[tuple[bool, int], Plan] = {}

    def plan(self, num_microbatches: int, *, forward_only: bool) -> Plan:
        """The plan for a batch.

        Args:
            num_microbatches: Of this batch.
            forward_only: Forwards alone, for evaluation.

        Raises:
            ScheduleError: The schedule does not serve this number, or trains nothing, or begins backwards
                before a loss over the whole batch can be had.
        """
        key = (forward_only, num_microbatches)
        if key not in self._made:
            self._made[key] = (
                self._forward.plan(self.num_ranks, num_microbatches)
                if forward_only
                else training_plan(self.schedule, self.num_ranks, num_microbatches)
            )
        if self._over_batch and not self._made[key].finishes_forwards:
            raise ScheduleError(refusal_of_early_backwards(self.schedule))
        return self._made[key]

    def use(self, plan: Plan) -> None:
        """Run this one from now on for training batches of as many micro-batches."""
        self._made[False, plan.num_microbatches] = plan

    def choose_number(self, batch_size: int | None, *, at_least: int = 1) -> int:
        """A number of micro-batches for batches of a size: a divisor where there is a good one.

        Args:
            batch_size: Samples, `None` where the batch cannot be split.
            at_least: Samples that each micro-batch should have. `BatchNorm` needs 2 to train.
        """
        if batch_size is None or self.num_ranks == 1:
            return 1
        most: int = max(1, min(batch_size // at_least, _MICROBATCHES_PER_RANK * self.num_ranks))
        divisors: list[int] = [
            m for m in range(most, 0, -1) if batch_size % m == 0 and m >= min(most, self.num_ranks)
        ]
        candidates: list[int] = [*divisors, *range(most, 0, -1)]
        for number in candidates:
            if self._serves(number):
                return number
        return most

    def _serves(self, number: int) -> bool:
        try:
            self.plan(number, forward_only=False)
        except ScheduleError:
            return False
        return True
