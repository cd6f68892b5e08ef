"""Trace a step: by one run of it, or by several where one cannot show all."""

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_pipeline.errors import SplitError
from lightning_pipeline.model.places import (
    BatchAsGiven,
    Decisions,
    MetricBesideError,
    Owner,
    Standing,
    index_of,
    know_metric,
    with_noted_index,
)
from lightning_pipeline.model.random import Generators, MicrobatchSeeds, random_state_kept
from lightning_pipeline.model.tensors import (
    ModuleState,
    PlaceholderMode,
    StandIns,
    forget_placeholders,
    map_tensors,
)
from lightning_pipeline.model.trace.ahead import Ahead, distances, has_weights_apart
from lightning_pipeline.model.trace.choices import (
    NOTHING_ASSUMED,
    Assumed,
    circumstances,
    numbers_beside,
    numbers_changed,
    other_answers,
    updates_of_metrics,
)
from lightning_pipeline.model.trace.patches import UnitPatches
from lightning_pipeline.model.trace.ports import Porting
from lightning_pipeline.model.trace.record import (
    Call,
    ContextFactory,
    Look,
    Trace,
)
from lightning_pipeline.model.trace.sinks import printed_once, silence
from lightning_pipeline.model.trace.tracer import OtherWayError, Tracer, UndecidedError
from lightning_pipeline.model.trace.units import Unit

_log = logging.getLogger(__name__)
_NOW = Ahead()
_MOST_BESIDE = 100


def trace_step(
    root: nn.Module,
    step: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    units: Sequence[Unit],
    patches: UnitPatches | None = None,
    mode: PlaceholderMode | None = None,
    sinks: Sequence[str] = ("log", "log_dict"),
    forward_context: ContextFactory = nullcontext,
    others: Sequence[Owner] = (),
    seen: Sequence[Call] = (),
    device: torch.device | None = None,
    seeds: MicrobatchSeeds | None = None,
    like: Trace | None = None,
    costs: bool = True,
    opposite: bool = True,
    ahead: bool = False,
) -> Trace:
    """Call a step once with one micro-batch, every unit in fake-tensor mode, everything else for real.

    Nothing is left behind: the batch is cloned, and buffers, attributes, random states and caches are
    restored.

    Args:
        root: The LightningModule, with its weights or on the meta device.
        step: Name of its method.
        args: Its arguments: the micro-batch, its index, and so on.
        kwargs: Its keyword arguments.
        units: The units, from `find_units`.
        patches: The patched units where the module is split already; None patches them for this call.
        mode: The placeholders' mode of that split.
        sinks: Methods of `root` that take values away, such as `log`.
        forward_context: Makes the precision's context, such as autocast.
        others: What the step may change beside the module.
        seen: Calls of earlier traces, for a unit that can be traced on the whole module only.
        device: Where the step runs; weights that are elsewhere are seen there. None stands for the CPU.
        seeds: The random numbers of the micro-batch, where its way through the model is looked for; calls
            like one of `seen` then are not traced again.
        like: An earlier trace of the step. Ports that it has found are tried first, and are the ports of this
            one where no more is read of what units change.
        costs: Whether to note what the calls cost, and what autograd keeps of them.
        opposite: Whether what the step does where values have code go the other way is wanted too. Numbers
            that it reads are then much larger and smaller ones where its way is looked for.
        ahead: Whether a batch to come may need other stages to hold weights, which is to be known.

    Raises:
        SplitError: The step does something that no cut allows. The message names module and line.
    """
    patched = patches or UnitPatches(units)
    placeholders = mode or PlaceholderMode()
    batch = tuple(args), dict(kwargs or {})
    assumed = Assumed(few=like is not None and like.assumed.few)
    look = Look(sinks, others, seen, device or torch.device("cpu"), seeds, assumed=assumed, costs=costs)

    beside: list[Any] = []  # metrics that the module does not have

    def once(porting: Porting | None = None, look: Look = look, ahead: Ahead = _NOW) -> Trace:
        if patches is None:
            patched.install()
        try:
            return _traced(root, step, batch, patched, placeholders, look, forward_context, porting, ahead)
        except MetricBesideError as found:
            beside.append(found.metric)
            if len(beside) > _MOST_BESIDE:
                raise SplitError(f"{step} updates metrics that are others in each run of it") from None
            know_metric(root, found)
        finally:
            if patches is None:
                patched.remove()
        return once(porting, look, ahead)

    try:
        found = _with_ports(once, like)
    except SplitError as error:
        ways = [partial(once, look=look._replace(assumed=way)) for way in _ways_after(error, look.assumed)]
        found = _otherwise(error, ways, like)
    found = _to_its_end(found, partial(once, look=look._replace(assumed=found.assumed._replace(few=True))))
    found = _with_a_loss(found, partial(once, look=look._replace(assumed=found.assumed._replace(holds=True))))
    again = look._replace(assumed=found.assumed, opposite=found.path)
    compares = found.compares and seeds is not None
    for answers in other_answers(asked=found.asked, compares=compares) if opposite else ():
        _join_opposite(found, partial(once, look=again._replace(answers=answers)))
    if ahead and has_weights_apart(found):
        _foresee(found, partial(once, look=look._replace(assumed=found.assumed)))
    return found


def _traced(
    root: nn.Module, step: str, batch: Any, patches: UnitPatches, mode: PlaceholderMode,
    look: Look, forward_context: ContextFactory, porting: Porting | None, ahead: Ahead,
) -> Trace:  # fmt: skip
    clone = map_tensors(lambda tensor: tensor.detach().clone(), batch)
    decisions, given = Decisions(), BatchAsGiven(clone[0])
    clone = with_noted_index(ahead.arguments(clone[0], index_of(batch[0])), decisions), clone[1]
    beside = [*numbers_beside(look.others), *ahead.counted]
    numbers = {one.label: one for one in (*beside, *updates_of_metrics(root))}
    saved, outside, begin = ModuleState(root), Standing(look.others), circumstances(root, look.others)
    grad_mode = torch.is_grad_enabled()
    tracer = None
    try:
        stand_ins = StandIns(mode, look.device)
        weightless = stand_ins.put_into(root)
        tracer = Tracer(root, step, patches, mode, look, stand_ins if weightless else None, porting)
        # Code that torch.compile meets under a dispatch mode it would leave uncompiled for good.
        with (
            random_state_kept(Generators(root.modules())),
            torch.compiler.set_stance("force_eager"),
            ahead.standing(beside),
            decisions.noting(numbers.values()),
            printed_once(root),
        ):
            trace = tracer.run(clone[0], clone[1], forward_context)
        trace.refills_batch = given.is_refilled
    finally:
        if tracer is not None:
            tracer.close()
        torch.set_grad_enabled(grad_mode)
        kept = tracer.effects.iterators_taken() if tracer is not None else []
        saved.restore()
        outside.restore()
        for place, replayed in kept:
            place.put(replayed)
    trace.of_batch(*batch)
    trace.index = index_of(batch[0])
    trace.circumstances, trace.porting = begin, porting
    trace.decisions = decisions.made
    trace.numbers = {label: numbers[label] for label in decisions.labels() & numbers.keys()}
    made = tracer.observed.made
    del tracer, clone, given
    forget_placeholders(made)
    return trace


def _join_opposite(trace: Trace, once: Callable[..., Trace]) -> None:
    """What `if loss < self.best:` does, too: trace once more with the opposite of every such answer.

    A run that raises then, or calls other units, ends there: it adds nothing but that it does the latter.
    """
    try:
        with silence():
            other = once(trace.porting)
    except OtherWayError as error:
        trace.divided_at = trace.divided_at or str(error)
        return
    except (Exception, SystemExit) as error:  # the user's, of a run that may never come to pass
        _log.debug("%s goes another way where values say so: %s", trace.step, error)
        return
    alike = other.path == trace.path and other.ports.keys() == trace.ports.keys()
    if alike and other.ended_early <= trace.ended_early:
        trace.join(other)


def _is_number(trace: Trace) -> bool:
    """Whether the step has returned a plain number."""
    return issubclass(trace.returns, int | float)


def _with_a_loss(trace: Trace, once: Callable[..., Trace]) -> Trace:
    """Of `total = 0`, to which a step adds under `if loss > 0`: what it does where that holds."""
    if not (trace.asked and _is_number(trace)):
        return trace
    with suppress(SplitError):  # then the first says what it does
        other = _with_ports(once, None)
        return trace if _is_number(other) else other
    return trace


def _to_its_end(trace: Trace, once: Callable[..., Trace]) -> Trace:
    """Where a step ends early that asks which values differ: what it does where all of them are alike.

    torchmetrics raises where a prediction has more values than there are classes.
    """
    if not (trace.ended_early and trace.counts_apart) or trace.assumed.few:
        return trace
    with suppress(SplitError):  # then the first says what it does
        other = _with_ports(once, None)
        return trace if other.ended_early else other
    return trace


def _foresee(trace: Trace, once: Callable[..., Trace]) -> None:
    """What batches to come need of the stages, as far as they call the same units.

    What they leave behind is found when they come.
    """
    counted = tuple(place for place in numbers_changed(trace.effects) if type(place.get()) is int)
    shows = trace
    with silence():
        if counted:
            with suppress(Exception):  # the user's, of a run that may never come to pass
                shows = once(trace.porting, ahead=Ahead(0, counted))
        for distance in distances(shows, counted):
            try:
                other = once(trace.porting, ahead=Ahead(distance, counted))
            except (Exception, SystemExit) as error:  # likewise
                _log.debug("%s does not run as in a batch to come: %s", trace.step, error)
                continue
            if other.path == trace.path and other.ports.keys() == trace.ports.keys():
                trace.foresee(other)


def _ways_after(error: SplitError, assumed: Assumed) -> list[Assumed]:
    """What else may be taken for granted."""
    asked = isinstance(error, UndecidedError) and error.asked
    counts_apart = isinstance(error, UndecidedError) and error.counts_apart
    ways = [Assumed(few=True), Assumed(constants=True, few=True)] if counts_apart else []
    ways.append(Assumed(constants=True))
    ways += [Assumed(holds=True), Assumed(holds=True, constants=True)] if asked else []
    ways += [Assumed(holds=True, few=True)] if asked and counts_apart else []
    return [way for way in ways if way != assumed] + [NOTHING_ASSUMED] * assumed.few


def _otherwise(error: SplitError, ways: Sequence[Callable[..., Trace]], like: Trace | None) -> Trace:
    """Trace once more, with other answers to what cannot be known: of several, the first that works.

    With the values of what depends on shapes alone, such as a mask made like a value: that takes memory on
    every stage, and the time of what is done with it, so that it is not the first way. And with what is asked
    of values taken to hold, as an assertion wants it.
    """
    for once in ways:
        try:
            return _with_ports(once, like)
        except SplitError:
            continue  # the first error says most
    raise SplitError(str(error)) from error.__cause__


def _with_ports(once: Callable[[Porting | None], Trace], like: Trace | None) -> Trace:
    """Trace, and once more with ports where units change something beside their output that is read.

    Hooks inside units are left where they are unless attributes and containers do not explain it all. Where
    an earlier trace had to look for ports, those that it found come first; they do where nothing else leaks.
    """
    if like is not None and like.porting is not None:
        try:
            found = once(like.porting)
        except SplitError as error:
            _log.debug("%s takes other ports now: %s", like.step, error)
        else:
            if not found.leaking_units():
                return found
    best = once(None)
    leaking, places = best.leaking_units(), frozenset(best.side_writes)
    for hooks in (False, True):
        if not best.leaking_units():
            break
        try:
            other = once(Porting(leaking, places, hooks))
        except SplitError:
            continue  # what is refused with ports works without, on one stage
        if len(other.leaking_units()) < len(best.leaking_units()):
            best = other
    return best
