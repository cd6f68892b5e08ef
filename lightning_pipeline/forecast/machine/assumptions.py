"""What a prediction takes for granted about the machine."""

from dataclasses import dataclass, replace
from typing import Any

from lightning_pipeline.errors import ConfigurationError
from lightning_pipeline.forecast.machine.devices import Device, device_named
from lightning_pipeline.model.tensors import FLOPS_PER_BYTE, Work

EFFICIENCY = 0.6
"""Share of a data sheet's peak that large matrix products reach."""
BANDWIDTH_SHARE = 0.8
"""Share of a data sheet's memory bandwidth that elementwise operations reach."""
DEFAULT_COPIES = 2.0
"""Numbers that an optimizer keeps per trained parameter where nothing is known of it: those of Adam."""
SPLIT_SURPLUS = 1.1
"""Time of I and W together over that of a fused backward; 1.06 to 1.14 were measured (docs/benchmarks.md)."""


@dataclass(frozen=True)
class Handling:
    """What a rank itself does about a message, a part of the message's time in which it computes nothing.

    Args:
        send: Seconds to pack a message and give it to the communicator, beside its bytes.
        send_per_byte: Seconds that each byte adds.
        receive: Seconds to take and unpack a message that is there, beside its bytes.
        receive_per_byte: Seconds that each byte adds.
    """

    send: float = 0.0
    send_per_byte: float = 0.0
    receive: float = 0.0
    receive_per_byte: float = 0.0

    def of(self, num_bytes: float) -> tuple[float, float]:
        """Seconds on the rank that sends so many bytes, and on the one that receives them."""
        return (
            self.send + num_bytes * self.send_per_byte,
            self.receive + num_bytes * self.receive_per_byte,
        )


@dataclass(frozen=True)
class Assumptions:
    """The devices and links of a prediction.

    Args:
        flops: Operations per second that a device achieves, not its peak. `None`: `EFFICIENCY` of the peak of
            `device` in each operation's type, or 100e12 without one.
        bandwidth: Bytes per second that its memory achieves. `None`: `BANDWIDTH_SHARE` of that of `device`;
            without one, 16 operations take as long as a byte.
        link_bytes: Bytes per second from a device to another.
        latency: Seconds that a message takes beside its bytes.
        memory: Bytes of a device. `None`: everything fits.
        optimizer_copies: Numbers that the optimizer keeps per trained parameter, in the parameter's type: 2
            for Adam, 1 for SGD with momentum, 0 without. `None`: those of the module's own optimizer, or 2.
        link_measured: Whether `link_bytes` and `latency` were measured on this machine.
        device: What its data sheet says.
        node_size: Devices of a node. `None`: all are in one.
        node_link_bytes: Bytes per second of a device to another node. `None`: `link_bytes`.
        handling: The part of a message's time in which ranks are busy with it.

    Raises:
        ConfigurationError: A number is not above 0, or below 0 for `latency` and `optimizer_copies`.
    """

    flops: float | None = None
    bandwidth: float | None = None
    link_bytes: float = 25e9
    latency: float = 20e-6
    memory: float | None = None
    optimizer_copies: float | None = None
    link_measured: bool = False
    device: Device | None = None
    node_size: int | None = None
    node_link_bytes: float | None = None
    handling: Handling = Handling()

    def __post_init__(self) -> None:
        above = ("flops", "bandwidth", "link_bytes", "memory", "node_size", "node_link_bytes")
        problems = [
            f"{name}={getattr(self, name)} must be above 0"
            for name in above
            if getattr(self, name) is not None and not getattr(self, name) > 0
        ]
        problems += [
            f"{name}={getattr(self, name)} must not be below 0"
            for name in ("latency", "optimizer_copies")
            if getattr(self, name) is not None and not getattr(self, name) >= 0
        ]
        if problems:
            raise ConfigurationError("; ".join(problems))

    @classmethod
    def of_device(cls, name: str, **others: Any) -> "Assumptions":
        """Those of a device by name, such as `h100`, in the machine that it is sold in.

        Args:
            name: One of `DEVICES`.
            others: What is to be different.

        Raises:
            ConfigurationError: The device is not known.

        Example:
            >>> Assumptions.of_device("h100").node_size
            8
        """
        device = device_named(name)
        known = cls(
            device=device, memory=device.memory, link_bytes=device.link, node_size=device.node_size,
            node_link_bytes=device.node_link,
        )  # fmt: skip
        return replace(known, **others)

    def speed(self, work: Work) -> float:
        """Operations per second in the type of an operation."""
        if self.flops is not None:
            return self.flops
        return 100e12 if self.device is None else EFFICIENCY * self.device.flops(work.dtype)

    @property
    def memory_speed(self) -> float:
        """Bytes per second of a device's memory."""
        if self.bandwidth is not None:
            return self.bandwidth
        if self.device is not None:
            return BANDWIDTH_SHARE * self.device.bandwidth
        return (100e12 if self.flops is None else self.flops) / FLOPS_PER_BYTE

    def seconds(self, work: Work) -> float:
        """Of an operation: what its arithmetic or its memory traffic takes, whichever is longer."""
        return max(work.flops / self.speed(work), work.num_bytes / self.memory_speed)

    def hop(self, num_bytes: float, *, between_nodes: bool = False) -> float:
        """Seconds of a message of this size."""
        return self.latency + num_bytes / self.link(between_nodes)

    def link(self, between_nodes: bool) -> float:
        """Bytes per second of a device to another of its node, or of another one."""
        return self.node_link_bytes if between_nodes and self.node_link_bytes else self.link_bytes

    def exchange(self, num_bytes: float, ranks: int) -> float:
        """Seconds of an all-reduce over so many neighbouring devices: each sends twice what is to be summed.

        A gather or a scatter takes half of it.
        """
        across = self.node_size is not None and ranks > self.node_size
        return 2.0 * num_bytes * (ranks - 1) / ranks / self.link(across)

    def crosses(self, first: int, second: int) -> bool:
        """Whether two global ranks are on different nodes."""
        return self.node_size is not None and first // self.node_size != second // self.node_size
