"""The planner: the best plan it can find for given costs and memory."""

from collections.abc import Sequence
from dataclasses import replace

from lightning_pipeline.errors import ConfigurationError, ScheduleError
from lightning_pipeline.schedules.plans import Costs, Plan, Schedule, require_sizes
from lightning_pipeline.schedules.search.candidates import loop, zigzag
from lightning_pipeline.schedules.search.problem import Problem
from lightning_pipeline.schedules.search.search import best_plan


class Auto(Schedule):
    """The plan with the smallest makespan that a search finds under a memory cap.

    The search is over placements (one stage per rank, loops, zigzags such as the V), stages per rank,
    warm-ups and where weight gradients go. It tries every named schedule that fits, so it is never worse
    than they are. The same costs give the same plan on every machine.

    Args:
        costs: Times and memory. Numbers: the planner chooses the stages per rank. Sequences: the stages
            are given. Default: equal halves and free hops, one stage per rank, until costs are measured.
        memory: Most that a rank may hold, in the unit of `costs.activation`: a number or one per rank.
            Default: what 1F1B needs on its fullest rank.
        objective: `makespan`, what a step with a barrier at its end takes, or `span`, the rate of steps
            that overlap.
        max_stages_per_rank: Most stages per rank to try.

    Attributes:
        stages_per_rank: Those of the last plan that was made; 1 before.

    Raises:
        ConfigurationError: A setting is not one of these.

    Example:
        >>> print(Auto(costs=Costs(1, 1, 1), max_stages_per_rank=1).plan(num_ranks=2, num_microbatches=2))
        0F0 0F1 0I0 0W0 0I1 0W1
        1F0 1I0 1F1 1I1 1W0 1W1
    """

    def __init__(
        self,
        *,
        costs: Costs | None = None,
        memory: float | Sequence[float] | None = None,
        objective: str = "makespan",
        max_stages_per_rank: int = 4,
    ) -> None:
        self.costs = costs
        self.memory = memory
        self.objective = objective
        self.max_stages_per_rank = max_stages_per_rank
        problems = []
        if objective not in ("makespan", "span"):
            problems.append(f"objective={objective!r}: choose 'makespan' or 'span'")
        if max_stages_per_rank < 1:
            problems.append(f"max_stages_per_rank={max_stages_per_rank}: a rank holds at least 1 stage")
        if problems:
            raise ConfigurationError("; ".join(problems))

    def plan(self, num_ranks: int, num_microbatches: int) -> Plan:
        """Search over placements and orders.

        Raises:
            ScheduleError: No plan fits in the memory, or the costs are for another number of ranks.
        """
        require_sizes(num_ranks, num_microbatches)
        plan = self._search(self._placements(num_ranks), num_microbatches, self.costs or Costs(1, 1, 1))
        self.stages_per_rank = plan.num_stages // num_ranks
        return plan

    def reorder(self, placement: Sequence[int], num_microbatches: int, costs: Costs) -> Plan:
        """Search over orders alone: the stages stay where they are.

        Args:
            placement: The rank of each stage.
            num_microbatches: Micro-batches per batch.
            costs: As measured, by stage.

        Raises:
            ScheduleError: No plan fits in the memory.
        """
        return self._search([tuple(placement)], num_microbatches, costs)

    def _placements(self, num_ranks: int) -> list[tuple[int, ...]]:
        """Placements to try, those with fewer stages per rank first, so that they win a draw."""
        counts = range(1, self.max_stages_per_rank + 1)
        if self.costs is None:
            counts = range(1, 2)
        elif self.costs.num_stages is not None:
            stages = self.costs.num_stages
            if stages % num_ranks:
                raise ScheduleError(
                    f"costs are given for {stages} stages, which {num_ranks} ranks cannot share equally: "
                    f"give them for a multiple of {num_ranks}"
                )
            counts = range(stages // num_ranks, stages // num_ranks + 1)
        both = [make(num_ranks, count) for count in counts for make in (loop, zigzag)]
        return list(dict.fromkeys(both))

    def _search(self, placements: list[tuple[int, ...]], num_microbatches: int, costs: Costs) -> Plan:
        problems = []
        for placement in placements:
            stage_costs = costs.per_stage([placement.count(rank) for rank in placement])
            free = (0.0,) * (max(placement) + 1)
            problem = Problem(placement, num_microbatches, stage_costs, free, self.objective)
            problems.append(replace(problem, caps=self._caps(problem.shares)))
        plan = best_plan(problems, costs)
        if plan is None:
            need = round(max(problems[0].shares), 6)
            raise ScheduleError(
                f"memory={self.memory} holds no plan: one micro-batch alone takes {need} on the rank that "
                f"needs most"
            )
        return plan

    def _caps(self, shares: list[float]) -> tuple[float, ...]:
        """By rank, what it may hold, given what one micro-batch takes on all stages of each rank."""
        num_ranks = len(shares)
        if isinstance(self.memory, Sequence):
            if len(self.memory) != num_ranks:
                raise ScheduleError(f"memory is given for {len(self.memory)} ranks, not for {num_ranks}")
            return tuple(self.memory)
        if self.memory is not None:
            return (self.memory,) * num_ranks
        return (max((num_ranks - rank) * share for rank, share in enumerate(shares)),) * num_ranks

    def __repr__(self) -> str:
        return (
            f"Auto(costs={self.costs!r}, memory={self.memory!r}, objective={self.objective!r}, "
            f"max_stages_per_rank={self.max_stages_per_rank!r})"
        )
