"""What a prediction takes for granted about the machine."""

from dataclasses import dataclass

from lightning_pipeline.errors import ConfigurationError


@dataclass(frozen=True)
class Assumptions:
    """The devices and links of a prediction.

    Args:
        flops: Operations per second that a device achieves, not its peak. An operation that is bound by
            memory counts 16 operations per byte.
        link_bytes: Bytes per second from a rank to the next.
        latency: Seconds that a message takes beside its bytes.
        memory: Bytes of a device. `None`: everything fits.
        optimizer_copies: Numbers that the optimizer keeps per trained parameter, in the parameter's type: 2
            for Adam, 1 for SGD with momentum, 0 without.
        link_measured: Whether `link_bytes` and `latency` were measured on this machine.

    Raises:
        ConfigurationError: A number is not above 0, or below 0 for `latency` and `optimizer_copies`.
    """

    flops: float = 100e12
    link_bytes: float = 25e9
    latency: float = 20e-6
    memory: float | None = None
    optimizer_copies: float = 2.0
    link_measured: bool = False

    def __post_init__(self) -> None:
        problems = [
            f"{name}={value} must be above 0"
            for name, value in (
                ("flops", self.flops),
                ("link_bytes", self.link_bytes),
                ("memory", self.memory),
            )
            if value is not None and not value > 0
        ]
        problems += [
            f"{name}={value} must not be below 0"
            for name, value in (("latency", self.latency), ("optimizer_copies", self.optimizer_copies))
            if not value >= 0
        ]
        if problems:
            raise ConfigurationError("; ".join(problems))

    def hop(self, num_bytes: float) -> float:
        """Seconds of a message of this size."""
        return self.latency + num_bytes / self.link_bytes
