"""The ranks of a run, and what they do together."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_pipeline import _lightning
from lightning_pipeline.errors import StageTimeoutError
from lightning_pipeline.measure import Exchange
from lightning_pipeline.ranks import Company, Failure, Groups, Outlet, RollCall, Within, reach_store
from lightning_pipeline.schedules import Plan
from lightning_pipeline.settings import Settings

_REACH = timedelta(seconds=5)  # for the store of a run that this rank will not come to


def join(environment: ClusterEnvironment, backend: str, settings: Settings) -> RollCall:
    """Join the default process group, unless this process is in it already.

    Args:
        environment: Of the run.
        backend: Of the group.
        settings: Of the strategy.

    Returns:
        Watches over what the ranks do together until somebody else does.

    Raises:
        StageFailedError: A rank has not come within `init_timeout`, is lost, or failed; it is named.
    """
    patience = settings.init_timeout
    roll = _roll_of(environment, patience, settings)
    try:
        roll.come()
        if not dist.is_initialized():
            roll.within(
                "joining the process group",
                lambda: _lightning.join_group(environment, backend, patience, roll.store),
            )
    except BaseException:
        roll.close()
        raise
    return roll


def stay_away(environment: ClusterEnvironment | None, settings: Settings, error: Exception) -> None:
    """Tell the ranks that wait for this one at the start of a run that it will not come.

    Args:
        environment: Of the run.
        settings: Of the strategy.
        error: What this rank raises. Where it is raised by all, there may be nobody to tell.
    """
    if environment is None or environment.world_size() == 1:
        return
    try:
        roll = _roll_of(environment, min(settings.init_timeout, _REACH), settings)
    except (StageTimeoutError, dist.DistError) as unreached:
        error.add_note(f"The other ranks could not be told: {unreached}")
        return
    roll.stay_away(error)
    roll.close()


def _roll_of(environment: ClusterEnvironment, patience: timedelta, settings: Settings) -> RollCall:
    if dist.is_initialized():
        rank, size, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
        assert world is not None, "it is initialized"
        store = world.get_group_store()
    else:
        rank, size = environment.global_rank(), environment.world_size()
        store = reach_store(environment.main_address, environment.main_port, rank, size, patience)
    return RollCall(store, rank, size, init_timeout=patience, step_timeout=settings.step_timeout)


class Members:
    """All ranks of a run; all make and use it together.

    Args:
        settings: Of the strategy.
        placement: Which pipeline rank holds which stage.
        backend: Of the collectives.
        device: Of this rank.
        within: Does what all ranks do together before somebody watches over waits.

    Attributes:
        groups: Of processes.
        failure: Ends all ranks when one fails.
        world: All ranks.
        replica: Those that hold the module together.
        meetings: The same, in hooks: a rank that is alone in one meets nothing else there.
        ranks: The global ranks of this replica, by pipeline rank.
        from_zero: From global rank 0 to all ranks.
        from_last: From the rank with the last stage to the others of its replica.
        exchange: Gathers what the callbacks tell of a batch.
        aside: Around what they do together inside a hook of the user's, once the module is split.
    """

    def __init__(
        self, settings: Settings, placement: Plan, backend: str, device: torch.device, within: Within
    ) -> None:
        self.groups = groups = Groups(
            placement, replicas=dist.get_world_size() // placement.num_ranks, backend=backend,
            init_timeout=settings.init_timeout, step_timeout=settings.step_timeout,
            hook_timeout=settings.hook_timeout, copies=settings.copies(device),
            edge_backend=settings.edge_backend(device, backend), device=device, within=within,
        )  # fmt: skip
        self.failure = Failure(groups, asked=SIGTERMException)
        self.world = Company(groups.control, self.failure.watch, groups.global_rank)
        self.replica = Company(groups.pipeline_control, self.failure.watch, groups.global_rank)
        self.meetings = Company(groups.meetings, self.failure.watch, groups.global_rank)
        self.ranks = groups.numbering.pipelines()[groups.replica]
        self.from_zero = Outlet(self.world, 0, groups.global_rank == 0)
        last = placement.rank_of(placement.num_stages - 1)
        self.from_last = Outlet(self.replica, self.ranks[last], last == groups.rank)
        self.aside: Callable[[], AbstractContextManager[None]] = nullcontext
        self.exchange = Exchange(self._begin_to_gather)

    def agreed(self, work: Callable[[], Any]) -> Any:
        """Do local work on every rank of the world; when one fails, all raise."""
        return self.world.all_or_none("splitting the module", work)

    def gather(self, value: Any, what: str = "gathering from all stages") -> list[Any]:
        """An object of every rank of this replica, by pipeline rank."""
        with self.aside():
            return self.by_rank(self.replica.gather(what, value))

    def _begin_to_gather(self, values: Sequence[float]) -> Callable[[], list[list[list[float]]]]:
        """Numbers of every rank, by replica and pipeline rank, without waiting for them yet."""
        wait = self.world.numbers_later("gathering what was measured", values)

        def by_replica() -> list[list[list[float]]]:
            found = wait()
            return [[found[rank] for rank in ranks] for ranks in self.groups.numbering.pipelines()]

        return by_replica

    def gather_for(self, what: str) -> Callable[[Any], list[Any]]:
        """`gather`, for something that messages are to name."""
        return lambda value: self.gather(value, what)

    def by_rank(self, found: Mapping[int, Any]) -> list[Any]:
        """What was found by global rank, by pipeline rank of this replica."""
        return [found[rank] for rank in self.ranks]

    def any_of(self, *flags: bool) -> list[bool]:
        """For each flag whether any rank of the world raised it."""
        return self.world.any_of("asking all ranks", *flags)

    def close(self) -> None:
        """A failure is told: from now on nobody waits for another."""
        self.world.close()
        self.replica.close()
        self.meetings.close()
