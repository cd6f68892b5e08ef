"""One way for ranks to do something together: it goes well on all of them, or all raise.

Who is missing is named, by the rules of `lookout`; what went wrong on a rank is told to all.
"""

import pickle
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from lightning_pipeline._torch import disable_current_modes
from lightning_pipeline.errors import MessageError, StageFailedError
from lightning_pipeline.ranks.lookout import WAY_OUT

T = TypeVar("T")
Watch = Callable[[str, dist.ProcessGroup], AbstractContextManager[None]]
_MOST_FLAGS = 8
_LENGTH = 8  # bytes of the length of an object
_ROOM = 1024 - _LENGTH  # bytes of an object that travel with its length


@dataclass(frozen=True)
class Failed:
    """What went wrong on a rank, as text: not every exception can be pickled."""

    kind: str
    text: str
    detail: str
    rank: int

    @classmethod
    def of(cls, error: BaseException, rank: int) -> "Failed":
        """Describe an exception."""
        text = traceback.format_exception_only(error)[-1].strip()
        return cls(type(error).__name__, text, "".join(traceback.format_exception(error)), rank)


class Company:
    """Ranks that do things together.

    Args:
        group: Of them, over gloo; `None` where there is one rank.
        watch: Makes the context in which they are watched: it ends all ranks when one is lost.
        rank: This global rank.
    """

    def __init__(self, group: dist.ProcessGroup | None, watch: Watch | None, rank: int) -> None:
        self.group = group if group is not None and group.size() > 1 else None
        self.ranks = [rank] if self.group is None else dist.get_process_group_ranks(self.group)
        self._watch, self.rank = watch, rank
        self.exchanges = 0
        """How many there were: as many on every rank, where all are at the same point."""

    def close(self) -> None:
        """Let go of the group: a connection closes only when nobody refers to its group any more."""
        self.group = None

    @contextmanager
    def exchange(self, what: str, group: dist.ProcessGroup | None = None) -> Iterator[dist.ProcessGroup]:
        """Communicate in the block. A rank that is gone or stuck is named, and all others are freed.

        Args:
            what: For messages: `asking all ranks`.
            group: Of the same ranks. Default: that of the company.

        Raises:
            StageFailedError: The first cause, where it is not this rank's.
        """
        assert self._watch is not None, "several ranks have a way to fail"
        used = self.group if group is None else group
        assert used is not None, "a company that was left does nothing together"
        with self._watch(what, used), disable_current_modes():  # a module may be under construction
            self.exchanges += 1
            yield used

    def any_of(self, what: str, *flags: bool) -> list[bool]:
        """For each flag whether any rank raised it."""
        if len(self.ranks) == 1:
            return list(flags)
        assert len(flags) <= _MOST_FLAGS, "ranks that ask different questions must not send different sizes"
        code = zlib.crc32(what.encode()) & 0x7F
        mine = [*flags, *[0] * (_MOST_FLAGS - len(flags)), code, 0x7F - code]
        with self.exchange(what) as group:
            votes = torch.tensor(mine, dtype=torch.uint8)
            dist.all_reduce(votes, dist.ReduceOp.MAX, group=group)
            *found, high, low = votes.tolist()
            if high + low != 0x7F:  # not all have the same code, and all can see that
                self._refuse_different(_of_all(what, group))
            return [bool(vote) for vote in found[: len(flags)]]

    def numbers(self, what: str, own: Sequence[float]) -> list[list[float]]:
        """As many float64 of every rank, by position in the group."""
        if len(self.ranks) == 1:
            return [[float(number) for number in own]]
        with self.exchange(what) as group:
            mine = torch.tensor(own, dtype=torch.float64)
            found = [torch.empty_like(mine) for _ in self.ranks]
            dist.all_gather(found, mine, group=group)
            return [values.tolist() for values in found]

    def numbers_later(self, what: str, own: Sequence[float]) -> Callable[[], list[list[float]]]:
        """Begin `numbers`, without waiting for anybody; gives what waits for those of every rank."""
        if len(self.ranks) == 1:
            alone = [[float(number) for number in own]]
            return lambda: alone
        mine = torch.tensor(own, dtype=torch.float64)
        found = [torch.empty_like(mine) for _ in self.ranks]
        with self.exchange(what) as group:
            work = dist.all_gather(found, mine, group=group, async_op=True)

        def wait() -> list[list[float]]:
            with self.exchange(what):
                work.wait()
                assert mine.numel() == found[0].numel(), "what is sent lives until it has arrived"
            return [values.tolist() for values in found]

        return wait

    def gather(self, what: str, own: T) -> dict[int, T]:
        """An object of every rank, by global rank."""
        if len(self.ranks) == 1:
            return {self.rank: own}
        with self.exchange(what) as group:
            found = _of_all((what, own), group)
            self._refuse_different([place for place, _ in found])
        return dict(zip(self.ranks, (value for _, value in found), strict=True))

    def _refuse_different(self, places: Sequence[str]) -> None:
        """Raise where ranks that met in an exchange did not mean the same."""
        if len(set(places)) > 1:
            lines = "; ".join(
                f"(global rank {rank}) in {what}" for rank, what in zip(self.ranks, places, strict=True)
            )
            raise MessageError(f"the ranks do different things at the same time: {lines}.{WAY_OUT}")

    def all_or_none(self, what: str, work: Callable[[], T]) -> T:
        """Do local work on every rank; when one fails, all raise.

        Args:
            what: For messages: `splitting the module`.
            work: Without communication.

        Raises:
            StageFailedError: Where the work went well but not on another rank.
        """
        result, failure = None, None
        try:
            result = work()
        except Exception as error:  # told to the others first, raised below
            failure = error
        told = self.gather(what, None if failure is None else Failed.of(failure, self.rank))
        if failure is not None:
            raise failure
        failed = [entry for entry in told.values() if entry is not None]
        if failed:
            self.refuse(what, failed)
        return result  # type: ignore[return-value]  # there was no failure

    def collect(
        self, what: str, local: Callable[[], T], lead: Callable[[list[T]], Any], *, scatter: bool = False
    ) -> Any:
        """Every rank works something out; the first one makes one result of it, for all.

        Args:
            what: For messages: `writing`.
            local: On every rank, without communication.
            lead: On the first rank, with what `local` gave on each rank.
            scatter: Whether the result is a list with one entry for each rank.

        Raises:
            PipelineError: Something raised on any rank; the same on all; see `refuse`.
        """
        done, interrupt = self._try(local)
        results = self._to_first(what, done)
        outcome: Any = None
        if results is not None:
            failed = [result for result in results if isinstance(result, Failed)]
            outcome = failed or self._try(lambda: lead(results))[0]
        outcome = self._from_first(what, outcome, scatter)
        if interrupt is not None:
            raise interrupt
        if isinstance(outcome, Failed):
            outcome = [outcome]
        if isinstance(outcome, list) and outcome and isinstance(outcome[0], Failed):
            self.refuse(what, outcome)
        return outcome

    def refuse(self, what: str, failed: Sequence[Failed]) -> NoReturn:
        """Raise what failed on other ranks."""
        first = failed[0]
        raise StageFailedError(f"global rank {first.rank} failed in {what}: {first.text}\n{first.detail}")

    def _try(self, work: Callable[[], Any]) -> tuple[Any, BaseException | None]:
        try:
            return work(), None
        except (KeyboardInterrupt, SystemExit) as error:
            return Failed.of(error, self.rank), error
        except BaseException as error:  # DCP's exceptions are no `Exception`
            return Failed.of(error, self.rank), None

    def _to_first(self, what: str, value: Any) -> list[Any] | None:
        if len(self.ranks) == 1:
            return [value]
        found: list[Any] | None = [None] * len(self.ranks) if self.rank == self.ranks[0] else None
        with self.exchange(what) as group:
            dist.gather_object(value, found, group=group, group_dst=0)
        return found

    def _from_first(self, what: str, value: Any, scatter: bool) -> Any:
        if len(self.ranks) == 1:
            return value[0] if scatter and isinstance(value, list) else value
        leads = self.rank == self.ranks[0]
        if not scatter:
            box = [value]
            with self.exchange(what) as group:
                dist.broadcast_object_list(box, group=group, group_src=0)
            return box[0]
        failed = isinstance(value, Failed) or (
            isinstance(value, list) and any(isinstance(entry, Failed) for entry in value)
        )
        own: list[Any] = [None]
        given = [value] * len(self.ranks) if failed else value
        with self.exchange(what) as group:
            dist.scatter_object_list(own, given if leads else None, group=group, group_src=0)
        return own[0]

    def share(self, what: str, make: Callable[[], T], source: int) -> T:
        """Call `make` on one rank only, and return its result on every rank.

        Args:
            what: For messages: `sharing the seed`.
            make: Without arguments; its result is pickled.
            source: The global rank that works it out.

        Raises:
            StageFailedError: On the other ranks, when `make` raised; the source raises what `make` raised.
        """
        if len(self.ranks) == 1:
            return make()
        box: list[Any] = [None]
        failure: Exception | None = None
        if self.rank == source:
            try:
                box = [make()]
            except Exception as error:
                failure, box = error, [Failed.of(error, self.rank)]
        with self.exchange(what) as group:
            dist.broadcast_object_list(box, src=source, group=group)
        if failure is not None:
            raise failure
        if isinstance(box[0], Failed):
            self.refuse(what, box)
        result: T = box[0]
        return result

    def broadcast(
        self, what: str, tensor: torch.Tensor, source: int, group: dist.ProcessGroup | None = None
    ) -> None:
        """Give every rank the tensor of one.

        Args:
            what: For messages: `the end of a step`.
            tensor: To send, or to be filled.
            source: The global rank that sends.
            group: Of the same ranks, for tensors of a device. Default: that of the company.
        """
        if len(self.ranks) > 1:
            with self.exchange(what, group) as used:
                dist.broadcast(tensor, src=source, group=used)

    def sum(self, what: str, tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
        """Add up a tensor of every rank, in place.

        Args:
            what: For messages: `the end of a step`.
            tensor: Of the same shape on every rank.
            group: Of the same ranks, for tensors of a device. Default: that of the company.
        """
        if len(self.ranks) > 1:
            with self.exchange(what, group) as used:
                dist.all_reduce(tensor, group=used)

    def barrier(self, what: str) -> None:
        """Wait until all ranks have come here."""
        self.any_of(what, False)


def _of_all(own: Any, group: dist.ProcessGroup) -> list[Any]:
    """An object of every rank, by position in the group.

    A small one travels with its length, in one exchange; torch's `all_gather_object` makes two of each.
    """
    data = pickle.dumps(own)
    frames = _bytes_of_all(
        (len(data).to_bytes(_LENGTH, "little") + data[:_ROOM]).ljust(_LENGTH + _ROOM), group
    )
    lengths = [int.from_bytes(frame[:_LENGTH], "little") for frame in frames]
    objects = [frame[_LENGTH:] for frame in frames]
    rest = max(lengths) - _ROOM
    if rest > 0:
        rests = _bytes_of_all(data[_ROOM:].ljust(rest), group)
        objects = [begun + ended for begun, ended in zip(objects, rests, strict=True)]
    return [pickle.loads(whole[:length]) for whole, length in zip(objects, lengths, strict=True)]


def _bytes_of_all(own: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """As many bytes of every rank."""
    mine = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    found = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(found, mine, group=group)
    return [bytes(values.numpy()) for values in found]


@dataclass
class Outlet:
    """Where one rank of a company tells the others.

    Attributes:
        company: The ranks.
        source: Global rank that works things out.
        is_source: Whether that is this rank.
    """

    company: Company
    source: int
    is_source: bool

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Of the ranks; `None` where there is one."""
        return self.company.group

    def share(self, make: Callable[[], Any], what: str = "sharing what one rank has") -> Any:
        """Call `make` on the source only and return its result on every rank; see `Company.share`."""
        return self.company.share(what, make, self.source)
