"""One rank works something out and the others get the same value, or the same failure."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from lightning_pipeline.errors import StageFailedError


@dataclass
class Outlet:
    """Where one rank of a group tells the others.

    Attributes:
        group: The ranks, `None` for a world of one rank. Carries pickled objects, so a CPU group.
        source: Global rank that works things out.
        is_source: Whether that is this rank.
    """

    group: dist.ProcessGroup | None
    source: int
    is_source: bool

    def share(self, make: Callable[[], Any]) -> Any:
        """Call `make` on the source only and return its result on every rank of the group.

        Args:
            make: Without arguments; its result is pickled.

        Raises:
            StageFailedError: On the other ranks, when `make` raised; the source raises what `make` raised.
        """
        if self.group is None:
            return make()
        if not self.is_source:
            return self._receive()
        try:
            result = make()
        except Exception as error:
            self._send("failed", f"{type(error).__name__}: {error}")
            raise
        self._send("result", result)
        return result

    def close(self) -> None:
        """Let go of the group: a connection closes only when nobody refers to its group any more."""
        vars(self).pop("group", None)

    def _send(self, kind: str, value: Any) -> None:
        dist.broadcast_object_list([(kind, value)], src=self.source, group=self.group)

    def _receive(self) -> Any:
        box: list[Any] = [None]
        dist.broadcast_object_list(box, src=self.source, group=self.group)
        kind, value = box[0]
        if kind == "failed":
            raise StageFailedError(f"rank {self.source} failed: {value}")
        return value


def agreed(work: Callable[[], Any], group: dist.ProcessGroup) -> Any:
    """Do local work on every rank; when one fails, all raise.

    Args:
        work: Without communication.
        group: Of all ranks.

    Raises:
        StageFailedError: Where the work went well but not on another rank.
    """
    result, failure = None, None
    try:
        result = work()
    except Exception as error:  # told to the others first, raised below
        failure = error
    texts: list[str | None] = [None] * group.size()
    own = None if failure is None else f"{type(failure).__name__}: {failure}"
    dist.all_gather_object(texts, own, group=group)
    if failure is not None:
        raise failure
    for rank, text in enumerate(texts):
        if text is not None:
            raise StageFailedError(f"rank {rank} failed while the module was split: {text}")
    return result
