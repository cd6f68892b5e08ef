"""What a step tells loggers and metrics, once, on the last stage; and what it tells as one for the batch."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_pipeline.errors import SplitError
from lightning_pipeline.model.cut import Microbatch, TracedOutput
from lightning_pipeline.model.loss import Bent, Follower, MetricCalls, Part
from lightning_pipeline.model.random import Generators, host_draws, random_state_kept
from lightning_pipeline.model.replay.view import Step
from lightning_pipeline.model.rules import Gathered, MadeUp
from lightning_pipeline.model.state import CannotRepeatError, StepState
from lightning_pipeline.model.tensors import (
    PlaceholderMode,
    TensorSpec,
    is_placeholder,
    map_tensors,
    user_line,
)
from lightning_pipeline.model.trace import (
    ToldOnce,
    Trace,
    UnitPatches,
    around_metrics,
    metrics_of,
    note_told,
    printed_once,
    stub_metrics,
    stub_sinks,
)
from lightning_pipeline.patching import patched

_log = logging.getLogger(__name__)
Sink = Callable[..., None]
_LARGEST = 1 << 28  # bytes of a batch's values that are kept until its end
_METRICS_GIVE = (0.25, 0.75)  # in two runs, so that what is made of it is seen
_MOST_LINES, _MOST_SIZES = 4, 16
_READS = frozenset({"item", "tolist", "numpy", "__array__", "__int__", "__float__", "__index__", "__bool__"})


class Told:
    """Calls of `root.log(...)` and the like, and of torchmetrics objects, on one rank.

    Args:
        root: The LightningModule.
        sinks: What the methods become on the last stage: called with the micro-batch's index and the user's
            arguments.
        mode: Of placeholders.
        has_last_stage: Whether what is told counts here.
        follower: Of the batch that runs; None where nothing is followed.

    Attributes:
        metrics: The module's torchmetrics objects.
        device: Of the run.
        calls: Takes the calls of metrics, where there are several micro-batches.
        lines: What the step prints and logs as information or more.
        microbatch: The one that runs on the last stage.
        made_up: What metrics give in runs that measure nothing.
        of_whole: Told, with the name of the method and whether no value of units was made up before, what the
            step of the whole batch logs.
        of_whole_begins: Told that it begins.
    """

    def __init__(
        self, root: nn.Module, sinks: Mapping[str, Sink], mode: PlaceholderMode, device: torch.device,
        *, has_last_stage: bool, follower: Callable[[], Follower | None],
    ) -> None:  # fmt: skip
        self._root, self._sinks, self._mode = root, dict(sinks), mode
        self.device, self._has_last_stage = device, has_last_stage
        self.metrics, self._follower = metrics_of(root), follower
        self.calls = MetricCalls(self._followed, self._know)
        self.lines = ToldOnce()
        self.microbatch, self.made_up = 0, 0.0
        self.of_whole: Callable[[str, bool, Any, Any], None] = lambda how, is_sure, args, kwargs: None
        self.of_whole_begins: Callable[[], None] = lambda: None

    @property
    def names(self) -> tuple[str, ...]:
        """Of the methods."""
        return tuple(self._sinks) or ("log", "log_dict")

    def part(self, value: Any, *, always: bool = False) -> Part:
        """What a number of the micro-batch that runs is of the batch's. See `Follower.part`."""
        return self.calls.part(value) or self._followed(value, always=always)

    def _followed(self, value: Any, *, always: bool = False) -> Part:
        follower = self._follower()
        return Part() if follower is None else follower.part(value, always=always)

    def _know(self, value: Any, bent: Bent) -> None:
        follower = self._follower()
        if follower is not None:
            follower.know(value, bent)

    def silent_metrics(self) -> AbstractContextManager[None]:
        """Inside, metrics take nothing, and give placeholders."""
        return stub_metrics(self.metrics, _drop, self._no_value)

    @contextmanager
    def silent(self) -> Iterator[None]:
        """The same for a run of a step more than on one device, which prints nothing."""
        with self.silent_metrics(), printed_once(self._root):
            yield

    def whole_noted(self) -> AbstractContextManager[None]:
        """Inside `silent_metrics`, for a step of the whole batch: what metrics are given is noted."""
        self.of_whole_begins()
        return self.calls.of_whole(self.metrics, self._unfollowed)

    def metrics_by_batch(self, step: str, sizes: Sequence[int]) -> AbstractContextManager[None]:
        """Inside, metrics are called once for all micro-batches, by `calls.settle()`."""
        return self.calls.taken(self.metrics, step, sizes, lambda: self.microbatch)

    @contextmanager
    def nothing(self) -> Iterator[None]:
        """Inside, nothing is logged, printed or measured, and no random number is used up."""
        with ExitStack() as stack:
            stack.enter_context(random_state_kept(Generators(list(self._root.modules()))))
            stack.enter_context(printed_once(self._root))
            stack.enter_context(stub_sinks(self._root, self.names, _drop))
            stack.enter_context(
                stub_metrics(self.metrics, _drop, lambda: torch.full((), self.made_up, device=self.device))
            )
            yield

    @contextmanager
    def in_step(self, *, several: bool) -> Iterator[None]:
        """Logs and metrics count once, on the last stage; elsewhere their calls are dropped.

        Args:
            several: Whether the batch has micro-batches, of which the others print nothing again.
        """
        with ExitStack() as stack:
            if several:
                stack.enter_context(self.lines.batch(self._root))
            stack.enter_context(stub_sinks(self._root, tuple(self._sinks), _drop))
            if not self._has_last_stage:
                stack.enter_context(self.silent_metrics())
            if self._has_last_stage:
                checked = {name: self._checked(name, sink) for name, sink in self._sinks.items()}
                stack.enter_context(patched(self._root, checked))
            yield

    def to(
        self, record: Callable[[str, tuple[Any, ...], dict[str, Any]], None]
    ) -> AbstractContextManager[None]:
        """Outside a step: give calls to `record`, with the method's name."""

        def sink(name: str) -> Callable[..., None]:
            return lambda *args, **kwargs: record(name, args, kwargs)

        return patched(self._root, {name: sink(name) for name in self._sinks})

    def metrics_unfollowed(self) -> AbstractContextManager[None]:
        """Inside, what metrics compute is none of the step's own functions."""
        return around_metrics(self.metrics, self._unfollowed)

    def _checked(self, name: str, sink: Sink) -> Callable[..., None]:
        def log(*args: Any, **kwargs: Any) -> None:
            watcher: Any = self._mode.watcher
            if watcher is not None and not getattr(watcher, "is_last", True):
                note_told((args, kwargs))
                if getattr(watcher, "rehearses", False):
                    with self._unfollowed():
                        self.of_whole(name, watcher.is_sure, args, kwargs)
                return
            if watcher is not None:
                watcher.check_real((args, kwargs), f"self.{name}")
            with self._unfollowed():
                sink(self.microbatch, *args, **kwargs)

        return log

    @contextmanager
    def _unfollowed(self) -> Iterator[None]:
        watcher: Any = self._mode.watcher
        if not hasattr(watcher, "mixing"):
            yield
            return
        seeing = watcher.follow, watcher.mixing
        watcher.follow = watcher.mixing = None
        try:
            yield
        finally:
            watcher.follow, watcher.mixing = seeing

    def _no_value(self) -> Tensor:
        with self._unfollowed():
            return self._mode.make(TensorSpec((), (), torch.float32, self.device.type, False))


def _drop(call: Any) -> None:
    """Logs and metrics outside the last stage."""
    note_told(call)


class Heard(NamedTuple):
    """What a step has told when it ran once for the whole batch, on what units gave its micro-batches.

    Attributes:
        loss: That it returned; None where that is none of a training step's, or has been warned of.
        logged: Numbers, by name and how often that was logged before.
        lines: At which it read numbers.
        left: Places in which something else stands then.
        returned: What it returned.
    """

    loss: float | None
    logged: dict[tuple[str, int], float]
    lines: list[str]
    left: frozenset[str] = frozenset()
    returned: Any = None


class _LinesOfReads(TorchFunctionMode):
    """Notes where numbers of tensors become Python's or NumPy's.

    Args:
        root: The LightningModule.
    """

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self._root, self.lines = root, list[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _READS:
            line = user_line(self._root)
            if line not in self.lines and len(self.lines) < _MOST_LINES:
                self.lines.append(line)
        return func(*args, **(kwargs or {}))


class ToldAsOne:
    """Looks at some batches as one: what the step then tells is one device's, whatever it is made of.

    The last stage keeps what the end of the step reads of units. When the batch is done the code between
    units runs once more, with that in the units' place. This is done for the first batch of a step, the
    second, the fourth, the eighth and so on, and for each with other numbers of samples; where a device
    beside the processor computes only for these and the first, for numbers are read of it.

    Args:
        root: The LightningModule.
        told: What steps tell.
        patches: The patched units.
        apart: Inside, runs of a step leave nothing behind and tell nobody anything.
        quiet: Inside that, runs on values log nothing, and keep random states.
    """

    def __init__(
        self, root: nn.Module, told: Told, patches: UnitPatches,
        apart: Callable[[str], AbstractContextManager[None]],
        quiet: Callable[[], AbstractContextManager[None]],
    ) -> None:  # fmt: skip
        self._root, self._told, self._patches, self._apart, self._quiet = root, told, patches, apart, quiet
        self._batches: Counter[str] = Counter()
        self._sizes: dict[str, set[tuple[int, ...]]] = {}
        self._kept: tuple[Step, StepState | None, Gathered] | None = None

    def begin(
        self, step: Step, state: StepState | None, whole: Microbatch, sizes: Sequence[int],
        as_one: Callable[[Microbatch], tuple[Trace, dict[tuple[int, int], TracedOutput]]],
    ) -> None:  # fmt: skip
        """A batch begins: have it looked at, if it is its turn.

        Args:
            step: The batch.
            state: Where the step leaves something behind.
            whole: Its arguments as one.
            sizes: Samples of each micro-batch.
            as_one: Gives its trace as one, and what units return for it.
        """
        self._kept = None
        self._batches[step.name] += 1
        number, known = self._batches[step.name], self._sizes.setdefault(step.name, set())
        is_new = tuple(sizes) not in known and len(known) < _MOST_SIZES
        is_turn = not number & (number - 1) and self._told.device.type == "cpu"  # others would wait for it
        if not (is_turn or is_new) or (state is not None and state.takes):
            return
        known.add(tuple(sizes))
        with suppress(SplitError):  # the batch as one cannot be traced, though its micro-batches may be
            gathered = Gathered(whole, *as_one(whole), sizes, copied=True)
            if gathered.bytes <= _LARGEST:
                step.gathered = gathered
                self._kept = step, state, gathered

    def runs(self) -> Iterator[Heard]:
        """After the batch: what is told, twice, with other numbers of metrics. Nothing where nobody knows."""
        kept, self._kept = self._kept, None
        if kept is None:
            return
        step, state, gathered = kept
        step.gathered = None
        try:
            values = gathered.values()
            for number, given in enumerate(_METRICS_GIVE):
                self._told.made_up = given
                found = self._run(
                    step, state, gathered.whole, values.but(gathered.keys) if number else values
                )
                if found is None:
                    return
                yield found
        except CannotRepeatError:
            return
        except Exception as error:  # the user's code, which goes by what is not here
            _log.debug("%s does not run for the batch as one: %s", step.name, error)
        finally:
            self._told.made_up = 0.0

    def _run(self, step: Step, state: StepState | None, whole: Microbatch, values: MadeUp) -> Heard | None:
        logged, reads, counts = dict[tuple[str, int], float](), _LinesOfReads(self._root), Counter[str]()

        def note(given: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
            for name, value in _numbers(*given):
                logged[name, counts[name]] = value
                counts[name] += 1

        begun = nullcontext() if state is None else state.as_begun()
        settled = {} if state is None else state.numbers()
        with self._apart(step.name), begun, self._quiet(), stub_sinks(self._root, self._told.names, note):
            args, kwargs = map_tensors(lambda tensor: tensor.detach().clone(), whole)
            stood = self._draws()
            self._patches.runner = values.again(self._patches.originals)
            try:
                with reads:
                    result = step.function(*args, **kwargs)
            finally:
                self._patches.runner = None
            if self._draws() != stood:
                return None
            left = _others(settled, {} if state is None else state.numbers())
        loss = result.get("loss") if isinstance(result, dict) else result
        told = None
        said = step.follower is not None and step.follower.has_warned
        if step.weights is not None and isinstance(loss, Tensor) and loss.numel() == 1 and not said:
            told = float(loss.detach())
        return Heard(told, logged, reads.lines, left, map_tensors(Tensor.detach, result))

    def _draws(self) -> Any:
        """Where random numbers stand."""
        device = self._told.device
        own = torch.cuda.get_rng_state(device).tolist() if device.type == "cuda" else []
        return torch.get_rng_state().tolist(), own, host_draws(Generators(self._root.modules()))


def _others(settled: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> frozenset[str]:
    """Places where another number stands."""
    return frozenset(
        label
        for label, value in settled.items()
        if label in now
        and not (
            now[label].shape == value.shape
            and torch.allclose(now[label], value, rtol=1e-3, atol=1e-5, equal_nan=True)
        )
    )


def _numbers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """What a call of `log` or `log_dict` logs, apart from metrics."""
    values = [*args, *kwargs.values()]
    several = next((value for value in values[:1] if isinstance(value, dict)), kwargs.get("dictionary"))
    pairs = several.items() if isinstance(several, dict) else [_bound(*args, **kwargs)]
    for name, value in pairs:
        one = isinstance(value, Tensor) and value.numel() == 1 and not is_placeholder(value)
        if one or isinstance(value, int | float):
            yield name, float(value.detach() if isinstance(value, Tensor) else value)


def _bound(name: Any = "", value: Any = None, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    return name, value
