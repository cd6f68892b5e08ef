"""What a step tells, and leaves behind, as one for the batch."""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torchmetrics import Metric

from lightning_pipeline.errors import SplitError
from lightning_pipeline.model.cut import Microbatch, TracedOutput
from lightning_pipeline.model.mixing import is_cut_by_rows
from lightning_pipeline.model.random import Generators, host_draws
from lightning_pipeline.model.replay import Step, Told
from lightning_pipeline.model.rules import Gathered, MadeUp
from lightning_pipeline.model.state import CannotRepeatError, StepState
from lightning_pipeline.model.tensors import (
    Opaque,
    is_placeholder,
    leaves_in,
    map_tensors,
    operands_of,
    user_line,
)
from lightning_pipeline.model.trace import (
    Trace,
    UnitPatches,
    stub_sinks,
)

_log = logging.getLogger(__name__)
_LARGEST = 1 << 28  # bytes of a batch's values that are kept until its end
_METRICS_GIVE = (0.25, 0.75)  # in two runs, so that what is made of it is seen
_MOST_LINES, _MOST_SIZES = 4, 16
_READS = frozenset({"item", "tolist", "numpy", "__array__", "__int__", "__float__", "__index__", "__bool__"})


class Heard(NamedTuple):
    """What a step has told when it ran once for the whole batch, on what units gave its micro-batches.

    Attributes:
        loss: That it returned; None where that is none of a training step's, or has been warned of.
        logged: Numbers, by name and how often that was logged before.
        lines: At which it read numbers.
        left: What is small of what stands in the places of the step then, by label.
        returned: What it returned.
        writes: What it gave to loggers.
        unknown: What it logged of values that are not here, likewise.
        calls: The numbers that it logged as they were, with the arguments of each call, likewise.
        batch_sizes: What it said of how many samples numbers are of, likewise by name.
        is_sure: Whether what units gave is put together as they would have given it for the batch as one.
    """

    loss: float | None
    logged: dict[tuple[str, int], float]
    lines: list[str]
    left: Mapping[str, Any] = MappingProxyType({})
    returned: Any = None
    writes: Sequence[Any] = ()
    is_sure: bool = False
    batch_sizes: Mapping[tuple[str, int], int] = MappingProxyType({})
    unknown: Collection[tuple[str, int]] = ()
    calls: Mapping[tuple[str, int], tuple[Any, Any]] = MappingProxyType({})


class _ReadsSeen(TorchFunctionMode):
    """Notes where numbers of tensors become Python's or NumPy's, and what is made of made-up values.

    Args:
        root: The LightningModule.

    Attributes:
        lines: Where numbers are read.
        is_astray: Whether one of them was made of what nobody knows.
    """

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self._root, self.lines, self.is_astray = root, list[str](), False
        self._unknown: dict[int, Tensor] = {}  # held, so that no identity is used twice

    def note(self, tensor: Tensor) -> None:
        """Nobody knows this value."""
        self._unknown[id(tensor)] = tensor

    def is_unknown(self, value: Any) -> bool:
        """Whether it is made of one that nobody knows."""
        return id(value) in self._unknown

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        unknown = bool(self._unknown) and any(map(self.is_unknown, operands_of(args, kwargs)))
        reads = getattr(func, "__name__", "") in _READS
        if reads:
            line = user_line(self._root)
            if line not in self.lines and len(self.lines) < _MOST_LINES:
                self.lines.append(line)
        result = func(*args, **kwargs)
        if unknown:
            self.is_astray |= reads
            for tensor in operands_of((args[0] if func is Tensor.__setitem__ else result,)):
                self.note(tensor)
        return result


class ToldAsOne:
    """Looks at some batches as one: what the step then tells is one device's, whatever it is made of.

    The last stage keeps what the end of the step reads of units. When the batch is done the code between
    units runs once more, with that in the units' place. This is done for the first batch of a step, the
    second, the fourth, the eighth and so on, for each with other numbers of samples, and for the first of an
    epoch, in which a step may do what it has not done before; where a device beside the processor computes
    only for these and the first of all, for numbers are read of it. Of a step that logs numbers which its
    micro-batches do not tell, each batch is looked at, and has them from here.

    Args:
        root: The LightningModule.
        told: What steps tell.
        patches: The patched units.
        apart: Inside, runs of a step leave nothing behind and tell nobody anything.
        quiet: Inside that, runs on values log nothing, and keep random states.
        torn: Steps whose micro-batches have decided differently: each batch is looked at.

    Attributes:
        each: Steps of which each batch is looked at.
        missed: Steps of which some batch was not.
        kept: Steps that log what they have written, of which the batch as one alone tells the numbers.
        is_filled: Whether values were made up for micro-batches of the last one, which took another way.
        epoch: The epoch that runs.
    """

    def __init__(
        self, root: nn.Module, told: Told, patches: UnitPatches,
        apart: Callable[[str], AbstractContextManager[None]],
        quiet: Callable[[], AbstractContextManager[None]],
        torn: Collection[str],
    ) -> None:  # fmt: skip
        self._root, self._told, self._patches, self._apart, self._quiet = root, told, patches, apart, quiet
        self._torn = torn
        self.each, self.missed, self.kept, self.is_filled = set[str](), set[str](), set[str](), False
        self.epoch = 0
        self._batches: Counter[str] = Counter()
        self._epochs: dict[str, int] = {}  # of which a batch was looked at
        self._sizes: dict[str, set[tuple[int, ...]]] = {}
        self._kept: tuple[Step, StepState | None, Gathered] | None = None
        self._is_cut = False

    def know(self, kept: Collection[str]) -> None:
        """Steps that log what they have written: each of their batches is looked at."""
        self.kept.update(kept)
        self.each.update(kept)

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
        self._kept, self.is_filled = None, False
        self._batches[step.name] += 1
        number, known = self._batches[step.name], self._sizes.setdefault(step.name, set())
        is_new = tuple(sizes) not in known and len(known) < _MOST_SIZES
        is_turn = not number & (number - 1) and self._told.device.type == "cpu"  # others would wait for it
        is_first = self._epochs.get(step.name) != self.epoch
        if state is not None and state.may_be_divided:
            self.each.add(step.name)
        is_asked = step.name in self.each or (step.name in self._torn and not step.mixing)
        is_looked_at = is_turn or is_new or is_first or is_asked
        takes = state is not None and state.takes
        if not is_looked_at or step.trace.is_shared or takes or _is_written_twice(step.trace):
            self.missed.add(step.name)
            return
        known.add(tuple(sizes))
        self._epochs[step.name] = self.epoch
        self._is_cut = is_cut_by_rows(whole, step.microbatches, sizes)
        with suppress(SplitError):  # the batch as one cannot be traced, though its micro-batches may be
            gathered = Gathered(whole, *as_one(whole), sizes, copied=True, fills=True)
            if gathered.bytes <= _LARGEST:
                step.gathered, self._told.calls.looks = gathered, True
                self._kept = step, state, gathered
        if self._kept is None:
            self.missed.add(step.name)

    def runs(self) -> Iterator[Heard]:
        """After the batch: what is told, twice, with other numbers of metrics. Nothing where nobody knows."""
        kept, self._kept = self._kept, None
        if kept is None:
            return
        step, state, gathered = kept
        step.gathered = None
        try:
            values = gathered.values()
            is_sure = self._is_cut and not (gathered.takes_means or step.trace.unordered)
            self.is_filled = gathered.is_filled
            for number, given in enumerate(_METRICS_GIVE):
                self._told.made_up, self._told.as_batch = given, True
                if number and self.is_filled:
                    values = gathered.values(again=True)
                found = self._run(
                    step, state, gathered.whole, values.but(gathered.keys) if number else values
                )
                if found is None:
                    return
                yield found._replace(is_sure=is_sure)
        except CannotRepeatError:
            return
        except Exception as error:  # the user's code, which goes by what is not here
            _log.debug("%s does not run for the batch as one: %s", step.name, error)
        finally:
            self._told.made_up, self._told.as_batch = 0.0, False

    def _run(self, step: Step, state: StepState | None, whole: Microbatch, values: MadeUp) -> Heard | None:
        logged, reads, counts = dict[tuple[str, int], float](), _ReadsSeen(self._root), Counter[str]()
        batch_sizes, unknown = dict[tuple[str, int], int](), set[tuple[str, int]]()
        calls = dict[tuple[str, int], tuple[Any, Any]]()

        def note(given: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
            for name, value in _numbers(*given):
                if isinstance(value, Metric) or is_placeholder(value) or reads.is_unknown(value):
                    unknown.add((name, counts[name]))
                else:
                    number = value.detach() if isinstance(value, Tensor) else value
                    logged[name, counts[name]] = float(number)
                    calls[name, counts[name]] = number, given
                if isinstance(size := given[1].get("batch_size"), int):
                    batch_sizes[name, counts[name]] = size
                counts[name] += 1

        begun = nullcontext() if state is None else state.as_begun()
        with self._apart(step.name), begun, self._quiet(), stub_sinks(self._root, self._told.names, note):
            args, kwargs = map_tensors(lambda tensor: tensor.detach().clone(), whole)
            stood = self._draws()
            answers = values.again(self._patches.originals)
            answers.gives_unknown = reads.note
            runs = self._patches.run_by(answers)
            with self._told.writes() as writes, runs, reads:
                result = step.function(*args, **kwargs)
            if self._draws() != stood or reads.is_astray:
                return None
            left = {} if state is None else state.left()
        if any(leaves_in((result, left), Opaque)):
            return None
        loss = result.get("loss") if isinstance(result, dict) else result
        told = None
        said = step.follower is not None and not step.follower.compares_losses
        if step.weights is not None and isinstance(loss, Tensor) and loss.numel() == 1 and not said:
            told = float(loss.detach())
        returned = map_tensors(Tensor.detach, result)
        return Heard(
            told, logged, reads.lines, left, returned, writes, batch_sizes=batch_sizes, unknown=unknown,
            calls=calls,
        )  # fmt: skip

    def _draws(self) -> Any:
        """Where random numbers stand."""
        device = self._told.device
        own = torch.cuda.get_rng_state(device).tolist() if device.type == "cuda" else []
        return torch.get_rng_state().tolist(), own, host_draws(Generators(self._root.modules()))


def _is_written_twice(trace: Trace) -> bool:
    """Whether code between units writes what units, which do not run again, write too (a spectral norm)."""
    by_units = trace.buffers_written & trace.state_units.keys()
    return any(effect.place.label in by_units for effect in trace.effects)


def _numbers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """What a call of `log` or `log_dict` logs: names, and numbers or metrics."""
    values = [*args, *kwargs.values()]
    several = next((value for value in values[:1] if isinstance(value, dict)), kwargs.get("dictionary"))
    pairs = several.items() if isinstance(several, dict) else [_bound(*args, **kwargs)]
    for name, value in pairs:
        one = isinstance(value, Tensor) and value.numel() == 1
        if one or isinstance(value, int | float | Metric):
            yield name, value


def _bound(name: Any = "", value: Any = None, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    return name, value
