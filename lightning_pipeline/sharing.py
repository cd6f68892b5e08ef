"""One rank works something out and the others get the same value, or the same failure."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from lightning_pipeline.errors import StageFailedError


@dataclass(frozen=True)
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

    def _send(self, kind: str, value: Any) -> None:
        dist.broadcast_object_list([(kind, value)], src=self.source, group=self.group)

    def _receive(self) -> Any:
        box: list[Any] = [None]
        dist.broadcast_object_list(box, src=self.source, group=self.group)
        kind, value = box[0]
        if kind == "failed":
            raise StageFailedError(f"rank {self.source} failed: {value}")
        return value
