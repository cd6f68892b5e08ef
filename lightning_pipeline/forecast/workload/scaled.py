"""A workload of any number of samples, from traces of two: what a step does is linear in them."""

from collections.abc import Sequence
from dataclasses import replace

from typing_extensions import override

from lightning_pipeline.forecast.workload.profile import StageProfile, State, profile
from lightning_pipeline.forecast.workload.workload import Workload
from lightning_pipeline.model.cut import Partition, StageActivations, stage_activations
from lightning_pipeline.model.tensors import Work


class ScaledWorkload(Workload):
    """Reads two workloads off at another number of samples. The cut is that of the first.

    Args:
        first: For `sizes[0]` samples.
        second: For `sizes[1]` samples.
        sizes: Two different numbers.
        samples: Of the micro-batch.
    """

    def __init__(self, first: Workload, second: Workload, sizes: tuple[int, int], samples: int) -> None:
        super().__init__(first.root, first.args)
        self._first, self._second = first, second
        self._share = (samples - sizes[0]) / (sizes[1] - sizes[0])
        self._tokens = first.tokens and first.tokens * samples // sizes[0]

    @override
    def partition(self, num_stages: int) -> Partition:
        return self._first.partition(num_stages)

    @override
    def stages(self, num_stages: int) -> tuple[StageProfile, ...]:
        if num_stages not in self._profiles:
            cut = self._second.like(self._first.partition(num_stages))
            known = zip(self._first.stages(num_stages), profile(self.root, cut), strict=True)
            self._profiles[num_stages] = tuple(self._between(*pair) for pair in known)
        return self._profiles[num_stages]

    @override
    def held(self, num_stages: int, rank_of: Sequence[int]) -> list[StageActivations]:
        cut = self._first.partition(num_stages)
        cuts = cut, self._second.like(cut)
        known = zip(*(stage_activations(each, rank_of) for each in cuts), strict=True)
        return [
            StageActivations(
                round(self._at(one.until_backward, two.until_backward)),
                round(self._at(one.until_weight, two.until_weight)),
            )
            for one, two in known
        ]

    @override
    def largest_unit(self, states: Sequence[State]) -> int:
        return self._first.largest_unit(states)

    @property
    @override
    def optimizer_states(self) -> dict[str, float] | None:
        return self._first.optimizer_states

    @property
    @override
    def num_units(self) -> int:
        return self._first.num_units

    @property
    @override
    def tokens(self) -> int | None:
        return self._tokens

    def _at(self, first: float, second: float) -> float:
        return max(0.0, first + (second - first) * self._share)

    def _between(self, one: StageProfile, two: StageProfile) -> StageProfile:
        return replace(
            one,
            flops=self._at(one.flops, two.flops),
            forward=self._works(one.forward, two.forward),
            backward_input=self._works(one.backward_input, two.backward_input),
            backward_weight=self._works(one.backward_weight, two.backward_weight),
            activation_bytes=round(self._at(one.activation_bytes, two.activation_bytes)),
            recomputed_bytes=round(self._at(one.recomputed_bytes, two.recomputed_bytes)),
            message_bytes=round(self._at(one.message_bytes, two.message_bytes)),
        )

    def _works(self, one: Sequence[Work], two: Sequence[Work]) -> tuple[Work, ...]:
        """Operation by operation; where the two did not do the same, those of the second by their share."""
        if len(one) != len(two):
            factor = self._at(sum(work.cost for work in one), sum(work.cost for work in two))
            factor /= sum(work.cost for work in two) or 1.0
            return tuple(w._replace(flops=factor * w.flops, num_bytes=factor * w.num_bytes) for w in two)
        return tuple(
            a._replace(flops=self._at(a.flops, b.flops), num_bytes=self._at(a.num_bytes, b.num_bytes))
            for a, b in zip(one, two, strict=True)
        )
