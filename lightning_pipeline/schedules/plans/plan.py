"""A schedule worked out for given sizes: one list of actions per rank, as text, CSV or data."""

import csv
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

from lightning_pipeline.errors import ScheduleError
from lightning_pipeline.schedules.plans.action import MESSAGES, Action

_PAIR = re.compile(r"\(([^;()]+);([^;()]+)\)OVERLAP_F_B")
_OTHERS_DUTIES = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD)\d*")


class Plan:
    """What each rank does, in which order. Immutable; equal when all lists are equal.

    A plan is a sequence of ranks: `plan[rank]` is that rank's tuple of actions.

    Args:
        ranks: Per rank its actions, in order.
        pairs: Per rank the positions of actions that run as one with the action right after them,
            as DualPipe overlaps a forward with a backward. Default: none.

    Example:
        >>> plan = Plan([[Action(0, "F", 0), Action(0, "B", 0)], [Action(1, "F", 0), Action(1, "B", 0)]])
        >>> print(plan)
        0F0 0B0
        1F0 1B0
        >>> Plan.parse(str(plan)) == plan, plan.rank_of(1)
        (True, 1)
    """

    def __init__(
        self, ranks: Iterable[Iterable[Action]], *, pairs: Sequence[Iterable[int]] | None = None
    ) -> None:
        self._ranks = tuple(tuple(actions) for actions in ranks)
        self._pairs = tuple(frozenset(p) for p in pairs) if pairs else (frozenset[int](),) * len(self._ranks)
        if len(self._pairs) != len(self._ranks):
            raise ScheduleError(f"pairs were given for {len(self._pairs)} of {len(self._ranks)} ranks")

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline axis."""
        return len(self._ranks)

    @cached_property
    def num_stages(self) -> int:
        """Stages of all ranks together: one more than the largest index."""
        return max((a.stage for actions in self._ranks for a in actions), default=-1) + 1

    @cached_property
    def num_microbatches(self) -> int:
        """Micro-batches that the plan serves: one more than the largest index."""
        return max((a.microbatch for actions in self._ranks for a in actions), default=-1) + 1

    @cached_property
    def _placement(self) -> dict[int, int]:
        placement: dict[int, int] = {}
        for rank, actions in enumerate(self._ranks):
            for action in actions:
                placement.setdefault(action.stage, rank)
        return placement

    def rank_of(self, stage: int) -> int:
        """The rank that holds a stage.

        Args:
            stage: Index of the stage.

        Raises:
            ScheduleError: No rank has an action of this stage.
        """
        if stage not in self._placement:
            raise ScheduleError(f"no rank of this plan holds stage {stage}; it has stages {self._held()}")
        return self._placement[stage]

    def _held(self) -> str:
        return ", ".join(map(str, sorted(self._placement))) or "none"

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, ascending."""
        return tuple(sorted(stage for stage, holder in self._placement.items() if holder == rank))

    def pairs_of(self, rank: int) -> frozenset[int]:
        """Positions in `plan[rank]` whose action runs as one with the action after it."""
        return self._pairs[rank]

    @cached_property
    def splits_backward(self) -> bool:
        """Whether any backward is in two halves, I and W."""
        return any(action.kind in ("I", "W") for actions in self for action in actions)

    @cached_property
    def finishes_forwards(self) -> bool:
        """Whether the last stage runs the forwards of all micro-batches before its first backward.

        Example:
            >>> [Plan.parse(text).finishes_forwards for text in ("0F0 0F1 0B0 0B1", "0F0 0B0 0F1 0B1")]
            [True, False]
        """
        last = self.num_stages - 1
        kinds = [a.kind for actions in self for a in actions if a.stage == last]
        return "F" not in kinds[kinds.count("F") :]

    def first(self, num_microbatches: int) -> "Plan":
        """The same plan for a batch with fewer micro-batches: the surplus left out, all else in place.

        Args:
            num_microbatches: How many to keep. At least 1, at most what the plan serves.

        Raises:
            ScheduleError: The plan serves fewer.

        Example:
            >>> print(Plan.parse("0F0 0F1 0B0 0B1").first(1))
            0F0 0B0
        """
        if not 1 <= num_microbatches <= self.num_microbatches:
            raise ScheduleError(
                f"the plan serves 1 to {self.num_microbatches} micro-batches, not {num_microbatches}"
            )
        rows, pairs = [], []
        for actions, starts in zip(self._ranks, self._pairs, strict=True):
            kept = [i for i, action in enumerate(actions) if action.microbatch < num_microbatches]
            rows.append([actions[i] for i in kept])
            pairs.append(
                [at for at, i in enumerate(kept) if i in starts and kept[at + 1 : at + 2] == [i + 1]]
            )
        return Plan(rows, pairs=pairs)

    def __len__(self) -> int:
        return len(self._ranks)

    def __getitem__(self, rank: int) -> tuple[Action, ...]:
        return self._ranks[rank]

    def __iter__(self) -> Iterator[tuple[Action, ...]]:
        return iter(self._ranks)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return NotImplemented
        return self._ranks == other._ranks and self._pairs == other._pairs

    def __hash__(self) -> int:
        return hash((self._ranks, self._pairs))

    def __repr__(self) -> str:
        return (
            f"<Plan of {self.num_stages} stages on {self.num_ranks} ranks for "
            f"{self.num_microbatches} micro-batches>"
        )

    def cells(self, rank: int) -> list[str]:
        """A rank's actions as torch writes them, a pair as one `(0F4;7B0)OVERLAP_F_B`."""
        cells: list[str] = []
        actions = iter(enumerate(self._ranks[rank]))
        for position, action in actions:
            if position in self._pairs[rank]:
                cells.append(f"({action};{next(actions)[1]})OVERLAP_F_B")
            else:
                cells.append(str(action))
        return cells

    def __str__(self) -> str:
        return "\n".join(" ".join(self.cells(rank)) for rank in range(self.num_ranks))

    @classmethod
    def parse(cls, text: str) -> "Plan":
        """Read what `str` wrote: a line per rank, actions with spaces between. Blank lines do not count.

        Raises:
            ScheduleError: A word is not an action; the message names rank and position.
        """
        return cls.from_cells(line.split() for line in text.splitlines() if line.strip())

    @classmethod
    def from_cells(cls, rows: Iterable[Iterable[str]]) -> "Plan":
        """Build a plan from rows of words, one row per rank; empty words are idle slots and are dropped."""
        ranks: list[list[Action]] = []
        pairs: list[list[int]] = []
        for rank, row in enumerate(rows):
            ranks.append([])
            pairs.append([])
            for position, cell in enumerate(row):
                actions = _parse_cell(cell, rank, position)
                if len(actions) == 2:
                    pairs[-1].append(len(ranks[-1]))
                ranks[-1].extend(actions)
        return cls(ranks, pairs=pairs)

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write torch's `compute_only` format: a row per rank, an action per cell."""
        with open(path, "w", newline="") as file:
            csv.writer(file).writerows(self.cells(rank) for rank in range(self.num_ranks))

    @classmethod
    def from_csv(cls, path: str | os.PathLike[str]) -> "Plan":
        """Read torch's `compute_only` format. Empty cells, and the cells in which torch's runtime
        gathers, frees or reduces parameters, are dropped: our runtime decides that itself.

        Raises:
            ScheduleError: A cell is not an action, or the file holds sends and receives.
        """
        with open(path, newline="") as file:
            rows = [row for row in csv.reader(file) if row]
        plan = cls.from_cells(rows)
        if any(action.kind in MESSAGES for actions in plan for action in actions):
            raise ScheduleError(
                f"{os.fspath(path)} holds sends and receives: write it with format='compute_only'; "
                f"messages are added here"
            )
        return plan


def _parse_cell(cell: str, rank: int, position: int) -> list[Action]:
    cell = cell.strip()
    if not cell or _OTHERS_DUTIES.fullmatch(cell):
        return []
    try:
        pair = _PAIR.fullmatch(cell)
        if pair is not None:
            return [Action.parse(pair[1]), Action.parse(pair[2])]
        return [Action.parse(cell)]
    except ScheduleError as error:
        raise ScheduleError(f"rank {rank}, position {position}: {error}") from None
