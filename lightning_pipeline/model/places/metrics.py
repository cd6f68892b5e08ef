"""The torchmetrics objects that steps of a module work with, replaced for the time of a trace or replay.

Those of the module, in its plain containers and objects too, and others that a step was seen to update, such
as a global one: those are known from then on.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torchmetrics import Metric, MetricCollection

from lightning_pipeline.errors import SplitError
from lightning_pipeline.model.places.owners import Guard
from lightning_pipeline.model.tensors import attributes_of, items_of, objects_below, user_line
from lightning_pipeline.patching import Undo, patch, patched

_MOST = 100  # items of a container that are looked into
_METRICS, _NESTED = (Metric, MetricCollection), (dict, list, tuple)
_MAY_LEAD_TO_METRICS = (nn.Module, *_NESTED)
_REGISTRIES = ("_modules", "_parameters", "_buffers")
_METRIC_METHODS = ("forward", "update", "compute", "reset")
_UPDATES = "_update_count"  # that every update of a metric sets, before it does anything


@dataclass
class _Beside:
    """What is known of metrics that a module does not have.

    Attributes:
        metrics: Those that a step was seen to update.
        changes: How often there were more metrics than before, the module's too.
        made: Places in the module where a step has made one.
    """

    metrics: list[Metric | MetricCollection] = field(default_factory=list)
    changes: int = 0
    made: list[tuple[Any, Any]] = field(default_factory=list)


_beside: WeakKeyDictionary[nn.Module, _Beside] = WeakKeyDictionary()


class MetricBesideError(BaseException):
    """A step updates a metric that is not known yet. Not for the user's `except Exception`.

    Args:
        metric: The metric, to which nothing was done.
        holder: The module, dictionary or list that the step has put it into, where the step has made it.
        key: Where there.
    """

    def __init__(self, metric: Metric | MetricCollection, holder: Any = None, key: Any = None) -> None:
        super().__init__(f"{type(metric).__name__} is not the module's")
        self.metric, self.holder, self.key = metric, holder, key


def changes_of_metrics(root: nn.Module) -> int:
    """A number that grows whenever a module's steps may work with more metrics than before."""
    return _of(root).changes


def metrics_born(root: nn.Module, counts: Callable[[], bool]) -> Undo:
    """From now on, until it is undone, metrics that come into being count as changes of a module's.

    Args:
        root: The LightningModule.
        counts: Whether they do now, as they do not within a step.
    """
    original = Metric.__init__

    @wraps(original)
    def init(metric: Metric, *args: Any, **kwargs: Any) -> None:
        original(metric, *args, **kwargs)
        if counts():
            _of(root).changes += 1

    return patch(Metric, "__init__", init)


def know_metric(root: nn.Module, found: MetricBesideError) -> None:
    """Have a metric that steps of a module update, from now on.

    One that the step makes is there before the step then, as it is in all batches but the first.
    """
    beside, holder = _of(root), found.holder
    beside.changes += 1
    if holder is None:
        beside.metrics.append(found.metric)
        return
    beside.made.append((holder, found.key))
    if isinstance(holder, nn.Module):
        setattr(holder, found.key, found.metric)
    elif isinstance(holder, dict):
        holder[found.key] = found.metric
    else:
        holder.append(found.metric)


@contextmanager
def others_refused(
    root: nn.Module, metrics: Sequence[Metric | MetricCollection], *, is_traced: bool = True
) -> Iterator[None]:
    """Inside, the update of a metric that is none of these raises, before it changes anything.

    Those that are made inside may be updated, unless the module has them by then.

    Args:
        root: The LightningModule.
        metrics: Those that are known.
        is_traced: Whether the step is run again with one that was found.

    Raises:
        MetricBesideError: One is updated.
        SplitError: The module has got one that it had got before, which the step makes every time.
    """
    known, born = {id(part) for metric in metrics for part in metric.modules()}, list[Metric]()
    before = {id(one) for part in root.modules() for one in (part, *_held(part))} if is_traced else set[int]()
    original = Metric.__setattr__

    def setting(metric: Metric, name: str, value: Any) -> None:
        if name == _UPDATES and id(metric) not in known:
            if name not in vars(metric):
                born.append(metric)
            elif all(metric is not one for one in born):
                raise MetricBesideError(metric) if is_traced else _unforeseen(root, metric)
            else:
                known.add(id(metric))
                if is_traced:
                    _check_made(root, metric, before)
                elif any(_places_of(root, metric, {id(one) for one in root.modules()} - set(map(id, born)))):
                    raise _unforeseen(root, metric)
        original(metric, name, value)

    def copied(metric: Metric, state: dict[str, Any]) -> None:
        fill(metric, state)
        born.append(metric)

    fill = Metric.__setstate__
    with patched(Metric, {"__setattr__": setting, "__setstate__": copied}):
        yield


def _check_made(root: nn.Module, metric: Metric, before: Collection[int]) -> None:
    """Raise where the module has got a metric that a step has made; see `others_refused`."""
    made = _of(root).made
    for holder, key, new in _places_of(root, metric, before):
        if id(holder) not in before or any(one is holder and own == key for one, own in made):
            raise SplitError(
                f"a step makes a metric ({type(metric).__name__}) that the module keeps, in every batch: "
                "micro-batches would have one each. Make it in __init__, and let the step call its `reset()` "
                f"[at {user_line(root)}]"
            )
        raise MetricBesideError(new, holder, key)


def _unforeseen(root: nn.Module, metric: Metric) -> SplitError:
    return SplitError(
        f"a metric ({type(metric).__name__}) that the module does not have is updated by a step that did not "
        "when it was traced, and micro-batches would count by themselves: assign it to the LightningModule, "
        f"or update it in a hook [at {user_line(root)}]"
    )


def _places_of(
    root: nn.Module, metric: Metric, before: Collection[int]
) -> Iterator[tuple[Any, Any, Metric | MetricCollection]]:
    """Where modules have a new metric, or the new collection that it is in: in what, and at which key.

    Args:
        root: The LightningModule.
        metric: The metric.
        before: Identities of the modules and their containers that there were.
    """
    for module in [one for one in root.modules() if id(one) in before]:
        held = [(one, items_of(one)) for one in _held(module)]
        for holder, items in [(module, module._modules.items()), *held]:
            for key, item in items:
                is_new = isinstance(item, nn.Module) and isinstance(item, _METRICS) and id(item) not in before
                if is_new and any(part is metric for part in item.modules()):
                    yield holder, key, item


def _held(module: nn.Module) -> list[Any]:
    """Containers of a module in which it may keep metrics."""
    return [one for one in vars(module).values() if type(one) in (dict, list) and len(one) < _MOST]


def _of(root: nn.Module) -> _Beside:
    return _beside.setdefault(root, _Beside())


def named_metrics(root: nn.Module) -> dict[str, Metric | MetricCollection]:
    """All torchmetrics objects that steps of a module work with, by name.

    Those in plain dictionaries, lists and objects too, and those beside the module that are known.
    """
    modules = list(root.named_modules())
    found = {name: module for name, module in modules if isinstance(module, _METRICS)}
    known = {id(metric) for metric in found.values()}
    entries = [(f"{prefix}." if prefix else "", vars(module)) for prefix, module in modules]
    entries += [(f"{path}.", attributes_of(one) or {}) for path, one in objects_below(entries)]
    for prefix, held in entries:
        for key, value in held.items():
            if isinstance(value, _MAY_LEAD_TO_METRICS) and key not in _REGISTRIES:
                for path, metric in _metrics_in(f"{prefix}{key}", value, 3):
                    if id(metric) not in known:
                        parts = list(metric.named_modules(prefix=path))
                        known.update(id(part) for _, part in parts)
                        found |= {name: part for name, part in parts if isinstance(part, _METRICS)}
    for number, metric in enumerate(_of(root).metrics):
        if id(metric) not in known:
            found[f"{type(metric).__name__} {number} beside the module"] = metric
    return found


def _metrics_in(name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, nn.Module) and isinstance(value, _METRICS):  # the first is quick
        yield name, value
    elif isinstance(value, _NESTED) and not isinstance(value, Guard) and depth and len(value) < _MOST:
        for key, item in items_of(value):
            yield from _metrics_in(f"{name}.{key}", item, depth - 1)


def metrics_of(root: nn.Module) -> list[Metric | MetricCollection]:
    """All torchmetrics objects that steps of a module work with, members of collections too: each once."""
    return list({id(metric): metric for metric in named_metrics(root).values()}.values())


@contextmanager
def around_metrics(
    metrics: Sequence[Metric | MetricCollection], around: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    """Run the methods of metrics inside a context."""

    def wrapped(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with around():
                return method(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for metric in metrics:
            methods = {name: wrapped(getattr(metric, name)) for name in _METRIC_METHODS}
            stack.enter_context(patched(metric, methods))
        yield
