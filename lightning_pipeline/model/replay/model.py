"""A LightningModule cut into stages, as one rank holds it."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipeline.data import signature_of
from lightning_pipeline.errors import SplitError
from lightning_pipeline.model.cut import Liveness, Partition, backward_edges, stages_of_states
from lightning_pipeline.model.replay.guards import IdleRunner
from lightning_pipeline.model.replay.seeds import StepSeeds
from lightning_pipeline.model.replay.stage import StageProgram, Step, TracedOutput
from lightning_pipeline.model.state import (
    AttributeGuards,
    Elsewhere,
    Isolation,
    Kept,
    Meeting,
    Residence,
    SharedParameter,
    Sources,
)
from lightning_pipeline.model.tensors import Held, Peaks, PlaceholderMode, SavedCount, TensorSpec, tensors_in
from lightning_pipeline.model.trace import (
    Trace,
    UnitPatches,
    metrics_of,
    replaced,
    step_function,
    stub_metrics,
    stub_sinks,
    trace_step,
)

Sink = Callable[..., None]
MicrobatchArguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the last stage has after a batch; empty lists elsewhere.

    Attributes:
        losses: The undivided loss of each micro-batch, detached; None where the step returned None.
        outputs: What the step returned for each micro-batch, detached.
    """

    losses: list[Tensor | None]
    outputs: list[Any]


class SplitModel:
    """This rank's stages of a module, with every patch that replay needs.

    Args:
        root: The LightningModule, whole.
        cut: Its partition.
        stages: The stages of this rank.
        sinks: What `root.log(...)` and the like become on the last stage: called with the micro-batch's
            index and the user's arguments.
        forward_context: Makes the precision's context for one forward, such as autocast.
        seed: Base of all random draws inside steps; the same on every rank.
        later: Traces of other steps, made when the module was whole; what has none is traced when it comes.

    Attributes:
        counts_next: Whether to count what the stages hold in the next step that has a backward.
        kept: What the attributes of the module went through in a batch; None where nothing is to be merged.
        count: That of the last step in which it was counted.
        worst: The worst moment of all steps in which it was.
    """

    def __init__(
        self, root: nn.Module, cut: Partition, stages: Sequence[int], *,
        sinks: Mapping[str, Sink] | None = None, seed: int = 0,
        forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        later: Sequence[Trace] = (),
    ) -> None:  # fmt: skip
        self.root, self.cut = root, cut
        self._sinks = dict(sinks or {})
        self._context, self.seed = forward_context, seed
        self.mode = PlaceholderMode()
        self._patches = UnitPatches(cut.trace.units)
        self._stage_of = cut.stage_of
        self.num_stages = cut.num_stages
        self._programs = {stage: self._program(stage) for stage in stages}
        needed = stages_of_states(root, cut.trace, self._stage_of, self.num_stages)
        self._residence = Residence(root, needed, set(stages), self.mode)
        self._guards = AttributeGuards(root)
        self._spread = self._shared_modules()
        self._known: dict[str, tuple[Trace, Liveness]] = {cut.trace.step: (cut.trace, cut.liveness())}
        for trace in later:
            self._know(trace)
        self._modules = list(root.modules())
        self._metrics = metrics_of(root)
        self._traced_outputs: dict[Hashable, dict[tuple[int, int], TracedOutput]] = {}
        self._open: ExitStack | None = None
        self._step: Step | None = None
        self.kept: Kept | None = None
        self._microbatch = 0
        self.signatures: list[Hashable] = []
        self.counts_next = False
        self.count: SavedCount | None = None
        self.worst = Peaks()
        self._isolation = Isolation(root, self._no_value) if len(self._programs) > 1 else None
        self._install()

    def _program(self, stage: int) -> StageProgram:
        last = stage == self.num_stages - 1
        return StageProgram(stage, self.root, self._stage_of, self._patches, self.mode, is_last=last)

    def _shared_modules(self) -> list[nn.Module]:
        """Modules with units of several stages inside."""
        if self.num_stages == 1:
            return []
        stages = {id(unit.module): self._stage_of[number] for number, unit in enumerate(self._patches.units)}
        return [
            module
            for module in self.root.modules()
            if len({stages[id(part)] for part in module.modules() if id(part) in stages}) > 1
        ]

    def _install(self) -> None:
        self._residence.drop()
        self._patches.install()
        self._patches.idle = IdleRunner(self.root, self._patches, self._programs)
        for stage, program in self._programs.items():
            if self._isolation is not None and stage != max(self._programs):
                program.apart = self._isolation

    def restore(self, states: Mapping[str, Tensor] | None = None) -> None:
        """Undo every patch.

        Args:
            states: Values of parameters and buffers of other stages, by name; those without one keep no
                values, and using them raises.
        """
        self.failed()
        self._patches.remove()
        self._guards.remove()
        self._residence.restore(states or {})

    # ---- what this rank holds

    def stage(self, index: int) -> StageProgram:
        """A stage of this rank, for the executor."""
        return self._programs[index]

    @property
    def has_last_stage(self) -> bool:
        """Whether losses, logs and outputs arrive here."""
        return self.num_stages - 1 in self._programs

    def owned_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters by their first names, tied ones once."""
        return self._residence.parameters()

    @property
    def stand_ins(self) -> dict[Tensor, nn.Parameter]:
        """The placeholder of each parameter of other stages, by what it stands for."""
        return self._residence.stand_ins

    def stand_in(self, name: str, spec: TensorSpec) -> Tensor:
        """What stands for a tensor that belongs to a parameter of another stage.

        Args:
            name: Of the parameter.
            spec: Of the tensor.
        """
        return self._residence.absent.make(name, spec)

    def meeting(
        self, rank_of: Callable[[int], int], num_ranks: int, gather: Callable[[str, Any], list[Any]],
        optimizers: Callable[[], Iterable[Optimizer]],
    ) -> Meeting:  # fmt: skip
        """What completes values of several stages in the user's hooks.

        Args:
            rank_of: The pipeline rank of a stage.
            num_ranks: Of the pipeline.
            gather: Collects an object of each pipeline rank; told for what.
            optimizers: Of the run.
        """
        holders = {name: frozenset(map(rank_of, stages)) for name, stages in self._residence.needed.items()}
        partly = {name: ranks for name, ranks in holders.items() if len(ranks) < num_ranks}

        def listed() -> Iterator[tuple[str, list[Tensor]]]:
            states = list(optimizers())
            for name, tensor in self.root.named_parameters():
                kept = [t for o in states for t in tensors_in(o.state.get(tensor, ()))]
                yield name, [tensor, *([] if tensor.grad is None else [tensor.grad]), *kept]
            yield from ((name, [buffer]) for name, buffer in self.root.named_buffers())

        sources = Sources(lambda: ((name, found) for name, found in listed() if name in partly))
        return Meeting(self._residence.absent, sources, partly, num_ranks, gather)

    def show_gradients(self) -> None:
        """After a backward, let placeholders of trained parameters have placeholders as gradients."""
        self._residence.show_gradients()

    def parameter_names(self) -> list[str]:
        """Names of all parameters of the whole module, tied ones once, in its order."""
        return self._residence.parameter_names

    def owned_states(self, *, transient: bool = False) -> dict[str, Tensor]:
        """Parameters and buffers that this rank writes into a checkpoint; each is owned by one stage.

        Args:
            transient: Whether non-persistent buffers are among them, which no checkpoint holds.
        """
        return self._residence.owned_states(set(self._programs), transient=transient)

    @property
    def shared(self) -> list[SharedParameter]:
        """Parameters that several stages keep a copy of; their gradients must be summed."""
        return self._residence.shared

    def stages_of(self, name: str) -> tuple[int, ...]:
        """The stages that keep a copy of a parameter or buffer."""
        return self._residence.needed[name]

    def step_attributes(self, step: str) -> list[tuple[Any, str]]:
        """Attributes that a step sets or fills after its first unit ran, once it has been traced."""
        return list(self._known[step][0].attributes) if step in self._known else []

    def extras_elsewhere(self, step: str) -> dict[Any, Any]:
        """For each entry beside `loss` that a step returns on the last stage, what raises when it is used."""
        if self.has_last_stage:
            return {}
        keys = [key for key in self._known[step][0].returned if key != "loss"]
        return {key: Elsewhere(f"entry {key!r} of what {step} returned") for key in keys}

    def late_states(self, step: str) -> list[str]:
        """Buffers and plain tensors outside the units that the end of a step writes, on the last stage."""
        return self._known[step][0].late_states if self.num_stages > 1 else []

    def doubtful(self, step: str) -> list[str]:
        """Names of what a step works out from its last value, where micro-batches may make a difference."""
        return list(self._known[step][0].doubtful)

    # ---- a batch

    def begin(
        self,
        step: str,
        microbatches: Sequence[MicrobatchArguments],
        *,
        weights: Sequence[float] | None,
        key: Sequence[int],
        replica: int = 0,
        split_backward: bool = False,
    ) -> None:
        """Get ready to run a batch; a kind of step that was not seen yet is traced first.

        Args:
            step: Name of the user's method.
            microbatches: Arguments and keyword arguments for each.
            weights: What each loss is multiplied with for the backward; None where none follows.
            key: Numbers that name the batch, such as epoch and batch index; random draws follow from them.
            replica: Index of the data-parallel replica.
            split_backward: Whether the plan has I and W actions.
        """
        assert self._open is None, "the batch before was not finished"
        self._check_backward_hooks()
        trace, liveness = self._known.get(step) or self._trace(step, microbatches[0])
        if not self.has_last_stage:
            self._guards.install(trace.guarded_attributes())
        if self._isolation is not None:
            self._isolation.begin(trace)
        context = (step, torch.is_grad_enabled(), torch.is_autocast_enabled(), self.root.training)
        self.signatures = [(*context, signature_of(args, kwargs)) for args, kwargs in microbatches]
        seeds = StepSeeds(self._modules, (self.seed, sum(step.encode()), *key, replica))
        self._step = Step(
            step,
            step_function(self.root, step),
            microbatches,
            weights,
            trace,
            liveness,
            seeds,
            self._context,
            self._at,
            split_backward,
            self._later_outputs(step, microbatches, liveness),
            count=self._new_count(microbatches) if weights is not None and self.counts_next else None,
        )
        self._open = ExitStack()
        self._open.callback(seeds.close)
        self._silence_or_record(self._open)
        several = len(microbatches) > 1 and bool(trace.assigned or trace.entries or trace.counters)
        self.kept = self._programs[max(self._programs)].kept = Kept(self.root, trace) if several else None
        for program in self._programs.values():
            program.begin(self._step)

    def _check_backward_hooks(self) -> None:
        for module in self._spread:
            if module._backward_hooks:
                name = next(name for name, one in self.root.named_modules() if one is module)
                raise SplitError(
                    f"register_full_backward_hook: the backward hook of {(name or type(module).__name__)!r}, "
                    "which is spread over stages, would need the gradients of its inputs and of its outputs "
                    "on one of them: put it on a module inside, or keep that whole with "
                    f"PipelineStrategy(units=['{name}'])"
                )

    def _new_count(self, microbatches: Sequence[MicrobatchArguments]) -> SavedCount:
        """Counts what the stages hold beside parameters, buffers, plain tensors of modules and the batch."""
        held = [vars(m).values() for m in self._modules]
        states = [(*m._parameters.values(), *m._buffers.values()) for m in self._modules]
        tensors = [t for values in (*held, *states) for t in values if isinstance(t, Tensor)]
        self.count = SavedCount([*tensors, *tensors_in(microbatches)])
        self.counts_next = False
        return self.count

    def counted_now(self) -> dict[int, Held] | None:
        """What each stage of this rank holds, where the step that is running counts it."""
        if self._step is None or self._step.count is None:
            return None
        self._step.count.settle()
        return self._step.count.held()

    def _later_outputs(
        self, step: str, microbatches: Sequence[MicrobatchArguments], liveness: Liveness
    ) -> list[dict[tuple[int, int], TracedOutput]]:
        """Where a stage meets calls of later ones half way, their shapes: a trace for each new signature."""
        if not any(liveness.meets_later_calls[stage] for stage in self._programs):
            return [{} for _ in microbatches]
        for signature, microbatch in zip(self.signatures, microbatches, strict=True):
            if signature not in self._traced_outputs:
                calls = self._traced(step, microbatch).calls
                outputs = {(call.unit, call.nth): (call.structure, call.specs) for call in calls}
                self._traced_outputs[signature] = outputs
        return [self._traced_outputs[signature] for signature in self.signatures]

    def _traced(self, step: str, microbatch: MicrobatchArguments) -> Trace:
        with self._guards.lifted():
            return trace_step(
                self.root, step, *microbatch, units=self.cut.trace.units, patches=self._patches,
                mode=self.mode, forward_context=self._context,
                sinks=tuple(self._sinks) or ("log", "log_dict"),
                seen=[call for trace, _ in self._known.values() for call in trace.calls],
            )  # fmt: skip

    def _trace(self, step: str, microbatch: MicrobatchArguments) -> tuple[Trace, Liveness]:
        return self._know(self._traced(step, microbatch))

    def _know(self, trace: Trace) -> tuple[Trace, Liveness]:
        wrong = backward_edges(trace, self._stage_of)
        if wrong:
            source, reader = wrong[0]
            raise SplitError(
                f"in {trace.step} the output of {source!r} flows into {reader!r}, which is on an earlier "
                "stage: choose a partition that keeps them together, or in this order"
            )
        self._known[trace.step] = (trace, self.cut.liveness(trace))
        return self._known[trace.step]

    def _at(self, microbatch: int) -> None:
        self._microbatch = microbatch

    def _silence_or_record(self, stack: ExitStack) -> None:
        """Logs and metrics count once, on the last stage; elsewhere their calls are dropped."""
        stack.enter_context(stub_sinks(self.root, tuple(self._sinks), lambda value: None))
        if not self.has_last_stage:
            stack.enter_context(stub_metrics(self._metrics, lambda value: None, self._no_value))
            return
        for name, sink in self._sinks.items():
            vars(self.root)[name] = self._checked(name, sink)

    def _checked(self, name: str, sink: Sink) -> Callable[..., None]:
        def log(*args: Any, **kwargs: Any) -> None:
            watcher: Any = self.mode.watcher
            if watcher is not None and not getattr(watcher, "is_last", True):
                return
            if watcher is not None:
                watcher.check_real((args, kwargs), f"self.{name}")
            sink(self._microbatch, *args, **kwargs)

        return log

    def _no_value(self) -> Tensor:
        return self.mode.make(TensorSpec((), (), torch.float32, "cpu", False))

    def finish(self) -> StepResult:
        """End the batch and hand out what the last stage has."""
        step = self._step
        assert step is not None, "begin() comes first"
        if step.count is not None:
            step.count.settle()
            self.worst.rise_to(step.count.peaks)
        self.failed()
        if not self.has_last_stage:
            return StepResult([], [])
        order = range(len(step.microbatches))
        return StepResult([step.losses[i] for i in order], [step.results[i] for i in order])

    def failed(self) -> None:
        """Drop the state of a batch, after an error too."""
        for program in self._programs.values():
            program.end()
        if self._open is not None:
            self._open.close()
        self._open, self._step = None, None

    def sinks_to(
        self, record: Callable[[str, tuple[Any, ...], dict[str, Any]], None]
    ) -> AbstractContextManager[None]:
        """Outside a step: give calls of `root.log(...)` and the like to `record`, with the method's name."""

        def sink(name: str) -> Callable[..., None]:
            return lambda *args, **kwargs: record(name, args, kwargs)

        return replaced(self.root, {name: sink(name) for name in self._sinks})

    def metrics(self) -> list[Any]:
        """The module's torchmetrics objects."""
        return list(self._metrics)
