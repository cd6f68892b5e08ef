"""Run the stages of a split model one after another in this process, and one process for comparison."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeline.data.microbatch import batch_size_of, split_batch
from lightning_pipeline.errors import SplitError
from lightning_pipeline.model.cut.circles import opened
from lightning_pipeline.model.cut.partitioning import partition
from lightning_pipeline.model.loss import Bent, DifferentWaysError, together
from lightning_pipeline.model.replay import WholeBatch
from lightning_pipeline.model.split import SplitModel
from lightning_pipeline.model.state import late_values, put_late_values
from lightning_pipeline.model.trace import trace_step
from lightning_pipeline.model.trace.units import find_units
from lightning_pipeline.wire.stage import Values


class Module(nn.Module):
    """What the split needs of a LightningModule: `log`, and the user's steps."""

    once_per_batch: tuple[str, ...] = ()  # counters, which on one device advance once per batch

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[str, Any]] = []

    def log(self, name: str, value: Any, **options: Any) -> None:
        self.logged.append((name, value.detach().clone() if isinstance(value, Tensor) else value))


@dataclass
class Outcome:
    """What a run left: compare two of them."""

    losses: list[Tensor | None] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    logged: list[tuple[int, str, Any]] = field(default_factory=list)
    splits: list[SplitModel] = field(default_factory=list)
    loss: Tensor | None = None
    logs: dict[str, Tensor] = field(default_factory=dict)
    module: Any = None  # that ran alone


def split_arguments(batch: Any, num_microbatches: int, index: int = 0) -> tuple[list[Any], list[float]]:
    """Arguments of each micro-batch and the weights of their losses."""
    parts = split_batch(batch, num_microbatches)
    total = sum(size for _, size in parts)
    return [((part, index), {}) for part, _ in parts], [size / total for _, size in parts]


def alone(
    module: Any, batch: Any, num_microbatches: int = 2, steps: int = 1, step: str = "training_step",
    each: Callable[[Any, int], Any] | None = None,
) -> Outcome:  # fmt: skip
    """One process that runs the same micro-batches with gradient accumulation. `each`: see `piped`."""
    module = copy.deepcopy(module)
    outcome = Outcome(module=module)
    training = step == "training_step"
    with torch.set_grad_enabled(training):
        for number in range(steps):
            given = batch if each is None else each(module, number)
            index = number if each is not None else 0
            microbatches, weights = split_arguments(given, num_microbatches, index)
            held = [_held(module, name) for name in getattr(module, "once_per_batch", ())]
            counters = [(part, own, copy.deepcopy(getattr(part, own))) for part, own in held]
            for index, ((args, kwargs), weight) in enumerate(zip(microbatches, weights, strict=True)):
                module.logged = []
                for part, own, value in counters:
                    setattr(part, own, copy.deepcopy(value))
                result = getattr(module, step)(*_copied(args), **kwargs)
                outcome.logged.extend((index, name, value) for name, value in module.logged)
                loss = result["loss"] if isinstance(result, dict) and training else result
                if training and loss is not None:
                    (loss * weight).backward()
                outcome.losses.append(loss.detach() if isinstance(loss, Tensor) else loss)
                outcome.outputs.append(result)
    outcome.gradients = {n: p.grad for n, p in module.named_parameters()}
    outcome.buffers = dict(module.named_buffers())
    return outcome


def _held(module: Any, name: str) -> tuple[Any, str]:
    """The module that has an attribute, such as `layers.0.calls`, and its name there."""
    path, _, own = name.rpartition(".")
    return module.get_submodule(path), own


def _copied(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        torch.utils._pytree.tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, a) for a in args
    )


def piped(
    module: Any, batch: Any, stages: int = 2, num_microbatches: int = 2, steps: int = 1,
    step: str = "training_step", how: str | Sequence[str] = "uniform", units: Sequence[str] | None = None,
    seed: int = 0, split_by: str | None = None, split_backward: bool = False,
    ranks: list[list[int]] | None = None, follow: bool = False, over_batch: bool = False,
    each: Callable[[Any, int], Any] | None = None, as_one: bool = False,
) -> Outcome:  # fmt: skip
    """The same through `stages` stages, each with a copy of the module, in this process.

    `each`: called with each copy of the module before each step, and gives its batch.
    `follow`: divisors are followed, as the strategy does by default; `loss` and `logs` are the batch's then.
    `as_one`: the batch is known as one, as with the strategy, to which outcomes then are compared.
    `over_batch`: the end of the step runs once for the batch, so that there is one loss.
    """
    logged: list[tuple[int, str, Any]] = []
    splits: list[SplitModel] = []
    outcome, bent = Outcome(), dict[str, list[Bent]]()
    ranks = ranks or [[stage] for stage in range(stages)]
    microbatches, weights = split_arguments(batch, num_microbatches)
    for held in ranks:
        mine = copy.deepcopy(module)
        found = find_units(mine, at_least=stages, keep_whole=units)
        with torch.set_grad_enabled((split_by or step) == "training_step"):
            trace = opened(
                found, stages, lambda u, m=mine: trace_step(m, split_by or step, *microbatches[0], units=u)
            )
        cut = partition(trace, stages, how=how)

        def log(microbatch: int, name: str, value: Any, **options: Any) -> None:
            logged.append((microbatch, name, value.detach().clone() if isinstance(value, Tensor) else value))
            part = splits[-1].part(value)
            if part.value is not None:
                outcome.logs[name] = outcome.logs.get(name, torch.zeros(())) + part.value
            if part.bent is not None:
                bent.setdefault(name, []).append(part.bent)

        splits.append(SplitModel(mine, cut, held, sinks={"log": log}, seed=seed, loss_over_batch=over_batch))
    splits = [
        next(split for split, held in zip(splits, ranks, strict=True) if s in held) for s in range(stages)
    ]
    outcome.splits = splits
    for count in range(steps):
        outcome.logs.clear()
        bent.clear()
        for split in dict.fromkeys(splits) if each is not None else ():
            batch = each(split.root, count)
        microbatches, weights = split_arguments(batch, num_microbatches, count if each is not None else 0)
        total = sum(batch_size_of(args[0]) for args, _ in microbatches)
        if not splits[0].fits(step, total):
            microbatches, weights = split_arguments(batch, 1, count if each is not None else 0)
        entire = ((batch, count if each is not None else 0), {})
        whole = WholeBatch(entire, weights, 1.0) if follow else None
        at_once = ((batch, 0), {}) if over_batch else entire if as_one else None
        try:
            _run_batch(
                splits, microbatches, weights, step, count, outcome, split_backward, whole, at_once, entire,
                over_batch,
            )  # fmt: skip
            outcome.logs.update({name: _together(name, found) for name, found in bent.items()})
        except BaseException:
            for split in reversed(dict.fromkeys(splits)):  # each puts back the standard output that it found
                split.failed()
            raise
    outcome.logged = logged
    _collect(splits, outcome)
    return outcome


def _together(name: str, found: list[Bent]) -> Tensor:
    """What is logged of micro-batches; refused where a run of the strategy guesses, and warns."""
    try:
        return together(found)
    except DifferentWaysError as error:
        raise SplitError(f"what self.log({name!r}, ...) is given would be guessed, with a warning") from error


def _run_batch(
    splits: Any,
    microbatches: Any,
    weights: Any,
    step: str,
    count: int,
    outcome: Outcome,
    split_backward: bool,
    whole: Any = None,
    at_once: Any = None,
    entire: Any = None,
    over_batch: bool = False,
) -> None:
    training = step == "training_step"
    with torch.set_grad_enabled(training):
        for split in dict.fromkeys(splits):
            weighted = ([1.0] if over_batch else weights) if training else None
            sizes = [batch_size_of(args[0]) for args, _ in microbatches]
            split.begin(
                step, microbatches, weights=weighted, key=(0, count), split_backward=split_backward,
                whole=whole, sizes=sizes, at_once=at_once,
            )  # fmt: skip
        sent: list[list[Values | None]] = []
        for index in range(len(microbatches)):
            values: Values | None = None
            row = []
            for stage, split in enumerate(splits):
                values = split.programs.executed(stage).forward(index, _received(values))
                row.append(values)
            sent.append(row)
        if training:
            for index in range(len(microbatches)):
                _run_backward(splits, index, sent[index], split_backward)
        found = {split: split.finish() for split in reversed(dict.fromkeys(splits))}
        results = dict(reversed(found.items()))
        _settle(list(results), splits[-1], step, entire)
    last = results[splits[-1]]
    last.say_doubt()
    outcome.losses.extend(last.losses)
    if training and None not in last.losses and not over_batch:
        parts = zip(last.parts, last.losses, weights, strict=True)
        outcome.loss = sum(loss * weight if part is None else part for part, loss, weight in parts)
    outcome.outputs.extend(last.outputs)


def _settle(splits: list[SplitModel], last: SplitModel, step: str, entire: Any) -> None:
    for split in splits:
        split.settle()
    for split in splits:
        if not split.has_last_stage:
            split.take_from_last(last.left_on_last(step, entire))
            names = split.late_states(step)
            put_late_values(split.root, names, late_values(last.root, names))
    if step == "training_step" and last.retains():
        found = [split.retained() for split in splits]
        for split in splits:
            split.take_gradients(found)
    for split in splits:
        split.settled(step)


def _run_backward(splits: Any, index: int, sent: list[Values | None], split_backward: bool) -> None:
    gradients = None
    for stage in reversed(range(len(splits))):
        values = sent[stage]
        if values is not None and values.empty:
            gradients = None
            continue
        if values is not None:
            gradients = [
                g if t.requires_grad else None for g, t in zip(gradients or [], values.tensors, strict=True)
            ]
        program = splits[stage].programs.executed(stage)
        if split_backward:
            gradients = program.backward_input(index, gradients)
            program.backward_weight(index)
        else:
            gradients = program.backward(index, gradients)
        if gradients is not None:
            gradients = [g if g is None else g.detach().clone() for g in gradients]


def _received(values: Values | None) -> Values | None:
    if values is None:
        return None
    tensors = [t.detach().clone().requires_grad_(t.requires_grad) for t in values.tensors]
    return Values(tensors, values.table, values.empty)


def _collect(splits: list[SplitModel], outcome: Outcome) -> None:
    for split in dict.fromkeys(splits):
        for name, parameter in split.owned_parameters():
            gradient = parameter.grad
            known = outcome.gradients.get(name)
            if known is not None and gradient is not None:
                gradient = known + gradient
            outcome.gradients[name] = gradient if gradient is not None else known
        for name, tensor in split.owned_states().items():
            if not isinstance(tensor, nn.Parameter):
                outcome.buffers[name] = tensor


def assert_same(piped_outcome: Outcome, alone_outcome: Outcome, exact: bool = False) -> None:
    """Losses, every gradient, buffers and logged values are those of one process."""
    rtol = 0.0 if exact else 1e-10
    assert len(piped_outcome.losses) == len(alone_outcome.losses)
    for mine, theirs in zip(piped_outcome.losses, alone_outcome.losses, strict=True):
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=rtol, atol=rtol)
    assert set(piped_outcome.gradients) == set(alone_outcome.gradients)
    for name, gradient in alone_outcome.gradients.items():
        mine = piped_outcome.gradients[name]
        assert (mine is None) == (gradient is None), f"{name}: {mine is None} for {gradient is None}"
        if gradient is not None:
            torch.testing.assert_close(
                mine, gradient, rtol=rtol, atol=rtol, msg=lambda m, n=name: f"{n}: {m}"
            )
    for name, buffer in piped_outcome.buffers.items():
        torch.testing.assert_close(buffer, alone_outcome.buffers[name], rtol=rtol, atol=rtol)
    assert [(i, n) for i, n, _ in piped_outcome.logged] == [(i, n) for i, n, _ in alone_outcome.logged]
    for (_, name, mine), (_, _, theirs) in zip(piped_outcome.logged, alone_outcome.logged, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=rtol, msg=lambda m, n=name: f"{n}: {m}")


def assert_whole(
    module: Any,
    batch: Any,
    stages: int = 2,
    num_microbatches: int = 4,
    tolerance: float = 1e-10,
    **options: Any,
) -> Outcome:
    """Every gradient, the loss and what is logged are those of the whole batch on one device."""
    mine = piped(module, batch, stages, num_microbatches, follow=True, **options)
    theirs = alone(module, batch, num_microbatches=1)
    for name, gradient in theirs.gradients.items():
        found = mine.gradients[name]
        assert (found is None) == (gradient is None), f"{name}: {found is None} for {gradient is None}"
        if gradient is not None:
            torch.testing.assert_close(
                found, gradient, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )
    torch.testing.assert_close(mine.loss, theirs.losses[0], rtol=tolerance, atol=tolerance)
    if len(batch_parts(batch, num_microbatches)) > 1:
        for _, name, value in theirs.logged:
            expected = torch.as_tensor(value)
            torch.testing.assert_close(
                torch.as_tensor(mine.logs[name], dtype=expected.dtype), expected, rtol=tolerance, atol=tolerance,
                msg=lambda m, n=name: f"logged {n}: {m}",
            )  # fmt: skip
    return mine


def batch_parts(batch: Any, num_microbatches: int) -> list[Any]:
    """The micro-batches."""
    return [part for part, _ in split_batch(batch, num_microbatches)]
