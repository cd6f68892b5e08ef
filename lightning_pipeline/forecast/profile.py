"""What each stage of a partition holds and computes, read off its trace."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from lightning_pipeline.model.cut import Partition, stage_activations, stages_of_states, value_sizes
from lightning_pipeline.model.trace import Call, Trace


@dataclass(frozen=True)
class State:
    """A parameter or buffer.

    Attributes:
        name: Its first name in the module.
        count: Elements.
        num_bytes: Size.
        is_parameter: Whether it is no buffer.
        trained: Whether it gets a gradient.
    """

    name: str
    count: int
    num_bytes: int
    is_parameter: bool
    trained: bool


@dataclass(frozen=True)
class StageProfile:
    """One stage, for one micro-batch.

    Attributes:
        stage: Its index.
        units: Names of its units.
        states: Parameters and buffers that it keeps, copies of tied ones too.
        copies: Names of the parameters that an earlier stage keeps as well.
        flops: Operations of a forward, without memory traffic.
        forward: Equivalent operations of a forward, memory traffic counted in.
        backward_input: The same of the input-gradient half of a backward, and of what it computes again.
        backward_weight: The same of the weight-gradient half.
        activation_bytes: Held from forward to backward, what it was sent and the loss included.
        recomputed_bytes: Held while the largest checkpointed region is computed again.
        message_bytes: Size of what it is sent.
    """

    stage: int
    units: tuple[str, ...]
    states: tuple[State, ...]
    copies: frozenset[str]
    flops: float
    forward: float
    backward_input: float
    backward_weight: float
    activation_bytes: int
    recomputed_bytes: int
    message_bytes: int

    @property
    def num_parameters(self) -> int:
        """Elements of its parameters, copies of tied ones too."""
        return sum(state.count for state in self.states if state.is_parameter)


def profile(root: nn.Module, partition: Partition) -> tuple[StageProfile, ...]:
    """Add up what the trace says, by stage.

    Args:
        root: The module that was traced, whole or on the meta device.
        partition: From its trace.
    """
    trace, stage_of, count = partition.trace, partition.stage_of, partition.num_stages
    needed = stages_of_states(root, trace, stage_of, count)
    states = _states(root)
    sizes = value_sizes(trace)
    held = stage_activations(partition)
    messages = partition.liveness().messages
    return tuple(
        StageProfile(
            stage=stage,
            units=tuple(trace.units[unit].name for unit in partition.units_of(stage)),
            states=tuple(state for state in states if stage in needed[state.name]),
            copies=frozenset(s.name for s in states if s.is_parameter and stage in needed[s.name][1:]),
            activation_bytes=held[stage].until_backward,
            recomputed_bytes=max(
                (call.recomputed_bytes for call in trace.calls if stage_of[call.unit] == stage), default=0
            ),
            message_bytes=sum(sizes[key] for key in messages[stage]),
            **_work(trace, [call for call in trace.calls if stage_of[call.unit] == stage]),
        )
        for stage in range(count)
    )


def _states(root: nn.Module) -> list[State]:
    """Every parameter and buffer once, under its first name."""
    both: list[tuple[Iterable[tuple[str, Tensor]], bool]] = [
        (root.named_parameters(), True),
        (root.named_buffers(), False),
    ]
    return [
        State(name, tensor.numel(), tensor.numel() * tensor.element_size(), parameter, tensor.requires_grad)
        for named, parameter in both
        for name, tensor in named
    ]


def _work(trace: Trace, calls: list[Call]) -> dict[str, float]:
    """Sums over calls. Each half of a backward costs a forward, where it is needed at all."""
    trained = [any(p.requires_grad for p in unit.module.parameters()) for unit in trace.units]
    return dict(
        flops=sum(call.flops for call in calls),
        forward=sum(call.cost for call in calls),
        backward_input=sum(call.cost for call in calls if _passes_gradients(trace, call))
        + sum(work.cost for call in calls for work in call.recomputed),
        backward_weight=sum(call.cost for call in calls if trained[call.unit]),
    )


def _passes_gradients(trace: Trace, call: Call) -> bool:
    """Whether a gradient goes on to what the call reads."""
    return any(
        tag.kind == "value" and trace.calls[tag.call].specs[tag.leaf].requires_grad for tag in call.reads
    )
