"""What torchmetrics objects are given in a step: once a batch, with the numbers of the batch.

One device calls a metric once with all samples. A micro-batch has its own, so its call is kept; when all have
run, what they gave is put together and the metric is called as one device calls it. What a call returns in a
micro-batch is its own; where that is logged, the metric's answer for the batch takes its place. A metric of
the library that only takes samples, and adds them up, gets them at once: nothing is kept of those.
"""

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from lightning_pipeline.model.loss.bent import Bent, DifferentWaysError, Leaf
from lightning_pipeline.model.loss.follower import Part
from lightning_pipeline.model.loss.metric_arguments import Way, are_close, given, join, kept, way_of
from lightning_pipeline.model.loss.metric_objects import (
    METHODS,
    AnyMetric,
    copy_of,
    goes_by_call,
    put_back,
    sums_samples,
)
from lightning_pipeline.model.tensors import flatten, map_tensors, same_values, tensors_in
from lightning_pipeline.patching import patched

_OPEN = (
    "numbers in {} that differ between micro-batches, and of which it cannot be said what they would be for "
    "the batch as a whole, so that their mean by samples is taken: give it values for each sample"
)
_OTHERWISE = (
    "something else by {} for the batch as one than for its micro-batches, such as where a number of samples "
    "decides whether it is called, and not all of that is known here: call it for any number of samples"
)
_OF_ALL = (
    "values of samples in {} in which a number of all of them stands, and each micro-batch has its own: give "
    "it these by `update`, which has the batch's where that can be worked out"
)


class _Call:
    """One call in a micro-batch."""

    def __init__(self, microbatch: int, method: str, arguments: Any) -> None:
        self.microbatch, self.method, self.arguments = microbatch, method, arguments


class _Line:
    """The calls of one metric in a batch, by their number in a micro-batch, and its answers for the batch."""

    def __init__(self, metric: AnyMetric) -> None:
        self.metric = metric
        self.calls: list[list[_Call]] = []
        self.answers: list[Any] = []
        self.counts: Counter[int] = Counter()
        self.before: AnyMetric | None = None  # the metric as it was, where that may have to be put back
        self.is_read = False  # whether an answer was asked for

    @property
    def waits(self) -> bool:
        """Whether there are updates alone, and the metric has been given none of them."""
        calls = [call for column in self.calls for call in column]
        return len(calls) == self.counts.total() and all(call.method == "update" for call in calls)

    def of(self, microbatch: int) -> list[_Call]:
        """Those of one micro-batch, in order."""
        return [call for column in self.calls for call in column if call.microbatch == microbatch]


class MetricCalls:
    """The calls of a module's metrics on the last stage.

    Args:
        part: What a number of the micro-batch that runs is of the batch's.
        watch: Called with a value that a metric has returned, and how the batch's is made.
        is_of_all: Whether a tensor has a value for each sample in which a number of all of them is.

    Attributes:
        held: Metrics that wait for what the batch as one gives them: of updates, where that is looked at,
            and of all that were given such values.
        looks: Whether the batch is looked at as one.
    """

    def __init__(
        self, part: Callable[[Any], Part], watch: Callable[[Any, Bent], None],
        is_of_all: Callable[[Any], bool],
    ) -> None:  # fmt: skip
        self._follow, self._watch, self._is_of_all = part, watch, is_of_all
        self._of_all: set[tuple[str, int]] = set()
        self._as_one: dict[float, dict[int, list[tuple[str, Any]]]] = {}
        self.held: dict[int, _Line] = {}
        self.looks, self._metrics = False, dict[int, AnyMetric]()
        self._step, self._sizes = "", list[int]()
        self._microbatch: Callable[[], int] = int
        self._running = 0
        self._lines: dict[int, _Line] = {}
        self._values: dict[int, tuple[Any, Bent]] = {}
        self._originals: dict[int, dict[str, Callable[..., Any]]] = {}
        self._of_whole: dict[int, list[tuple[str, Any]]] = {}
        self._ways: dict[tuple[str, int, int, str], Way] = {}
        self._one_by_one: dict[tuple[str, int | type], bool] = {}  # by the metric, and by its kind
        self._more_often: dict[tuple[str, int], bool] = {}
        self._only_updates: dict[tuple[str, int], bool] = {}
        self._drafts: dict[int, tuple[AnyMetric, Any]] = {}
        self._settling = False
        self._answers: dict[int, list[Any]] = {}
        self._warned: set[int] = set()

    # ---- a batch

    @contextmanager
    def taken(
        self, metrics: Sequence[AnyMetric], step: str, sizes: Sequence[int], microbatch: Callable[[], int]
    ) -> Iterator[None]:
        """For a batch: the methods of metrics keep what they are given.

        Args:
            metrics: Those of the module.
            step: Name of the user's method.
            sizes: Samples of each micro-batch.
            microbatch: Which of them runs.
        """
        self._step, self._sizes, self._microbatch = step, list(sizes), microbatch
        self._answers, self._as_one, self.held, self.looks = {}, {}, {}, False
        self._lines, self._of_whole = {}, {}
        self._metrics = {id(metric): metric for metric in metrics}
        self._originals = {id(m): {name: getattr(m, name) for name in METHODS} for m in metrics}
        with ExitStack() as stack:
            for metric in metrics:
                calls = {name: partial(self._call, metric, name) for name in METHODS}
                stack.enter_context(patched(metric, calls))
            try:
                yield
            finally:
                self._values, self._originals = {}, {}
                if not (self.held or self.looks):
                    self._lines, self._of_whole = {}, {}

    @contextmanager
    def of_whole(
        self, metrics: Sequence[AnyMetric], apart: Callable[[], AbstractContextManager[None]]
    ) -> Iterator[None]:
        """While the step of the whole batch is run without units: what it gives to metrics is noted.

        Args:
            metrics: Those of the module.
            apart: Inside, functions are none of the step's own.
        """
        self._of_whole.clear()
        with ExitStack() as stack:
            for metric in metrics:
                calls = {
                    name: partial(self._note, apart, metric, name, getattr(metric, name)) for name in METHODS
                }
                stack.enter_context(patched(metric, calls))
            yield
        for metric in metrics:
            found = self._of_whole.get(id(metric), [])
            only = bool(found) and all(method == "update" for method, _ in found)
            self._only_updates[self._step, id(metric)] = only

    def _note(
        self, apart: Callable[[], AbstractContextManager[None]], metric: AnyMetric, method: str,
        instead: Callable[..., Any], *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        with apart():
            self._of_whole.setdefault(id(metric), []).append((method, kept((args, kwargs))))
            return instead(*args, **kwargs)

    def part(self, value: Any) -> Part | None:
        """What a metric returned, where a value is that."""
        found = self._values.get(id(value))
        return None if found is None else Part(bent=found[1])

    @property
    def waiting(self) -> bool:
        """Whether any were kept."""
        return bool(self._lines)

    def settle(self) -> None:
        """All micro-batches have run: let the metrics have what was kept."""
        self._values.clear()
        for line in list(self._lines.values()):
            of_all = self._is_given_of_all(line.metric)
            if (of_all or self.looks) and line.waits:
                self.held[id(line.metric)] = line
            elif line.calls:
                if of_all:
                    self._doubt(line.metric, _OF_ALL)
                line.before = self._copy(line.metric) if self.looks else None
                self._answer(line, len(line.calls) - 1)
        self._answers = {place: line.answers for place, line in self._lines.items()}

    def _is_given_of_all(self, metric: AnyMetric) -> bool:
        return (self._step, id(metric)) in self._of_all

    def as_one(self, run: float, metric: AnyMetric, method: str, arguments: Any) -> None:
        """A run of the step for the batch as one gives this to a metric.

        Args:
            run: Which of these.
            metric: That is called.
            method: Of it.
            arguments: What that is given.
        """
        if self.looks or id(metric) in self.held:
            own = map_tensors(lambda tensor: tensor.detach().clone(), arguments)
            self._as_one.setdefault(run, {}).setdefault(id(metric), []).append((method, own))

    @property
    def asks_again(self) -> bool:
        """After such a run: whether another one is to tell whether what it gives is certain."""
        of_all = any(self._is_given_of_all(line.metric) for line in self.held.values())
        return of_all or any(True for _ in self._otherwise())

    def _otherwise(self) -> Iterator[int]:
        """Identities of metrics that the batch as one gives something else than its micro-batches."""
        for found in list(self._as_one.values())[:1]:
            for key in self._metrics:
                line, theirs = self._lines.get(key), found.get(key, [])
                if (theirs if line is None else line.calls) and self._differs(line, theirs):
                    yield key

    def _differs(self, line: _Line | None, theirs: Sequence[tuple[str, Any]]) -> bool:
        """Whether calls of the batch as one are not what is put together of the micro-batches'."""
        if line is None:
            return True
        every = [call for number in range(len(self._sizes)) for call in line.of(number)]
        if len(every) == line.counts.total() == len(theirs) and all(
            mine.method == method and are_close(given(mine.arguments), arguments)
            for mine, (method, arguments) in zip(every, theirs, strict=True)
        ):
            return False
        if len(line.calls) != len(theirs):
            return True
        for nth, (calls, (method, arguments)) in enumerate(zip(line.calls, theirs, strict=True)):
            if any(call.method != method for call in calls):
                return True
            sizes = [self._sizes[call.microbatch] for call in calls]
            try:
                mine = self._joined(line.metric, calls, nth, sizes, doubt=lambda: None) if calls else None
            except (DifferentWaysError, LookupError, RuntimeError, TypeError, ValueError):
                return True  # nothing joins them
            if not are_close(mine, arguments):
                return True
        return False

    def release(self, *, is_sure: bool) -> bool:
        """After these runs: let the metrics that were held have what they give, else what was kept.

        Args:
            is_sure: Whether what units gave is put together as they would have given it for the batch as one.

        Returns:
            Whether the batch as one gives a metric something else than what is put together.
        """
        otherwise = set(self._otherwise())
        runs, held, self.held = list(self._as_one.values()), self.held, {}
        for key in self._metrics:
            line, of_all = self._lines.get(key), key in held and self._is_given_of_all(self._metrics[key])
            found = [calls.get(key, []) for calls in runs]
            if of_all or key in otherwise:
                self._give(self._metrics[key], line, found, is_sure=is_sure, of_all=of_all)
            elif key in held and line is not None and line.calls:
                self._answer(line, len(line.calls) - 1)
        of_all = any(self._is_given_of_all(line.metric) for line in held.values())
        self._lines, self._as_one, self._of_whole = {}, {}, {}
        return of_all or bool(otherwise)

    def _give(
        self, metric: AnyMetric, line: _Line | None, runs: Sequence[Sequence[tuple[str, Any]]],
        *, is_sure: bool, of_all: bool,
    ) -> None:  # fmt: skip
        """Let a metric have what the batch as one gives it, if that is certain."""
        certain = len(runs) > 1 and all(_are_alike(one, runs[0]) for one in runs[1:])
        if is_sure and certain:
            if line is not None and line.before is not None:
                put_back(metric, line.before)
            for method, arguments in runs[0]:
                self._run(metric, method, arguments)
            if line is not None and line.is_read:
                self._doubt(metric, _OTHERWISE)
            return
        if of_all or (len(runs) > 1 and _are_of_other_forms(line, runs)):
            self._doubt(metric, _OF_ALL if of_all else _OTHERWISE)
        if line is not None and line.calls and line.before is None:
            self._answer(line, len(line.calls) - 1)

    def answer(self, metric: AnyMetric, nth: int) -> Any:
        """After `settle`: what a call of the batch gave; None where nobody knows.

        Args:
            metric: That was called.
            nth: How many calls of it there were before in the step.
        """
        answers = self._answers.get(id(metric), [])
        found = answers[nth] if nth < len(answers) else None
        return None if found is None else found["value"]

    def of_some(self, metric: AnyMetric, given: tuple[Any, Any]) -> Any:
        """What a copy gives for some samples, with its gradients.

        Args:
            metric: That is called in a run on made-up values.
            given: Its arguments.
        """
        draft = self._draft(metric)
        try:
            return _value_or_nan(draft, *given)
        finally:
            draft.reset()

    # ---- a call in a micro-batch

    def _call(self, metric: AnyMetric, method: str, *args: Any, **kwargs: Any) -> Any:
        original = self._originals[id(metric)][method]
        if self._settling:
            return original(*args, **kwargs)
        number = self._microbatch()
        if number != self._running:
            self._running = number
            self._values.clear()
        line = self._lines.setdefault(id(metric), _Line(metric))
        nth = line.counts[number]
        line.counts[number] += 1
        if any(map(self._is_of_all, tensors_in((args, kwargs)))):
            self._of_all.add((self._step, id(metric)))
        if method == "update" and self._adds_up(metric, nth, (args, kwargs)):
            with self._settled():
                return original(*args, **kwargs)
        while len(line.calls) <= nth:
            line.calls.append([])
        arguments = kept((args, kwargs), self._part_of)
        line.calls[nth].append(_Call(number, method, arguments))
        if method == "forward":
            return self._forward(line, nth, args, kwargs)
        return self._compute(line, nth, number, args, kwargs) if method == "compute" else None

    def _part_of(self, value: Any) -> Part:
        return self.part(value) or self._follow(value)

    def _adds_up(self, metric: AnyMetric, nth: int, arguments: Any) -> bool:
        """Whether the order and number of updates is nothing to a metric, and it is given samples alone."""
        key = self._step, id(metric)
        if self.looks or key in self._of_all or not self._only_updates.get(key, False):
            return False
        if not sums_samples(metric) or goes_by_call(metric, arguments):
            return False
        place, whole = (*key, nth, "update"), self._given_to_whole(metric, nth, "update")
        if whole is not None:
            self._ways[place] = way_of([kept(arguments)], whole, self._sizes)
        return place in self._ways and self._ways[place].is_of_samples

    def _given_to_whole(self, metric: AnyMetric, nth: int, method: str) -> Any:
        """What the step of the whole batch has given to this call; None where it has made another."""
        calls = self._of_whole.get(id(metric), [])
        return calls[nth][1] if nth < len(calls) and calls[nth][0] == method else None

    def _forward(self, line: _Line, nth: int, args: Any, kwargs: Any) -> Any:
        """The value of the micro-batch alone; nan where its samples are too few for one, as for `R2Score`."""
        draft = self._draft(line.metric)
        value = _value_or_nan(draft, args, kwargs)
        pairs: Any = zip(line.metric.modules(), draft.modules(), strict=True)
        for place, (mine, theirs) in enumerate(pairs):
            if isinstance(theirs, Metric):
                mine._forward_cache = theirs._forward_cache
                self._known(theirs._forward_cache, line, nth, ("cache", place))
        self._known(value, line, nth, ("value",))
        draft.reset()
        return value

    def _compute(self, line: _Line, nth: int, number: int, args: Any, kwargs: Any) -> Any:
        """The value after what came before the batch, and this micro-batch."""
        draft = self._copy(line.metric)
        for call in line.of(number)[:-1]:
            given_args, given_kwargs = given(call.arguments)
            getattr(draft, call.method)(*given_args, **given_kwargs)
        value = draft.compute(*args, **kwargs)
        self._known(value, line, nth, ("value",))
        return value

    def _known(self, value: Any, line: _Line, nth: int, path: tuple[Any, ...]) -> None:
        """Note for each tensor of an answer where the batch's is."""
        if isinstance(value, Tensor):
            nothing = torch.zeros((), dtype=torch.float64)
            leaf = Leaf(nothing, lambda parts: self._found(line, nth, path), is_answer=True)
            bent = Bent(None, (leaf,), always=True)
            self._values[id(value)] = value, bent
            self._watch(value, bent)
        elif isinstance(value, dict):
            for key, item in value.items():
                self._known(item, line, nth, (*path, key))
        elif isinstance(value, list | tuple):
            for key, item in enumerate(value):
                self._known(item, line, nth, (*path, key))

    # ---- copies of metrics

    @property
    def drafts(self) -> list[AnyMetric]:
        """Copies that stay, for values of micro-batches."""
        return [draft for _, draft in self._drafts.values()]

    def _draft(self, metric: AnyMetric) -> Any:
        """A copy for values of micro-batches."""
        if id(metric) not in self._drafts:
            draft = self._copy(metric)
            draft.reset()
            self._drafts[id(metric)] = metric, draft
        return self._drafts[id(metric)][1]

    def _copy(self, metric: AnyMetric) -> Any:
        """Its states are copied; networks in it are not, and it gathers from nobody."""
        return copy_of(metric, self._originals)

    # ---- the batch's calls

    def _found(self, line: _Line, nth: int, path: tuple[Any, ...]) -> Tensor:
        """The metric's own answer for the batch."""
        line.is_read = True
        answer = self._answer(line, nth)
        if answer is None:
            raise DifferentWaysError
        kind, *rest = path
        found = answer[kind]
        for key in rest:
            found = found[key]
        return found if isinstance(found, Tensor) else torch.as_tensor(found)

    def _answer(self, line: _Line, nth: int) -> Any:
        """Make the calls up to one, if they have not been made; None: there is no answer of the batch."""
        one_by_one = self._is_one_by_one(line)
        while len(line.answers) <= nth:
            calls = line.calls[len(line.answers)]
            if one_by_one:
                line.answers.append(None)
                if len(line.answers) == len(line.calls):
                    self._make_one_by_one(line)
            elif not calls:
                line.answers.append(None)
            else:
                line.answers.append(self._make(line, calls, len(line.answers)))
        return line.answers[nth]

    def _is_one_by_one(self, line: _Line) -> bool:
        """Whether the whole batch's step calls the metric for each sample, or part of it.

        A batch tells where several micro-batches call it; until one has, others of its kind do.
        """
        key, found = (self._step, id(line.metric)), self._of_whole.get(id(line.metric))
        kind = self._step, type(line.metric)
        counts = [line.counts[number] for number in range(len(self._sizes))]
        if found is not None and sum(counts) > max(counts):
            self._one_by_one[key] = self._one_by_one[kind] = len(found) == sum(counts)
        usual = len(set(counts)) > 1 and counts == self._sizes
        return self._one_by_one.get(key, self._one_by_one.get(kind, usual))

    def _is_called_more(self, line: _Line) -> bool:
        """Whether the whole batch's step calls it more often than a micro-batch's, not for samples alone."""
        key, found = (self._step, id(line.metric)), self._of_whole.get(id(line.metric))
        if found is not None:
            self._more_often[key] = len(found) != max(line.counts.values())
        return self._more_often.get(key, False)

    def _make_one_by_one(self, line: _Line) -> None:
        for number in range(len(self._sizes)):
            for call in line.of(number):
                self._run(line.metric, call.method, given(call.arguments))

    def _make(self, line: _Line, calls: list[_Call], nth: int) -> Any:
        """One call with what all micro-batches gave; where nothing joins that, one for each."""
        metric, sizes = line.metric, [self._sizes[call.microbatch] for call in calls]
        try:
            if self._is_called_more(line) or any(call.method != calls[0].method for call in calls):
                raise DifferentWaysError  # one device calls it more often, some of it for each sample
            arguments = self._joined(metric, calls, nth, sizes)
        except (DifferentWaysError, LookupError, RuntimeError, TypeError, ValueError):
            if not sums_samples(metric) or any(goes_by_call(metric, given(c.arguments)) for c in calls):
                self._doubt(metric)
            for call in calls:
                self._run(metric, call.method, given(call.arguments))
            return None
        value = self._run(metric, calls[0].method, arguments)
        caches = {
            place: part._forward_cache
            for place, part in enumerate(metric.modules())
            if isinstance(part, Metric)
        }
        return {"value": value, "cache": caches}

    def _joined(
        self, metric: AnyMetric, calls: list[_Call], nth: int, sizes: list[int],
        doubt: Callable[[], None] | None = None,
    ) -> Any:  # fmt: skip
        values, method = [call.arguments for call in calls], calls[0].method
        key, whole = (self._step, id(metric), nth, method), self._given_to_whole(metric, nth, method)
        if whole is not None or key not in self._ways:
            self._ways[key] = way_of(values, whole, sizes)
        if not self._ways[key].is_joined:
            raise DifferentWaysError
        return join(values, self._ways[key], sizes, doubt or partial(self._doubt, metric))

    def _run(self, metric: AnyMetric, method: str, arguments: Any) -> Any:
        args, kwargs = arguments
        with self._settled(), torch.no_grad():
            original = self._originals.get(id(metric), {}).get(method)  # none once the batch is over
            return (original or getattr(metric, method))(*args, **kwargs)

    @contextmanager
    def _settled(self) -> Iterator[None]:
        """Inside, calls are made: those of a collection to its members, too."""
        before, self._settling = self._settling, True
        try:
            yield
        finally:
            self._settling = before

    def _doubt(self, metric: AnyMetric, why: str = _OPEN) -> None:
        if id(metric) in self._warned:
            return
        self._warned.add(id(metric))
        text = f"{why.format(self._step)}, or call it in on_train_batch_end or on_validation_batch_end"
        warnings.warn(f"a {type(metric).__name__} is given {text}")


def _are_of_other_forms(line: _Line | None, runs: Sequence[Sequence[tuple[str, Any]]]) -> bool:
    """Whether another number of calls is made, or of other methods, whatever was made up for a run."""
    mine = [] if line is None else [{call.method for call in calls} for calls in line.calls]
    theirs = [[{method} for method, _ in one] for one in runs]
    return all(one == theirs[0] for one in theirs) and theirs[0] != mine


def _are_alike(one: Any, other: Any) -> bool:
    """Whether two runs give a metric the same."""
    (mine, form), (theirs, other_form) = flatten(one), flatten(other)
    return form == other_form and all(map(same_values, mine, theirs))


def _value_or_nan(draft: Any, args: Any, kwargs: Any) -> Any:
    """What a metric gives for some samples; nan, where it takes these for too few."""
    try:
        return draft(*args, **kwargs)
    except ValueError:  # where the batch has too few, too, the call for the batch raises it
        draft.reset()
    if isinstance(draft, MetricCollection):
        named = draft.items(keep_base=False, copy_state=False)
        return {name: _value_or_nan(one, args, one._filter_kwargs(**kwargs)) for name, one in named}
    draft._forward_cache = torch.tensor(math.nan, device=draft.device)
    return draft._forward_cache
