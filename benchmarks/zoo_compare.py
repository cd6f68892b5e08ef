"""A module's step in one process and over stages in this process, and how far they differ."""

import copy
import time
from typing import Any

import numpy
import torch
import torch._dynamo.backends.debugging as backends
from torch import Tensor, nn

from lightning_pipeline.errors import PipelineError
from lightning_pipeline.model.cut.circles import opened
from lightning_pipeline.model.cut.partitioning import partition
from lightning_pipeline.model.split import SplitModel
from lightning_pipeline.model.tensors.structure import map_tensors, tensors_in
from lightning_pipeline.model.trace import Trace, trace_step
from lightning_pipeline.model.trace.units import Unit, find_units
from lightning_pipeline.wire.stage import Values

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
COMPILED = ("compiled units", "compiled module")


class Trained(nn.Module):
    """A model and its loss: its own, or the mean square of everything that it returns.

    Args:
        model: Called with the entries of a batch.
        every_output: Whether what it returns counts beside its own loss.
    """

    def __init__(self, model: nn.Module, every_output: bool = False) -> None:
        super().__init__()
        self.model, self.every_output = model, every_output

    def log(self, name: str, value: Any) -> None:
        """Takes nothing."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """As a LightningModule would write it."""
        outputs = self.model(**batch)
        loss = getattr(outputs, "loss", None)
        if loss is not None and not self.every_output:
            return loss if loss.dim() == 0 else loss.mean()
        found = [t for t in tensors_in(outputs) if t.is_floating_point() and t.requires_grad]
        return torch.stack([t.pow(2).mean().to(found[0].dtype) for t in found]).sum()


# ---- one process, and stages

_graphs: list[None] = []  # one for each run of a compiled graph


def _noted(graph: Any, inputs: Any) -> Any:
    """As aot_eager, which traces and differentiates as inductor does; notes each run of a graph."""
    compiled: Any = backends.aot_eager(graph, inputs)  # type: ignore[no-untyped-call]

    def run(*args: Any) -> Any:
        _graphs.append(None)
        return compiled(*args)

    return run


def _compile(module: nn.Module) -> nn.Module:
    """With compiled units, as a user compiles the layers of a model."""
    for unit in find_units(module, at_least=3):
        unit.module.compile(backend=_noted)
    return module


def alone(
    module: nn.Module, batches: list[Arguments], seed: int = 0, compiles: bool = False
) -> tuple[list[Tensor], nn.Module]:
    """Losses, and a copy of the module with its gradients and buffers; with compiled units if asked."""
    module = copy.deepcopy(module)
    if compiles:
        _compile(module)
    torch.manual_seed(seed)
    numpy.random.seed(seed)
    losses = []
    for args, kwargs in batches:
        loss: Tensor = module.training_step(*map_tensors(Tensor.clone, args), **kwargs)  # type: ignore[operator]
        (loss / len(batches)).backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
    return losses, module


def staged(
    module: nn.Module,
    cut: Any,
    batches: list[Arguments],
    one_rank: bool = False,
    pristine: nn.Module | None = None,
    compiles: str = "",
) -> tuple[list[Any], list[SplitModel]]:
    """The same over stages, one after another in this process: each on a rank of its own, or all on one.

    A rank gets a copy of the module and its trace, which is quick, or a copy of the `pristine` module, traced
    again: hooks that the step itself installs are those of the module that was traced.
    """
    stages = list(range(cut.num_stages))
    ranks = []
    for held in [stages] if one_rank else [[stage] for stage in stages]:
        if pristine is None:
            mine, own = copy.deepcopy((module, cut), _shared(cut.trace))
        else:
            mine = copy.deepcopy(pristine)
            if compiles == "compiled units":
                _compile(mine)  # a copy of what is compiled is not
            own = partition(_traced(mine, batches, len(stages)), len(stages), how="uniform")
        ranks.append(SplitModel(mine, own, held, sinks={"log": lambda *args: None}))
        if compiles == "compiled module":
            ranks[-1].compile_units(lambda function: torch.compile(function, backend=_noted))
    splits = ranks * len(stages) if one_rank else ranks
    weights = [1 / len(batches)] * len(batches)
    for split in ranks:
        split.begin("training_step", batches, weights=weights, key=(0, 0))
    sent = []
    for index in range(len(batches)):
        values: Values | None = None
        row = []
        for stage, split in enumerate(splits):
            values = split.programs[stage].forward(index, _received(values))
            row.append(values)
        sent.append(row)
    for index in range(len(batches)):
        _backward(splits, index, sent[index])
    return [split.finish() for split in ranks][-1].losses, ranks


def _traced(module: nn.Module, batches: list[Arguments], stages: int) -> Trace:
    def trace(units: list[Unit]) -> Trace:
        return trace_step(module, "training_step", *batches[0], units=units)

    return opened(find_units(module, at_least=3), stages, trace)


def outcome(worst: float, precise: bool) -> str:
    """What a largest difference is called."""
    limit, near = (1e-9, 1e-5) if precise else (1e-4, 1e-3)
    return "equal" if worst <= limit else "close" if worst <= near else "wrong"


def gradients_of(ranks: list[SplitModel]) -> dict[str, Tensor | None]:
    """By name; those of one parameter on several ranks are added."""
    gradients: dict[str, Tensor | None] = {}
    for split in ranks:
        for name, parameter in split.owned_parameters():
            known, more = gradients.get(name), parameter.grad
            gradients[name] = more if known is None else known if more is None else known + more
    return gradients


def _shared(trace: Trace) -> dict[int, Any]:
    """For a copy: what a replay only reads, and what takes most of the time."""
    costs = [trace.between, trace.sizes, trace.handed, *(call.work for call in trace.calls)]
    return {id(held): held for held in costs}


def _received(values: Values | None) -> Values | None:
    if values is None:
        return None
    tensors = [t.detach().clone().requires_grad_(t.requires_grad) for t in values.tensors]
    return Values(tensors, values.table, values.empty)


def _backward(splits: list[SplitModel], index: int, sent: list[Values | None]) -> None:
    gradients: Any = None
    for stage in reversed(range(len(splits))):
        values = sent[stage]
        if values is not None:
            gradients = [
                g if t.requires_grad else None for g, t in zip(gradients, values.tensors, strict=True)
            ]
        gradients = splits[stage].programs[stage].backward(index, gradients)


def difference(module: nn.Module, losses: list[Tensor], mine: list[Any], splits: list[SplitModel]) -> float:
    """The largest difference of a loss, gradient or buffer, relative to the largest entry of its kind."""
    worst = max(_relative(a, b) for a, b in zip(mine, losses, strict=True))
    gradients = gradients_of(splits)
    own = {name: p.grad for name, p in module.named_parameters()}
    largest = max((float(g.abs().max()) for g in own.values() if g is not None and g.numel()), default=0.0)
    for name, expected in own.items():
        found = gradients[name]
        if (found is None) != (expected is None):
            return float("inf")
        if expected is not None and found is not None:
            worst = max(worst, _relative(found, expected, max(largest, 1e-30)))
    buffers = dict(module.named_buffers())
    for split in splits:
        for name, state in split.owned_states().items():
            if not isinstance(state, nn.Parameter) and name in buffers:
                worst = max(worst, _relative(state, buffers[name]))
    return worst


def _relative(found: Tensor, expected: Tensor, scale: float | None = None) -> float:
    if not expected.numel():
        return 0.0
    if not torch.equal(found.isnan(), expected.isnan()):
        return float("inf")
    found, expected = found.double().nan_to_num(), expected.double().nan_to_num()
    scale = scale or max(float(expected.abs().max()), 1e-30)
    return float((found - expected).abs().max()) / scale


# ---- one module


def compared(
    module: nn.Module,
    batches: list[Arguments],
    expected: tuple[list[Tensor], nn.Module],
    draws: bool,
    counts: tuple[int, ...] = (2, 3),
    reference_stages: int = 1,
    compiles: str = "",
) -> dict[str, Any]:
    """What becomes of a module over so many stages, as entries of a record.

    Args:
        module: With a `training_step`.
        batches: Arguments of each micro-batch.
        expected: What `alone` gave.
        draws: Whether it has drawn a number: the draws of one process are not promised, those of a rank are.
        counts: Numbers of stages.
        reference_stages: Where it draws, how many stages the rank holds that the others are compared with.
        compiles: Of `COMPILED`, what is compiled over stages; the one process is not.
    """
    pristine = copy.deepcopy(module)
    options = (batches, expected, draws, counts, reference_stages)
    if compiles:
        torch._dynamo.reset()  # type: ignore[no-untyped-call]
        _graphs.clear()
    if compiles != "compiled units":
        found = _compared(module, *options, None, compiles)
        if found["outcome"] == "equal":
            return found
    found = _compared(pristine, *options, copy.deepcopy(pristine), compiles)
    if compiles and found["outcome"] != "equal":
        try:
            alone(pristine, batches, compiles=True)
        except Exception as error:
            return found | {"outcome": "not run", "why": f"compiled on one device: {short(error)}"}
    return found


def cut_alone(module: nn.Module, batch: Arguments) -> dict[str, Any]:
    """What becomes of a module without weights: it is traced, and cut into 2 and 3 stages."""
    try:
        start = time.process_time()
        trace = _traced(module, [batch], 3)
        record: dict[str, Any] = {"trace_s": round(time.process_time() - start, 2)}
        for stages in (2, 3):
            shares = partition(trace, stages).table().rows
            record[f"largest_share_{stages}"] = round(max(row.cost_share for row in shares), 3)
    except PipelineError as error:
        return {"outcome": "refused", "why": short(error)}
    except Exception as error:
        return {"outcome": "crash", "why": short(error)}
    return record | {"outcome": "cut", "units": len(trace.units)}


def _compared(
    module: nn.Module,
    batches: list[Arguments],
    expected: tuple[list[Tensor], nn.Module],
    draws: bool,
    counts: tuple[int, ...],
    reference_stages: int,
    pristine: nn.Module | None,
    compiles: str,
) -> dict[str, Any]:
    losses, reference = expected
    draws = draws and not _same(expected, alone(module, batches, seed=1))
    record: dict[str, Any] = {"draws": draws, "dtype": str(losses[0].dtype)}
    try:
        start = time.process_time()
        trace = _traced(module, batches, max(counts))
        record |= {"trace_s": round(time.process_time() - start, 2), "units": len(trace.units)}
        if draws:
            cut = partition(trace, reference_stages, how="uniform")
            losses, (whole,) = staged(module, cut, batches, one_rank=True, pristine=pristine)
            whole.restore()
            reference = whole.root
        worst = 0.0
        for stages in counts:
            record["stages"] = stages
            cut = partition(trace, stages, how="uniform")
            shares = cut.table().rows
            record[f"largest_share_{stages}"] = round(max(row.cost_share for row in shares), 3)
            found = staged(module, cut, batches, pristine=pristine, compiles=compiles)
            worst = max(worst, difference(reference, losses, *found))
    except PipelineError as error:
        return record | {"outcome": "refused", "why": short(error)}
    except Exception as error:
        return record | {"outcome": "crash", "why": short(error)}
    if compiles:
        record["graphs"] = len(_graphs)  # that have run
        if not _graphs:
            return record | {"outcome": "refused", "why": "nothing was compiled"}
    record["staged_s"] = round(time.process_time() - start, 2)
    return record | {"difference": worst, "outcome": outcome(worst, losses[0].dtype == torch.float64)}


def _same(one: tuple[list[Tensor], nn.Module], other: tuple[list[Tensor], nn.Module]) -> bool:
    """Whether losses and gradients are the same: behind a weight of zero, draws show in gradients alone."""
    if not all(map(torch.equal, one[0], other[0])):
        return False
    gradients = zip(one[1].parameters(), other[1].parameters(), strict=True)
    return all(
        a.grad is b.grad or (a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad))
        for a, b in gradients
    )


def has_drawn() -> bool:
    """Whether `alone`, which has just run with seed 0, has drawn a number."""
    now, numbers = torch.get_rng_state(), numpy.random.get_state()[1]
    torch.manual_seed(0)
    numpy.random.seed(0)
    same = torch.equal(now, torch.get_rng_state())
    return not (same and numpy.array_equal(numbers, numpy.random.get_state()[1]))


def short(error: Exception) -> str:
    """Kind and text of an error, cut."""
    return f"{type(error).__name__}: {error}"[:600]
