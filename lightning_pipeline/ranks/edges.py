"""How tensors travel between two neighbours: which ways there are, and which of them is faster."""

import ctypes
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipeline.errors import ConfigurationError
from lightning_pipeline.settings import Copying
from lightning_pipeline.wire import SHARING, Communicators, Copies, Edge, Layout, Link, TensorSpec

_MESSAGE = 8 * 2**20  # bytes
_ROUNDS = 5
_TEXT = 256  # bytes
_SHARES_GPUS = (2, 30, 3)  # with NCCL_MULTI_RANK_GPU_ENABLE=1


class Place(NamedTuple):
    """Where a process works.

    Args:
        machine: Equal for processes of one machine.
        device: Equal for processes of one device of it.
    """

    machine: str
    device: str


class Ways:
    """Makes this rank's edges.

    Args:
        backend: Of communicators; None: there are none.
        copies: Whether processes of one machine copy.
        device: Where the tensors live.

    Attributes:
        told: What was chosen, by one rank of each two.
    """

    def __init__(self, backend: str | None, copies: Copying, device: torch.device) -> None:
        self.backend, self._copies, self._device = backend, copies, device
        self.place = Place(_machine(), _device_of(device))
        self.told: list[str] = []

    def may_communicate(self, pairs: Sequence[tuple[Place, Place]]) -> bool:
        """Whether the backend serves these processes: NCCL refuses two of one GPU, all but the newest."""
        if self.backend != "nccl" or all(one != other for one, other in pairs):
            return True
        enabled = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
        if enabled and nccl_version() >= _SHARES_GPUS:
            return True
        if self._copies == "never":
            raise ConfigurationError(
                "transport='nccl' does not work between two processes of one GPU, which NCCL refuses (from "
                "2.30.3 on it does not where NCCL_MULTI_RANK_GPU_ENABLE=1 is set): use transport='ipc'"
            )
        return False

    def choose(
        self, link: Link, outgoing: dist.ProcessGroup | None, incoming: dist.ProcessGroup | None,
        own: Place, peer: Place, between: str,
    ) -> Edge | None:  # fmt: skip
        """Make the edge to a neighbour; it calls this at the same time.

        Args:
            link: To the neighbour.
            outgoing: Communicator for what leaves; None: the backend does not serve these two.
            incoming: Communicator for what arrives.
            own: Where this process works.
            peer: Where the neighbour works.
            between: The two, for messages: `0 and 1`.

        Returns:
            None where tensors go through host memory.

        Raises:
            ConfigurationError: Copies alone were asked for, and do not work between these two.
        """
        found: dict[str, Edge] = {}
        if outgoing is not None and incoming is not None:
            name = self.backend or ""
            found[name] = Communicators(link, outgoing, incoming, device=self._device)
            found[name].warm_up()
        if self._copies != "never":
            copies = Copies(link, device=self._device) if self._device.type in SHARING else None
            reason = "they are processes of two machines"
            if copies is None:
                reason = f"there is no way to share memory of {self._device.type} devices"
            elif own.machine == peer.machine:
                reason = self._try(copies, link)
            if copies is not None and not reason:
                found["ipc"] = copies
            elif self._copies == "only":
                raise ConfigurationError(
                    f"transport='ipc' does not work between ranks {between} of a pipeline: {reason}; use "
                    "transport='auto', which takes another way there"
                )
        name, figures = self._faster(found, link) if len(found) > 1 else (next(iter(found), "host"), "")
        if link.is_first:
            self.told.append(f"by {name} between ranks {between}{figures}")
        for other, edge in found.items():
            if other != name:
                edge.abort()
        return found.get(name)

    def _try(self, copies: Copies, link: Link) -> str:
        """Why copies do not work between these two; empty where they do, the same on both ends."""
        reason = _either(link, copies.can_share())
        if not reason:
            layout = _layout(1)
            copies.send(layout, [torch.ones(1, dtype=torch.uint8, device=self._device)])
            try:
                (arrived,) = copies.receive(layout).tensors()
                if int(arrived[0]) != 1:
                    reason = "a byte did not arrive"
            except Exception as error:  # whatever driver, container or allocator have against it
                reason = f"{type(error).__name__}: {error}"
            reason = _either(link, reason)
        return reason

    def _faster(self, found: dict[str, Edge], link: Link) -> tuple[str, str]:
        """The name of the fastest, by the clock of one of the two, and what was measured."""
        seconds = {name: self._measured(edge, link) for name, edge in found.items()}
        text = min(seconds, key=lambda name: seconds[name]) if link.is_first else ""
        figures = ", ".join(f"{name} {1e3 * taken:.3f} ms" for name, taken in seconds.items())
        return _either(link, text), f" (8 MiB and back: {figures})"

    def _measured(self, edge: Edge, link: Link) -> float:
        """Seconds of a message there and back, the best of some."""
        layout = _layout(_MESSAGE)
        message = torch.zeros(_MESSAGE, dtype=torch.uint8, device=self._device)
        best = float("inf")
        for _ in range(_ROUNDS):
            _either(link, "")
            begin = time.perf_counter()
            if link.is_first:
                edge.send(layout, [message])
            (arrived,) = edge.receive(layout).tensors()
            if not link.is_first:
                edge.send(layout, [arrived])
            _wait_for(arrived)
            best = min(best, time.perf_counter() - begin)
            edge.peer_copied(int(_either(link, str(edge.copied), own=False)))
        return best


def _wait_for(tensor: Tensor) -> None:
    """The host waits for the device, at setup."""
    tensor[:1].cpu()


def _layout(num_bytes: int) -> Layout:
    return Layout((TensorSpec((num_bytes,), (1,), torch.uint8, False),), start=0)


def _either(link: Link, text: str, *, own: bool = True) -> str:
    """This rank's text or, where that is empty or not wanted, the neighbour's; it calls this too."""
    data = text.encode()[:_TEXT]
    buffer = torch.zeros(_TEXT, dtype=torch.uint8)
    if data:
        buffer[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    link.send(buffer)
    link.post(_TEXT)
    theirs = bytes(link.take().tolist()).rstrip(b"\0").decode(errors="replace")
    return text if own and text else theirs


def nccl_version() -> tuple[int, ...]:
    """Of the library that is loaded, which need not be the one that torch was built with."""
    number = ctypes.c_int()
    try:
        loaded = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:  # it is inside torch, or there is none
        return tuple(torch.cuda.nccl.version()[:3])
    loaded.ncclGetVersion(ctypes.byref(number))
    return number.value // 10000, number.value // 100 % 100, number.value % 100


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()


def _device_of(device: torch.device) -> str:
    if device.type != "cuda":
        return str(device)
    properties = torch.cuda.get_device_properties(device)
    return str(getattr(properties, "uuid", device))
