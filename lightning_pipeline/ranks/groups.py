"""Which global rank holds what, and the process groups between them."""

import os
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from lightning_pipeline._torch import set_group_timeout
from lightning_pipeline.ranks.aside import Aside
from lightning_pipeline.ranks.edges import Ways
from lightning_pipeline.ranks.lookout import Lookout, abort_devices, break_off
from lightning_pipeline.ranks.mesh import Numbering, Placement
from lightning_pipeline.ranks.notes import CAUSE, Notes
from lightning_pipeline.settings import Copying
from lightning_pipeline.wire import Edge, Link, LinkError, Wait, Waits

_SPARE = timedelta(seconds=60)
_LONGEST_NAP = 0.05  # seconds between two looks at the notes
_MAKING = "making groups"
_LINGER_SECONDS = 2.0
T = TypeVar("T")
Within = Callable[[str, Callable[[], Any]], Any]


def neighbours(placement: Placement) -> list[tuple[int, int]]:
    """Pairs of different ranks with neighbouring stages, each once, the smaller first."""
    holders = [placement.rank_of(stage) for stage in range(placement.num_stages)]
    return sorted({(min(a, b), max(a, b)) for a, b in pairwise(holders) if a != b})


class Groups:
    """All process groups of one pipeline, this rank's links, and the way to end them.

    Made on all global ranks at the same time, by all with the same arguments. The default process group is
    used to make them and stays usable after `close` and `abort`.

    Args:
        placement: Which rank holds which stage.
        replicas: Data-parallel replicas of the pipeline.
        backend: Of the groups that carry tensors: `pipeline`, replicas, and stages that share a parameter,
            such as `nccl`. Default: `gloo`.
        init_timeout: Longest wait for a rank that comes late to the making of a group.
        step_timeout: Longest wait for a rank that is stopped, or for ranks that wait for each other.
        hook_timeout: Longest wait for a rank that is alive inside the user's own code.
        edge_backend: Of the communicators that move tensors between neighbours, from device to device. None:
            there are none; tensors go through host memory, with their headers, or are copied.
        copies: Whether processes of one machine copy tensors between their memories: "never", "only", or
            "faster", where that works and is not slower than the backend.
        device: Where those tensors live.
        within: Does what all ranks do together before somebody watches over waits.

    Attributes:
        edges: By the neighbour's pipeline rank; empty where tensors go through host memory.
        ways: How tensors of this replica travel, as text; empty likewise.
        pipeline: The ranks of this replica, for tensors.
        pipeline_control: The same ranks, for objects, over gloo.
        meetings: The same, for what the user's hooks read; a rank that reads alone meets nothing else there.
        lookout: Ends waits that nobody will end.
        notes: Where ranks leave notes for each other.
        values: The same, over a connection that may be busy with large ones.
        host: Global rank that hosts the store; `None` where `torchrun` does.
    """

    def __init__(
        self,
        placement: Placement,
        *,
        replicas: int = 1,
        backend: str = "gloo",
        init_timeout: timedelta = timedelta(seconds=300),
        step_timeout: timedelta = timedelta(seconds=300),
        hook_timeout: timedelta = timedelta(seconds=1800),
        edge_backend: str | None = None,
        copies: Copying = "never",
        device: torch.device | None = None,
        within: Within | None = None,
    ) -> None:
        self.numbering = Numbering.of(placement, replicas=replicas)
        self.global_rank = dist.get_rank()
        self.rank, self.replica = self.numbering.coordinates(self.global_rank)
        self.step_timeout, self.hook_timeout, self.init_timeout = step_timeout, hook_timeout, init_timeout
        self.host = None if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True) else 0
        self.waits = Waits()
        self.aborted = False
        self._made: list[dist.ProcessGroup] = []
        if "nccl" in (backend, edge_backend):  # its watchdog would end the process before a cause is known
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        self._flags: dict[dist.ProcessGroup, dist.ProcessGroup] = {}
        self._shared: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        self.within: Within = within or (lambda what, work: work())
        everyone = [list(range(self.numbering.world_size))]
        self.control = _required(self._make(everyone, "control", "gloo", init_timeout))
        self._backend = backend
        self.store = self._own_store()
        self.notes = Notes(self.store)
        self.values = Notes(self.store, step_timeout.total_seconds())  # now: a stopped host connects nobody
        self.lookout = Lookout(
            self.notes, self.waits, rank=self.global_rank, size=self.numbering.world_size,
            pipeline_rank=lambda rank: self.numbering.coordinates(rank)[0],
            step_timeout=step_timeout, hook_timeout=hook_timeout, host=self.host,
        )  # fmt: skip
        self.lookout.groups = self._made
        self.lookout.start()
        pipelines = self.numbering.pipelines()
        self.pipeline = _required(self._make(pipelines, "pipeline", backend, init_timeout))
        # Objects and flags: NCCL would take them through the device, and the host would wait for it.
        self.pipeline_control = self.pipeline
        if backend != "gloo":
            self.pipeline_control = _required(self._make(pipelines, "objects", "gloo", init_timeout))
        self.meetings = _required(self._make(pipelines, "meetings", "gloo", init_timeout))
        replicated = self.numbering.replicated() if replicas > 1 else []
        self.data_parallel = self._make_with_flags(replicated, "data")
        self.links = self._make_links(placement, init_timeout)
        self.edges: dict[int, Edge] = {}
        self.ways = ""
        if edge_backend is not None or copies != "never":
            ways = Ways(edge_backend, copies, device or torch.device("cpu"))
            self._make_edges(placement, ways)
        for group in self._made:
            self._be_patient(group)
        self.within = self._watched

    def _make(
        self, rank_lists: Iterable[Sequence[int]], name: str, backend: str, timeout: timedelta
    ) -> dist.ProcessGroup | None:
        """Make a group for each list, on all ranks in the same order; returns the one this rank is in."""
        own = None
        for ranks in rank_lists:
            make = partial(
                dist.new_group, sorted(ranks), timeout=timeout, backend=backend, group_desc=f"lp_{name}"
            )
            group = self.within(_MAKING, make)
            if self.global_rank in ranks:
                own = group
                self._made.append(group)
        return own

    def _be_patient(self, group: dist.ProcessGroup) -> None:
        """From now on the lookout is sooner than the group itself."""
        if dist.get_backend(group) == "gloo":
            set_group_timeout(max(self.hook_timeout, self.init_timeout) + _SPARE, group)

    def _watched(self, what: str, work: Callable[[], T]) -> T:
        """Do what all ranks do together, over the store: the lookout watches, and who is lost is named."""
        aside, wait = Aside(work), Wait(what, tuple(range(self.numbering.world_size)), None, looks=True)
        with self.waits.inside(wait) as counted:
            while aside.is_alive() and not counted.is_over:
                aside.join(_LONGEST_NAP)
        if aside.is_alive():
            raise RuntimeError(f"{what} has come to nothing")
        result: T = aside.result()
        return result

    def _make_with_flags(self, rank_lists: Sequence[Sequence[int]], name: str) -> dist.ProcessGroup | None:
        """A group for tensors, and where it is one of devices a second one for those of hosts."""
        own = self._make(rank_lists, name, self._backend, self.init_timeout)
        if self._backend != "gloo":
            flags = self._make(rank_lists, f"{name}_flags", "gloo", self.init_timeout)
            if own is not None and flags is not None:
                self._flags[own] = flags
        return own

    def flags_of(self, group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
        """The same ranks as a group that carries tensors in host memory."""
        return None if group is None else self._flags.get(group, group)

    @property
    def replicas(self) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
        """The ranks that hold the same stages: for tensors, and for those of hosts."""
        return self.data_parallel, self.flags_of(self.data_parallel)

    def _make_links(self, placement: Placement, init_timeout: timedelta) -> dict[int, Link]:
        links = {}
        for low, high in neighbours(placement):
            pairs = [(pipeline[low], pipeline[high]) for pipeline in self.numbering.pipelines()]
            up = self._make(pairs, f"{low}_to_{high}", "gloo", init_timeout)
            down = self._make(pairs, f"{high}_to_{low}", "gloo", init_timeout)
            timeout = self.hook_timeout + _SPARE
            if self.rank == low:
                links[high] = Link(high, _required(up), _required(down), timeout=timeout, waits=self.waits)
            elif self.rank == high:
                links[low] = Link(low, _required(down), _required(up), timeout=timeout, waits=self.waits)
        return links

    def _make_edges(self, placement: Placement, ways: Ways) -> None:
        # The last resort where nothing else ends a rank; our own deadline and words come long before.
        timeout = 2 * self.step_timeout + timedelta(seconds=60)
        places: list[Any] = [None] * self.numbering.world_size
        dist.all_gather_object(places, ways.place, group=self.control)
        for low, high in neighbours(placement):
            pairs = [(pipeline[low], pipeline[high]) for pipeline in self.numbering.pipelines()]
            up = down = None
            if ways.backend is not None and ways.may_communicate([(places[a], places[b]) for a, b in pairs]):
                up = self._make(pairs, f"edge_{low}_{high}", ways.backend, timeout)
                down = self._make(pairs, f"edge_{high}_{low}", ways.backend, timeout)
            for own, peer, outgoing, incoming in ((low, high, up, down), (high, low, down, up)):
                if self.rank == own:
                    ranks = self.numbering.pipelines()[self.replica]
                    edge = ways.choose(
                        self.links[peer], outgoing, incoming, places[ranks[own]], places[ranks[peer]],
                        f"{low} and {high}",
                    )  # fmt: skip
                    if edge is not None:
                        self.edges[peer] = edge
        told: list[Any] = [None] * self.numbering.world_size
        dist.all_gather_object(told, ways.told, group=self.control)
        mine = [told[rank] for rank in self.numbering.pipelines()[self.replica]]
        found = [text for texts in mine for text in texts]
        self.ways = f"Tensors between stages travel {'; '.join(found)}" if found else ""

    def _own_store(self) -> Store:
        """A part of the default group's store that no earlier pipeline of this process has written to."""
        token = torch.tensor([secrets.randbits(62)])  # not torch's generator: that is the user's
        self.within(_MAKING, lambda: dist.broadcast(token, src=0, group=self.control))
        store = _required(dist.group.WORLD).get_group_store()
        return PrefixStore(f"lightning_pipeline/{int(token)}", store)

    def share(self, stage_sets: Iterable[Sequence[int]], placement: Placement) -> None:
        """Make groups for parameters that several stages share; on all ranks, with the same sets."""
        for stages in sorted({tuple(sorted(set(stages))) for stages in stage_sets}):
            ranks = self._ranks_of(stages, placement)
            if len(ranks) > 1 and ranks not in self._shared:
                lists = [[pipeline[rank] for rank in ranks] for pipeline in self.numbering.pipelines()]
                made = self._make_with_flags(lists, f"shared_{ranks}")
                self._shared[ranks] = made
                for group in (made, self.flags_of(made)):
                    if group is not None:
                        self._be_patient(group)

    def shared(self, stages: Sequence[int], placement: Placement) -> dist.ProcessGroup | None:
        """The group over the ranks that hold these stages; None where one rank holds them all."""
        return self._shared.get(self._ranks_of(stages, placement))

    @staticmethod
    def _ranks_of(stages: Sequence[int], placement: Placement) -> tuple[int, ...]:
        return tuple(sorted({placement.rank_of(stage) for stage in stages}))

    def abort(self) -> None:
        """End all groups of this pipeline at once, without waiting for anyone: peers see closed connections.

        A connection would close when the last reference to its group and to the handles of its messages is
        gone, and the traceback of what ended the run holds some.
        """
        if not self.aborted:
            self.aborted = True
            for group in self._made:
                if group.size() > 1:
                    break_off(group)
            abort_devices(self._made)
            self._drop()
            self.lookout.stop()

    def close(self, *, goes_on: bool = False) -> bool:
        """End all groups once every rank has come here, so that no rank sees a lost connection.

        Args:
            goes_on: Whether notes and lookout stay, for `leave`.

        Returns:
            Whether all have come; else a rank failed on its way here, or did not come in time.
        """
        if self.aborted or not self._settled():
            return False
        self.aborted = True
        came = self._all_come("closed", "the end of the run", host_stays=goes_on)
        self._drop()
        if not (came and goes_on):
            self.lookout.stop()
        return came

    def _settled(self) -> bool:
        """Whether this rank's device has done what edges have launched: their memory is about to go."""
        try:
            for edge in self.edges.values():
                edge.settle()
        except LinkError:
            self.abort()
            return False
        return True

    def leave(self) -> bool:
        """Wait, after `close`, until every rank has come to the end of the user's last hook, or one failed.

        Returns:
            Whether all have come.
        """
        size = self.numbering.world_size
        came = self._all_come("left", "the end of the last hooks", host_stays=True)
        if came and self.host == self.global_rank and self.notes.add("gone", 1) < size:
            deadline = time.monotonic() + _LINGER_SECONDS  # others may still have to read that
            while self.notes.add("gone", 0) < size and time.monotonic() < deadline:
                time.sleep(0.001)
        elif came:
            self.notes.add("gone", 1)
        self.lookout.stop(wait=1.0 if came else 0.0)
        return came

    def _all_come(self, place: str, what: str, *, host_stays: bool) -> bool:
        """Wait until every rank has come to a place, one failed, or the lookout says that one will not come.

        Args:
            place: A word for the notes.
            what: For messages.
            host_stays: Whether the host of the store stays until all have come; else it may have left since.
        """
        size, nap, everyone = self.numbering.world_size, 0.001, f"all_{place}"
        wait = Wait(what, tuple(range(size)), None, looks=True)
        if self.notes.add(place, 1) == size:
            self.notes.put(everyone, "1")
        with self.waits.inside(wait):
            while not (found := self.notes.get_all([everyone, CAUSE])) and not wait.is_over:
                if self.notes.is_gone and not host_stays:
                    return True
                time.sleep(nap)
                nap = min(2 * nap, _LONGEST_NAP)
        return everyone in found

    def _drop(self) -> None:
        for link in self.links.values():
            link.abort()
        for edge in self.edges.values():
            edge.abort()
        self._shared.clear()
        self._flags.clear()
        del self.control, self.pipeline, self.pipeline_control, self.meetings, self.data_parallel
        while self._made:
            dist.destroy_process_group(self._made.pop())


def _required(value: T | None) -> T:
    assert value is not None, "every rank is in one group of each kind"
    return value
