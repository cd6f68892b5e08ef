"""Does every model that trains on one device train over stages? Each tiny, all numbers compared.

    python -m benchmarks.zoo --records zoo.jsonl            # what is not in there yet; the table at the end
    python -m benchmarks.zoo --records zoo.jsonl --only llama
    python -m benchmarks.zoo --records zoo.jsonl --workers 0 --page docs/models.md

Losses, every gradient and buffers of 2 and 3 stages against one process on the same micro-batches, in float64
where the model allows it. One line for each (model type, class).
"""

import copy
import json
import multiprocessing
import re
import signal
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
from jsonargparse import auto_cli
from torch import Tensor, nn

from benchmarks.zoo_transformers import builds, pairs
from lightning_pipeline.errors import PipelineError
from lightning_pipeline.model.cut.partitioning import partition
from lightning_pipeline.model.replay.model import SplitModel
from lightning_pipeline.model.tensors.structure import map_tensors, tensors_in
from lightning_pipeline.model.trace import Trace, trace_step
from lightning_pipeline.model.trace.units import find_units
from lightning_pipeline.wire.stage import Values

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
OUTCOMES = ("equal", "close", "refused", "wrong", "crash", "died", "slow", "not run")


class Trained(nn.Module):
    """A model and its loss: its own, or the mean square of everything that it returns."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def log(self, name: str, value: Any) -> None:
        """Takes nothing."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """As a LightningModule would write it."""
        outputs = self.model(**batch)
        loss = getattr(outputs, "loss", None)
        if loss is not None:
            return loss if loss.dim() == 0 else loss.mean()
        found = [t for t in tensors_in(outputs) if t.is_floating_point() and t.requires_grad]
        return torch.stack([t.pow(2).mean().to(found[0].dtype) for t in found]).sum()


# ---- one process, and stages


def alone(module: nn.Module, batches: list[Arguments], seed: int = 0) -> tuple[list[Tensor], nn.Module]:
    """Losses, and a copy of the module with its gradients and buffers."""
    module = copy.deepcopy(module)
    torch.manual_seed(seed)
    numpy.random.seed(seed)
    losses = []
    for args, kwargs in batches:
        loss: Tensor = module.training_step(*map_tensors(Tensor.clone, args), **kwargs)  # type: ignore[operator]
        (loss / len(batches)).backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
    return losses, module


def staged(module: nn.Module, cut: Any, batches: list[Arguments]) -> tuple[list[Any], list[SplitModel]]:
    """The same over stages, one after another in this process."""
    splits = []
    for stage in range(cut.num_stages):
        mine, own = copy.deepcopy((module, cut), _shared(cut.trace))
        splits.append(SplitModel(mine, own, [stage], sinks={"log": lambda *args: None}))
    weights = [1 / len(batches)] * len(batches)
    for split in splits:
        split.begin("training_step", batches, weights=weights, key=(0, 0))
    sent = []
    for index in range(len(batches)):
        values: Values | None = None
        row = []
        for stage, split in enumerate(splits):
            values = split.stage(stage).forward(index, _received(values))
            row.append(values)
        sent.append(row)
    for index in range(len(batches)):
        _backward(splits, index, sent[index])
    return [split.finish() for split in splits][-1].losses, splits


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
        gradients = splits[stage].stage(stage).backward(index, gradients)


def difference(module: nn.Module, losses: list[Tensor], mine: list[Any], splits: list[SplitModel]) -> float:
    """The largest difference of a loss, gradient or buffer, relative to the largest entry of its kind."""
    worst = max(_relative(a, b) for a, b in zip(mine, losses, strict=True))
    gradients: dict[str, Tensor | None] = {}
    for split in splits:
        for name, parameter in split.owned_parameters():
            known, more = gradients.get(name), parameter.grad
            gradients[name] = more if known is None else known if more is None else known + more
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


# ---- one pair


def run_pair(kind: str, name: str, counts: tuple[int, ...] = (2, 3)) -> dict[str, Any]:
    """What becomes of one architecture under one head, over so many stages."""
    record: dict[str, Any] = {"type": kind, "class": name}
    start = time.process_time()
    try:
        module, batches, expected, draws = _trains(kind, name)
    except Exception as error:
        return record | {"outcome": "not run", "why": _short(error)}
    losses, reference = expected
    record["draws"] = draws and not all(map(torch.equal, losses, alone(module, batches, seed=1)[0]))
    precise = losses[0].dtype == torch.float64
    record |= {"dtype": str(losses[0].dtype), "alone_s": round(time.process_time() - start, 2)}
    try:
        start = time.process_time()
        units = find_units(module, at_least=3)
        trace = trace_step(module, "training_step", *batches[0], units=units)
        record |= {"trace_s": round(time.process_time() - start, 2), "units": len(units)}
        if record["draws"]:  # the draws of one process are not promised: those of one stage are
            losses, (whole,) = staged(module, partition(trace, 1), batches)
            whole.restore()
            reference = whole.root
        worst = 0.0
        for stages in counts:
            record["stages"] = stages
            cut = partition(trace, stages, how="uniform")
            shares = cut.table().rows
            record[f"largest_share_{stages}"] = round(max(row.cost_share for row in shares), 3)
            worst = max(worst, difference(reference, losses, *staged(module, cut, batches)))
    except PipelineError as error:
        return record | {"outcome": "refused", "why": _short(error)}
    except Exception as error:
        return record | {"outcome": "crash", "why": _short(error)}
    record["difference"] = worst
    limit = 1e-9 if precise else 1e-4
    record["outcome"] = (
        "equal" if worst <= limit else "close" if worst <= (1e-5 if precise else 1e-3) else "wrong"
    )
    return record


def _trains(kind: str, name: str) -> tuple[nn.Module, list[Arguments], tuple[list[Tensor], nn.Module], bool]:
    """The module and the first batches of its recipe with which one process trains, and whether it draws."""
    failed: list[Exception] = []
    for make in builds(kind, name):
        try:
            model, recipe = make()
        except Exception as error:
            failed.append(error)
            continue
        for attempt in recipe.attempts():
            for dtype in (torch.float64, torch.float32):
                module = Trained(model.to(dtype)).train()
                try:
                    batches: list[Arguments] = [((_cast(batch, dtype), 0), {}) for batch in attempt()]
                    expected = alone(module, batches)
                    if not all(bool(loss.isfinite()) for loss in expected[0]):
                        raise ValueError("the loss is not finite")
                except Exception as error:
                    failed.append(error)
                    if not _OF_TYPES.search(str(error)):
                        break
                else:
                    return module, batches, expected, _has_drawn()
    raise next((error for error in failed if "requires the" in str(error)), failed[0])


_OF_TYPES = re.compile(r"dtype|scalar type|Float|float|Double|double|type")


def _has_drawn() -> bool:
    """Whether `alone`, which has just run with seed 0, has drawn a number."""
    now, numbers = torch.get_rng_state(), numpy.random.get_state()[1]
    torch.manual_seed(0)
    numpy.random.seed(0)
    first = torch.equal(now, torch.get_rng_state())
    return not (first and numpy.array_equal(numbers, numpy.random.get_state()[1]))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:600]


# ---- all of them


@contextmanager
def _limited(seconds: int) -> Iterator[None]:
    def stop(number: int, frame: Any) -> None:
        raise TimeoutError(f"more than {seconds} s")

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)  # of CPU time: other work on the machine does not count
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _work(todo: list[tuple[str, str]], records: Path, now: Path, seconds: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for kind, name in todo:
        now.write_text(json.dumps([kind, name]))
        try:
            with _limited(seconds):
                record = run_pair(kind, name)
        except TimeoutError as error:
            record = {"type": kind, "class": name, "outcome": "slow", "why": str(error)}
        if "more than" in record.get("why", "") and record["why"].startswith("TimeoutError"):
            record["outcome"] = "slow"
        _append(records, record)
    now.unlink(missing_ok=True)


def _append(records: Path, record: dict[str, Any]) -> None:
    with records.open("a") as file:
        file.write(json.dumps(record) + "\n")


def _known(records: Path) -> dict[tuple[str, str], dict[str, Any]]:
    lines = records.read_text().splitlines() if records.exists() else []
    return {(record["type"], record["class"]): record for record in map(json.loads, lines)}


def sweep(records: Path, only: str, again: tuple[str, ...], workers: int, seconds: int, limit: int) -> None:
    """Run what is not recorded yet, in processes that are started again where one dies."""
    known = _known(records)
    todo = [
        pair for pair in pairs()
        if only in "/".join(pair) and (pair not in known or known[pair]["outcome"] in again)
    ][: limit or None]  # fmt: skip
    seen = Counter(kind for kind, _ in known)
    nth: dict[tuple[str, str], int] = {}
    for pair in todo:  # types that were not seen before come first, then the second head of each
        nth[pair] = seen[pair[0]]
        seen[pair[0]] += 1
    todo.sort(key=lambda pair: nth[pair])
    shares = {index: todo[index::workers] for index in range(workers)}
    running: dict[int, Any] = {}
    context = multiprocessing.get_context("spawn")
    while any(shares.values()) or running:
        for index, share in list(shares.items()):
            now = records.with_suffix(f".now{index}")
            if index in running:
                running[index].join(timeout=0.5)
                if running[index].is_alive():
                    continue
                died = running.pop(index).exitcode
                if died and now.exists():
                    kind, name = json.loads(now.read_text())
                    _append(records, {"type": kind, "class": name, "outcome": "died", "why": f"exit {died}"})
                    shares[index] = share[share.index((kind, name)) + 1 :]
                else:
                    shares[index] = []
            if shares[index] and index not in running:
                running[index] = context.Process(target=_work, args=(shares[index], records, now, seconds))
                running[index].start()


def table(records: Path) -> str:
    """Outcomes by number, and every one that is neither equal nor left out."""
    known = _known(records)
    counts = Counter(record["outcome"] for record in known.values())
    trained = sum(count for outcome, count in counts.items() if outcome != "not run")
    lines = [f"{trained} of {len(known)} pairs train in one process."]
    lines += [f"  {outcome:8} {counts[outcome]:5}" for outcome in OUTCOMES if counts[outcome]]
    times = sorted(record["trace_s"] for record in known.values() if "trace_s" in record)
    if times:
        lines.append(f"Trace: median {times[len(times) // 2]:.2f} s, worst {times[-1]:.2f} s.")
    for (kind, name), record in sorted(known.items()):
        if record["outcome"] not in ("equal", "not run"):
            detail = record.get("why") or f"difference {record.get('difference', 0):.1e}"
            lines.append(f"{record['outcome']:8} {kind}/{name}: {detail[:230]}".replace("\n", " "))
    return "\n".join(lines)


_NAMES = {"not run": "does not train in one process"}
_BEGIN, _END = "<!-- written by benchmarks/zoo.py -->", "<!-- end -->"
_KINDS = (
    (r"requires the|ImportError", "needs a library that is not installed"),
    (r"million parameters", "is larger than 40 million parameters even when made small"),
    (r"no .* in the configuration", "has another configuration than its type"),
    (r"inputs|input_|specify|argument|no recipe", "needs other inputs than the recipe makes"),
)


def page_text(known: dict[tuple[str, str], dict[str, Any]], num_pairs: int) -> str:
    """The generated part of the page of models: one line for each model type."""
    trained = {pair: record for pair, record in known.items() if record["outcome"] != "not run"}
    equal = sum(record["outcome"] == "equal" for record in trained.values())
    bits = sum(record.get("difference") == 0.0 for record in trained.values())
    times = sorted(record["trace_s"] for record in trained.values() if "trace_s" in record)
    lines = [
        f"{len(known):,} of {num_pairs:,} pairs of architecture and head were tried, of "
        f"{len({kind for kind, _ in known}):,} model types. {len(trained):,} train "
        f"in one process; **{equal:,} of these ({equal / max(len(trained), 1):.1%}) equal it** on 2 and on 3 "
        f"stages, {bits:,} to the last bit.",
        "",
        "| outcome | pairs |",
        "|---|---|",
        *(f"| {_NAMES.get(o, o)} | {n:,} |" for o, n in _counts(known)),
        f"| not tried | {num_pairs - len(known):,} |",
        "",
        f"Tracing took {times[len(times) // 2]:.2f} s of CPU time in the median, {times[-1]:.1f} s at most "
        f"({len(times):,} pairs).",
        "",
        "### Neither equal nor left out",
        "",
        *(
            f"* `{name}` ({kind}), {record['outcome']}: {_told(record)}"
            for (kind, name), record in sorted(trained.items())
            if record["outcome"] != "equal"
        ),
        "",
        "### By model type",
        "",
        "| type | equal | otherwise | not in one process |",
        "|---|---|---|---|",
    ]
    for kind in sorted({kind for kind, _ in known}):
        own = {name: record["outcome"] for (one, name), record in sorted(known.items()) if one == kind}
        columns = [
            [name for name, outcome in own.items() if outcome == "equal"],
            [f"{name} ({o})" for name, o in own.items() if o not in ("equal", "not run")],
            [name for name, outcome in own.items() if outcome == "not run"],
        ]
        lines.append(f"| {kind} | " + " | ".join(", ".join(column) for column in columns) + " |")
    lines += ["", "### Why some do not train in one process", ""]
    reasons = Counter(_reason(record) for record in known.values() if record["outcome"] == "not run")
    lines += [f"* {count:,}: {reason}" for reason, count in reasons.most_common()]
    return "\n".join(lines)


def _counts(known: dict[tuple[str, str], dict[str, Any]]) -> list[tuple[str, int]]:
    found = Counter(record["outcome"] for record in known.values())
    return [(outcome, found[outcome]) for outcome in OUTCOMES if found[outcome]]


def _told(record: dict[str, Any]) -> str:
    told: str = record.get("why") or f"largest difference {record.get('difference', 0):.1e}"
    return re.sub(r"/\S*/", "", told.replace("\n", " "))[:300]


def _reason(record: dict[str, Any]) -> str:
    why = record["why"]
    return next((text for pattern, text in _KINDS if re.search(pattern, why)), why.partition(":")[0])


def write_page(page: Path, records: Path) -> None:
    """Put the table between the two marks of a page."""
    text = page.read_text()
    head, _, rest = text.partition(_BEGIN)
    _, _, tail = rest.partition(_END)
    table = page_text(_known(records), len(pairs()))
    page.write_text(f"{head}{_BEGIN}\n\n{table}\n\n{_END}{tail}")


def main(
    records: Path = Path("zoo.jsonl"), only: str = "", again: list[str] | None = None, workers: int = 1,
    seconds: int = 90, limit: int = 0, page: Path | None = None,
) -> None:  # fmt: skip
    """Run what is not recorded yet and print the table.

    Args:
        records: One line for each pair; what is in there is not run again.
        only: Part of `type/class`.
        again: Outcomes that are run again.
        workers: Processes. 0: only print.
        seconds: Longest CPU time for a pair.
        limit: Largest number of pairs. 0: all.
        page: Is given the table, between two marks.
    """
    if workers:
        sweep(records, only, tuple(again or ()), workers, seconds, limit)
    print(table(records))
    if page is not None:
        write_page(page, records)


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
