"""What each stage of a partition holds and computes, read off its trace."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_pipeline.model.cut import Partition, stage_activations, stages_of_states, value_sizes
from lightning_pipeline.model.tensors import Work
from lightning_pipeline.model.trace import Call, Trace
from lightning_pipeline.registry import named_parameters_of

_ELEMENTWISE = (
    1.5  # bytes that the backward of an operation without products moves, over those of its forward
)


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
        flops: Floating-point operations of a forward.
        forward: Its operations, those of the code around its units too; the loss is the last stage's.
        backward_input: Those of the input-gradient half of a backward, and what it computes again.
        backward_weight: Those of the weight-gradient half.
        activation_bytes: Held from forward to backward, what it was sent and the loss included.
        recomputed_bytes: Held while the largest checkpointed region is computed again.
        message_bytes: Size of what it is sent.
    """

    stage: int
    units: tuple[str, ...]
    states: tuple[State, ...]
    copies: frozenset[str]
    flops: float
    forward: tuple[Work, ...]
    backward_input: tuple[Work, ...]
    backward_weight: tuple[Work, ...]
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
            **_work(trace, stage_of, stage, last=stage == count - 1),
        )
        for stage in range(count)
    )


def _states(root: nn.Module) -> list[State]:
    """Every parameter and buffer once, under its first name."""
    both: list[tuple[Iterable[tuple[str, Tensor]], bool]] = [
        (named_parameters_of(root), True),
        (root.named_buffers(), False),
    ]
    return [
        State(name, tensor.numel(), tensor.numel() * tensor.element_size(), parameter, tensor.requires_grad)
        for named, parameter in both
        for name, tensor in named
    ]


def _work(trace: Trace, stage_of: Sequence[int], stage: int, *, last: bool) -> dict[str, Any]:
    """What its units do, and the code between that comes before one of them, or ends the step."""
    forward: list[Work] = []
    inputs: list[Work] = []
    weights: list[Work] = []
    for call in trace.calls:
        if stage_of[call.unit] == stage:
            for operations in (trace.between.get(call.index, []), call.work):
                forward += operations
                _add_backward(operations, _passes_gradients(trace, call), inputs, weights)
            inputs += call.recomputed
    if last:
        end = trace.between.get(len(trace.calls), [])
        forward += end
        _add_backward(end, True, inputs, weights)
    return dict(
        flops=sum(work.flops for work in forward),
        forward=tuple(forward), backward_input=tuple(inputs), backward_weight=tuple(weights),
    )  # fmt: skip


def _add_backward(operations: Sequence[Work], passes: bool, inputs: list[Work], weights: list[Work]) -> None:
    """Add what a backward does for each operation.

    A product with a weight takes as much again for the gradient of its input, and for that of a weight that
    is trained; a product of two activations, as in attention, twice as much; anything else moves half as many
    bytes again.
    """
    for work in operations:
        if work.weighs and (work.flops or not passes):
            weights.append(work)
        if passes and work.flops:
            factor = 1.0 if work.stated else 2.0
            inputs.append(work._replace(flops=factor * work.flops, num_bytes=factor * work.num_bytes))
        elif passes:
            inputs.append(work._replace(num_bytes=_ELEMENTWISE * work.num_bytes))


def _passes_gradients(trace: Trace, call: Call) -> bool:
    """Whether a gradient goes on to what the call reads."""
    return any(
        tag.kind == "value" and trace.calls[tag.call].specs[tag.leaf].requires_grad for tag in call.reads
    )
