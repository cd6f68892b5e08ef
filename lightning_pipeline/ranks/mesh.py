"""Which global rank holds what: how the devices of a Trainer are shared out over stages and replicas."""

from dataclasses import dataclass
from typing import Protocol

from lightning_pipeline.errors import ScheduleError
from lightning_pipeline.schedules import ForwardOnly, Plan
from lightning_pipeline.settings import Problems, Settings


class Placement(Protocol):
    """Which rank of the pipeline holds which stage; a `Plan` is one."""

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline axis."""
        ...

    @property
    def num_stages(self) -> int:
        """Stages of all ranks together."""
        ...

    def rank_of(self, stage: int) -> int:
        """The rank that holds a stage."""
        ...


@dataclass(frozen=True)
class Numbering:
    """Global rank numbers: the rank that holds the last stage, of replica 0, is global rank 0.

    Loggers, progress bar and predictions are then where Lightning looks for them. Going down from the last
    stage's rank, each rank of the pipeline takes the next block of `replicas` numbers; with one stage per
    rank this is `(num_ranks - 1 - rank) * replicas + replica`.

    Args:
        num_ranks: Ranks of the pipeline axis.
        last: The one that holds the last stage.
        replicas: Data-parallel replicas of the pipeline.

    Example:
        >>> numbering = Numbering(num_ranks=2, last=1, replicas=2)
        >>> [numbering.coordinates(number) for number in range(4)]
        [(1, 0), (1, 1), (0, 0), (0, 1)]
    """

    num_ranks: int
    last: int
    replicas: int = 1

    @classmethod
    def of(cls, placement: Placement, *, replicas: int = 1) -> "Numbering":
        """Number the ranks of a placement."""
        return cls(placement.num_ranks, placement.rank_of(placement.num_stages - 1), replicas)

    @property
    def world_size(self) -> int:
        """How many global ranks there are."""
        return self.num_ranks * self.replicas

    def global_rank(self, rank: int, replica: int = 0) -> int:
        """The global rank at these coordinates."""
        return (self.last - rank) % self.num_ranks * self.replicas + replica

    def coordinates(self, global_rank: int) -> tuple[int, int]:
        """Pipeline rank and replica of a global rank."""
        block, replica = divmod(global_rank, self.replicas)
        return (self.last - block) % self.num_ranks, replica

    def pipelines(self) -> list[list[int]]:
        """Global ranks of each pipeline, by pipeline rank."""
        return [
            [self.global_rank(rank, replica) for rank in range(self.num_ranks)]
            for replica in range(self.replicas)
        ]

    def replicated(self) -> list[list[int]]:
        """Global ranks that hold the same stages, by replica."""
        return [
            [self.global_rank(rank, replica) for replica in range(self.replicas)]
            for rank in range(self.num_ranks)
        ]


@dataclass(frozen=True)
class RankMap:
    """Which rank holds what.

    Attributes:
        placement: Which pipeline rank holds which stage.
        numbering: Of the ranks.
    """

    placement: Plan
    numbering: Numbering

    @property
    def num_stages(self) -> int:
        """Of the whole pipeline."""
        return self.placement.num_stages

    @property
    def num_replicas(self) -> int:
        """Data-parallel replicas of the pipeline."""
        return self.numbering.replicas

    def stages_of(self, global_rank: int) -> tuple[int, ...]:
        """The stages that a rank holds."""
        return self.placement.stages_of(self.numbering.coordinates(global_rank)[0])

    def replica_of(self, global_rank: int) -> int:
        """The replica that a rank is part of."""
        return self.numbering.coordinates(global_rank)[1]


def fit_to_devices(settings: Settings, devices: int, num_nodes: int, device_type: str) -> RankMap:
    """Share the devices out.

    Args:
        settings: Checked arguments of the strategy.
        devices: Devices per node.
        num_nodes: Nodes.
        device_type: `"cpu"`, `"cuda"`, ...; for the advice in an error.

    Returns:
        Which rank holds what.

    Raises:
        ConfigurationError: `devices * num_nodes` is not `stages * data_parallel_size`, or the schedule
            does not serve this number of ranks.
    """
    world, problems = devices * num_nodes, Problems()
    stages, replicas = _sizes(settings, world)
    if stages * replicas != world:
        problems.append(_misfit(settings, devices, num_nodes, device_type))
    try:
        placement: Plan | None = ForwardOnly(like=settings.schedule).plan(stages, 1)
    except ScheduleError as error:
        placement = None
        problems.append(str(error))
    problems.refuse("PipelineStrategy does not fit the Trainer")
    assert placement is not None, "a problem was raised"
    return RankMap(placement, Numbering.of(placement, replicas=replicas))


def _sizes(settings: Settings, world: int) -> tuple[int, int]:
    asked_replicas = settings.data_parallel_size
    if settings.stages == "auto":
        replicas = 1 if asked_replicas == "auto" else asked_replicas
        return max(1, world // replicas), replicas
    stages = settings.stages
    return stages, max(1, world // stages) if asked_replicas == "auto" else asked_replicas


def _misfit(settings: Settings, devices: int, num_nodes: int, device_type: str) -> str:
    stages, replicas = _sizes(settings, devices * num_nodes)
    per_node, rest = divmod(stages * replicas, num_nodes)
    mend = f"use Trainer(devices={per_node})" if not rest else f"use a multiple of {num_nodes} ranks"
    found = "; devices='auto' on CPU is 1" if device_type == "cpu" and devices == 1 else ""
    return (
        f"devices={devices} * num_nodes={num_nodes} is {devices * num_nodes}, but stages={stages} * "
        f"data_parallel_size={replicas} is {stages * replicas}{found}: {mend}, or other stages"
    )
