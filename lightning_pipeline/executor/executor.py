"""Runs a rank's part of a plan: one loop, and a table from the kind of action to a method."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from lightning_pipeline._torch import is_profiled
from lightning_pipeline.executor.routes import Routes
from lightning_pipeline.ranks import Clocks, Failure, Groups, Where
from lightning_pipeline.recording import MessageLog, Timeline, stream_clock
from lightning_pipeline.schedules import Action, Plan
from lightning_pipeline.schedules.plans import SEND_B, SEND_F
from lightning_pipeline.wire import Channel, Stage, Values


class Executor:
    """Runs plans on the stages of this rank. Owns the messages; the stages own the autograd graphs.

    Args:
        stages: This rank's stages, by index.
        groups: The process groups; their links become this executor's channels.
        device: Where the tensors between stages live. Default: CPU.
        timeline: Where to record what happens. Default: a new one, on the clock of the device.
        failure: Ends all ranks. Default: a new one.

    Attributes:
        log: The messages of the last run; `None` while nobody records.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        groups: Groups,
        *,
        device: torch.device | str = "cpu",
        timeline: Timeline | None = None,
        failure: Failure | None = None,
    ) -> None:
        self.stages = stages
        self.timeline = timeline or Timeline(stream_clock(torch.device(device)))
        self.failure = failure or Failure(groups)
        groups.lookout.recent = self.timeline.recent
        self.clocks = Clocks(groups, self.failure)
        self.rank = groups.rank
        self.channels = {
            peer: Channel(link, device=torch.device(device), edge=groups.edges.get(peer))
            for peer, link in groups.links.items()
        }
        for link in groups.links.values():
            link.where = lambda: str(self._where())
        self.log: MessageLog | None = None
        self._runs = 0
        # Where edges move tensors, everything is launched at its place in one global order of all ranks.
        self._in_order = bool(groups.edges)
        self._outgoing: dict[Action, Callable[[], None]] = {}
        self._routes = Routes(self.rank, self.channels)
        self._handed: dict[tuple[str, int, int], Values | list[Tensor | None]] = {}
        self._empty: dict[tuple[int, int], int | None] = {}
        self._methods: dict[str, Callable[[int, int], None]] = {
            "F": self._forward,
            "B": self._backward,
            "I": partial(self._backward, input_alone=True),
            "W": self._backward_weight,
        }

    def record_messages(self, on: bool) -> None:
        """Write messages down in `log`, from the next run on; or stop it."""
        self.log = MessageLog() if on else None
        for channel in self.channels.values():
            channel.link.log = self.log

    @property
    def buffer_bytes(self) -> int:
        """The most that buffers of messages have taken on this rank, neighbour by neighbour."""
        return sum(channel.buffer_bytes for channel in self.channels.values())

    def run(self, plan: Plan, signatures: Sequence[Hashable]) -> None:
        """Run this rank's list of actions.

        Args:
            plan: Without messages; the same on all ranks, checked by `schedules.check`.
            signatures: Per micro-batch what determines the metadata between stages: shapes, types and mode.
                Their `repr` must be equal on all ranks of a replica.

        Raises:
            StageFailedError: Another rank failed. All connections are closed; make new `Groups` to go on.
            StageTimeoutError: A message took longer than `step_timeout`.
        """
        try:
            self._begin(plan, signatures)
            methods = self._methods_now()
            if self._in_order:
                self._launch_in_order(methods)
            else:
                for position, (stage, kind, microbatch) in enumerate(plan[self.rank]):
                    self.timeline.ask(position)
                    methods[kind](stage, microbatch)
            self._end()
        except StopIteration as error:  # Lightning would take it for the end of the data
            raised = RuntimeError(f"a step raised StopIteration: {error}")
            self.failure.end(raised, self._where())
            raise raised from error
        except BaseException as error:
            self.failure.end(error, self._where())
            raise

    def _methods_now(self) -> Mapping[str, Callable[[int, int], None]]:
        """The table of kinds; naming an action for a profiler costs more than recording it."""
        if not is_profiled():
            return self._methods
        return {kind: _named(kind, method) for kind, method in self._methods.items()}

    def _end(self) -> None:
        for channel in self.channels.values():
            channel.end()
        self.timeline.finish()
        assert not self._handed, "what one stage handed over the next one took"

    def _launch_in_order(self, methods: Mapping[str, Callable[[int, int], None]]) -> None:
        """Run actions and messages in the order of `communicate`, which no device can deadlock."""
        position, asked = 0, False
        for step in self._routes.steps:
            if step.kind in (SEND_F, SEND_B):
                self._outgoing.pop(step, _nothing)()
                continue
            if not asked:  # waiting for the header of a receive is waiting for what needs it
                self.timeline.ask(position)
                asked = True
            if step.kind in methods:
                methods[step.kind](step.stage, step.microbatch)
                position, asked = position + 1, False
            else:
                self._routes.launch(step)
        assert not self._outgoing, "every message has its place in the order"

    def _begin(self, plan: Plan, signatures: Sequence[Hashable]) -> None:
        assert len(signatures) == plan.num_microbatches, "one signature for each micro-batch of the plan"
        self._runs += 1
        self._empty.clear()
        if self.log is not None:
            self.log.begin()
        self._routes.follow(plan)
        opening = self._routes.opening(self._runs, signatures)
        for peer, channel in self.channels.items():
            channel.begin(self._routes.expected[peer], signatures, opening)
        self.timeline.begin(plan[self.rank])

    def _where(self) -> Where:
        action = self.timeline.current
        if action is None:
            return Where("the start of a step")
        return Where(str(action), action.stage, action.microbatch)

    def _forward(self, stage: int, microbatch: int) -> None:
        incoming = self._receive_values(stage, microbatch)
        self.timeline.start()
        outgoing = self.stages[stage].forward(microbatch, incoming)
        self.timeline.end()
        if outgoing is None:
            assert stage == self._routes.last, "only the last stage sends nothing on"
            outgoing = Values([], empty=incoming is not None and incoming.empty)
        elif stage != self._routes.last:
            channel = self._routes.channel_of[stage + 1]
            if channel is None:
                self._hand_over(stage + 1, microbatch, outgoing)
            elif self._in_order:
                send = partial(channel.send_values, stage + 1, microbatch, outgoing)
                self._outgoing[Action(stage, SEND_F, microbatch)] = send
            else:
                channel.send_values(stage + 1, microbatch, outgoing)
        if outgoing.empty:
            self._note_empty(stage, microbatch, incoming)

    def _note_empty(self, stage: int, microbatch: int, incoming: Values | None) -> None:
        """Remember that no backward follows, and how many tensors the stage before waits for gradients of."""
        self._empty[stage, microbatch] = None
        if incoming is not None and not incoming.empty:
            self._empty[stage, microbatch] = len(incoming.tensors)

    def _receive_values(self, stage: int, microbatch: int) -> Values | None:
        if stage == 0:
            return None
        channel = self._routes.channel_of[stage - 1]
        if channel is not None:
            return channel.receive_values(stage, microbatch)
        values = self._handed.pop(("F", stage, microbatch))
        assert isinstance(values, Values), "a forward hands over values"
        return values

    def _hand_over(self, stage: int, microbatch: int, values: Values) -> None:
        """To another stage of this rank."""
        leaves = [t.detach().requires_grad_(t.requires_grad) for t in values.tensors]
        self._handed["F", stage, microbatch] = Values(leaves, values.table, values.empty)

    def _backward(self, stage: int, microbatch: int, *, input_alone: bool = False) -> None:
        if (stage, microbatch) in self._empty:
            self._skip_backward(stage, microbatch)
            return
        incoming = self._receive_gradients(stage, microbatch)
        program = self.stages[stage]
        self.timeline.start()
        outgoing = (program.backward_input if input_alone else program.backward)(microbatch, incoming)
        self.timeline.end()
        if stage == 0:
            return
        assert outgoing is not None, "a stage with an input returns its gradients"
        channel = self._routes.channel_of[stage - 1]
        if channel is not None and not self._in_order:  # one frame less in the usual case
            channel.send_gradients(stage - 1, microbatch, outgoing)
        else:
            self._pass_on(stage - 1, microbatch, outgoing)

    def _pass_on(self, stage: int, microbatch: int, gradients: list[Tensor | None]) -> None:
        """Gradients, to a stage of this rank or another; at its place, where messages have an order."""
        channel = self._routes.channel_of[stage]
        if channel is None:
            self._handed["B", stage, microbatch] = gradients
        elif self._in_order:
            send = partial(channel.send_gradients, stage, microbatch, gradients)
            self._outgoing[Action(stage + 1, SEND_B, microbatch)] = send
        else:
            channel.send_gradients(stage, microbatch, gradients)

    def _skip_backward(self, stage: int, microbatch: int) -> None:
        self.timeline.start()
        self.timeline.end()
        count = self._empty[stage, microbatch]
        if count is not None:  # the step ended here, not before: no tensor gets a gradient
            self._pass_on(stage - 1, microbatch, [None] * count)

    def _receive_gradients(self, stage: int, microbatch: int) -> list[Tensor | None] | None:
        if stage == self._routes.last:
            return None
        channel = self._routes.channel_of[stage + 1]
        if channel is not None:
            return channel.receive_gradients(stage, microbatch)
        gradients = self._handed.pop(("B", stage, microbatch))
        assert isinstance(gradients, list), "a backward hands over gradients"
        return gradients

    def _backward_weight(self, stage: int, microbatch: int) -> None:
        self.timeline.start()
        if (stage, microbatch) not in self._empty:
            self.stages[stage].backward_weight(microbatch)
        self.timeline.end()


def _nothing() -> None:
    """An empty micro-batch sends no gradients back."""


def _named(kind: str, method: Callable[[int, int], None]) -> Callable[[int, int], None]:
    """The method with its action's name around it, for the trace of a profiler."""

    def named(stage: int, microbatch: int) -> None:
        with torch.profiler.record_function(str(Action(stage, kind, microbatch))):
            method(stage, microbatch)

    return named
