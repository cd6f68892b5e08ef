"""Numbers that micro-batches tell on the last stage, by `self.log` and otherwise, made into the batch's."""

import inspect
import math
import warnings
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from lightning_pipeline import _lightning
from lightning_pipeline.errors import ConfigurationError
from lightning_pipeline.hooks.reports import Entry, Report
from lightning_pipeline.model.loss import Bent, DifferentWaysError, Part, together
from lightning_pipeline.model.tensors import is_placeholder, storage_key
from lightning_pipeline.model.trace import logged_in_run

SIGNATURE = inspect.signature(LightningModule.log)
_DICT_SIGNATURE = inspect.signature(LightningModule.log_dict)
_TAKEN = {"sum": "sum", "max": "maximum", "min": "minimum"}
"""What the batch's number is taken for, by `reduce_fx`, where it is not known; else the mean by samples."""
_LOGGED = (
    "what self.log({!r}, ...) is given",
    "log the tensors that it is made of, log a torchmetrics object, or work it out in on_train_epoch_end or "
    "on_validation_epoch_end",
)
_SET_BY_REPLAY = ("name", "value", "batch_size", "enable_graph")


@dataclass
class _Call:
    """The calls of all micro-batches under one name."""

    options: tuple[tuple[str, Any], ...]
    metric: str | None
    values: list[Tensor] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    sizes: list[int | None] = field(default_factory=list)
    parts: list[Tensor] = field(default_factory=list)
    followed: bool = False
    known: int = 0
    bent: list[Bent] = field(default_factory=list)
    numbers: int = 0
    is_unclear: bool = False
    reads: set[int] = field(default_factory=set)
    sources: list[Any] = field(default_factory=list)
    given: list[int] = field(default_factory=list)
    is_constant: bool = False

    @property
    def batch_size(self) -> int | None:
        """Of the batch: the sum of what was given, or that itself where it does not go by the samples."""
        if not self.given:
            return None
        return self.given[0] if self.is_constant else sum(self.given)

    @property
    def reduces(self) -> str:
        """How what is logged in an epoch becomes one value."""
        return str(dict(self.options).get("reduce_fx", "mean")).lower()

    @property
    def shares(self) -> list[float]:
        """What the value of each micro-batch counts for."""
        return [float(size or 1) for size in self.sizes] if self.is_constant else self.weights


class LogRecorder:
    """Takes the place of `self.log` on the last stage while a step runs.

    Args:
        module: The LightningModule, to find logged metrics in.
        told: How a number that is not known is spoken of, and what to do of it.
    """

    def __init__(self, module: LightningModule, told: tuple[str, str] = _LOGGED) -> None:
        self._module, self._told = module, told
        self._calls: dict[tuple[str, int], _Call] = {}
        self._sizes: Sequence[int | None] = ()
        self._seen: dict[tuple[int, str], int] = {}
        self._paths: dict[int, str] = {}
        self.part_of: Callable[..., Part] = lambda value, always: Part()
        """What a value of the micro-batch that runs is of the batch's."""
        self._warned: set[str] = set()
        self.guesses: dict[str, str] = {}
        """Numbers of this batch that are not known to be one device's, and what to say of them."""
        self.followed = set[tuple[str, int]]()
        """Those that were followed, or will be, by name and how often that was logged before."""
        self.weighed = set[tuple[str, int]]()
        """Those that are the loss, whose micro-batches the user has weighed."""
        self._of_whole: dict[str, int] = {}  # batch sizes that the step of the whole batch gives
        self._numbers: dict[
            tuple[str, int], tuple[Any, bool]
        ] = {}  # that it logs, and whether these are sure
        self._others: list[dict[tuple[str, int], tuple[Any, bool]]] = []  # that it would, of other values
        self._swayed: set[tuple[str, int]] = set()  # what units compute chooses these
        self._logged: Counter[str] = Counter()
        self._means: set[tuple[str, int]] = set()
        self._ways: dict[tuple[str, int], str] = {}
        self._unclear: set[tuple[str, int]] = set()
        self._constant: dict[str, bool] = {}  # whether a batch size is one number of the batch's, by name

    @property
    def sinks(self) -> dict[str, Callable[..., None]]:
        """What methods of the module become in a step, by name: called with the micro-batch's index, too.

        A `log_dict` of the module's own runs in the step, and calls Lightning's, which calls `log`.
        """
        own: dict[str, Callable[..., None]] = {"log": self.log, "log_dict": self.log_dict}
        if type(self._module).log_dict is not LightningModule.log_dict:
            del own["log_dict"]
        return own

    def begin(self, sizes: Sequence[int | None]) -> None:
        """Forget the last step.

        Args:
            sizes: Samples of each micro-batch; `None` where unknown.
        """
        self._calls, self._seen, self._sizes, self.guesses = {}, {}, sizes, {}
        self.followed.clear()
        self.weighed.clear()
        self.whole_begins()
        self._of_whole.clear()
        self._others.clear()

    def whole_begins(self) -> None:
        """The step of the whole batch is about to run."""
        self._others.append(self._numbers)
        self._numbers = {}
        self._logged.clear()

    def whole_is_unlike(self) -> None:
        """What the step of the whole batch told goes by numbers or texts that units did not give."""
        self._numbers = {}
        self._others.clear()

    def log(self, microbatch: int, *args: Any, **kwargs: Any) -> None:
        """A call of `self.log` in a micro-batch."""
        given = SIGNATURE.bind(self._module, *args, **kwargs).arguments
        name, value = given["name"], given["value"]
        occurrence = self._seen.get((microbatch, name), 0)
        self._seen[microbatch, name] = occurrence + 1
        options = log_options(given)
        metric = self._path_of(value, given.get("metric_attribute")) if isinstance(value, Metric) else None
        call = self._calls.setdefault((name, occurrence), _Call(options, metric))
        if call.options != options:
            raise ConfigurationError(
                f"self.log({name!r}, ...) was called twice in a step with different arguments"
            )
        self._add(call, name, value, given.get("batch_size"), self._sizes[microbatch])

    def take(self, microbatch: int, name: str, value: Any) -> None:
        """A number that a micro-batch tells in another way."""
        call = self._calls.setdefault((name, 0), _Call((), None))
        self._add(call, name, value, None, self._sizes[microbatch])

    def take_of_whole(self, name: str, value: Any, *, is_sure: bool) -> None:
        """The same for the step of the whole batch. See `log_of_whole`."""
        self._numbers[name, 0] = value, is_sure

    def of_batch(self) -> dict[str, Tensor]:
        """What one device would have told, by name, as far as that is known; the others are `guesses`."""
        self._note_swayed()
        found = {}
        for key, call in self._calls.items():
            number = self._known(key, call)
            if number is not None:
                found[key[0]] = number
            else:
                self._guessed(key, call)
        return found

    def log_of_whole(self, how: str, is_sure: bool, args: Any, kwargs: Any) -> None:
        """A call of `log` or `log_dict` in the step of the whole batch, for what units do not compute.

        Args:
            how: Which of the two.
            is_sure: Whether no value of units was made up before.
            args: Of the call.
            kwargs: Likewise.
        """
        signature = SIGNATURE if how == "log" else _DICT_SIGNATURE
        given = signature.bind(self._module, *args, **kwargs).arguments
        logged = [(given["name"], given["value"])] if how == "log" else list(_items(given["dictionary"]))
        names = [name for name, _ in logged]
        for name, value in logged:
            self._logged[name] += 1
            if isinstance(value, int | float) or (
                isinstance(value, Tensor) and not is_placeholder(value) and value.numel() == 1
            ):
                number = value.detach() if isinstance(value, Tensor) else value
                self._numbers[name, self._logged[name] - 1] = number, is_sure
        if given.get("batch_size") is not None:
            self._of_whole.update(dict.fromkeys(names, given["batch_size"]))

    def _settle(self, name: str, call: _Call) -> None:
        """Whether the batch sizes that micro-batches gave are one number of the batch's."""
        whole = self._of_whole.get(name)
        if whole is not None and len(call.given) > 1:
            same = all(given == whole for given in call.given)
            self._constant[name] = same and whole != sum(call.given)
        uneven = len(set(call.given)) == 1 < len(set(call.sizes))
        call.is_constant = len(call.given) == len(call.values) > 0 and self._constant.get(name, uneven)

    def log_dict(self, microbatch: int, *args: Any, **kwargs: Any) -> None:
        """A call of `self.log_dict` in a micro-batch."""
        given = dict(_DICT_SIGNATURE.bind(self._module, *args, **kwargs).arguments)
        given.pop("self")
        values = given.pop("dictionary")
        for name, value in _items(values):
            self.log(microbatch, name, value, **given)

    def _add(self, call: _Call, name: str, value: Any, given: int | None, size: int | None) -> None:
        if given is not None:
            call.given.append(given)
        scalar = _scalar(name, value, self._module.device)
        if scalar is None:
            return
        call.values.append(scalar)
        call.sizes.append(size)
        call.weights.append(float(given if given is not None else (1 if size is None else size)))
        if isinstance(value, Metric):
            value = value._forward_cache
        call.sources.append(value.detach() if isinstance(value, Tensor) else value)
        part = self.part_of(value, always=call.reduces in _TAKEN)
        if part.value is not None:
            call.parts.append(torch.as_tensor(part.value).detach().double().reshape(()).to(scalar.device))
            call.followed = call.followed or part.differs
            call.known += part.is_known
            call.numbers += not isinstance(value, Tensor) and not part.is_known
        if part.bent is not None:
            call.bent.append(part.bent)
        call.is_unclear = call.is_unclear or part.is_unclear
        call.reads.add(part.read)

    def _path_of(self, metric: Metric, given: str | None) -> str:
        if given is not None:
            return given
        if id(metric) not in self._paths:
            self._paths = {id(m): path for path, m in self._module.named_modules() if isinstance(m, Metric)}
        path = self._paths.get(id(metric))
        if path is None:
            raise ConfigurationError(
                f"a {type(metric).__name__} that is no attribute of the LightningModule was logged: assign "
                "it in __init__, or pass metric_attribute=<its name>"
            )
        return path

    def report(
        self, loss: Tensor | None, losses: Sequence[Tensor | None] = (), weights: Sequence[float] = ()
    ) -> Report:
        """What one device would have logged: sums of the parts that were followed, else means by samples.

        Args:
            loss: Of the batch, `None` for a step without one.
            losses: Of the micro-batches, where the user has weighted them: what is logged of them alone.
            weights: What each then counts for.
        """
        self._note_swayed()
        values = [] if loss is None else [loss.detach().to(torch.float64).reshape(())]
        entries = []
        for key, call in self._calls.items():
            name = key[0]
            dtype = call.values[0].dtype if call.values else None
            self._settle(name, call)
            if dtype is not None:
                if _is_of(call.sources, losses):
                    self.weighed.add(key)
                    values.append(_weighted(call, weights))
                else:
                    values.append(self._reduced(key, call))
            entries.append(Entry(name, call.options, call.batch_size, call.metric, dtype))
        stacked = torch.stack(values) if values else None
        return Report(tuple(entries), None if loss is None else loss.dtype, stacked)

    def of_one(
        self, name: str, value: Any, given: tuple[tuple[Any, ...], dict[str, Any]]
    ) -> tuple[Entry, Tensor]:
        """What the step of the whole batch has logged, and no micro-batch.

        Args:
            name: The key.
            value: Of it.
            given: Arguments of `log` or `log_dict`.
        """
        args, kwargs = given
        several = "dictionary" in kwargs or (args and isinstance(args[0], Mapping))
        rest = args[1 if several else 2 :]
        options = {key: one for key, one in kwargs.items() if key not in ("dictionary", "name", "value")}
        bound = SIGNATURE.bind(self._module, name, value, *rest, **options).arguments
        scalar = _scalar(name, value, self._module.device)
        assert scalar is not None, "a number"
        entry = Entry(name, log_options(bound), bound.get("batch_size"), None, scalar.dtype)
        return entry, scalar.double()

    def _reduced(self, key: tuple[str, int], call: _Call) -> Tensor:
        """The batch's value of those of its micro-batches."""
        found = self._known(key, call)
        is_known = call.known == len(call.values) or (found is not None and call.bent)
        if is_known or not call.parts:  # of a way that is new: the next batches are followed
            self.followed.add(key)
        return self._guessed(key, call) if found is None else found

    def _known(self, key: tuple[str, int], call: _Call) -> Tensor | None:
        """The same where it is known."""
        if len(call.values) == 1 and not call.followed:
            return call.values[0].double()
        if len(call.reads) > 1:  # as of `max(a.item(), b.item())`
            call.is_unclear, call.known = True, 0
            call.numbers = sum(not isinstance(source, Tensor) for source in call.sources)
        return self._found(key, call)

    def _found(self, key: tuple[str, int], call: _Call) -> Tensor | None:
        """The number of the batch, where it is known."""
        whole, is_sure = self._numbers.get(key, (None, False))
        if is_sure and call.known < len(call.values) and self._way(key, call) == "":
            return torch.as_tensor(whole, dtype=torch.float64, device=call.values[0].device)
        if len(call.bent) == len(call.values):
            with suppress(DifferentWaysError):
                return together(call.bent)
        if call.known == len(call.values) and (call.followed or call.known == len(self._sizes)):
            if not call.followed:
                self._means.add(key)
            return torch.stack(call.parts).sum()
        return self._of_numbers(key, call)

    def _guessed(self, key: tuple[str, int], call: _Call) -> Tensor:
        """A mean by samples, or an extreme of the micro-batches; with a warning where that is a guess."""
        if call.is_unclear:
            self._unclear.add(key)
        swayed = key in self._swayed
        guesses = call.bent or call.numbers or self._ways.get(key) == "" or key in self._unclear or swayed
        if call.reduces in _TAKEN:  # of a number that a unit computes, which may be a mean
            guesses = guesses or len(call.parts) > call.known
        warns = guesses and len(call.values) > 1 and key not in self._means and key[0] not in self._warned
        differs = warns and ((call.numbers and call.reduces == "sum") or _differ(call))
        if differs or (warns and (swayed or call.is_unclear)):
            what = "is a Python number" if call.numbers else "is not seen to be a sum or mean over samples"
            what += " that differs between micro-batches" if differs else ", by values that units compute"
            taken = _TAKEN.get(call.reduces, "mean by samples")
            self._guess(key[0], what, "mean by samples" if key in self._means else taken)
        if call.reduces in ("max", "min") and key not in self._means:
            values = torch.stack([value.double() for value in call.values])
            return values.max() if call.reduces == "max" else values.min()
        return _reduced(call, is_mean=key in self._means)

    def _note_swayed(self) -> None:
        """Numbers that what units compute chooses: micro-batches may agree on them, and the batch not."""
        for key, (number, is_sure) in self._numbers.items():
            others = [one[key][0] for one in self._others if key in one] if not is_sure else []
            if any(other != float(number) == float(number) for other in map(float, others)):
                self._swayed.add(key)

    def _way(self, key: tuple[str, int], call: _Call) -> str | None:
        """How numbers make the batch's: the same, a sum, or another way; None where it was not seen."""
        if key not in self._ways and key in self._numbers and len(call.values) == len(self._sizes):
            whole, numbers = float(self._numbers[key][0]), [float(value) for value in call.values]
            same = all(number == whole for number in numbers)
            is_sum = not same and math.isclose(math.fsum(numbers), whole, rel_tol=1e-6)
            self._ways[key] = "same" if same else "sum" if is_sum else ""
        return self._ways.get(key)

    def _of_numbers(self, key: tuple[str, int], call: _Call) -> Tensor | None:
        """Of numbers that go by sizes, or are the same, as the step of the whole batch showed."""
        if call.known or call.bent or key in self._means or key in self._swayed:
            return None
        way = self._way(key, call)
        if way == "same" and (not call.numbers or not _differ(call)):  # tensors are not read for it
            return torch.stack([value.double() for value in call.values]).mean()
        return torch.stack([value.double() for value in call.values]).sum() if way == "sum" else None

    def warn_of(self, name: str, mine: float, theirs: float | None, lines: Sequence[str]) -> None:
        """Say that one device logs something else.

        Args:
            name: The key.
            mine: What is logged.
            theirs: What one device logs; None for nothing.
            lines: At which the step reads numbers.
        """
        if name in self._warned:
            return
        self._warned.add(name)
        reads = f" It reads numbers at {', '.join(lines)}." if lines else ""
        other = "nothing" if theirs is None else f"{theirs:.6g}"
        warnings.warn(
            f"what self.log({name!r}, ...) is given is {mine:.6g} from the micro-batches of a batch, and "
            f"{other} where the code between units runs once for all of it, as on one device.{reads} Log the "
            "tensors that it is made of, log a torchmetrics object, or work it out in on_train_epoch_end or "
            "on_validation_epoch_end"
        )

    def warn_of_guesses(self, but: Container[str] = ()) -> None:
        """Say which numbers of this batch may be other ones on one device.

        Args:
            but: Names of those that are known by now.
        """
        for name, said in self.guesses.items():
            if name not in but and name not in self._warned:
                self._warned.add(name)
                warnings.warn(said)

    def _guess(self, name: str, what: str, taken: str) -> None:
        subject, way_out = self._told
        self.guesses[name] = (
            f"{subject.format(name)} {what}, so that the batch's is taken for their {taken}. Where it is "
            f"another number (a root, a quotient of two sums, a median) {way_out}"
        )


def own_logs_shown(trainer: Trainer) -> Callable[[], None]:
    """From now on a step finds what it has logged in `trainer.callback_metrics` and the like.

    A micro-batch finds its own numbers, and goes by them as by any that layers compute.

    Args:
        trainer: Of the run.

    Returns:
        Undoes it.
    """
    return _lightning.shown_to_steps(trainer, logged_in_run)


def log_options(given: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """The arguments of `self.log` that are the same on every rank, ready to travel."""
    if given.get("sync_dist_group") is not None:
        raise ConfigurationError(
            "self.log(..., sync_dist_group=...) names ranks of one stage only: leave it out, sync_dist=True "
            "means the data-parallel replicas"
        )
    options = {name: value for name, value in given.items() if name not in (*_SET_BY_REPLAY, "self")}
    reduce_fx = options.get("reduce_fx")
    if callable(reduce_fx):
        options["reduce_fx"] = reduce_fx.__name__
    return tuple(options.items())


def _items(values: Any) -> Any:
    if isinstance(values, MetricCollection):
        return values.items(keep_base=False, copy_state=False)
    return values.items()


def _scalar(name: str, value: Any, device: torch.device) -> Tensor | None:
    if isinstance(value, Metric):
        value = value._forward_cache  # the step's own value; Lightning reads it there too
        if not isinstance(value, Tensor) or value.numel() != 1:
            return None
    if not isinstance(value, Tensor | int | float):
        raise ConfigurationError(
            f"`self.log({name}, {value})` was called, but `{type(value).__name__}` values cannot be logged"
        )
    if not isinstance(value, Tensor):
        value = torch.tensor(value, dtype=_wide(torch.get_default_dtype()))
    if value.numel() != 1:
        raise ConfigurationError(
            f"self.log({name!r}, ...) was called with a tensor of {value.numel()} elements; it must have one"
        )
    dtype = _wide(value.dtype if value.is_floating_point() else torch.get_default_dtype())
    scalar: Tensor = value.detach().to(device, dtype).reshape(()).clone()
    return scalar


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


def _differ(call: _Call) -> bool:
    """Whether micro-batches have logged different values; tensors, unlike numbers, are read for it."""
    plain = [value for value in call.sources if not isinstance(value, Tensor)]
    if call.numbers and len(plain) == len(call.sources):
        return any(value != plain[0] for value in plain)
    return any(bool(value != call.values[0]) for value in call.values[1:])


def _reduced(call: _Call, *, is_mean: bool) -> Tensor:
    values = torch.stack([value.double() for value in call.values])
    if call.followed and len(call.parts) == len(call.values):
        return torch.stack(call.parts).sum()
    if call.reduces == "sum" and not is_mean:
        return values.sum()
    shares = [float(size or 1) for size in call.sizes] if is_mean else call.shares
    weights = torch.tensor(shares, dtype=torch.float64, device=values.device)
    return (values * weights).sum() / weights.sum()


def _is_of(values: Sequence[Any], losses: Sequence[Tensor | None]) -> bool:
    """Whether each of the values is the loss of its micro-batch, or the very number that it is."""
    if not losses or len(values) != len(losses):
        return False
    return all(
        loss is not None
        and (
            _shares_memory(value, loss) and value.numel() == 1
            if isinstance(value, Tensor)
            else float(value) == float(loss) or (math.isnan(value) and bool(loss.isnan()))
        )
        for value, loss in zip(values, losses, strict=True)
    )


def _shares_memory(one: Tensor, other: Tensor) -> bool:
    return storage_key(one) == storage_key(other) and one.storage_offset() == other.storage_offset()


def _weighted(call: _Call, weights: Sequence[float]) -> Tensor:
    counted = [value.double() * w for value, w in zip(call.values, weights, strict=True) if w]
    return torch.stack(counted).sum() if counted else call.values[0].double() * float("nan")
