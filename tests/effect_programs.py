"""Modules whose steps and hooks change what outlives them at random: each run equals one device or is refused.

A program is a list of statements, each with where it stands (before, between or after the units, in a unit, in
hooks), a condition, an effect and what that is made of. A fit over ranks is compared with one on one device: the
state of every rank (attributes, containers, objects, flags, modes, rates, buffers), all weights and the log.
`tests/ranks/test_random_effects.py` runs a few, `benchmarks/random_effects.py` as many as asked.
"""

import random
import warnings
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipeline.errors import PipelineError
from lightning_pipeline.model.places import Guard
from tests.pool import Pool
from tests.ranks.lightning_cases import trainer, weights

WIDTH, UNITS, QUEUE = 5, 5, 32
IN_STEP = ("before", "between", "late", "after")
PLACES = (*IN_STEP * 3, "unit", "validation", "batch start", "batch end", "optimizer")
CONDITIONS = (
    "always", "always", "always", "always", "batch_idx", "odd batch", "global_step", "late step", "epoch", "own",
    "list", "flag", "dict", "data", "first sample", "seeded", "last batch", "rate", "buffer", "set", "table", "text",
)  # fmt: skip
SOURCES = {
    "any": ("one", "number", "step", "index"),
    "batch": ("samples", "batch mean", "batch sum", "batch rows", "batch column", "batch largest", "item"),
    "hidden": ("hidden mean", "hidden rows", "hidden column"),
    "loss": ("loss", "loss item"),
}
EFFECTS = (
    "count", "multiply", "add", "set", "append", "append", "keep three", "pop", "clear", "deque", "entry",
    "entry add", "nested list", "nested count", "set of", "buffer add", "buffer average", "buffer column",
    "rebind", "flag", "freeze", "thaw", "layer eval", "layer train", "rate down", "data", "closure", "class",
    "ring", "average of weights", "unit attribute", "object", "new attribute", "pair", "previous",
)  # fmt: skip
ARRAYS = (
    "array add", "array average", "array count", "array entry", "array history", "array largest", "array rebind",
)  # fmt: skip
"""Effects on NumPy arrays, of programs that ask for them."""
USES = ("use n", "use number", "use buffer", "use flag", "use last", "use object", "use list")
USES_OF_ARRAYS = ("use array",)


_ABOUT_EFFECTS = (
    "works out", "leaves behind", "leaves another number in", "on the last stage alone", "decides by what is in", "decides by the sum",
    "mixes samples of the batch", "mixes what layers gave",
)  # fmt: skip


class Statement(NamedTuple):
    """One line of a program.

    Attributes:
        place: Where it stands.
        condition: When it does something.
        effect: What it changes, or how it uses what was changed.
        source: What of.
        number: That these may use.
    """

    place: str
    condition: str
    effect: str
    source: str
    number: int


@dataclass(frozen=True)
class Program:
    """A fit as data.

    Attributes:
        statements: Of the module.
        pipeline: Arguments of the strategy.
        batches: Of an epoch, of which there are two.
        looks: Whether `on_train_batch_end` notes the state on all ranks.
    """

    statements: tuple[Statement, ...]
    pipeline: dict[str, Any]
    batches: int
    looks: bool


class Layer(nn.Module):
    """A residual layer with an attribute, a mode and statements of its own."""

    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.does = ""
        self.calls, self.kept, self.means = 0, None, list[Tensor]()
        self.register_buffer("samples", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """`x` and a part of it."""
        if self.does == "calls":
            self.calls += 1
        elif self.does == "kept":
            self.kept = x.detach()
        elif self.does == "samples":
            self.samples += len(x)
        elif self.does == "means" and self.training:
            self.means.append(x.detach().mean())
        return x + self.scale * (1.0 if self.training else 0.5) * self.linear(x).tanh()


class Counter:
    """A plain object."""

    def __init__(self) -> None:
        self.n = 0


class Data(pl.LightningDataModule):
    """Batches of eight samples, and a count."""

    def __init__(self, batches: int) -> None:
        super().__init__()
        self.batches, self.count = batches, 0

    def _loader(self, seed: int, batches: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        size = 8 * batches, WIDTH
        x, y = (torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(2))
        return DataLoader(TensorDataset(x, y), batch_size=8)

    def train_dataloader(self) -> Any:
        """For the fit."""
        return self._loader(3, self.batches)

    def val_dataloader(self) -> Any:
        """One batch."""
        return self._loader(4, 1)


class Here(NamedTuple):
    """What a statement can see.

    Attributes:
        index: Of the batch.
        x: Its samples.
        h: What a unit returned.
        loss: Of the step.
    """

    index: int
    x: Tensor
    h: Tensor | None = None
    loss: Tensor | None = None


class Effects(pl.LightningModule):
    """The module that runs a program."""

    total = 0

    def __init__(self, program: Program) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.program = program
        self.layers = nn.ModuleList(Layer() for _ in range(UNITS)).double()
        self.average = nn.Linear(WIDTH, WIDTH).double().requires_grad_(False)
        self.n, self.number, self.last, self.flag = 0, 1.0, None, False
        self.items: list[Any] = []
        self.recent: deque[Any] = deque(maxlen=3)
        self.table: dict[str, Any] = {}
        self.nested: dict[str, Any] = {"list": [], "count": {"n": 0}}
        self.seen: set[int] = set()
        self.object = Counter()
        self.pair: tuple[Any, Any] = (0, 0)
        self.previous: Any = None
        self.at = 0
        self.noted: list[Any] = []
        self.counts, self.history, self.place = numpy.zeros(WIDTH), numpy.zeros(64), 0
        self.named = {"matrix": numpy.zeros((2, WIDTH))}
        calls = 0

        def bump() -> int:
            nonlocal calls
            calls += 1
            return calls

        self.bump = bump
        type(self).total = 0
        self.register_buffer("buffer", torch.zeros((), dtype=torch.float64))
        self.register_buffer("column", torch.zeros(WIDTH, dtype=torch.float64))
        self.register_buffer("queue", torch.zeros(QUEUE, WIDTH, dtype=torch.float64))
        for one in program.statements:
            if one.place == "unit":
                layer: Any = self.layers[one.number % UNITS]
                layer.does = ("calls", "kept", "samples", "means")[len(one.effect) % 4]

    # ---- where statements stand

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The mean squared error."""
        x, y = batch
        h = self._run("before", Here(batch_idx, x), x)
        for number, layer in enumerate(self.layers):
            h = layer(h)
            if number == 0:
                h = self._run("between", Here(batch_idx, x, h), h)
            if number == UNITS - 2:
                h = self._run("late", Here(batch_idx, x, h), h)
        loss = F.mse_loss(h, y)
        self._run("after", Here(batch_idx, x, h, loss), h)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Logs the error."""
        x, y = batch
        h = x
        for layer in self.layers:
            h = layer(h)
        loss = F.mse_loss(h, y)
        self._run("validation", Here(batch_idx, x, h, loss), h)
        self.log("val", loss)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Statements."""
        self._run("batch start", Here(batch_idx, batch[0]), None)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Statements, and a note."""
        self._run("batch end", Here(batch_idx, batch[0], None, outputs["loss"]), None)
        if self.program.looks:
            self.noted.append([self.n, self.number, float(self.buffer), len(self.items), self.flag])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Statements, without a batch."""
        self._run("optimizer", Here(0, torch.ones(2, WIDTH, dtype=torch.float64)), None)

    def configure_optimizers(self) -> Any:
        """SGD with momentum."""
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)

    def _run(self, place: str, here: Here, h: Any) -> Any:
        for one in self.program.statements:
            if one.place == place and self._holds(one, here):
                h = self._do(one, here, h)
        return h

    # ---- conditions

    def _holds(self, one: Statement, here: Here) -> bool:
        conditions: dict[str, Callable[[], Any]] = {
            "always": lambda: True,
            "batch_idx": lambda: here.index == one.number % 3,
            "odd batch": lambda: here.index % 2,
            "global_step": lambda: self.global_step % 2 == 1,
            "late step": lambda: self.global_step > 1,
            "epoch": lambda: self.current_epoch == 1,
            "own": lambda: self.n % 2,
            "list": lambda: len(self.items) > 1,
            "flag": lambda: self.flag,
            "dict": lambda: "entry" in self.table,
            "data": lambda: here.x.sum() > 0,
            "first sample": lambda: here.x[0, 0] > 0,
            "seeded": lambda: random.Random(here.index + one.number).random() < 0.5,
            "last batch": lambda: self.trainer.is_last_batch,
            "rate": lambda: self.trainer.optimizers[0].param_groups[0]["lr"] < 0.095,
            "buffer": lambda: self.buffer > 0.5,
            "set": lambda: self.last is not None,
            "table": lambda: [False, True, True, False, True, False, True, False, False][self.global_step],
            "text": lambda: f"{self.global_step}" in ("1", "2"),
        }
        return bool(conditions[one.condition]())

    # ---- what effects are made of

    def _made(self, one: Statement, here: Here) -> Any:
        h, loss = here.h, here.loss
        sources: dict[str, Callable[[], Any]] = {
            "one": lambda: 1,
            "number": lambda: one.number / 10,
            "step": lambda: self.global_step,
            "index": lambda: here.index,
            "samples": lambda: len(here.x),
            "batch mean": lambda: here.x.mean(),
            "batch sum": lambda: here.x.sum(),
            "batch rows": lambda: here.x,
            "batch column": lambda: here.x.mean(0),
            "batch largest": lambda: here.x.max(),
            "item": lambda: here.x.mean().item(),
            "hidden mean": lambda: h.detach().mean(),  # type: ignore[union-attr]
            "hidden rows": lambda: h.detach(),  # type: ignore[union-attr]
            "hidden column": lambda: h.detach().mean(0),  # type: ignore[union-attr]
            "loss": lambda: loss.detach(),  # type: ignore[union-attr]
            "loss item": lambda: loss.item(),  # type: ignore[union-attr]
        }
        return sources[one.source]()

    def _scalar(self, one: Statement, here: Here) -> Any:
        made = self._made(one, here)
        return made.mean() if isinstance(made, Tensor) else made

    def _column(self, one: Statement, here: Here) -> Tensor:
        made = torch.as_tensor(self._made(one, here), dtype=torch.float64)
        return made.mean(0) if made.dim() == 2 else made.expand(WIDTH)

    # ---- effects

    def _do(self, one: Statement, here: Here, h: Any) -> Any:
        if one.effect in USES + USES_OF_ARRAYS:
            return h if h is None else self._use(one, h)
        getattr(self, "do_" + one.effect.replace(" ", "_"))(one, here)
        return h

    def _use(self, one: Statement, h: Tensor) -> Tensor:
        match one.effect:
            case "use n":
                return h * (1 + 0.05 * self.n)
            case "use number":
                return h * (1 + 0.01 * self.number)
            case "use buffer":
                return h + 0.01 * self.column
            case "use flag":
                return h * 0.9 if self.flag else h
            case "use last":
                return h if self.last is None else h + 0.01 * self.last
            case "use array":
                return h + 0.01 * torch.from_numpy(self.counts).tanh()
            case "use object":
                return h * (1 + 0.05 * self.object.n)
            case _:
                return h + 0.01 * self.items[-1] if self.items else h

    def do_count(self, one: Statement, here: Here) -> None:
        self.n += 1

    def do_multiply(self, one: Statement, here: Here) -> None:
        self.number *= 1.1

    def do_add(self, one: Statement, here: Here) -> None:
        self.number = self.number + self._scalar(one, here)

    def do_set(self, one: Statement, here: Here) -> None:
        self.last = self._made(one, here)

    def do_append(self, one: Statement, here: Here) -> None:
        self.items.append(self._made(one, here))

    def do_keep_three(self, one: Statement, here: Here) -> None:
        self.items = self.items[-3:]

    def do_pop(self, one: Statement, here: Here) -> None:
        if self.items:
            self.items.pop(0)

    def do_clear(self, one: Statement, here: Here) -> None:
        self.items.clear()

    def do_deque(self, one: Statement, here: Here) -> None:
        self.recent.append(self._made(one, here))

    def do_entry(self, one: Statement, here: Here) -> None:
        self.table["entry"] = self._made(one, here)

    def do_entry_add(self, one: Statement, here: Here) -> None:
        key = f"key {one.number % 2}"
        self.table[key] = self.table.get(key, 0) + self._scalar(one, here)

    def do_nested_list(self, one: Statement, here: Here) -> None:
        self.nested["list"].append(self._made(one, here))

    def do_nested_count(self, one: Statement, here: Here) -> None:
        self.nested["count"]["n"] += 1

    def do_set_of(self, one: Statement, here: Here) -> None:
        self.seen.add(here.index)

    def do_buffer_add(self, one: Statement, here: Here) -> None:
        self.buffer += self._scalar(one, here)

    def do_buffer_average(self, one: Statement, here: Here) -> None:
        self.column.mul_(0.9).add_(0.1 * self._column(one, here))

    def do_buffer_column(self, one: Statement, here: Here) -> None:
        self.column.copy_(self._column(one, here))

    def do_rebind(self, one: Statement, here: Here) -> None:
        self.column = self.column + self._column(one, here)

    def do_flag(self, one: Statement, here: Here) -> None:
        self.flag = not self.flag

    def do_freeze(self, one: Statement, here: Here) -> None:
        self.layers[one.number % UNITS].requires_grad_(False)

    def do_thaw(self, one: Statement, here: Here) -> None:
        self.layers[one.number % UNITS].requires_grad_(True)

    def do_layer_eval(self, one: Statement, here: Here) -> None:
        self.layers[one.number % UNITS].eval()

    def do_layer_train(self, one: Statement, here: Here) -> None:
        self.layers[one.number % UNITS].train()

    def do_rate_down(self, one: Statement, here: Here) -> None:
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] *= 0.9

    def do_data(self, one: Statement, here: Here) -> None:
        self.trainer.datamodule.count += 1  # type: ignore[attr-defined]

    def do_closure(self, one: Statement, here: Here) -> None:
        self.bump()

    def do_class(self, one: Statement, here: Here) -> None:
        type(self).total += 1

    def do_ring(self, one: Statement, here: Here) -> None:
        rows = self._made(one, here)
        if not isinstance(rows, Tensor) or rows.dim() != 2:
            rows = here.x
        if self.at + len(rows) <= QUEUE:
            self.queue[self.at : self.at + len(rows)] = rows
        self.at = (self.at + len(rows)) % QUEUE

    def do_average_of_weights(self, one: Statement, here: Here) -> None:
        with torch.no_grad():
            source: Any = self.layers[one.number % UNITS].linear
            self.average.weight.lerp_(source.weight, 0.1)

    def do_unit_attribute(self, one: Statement, here: Here) -> None:
        layer: Any = self.layers[one.number % UNITS]
        layer.scale = layer.scale * 0.9

    def do_object(self, one: Statement, here: Here) -> None:
        self.object.n += 1

    def do_new_attribute(self, one: Statement, here: Here) -> None:
        setattr(self, f"made_{one.number % 2}", self._made(one, here))

    def do_pair(self, one: Statement, here: Here) -> None:
        self.pair = (self.pair[1], self._scalar(one, here))

    def do_previous(self, one: Statement, here: Here) -> None:
        now = self._scalar(one, here)
        if self.previous is not None:
            self.items.append(now - self.previous)
        self.previous = now

    def do_array_add(self, one: Statement, here: Here) -> None:
        self.counts += self._column(one, here).numpy()

    def do_array_average(self, one: Statement, here: Here) -> None:
        self.counts *= 0.9
        self.counts += 0.1 * self._column(one, here).numpy()

    def do_array_count(self, one: Statement, here: Here) -> None:
        for value in torch.as_tensor(self._made(one, here)).flatten().tolist():
            self.counts[int(abs(value) * 10) % WIDTH] += 1

    def do_array_entry(self, one: Statement, here: Here) -> None:
        self.named["matrix"][one.number % 2] += self._column(one, here).numpy()

    def do_array_history(self, one: Statement, here: Here) -> None:
        self.history[self.place % len(self.history)] = float(self._scalar(one, here))
        self.place += 1

    def do_array_largest(self, one: Statement, here: Here) -> None:
        numpy.maximum(self.counts, self._column(one, here).numpy(), out=self.counts)

    def do_array_rebind(self, one: Statement, here: Here) -> None:
        self.counts = self.counts + self._column(one, here).numpy()

    # ---- what is compared

    def left(self) -> dict[str, Any]:
        """All state, by name; the text of an error where it raises."""
        layers: list[Any] = list(self.layers)
        reads: dict[str, Callable[[], Any]] = {
            name: lambda name=name: _plain(getattr(self, name, None))
            for name in (
                "n", "number", "last", "flag", "items", "recent", "table", "nested", "seen", "pair", "previous",
                "at", "noted", "buffer", "column", "queue", "made_0", "made_1", "counts", "history", "place", "named",
            )
        }  # fmt: skip
        reads |= {
            "object": lambda: self.object.n,
            "class": lambda: type(self).total,
            "closure": lambda: self.bump(),
            "data": lambda: self.trainer.datamodule.count,  # type: ignore[attr-defined]
            "rates": lambda: [group["lr"] for group in self.trainer.optimizers[0].param_groups],
            "modes": lambda: [layer.training for layer in layers],
            "frozen": lambda: [[p.requires_grad for p in layer.parameters()] for layer in layers],
            "scales": lambda: [layer.scale for layer in layers],
            "calls": lambda: [layer.calls for layer in layers],
            "kept": lambda: [_plain(layer.kept) for layer in layers],
            "samples": lambda: [_plain(layer.samples) for layer in layers],
            "means": lambda: [_plain(layer.means) for layer in layers],
        }
        return {name: _read(read) for name, read in reads.items()}


def _read(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except PipelineError as error:
        return f"refused: {error}"


def _plain(value: Any) -> Any:
    """The same in lists, dictionaries and numbers."""
    if isinstance(value, Guard):
        return f"refused: {value!r}"
    if isinstance(value, Tensor):
        return value.detach().tolist()
    if isinstance(value, numpy.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | deque | set):
        return [_plain(item) for item in value]
    return value


def run_whole(program: Program) -> Program:
    """The same one, with steps that every rank runs whole."""
    return replace(program, pipeline={"stages": program.pipeline["stages"], "whole_steps": True})


def random_effects(seed: int, stages: int = 2, *, arrays: bool = False) -> Program:
    """One of infinitely many, always the same for a seed; half of the effects are on `arrays`, where asked for."""
    effects = EFFECTS + ARRAYS * (len(EFFECTS) // len(ARRAYS)) if arrays else EFFECTS
    uses = USES + USES_OF_ARRAYS * len(USES) if arrays else USES
    choose = random.Random(seed + 7 * 10**6)
    statements = []
    for _ in range(choose.randrange(1, 6)):
        place = choose.choice(PLACES)
        effect = choose.choice(effects)
        sources = list(SOURCES["any"])
        if place != "optimizer":
            sources += SOURCES["batch"] * 2
        if place in ("between", "late", "after", "validation"):
            sources += SOURCES["hidden"] * 2
        if place in ("after", "batch end", "validation"):
            sources += SOURCES["loss"] * 2
        if place in IN_STEP[:3] and choose.random() < 0.25:
            effect = choose.choice(uses)
        statements.append(
            Statement(place, choose.choice(CONDITIONS), effect, choose.choice(sources), choose.randrange(10))
        )
    schedule: dict[str, Any] = choose.choice(
        ({"schedule": "1F1B"}, {"schedule": "ZBH1"}, {"schedule": "Interleaved1F1B", "stages_per_rank": 2})
    )
    pipeline = {"stages": stages, "num_microbatches": choose.choice((1, 2, 2, 4, 4)), **schedule}
    return Program(tuple(statements), pipeline, choose.choice((2, 3, 4)), choose.random() < 0.4)


class Left(NamedTuple):
    """What a fit leaves.

    Attributes:
        weights: Of the whole module.
        logs: At its end.
        state: See `Effects.left`.
        warned: What was warned of by this package, beside what every fit is.
    """

    weights: dict[str, Tensor]
    logs: dict[str, float]
    state: dict[str, Any]
    warned: list[str]


def fitted(program: Program, pipeline: dict[str, Any] | None) -> Left | str:
    """Fit it for two epochs; what it leaves, or the text of an error.

    Args:
        program: The module and its data.
        pipeline: Arguments of the strategy; None is one device.
    """
    kind = type("Made", (Effects,), {"__module__": __name__})
    module = kind(program)
    validates = any(one.place == "validation" for one in program.statements)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            run = trainer(pipeline, limit_val_batches=int(validates), **quiet)
            run.fit(module, Data(program.batches))
        except PipelineError as error:
            return f"refused: {error}"
        except Exception as error:
            return f"crashed: {type(error).__name__}: {error}"
    texts = [str(warning.message) for warning in caught]
    told = [text for text in texts if any(words in text for words in _ABOUT_EFFECTS)]
    logs = {key: float(value) for key, value in run.callback_metrics.items()}
    return Left(weights(module), logs, module.left(), told)


def all_fitted(programs: Iterable[Program], *, alone: bool) -> list[Left | str]:
    """Several, one after the other."""
    torch.set_num_threads(1)
    return [fitted(program, None if alone else program.pipeline) for program in programs]


def outcomes_of(programs: list[Program], pool: Pool) -> list[str]:
    """Run programs on one device and over ranks.

    Returns:
        For each "equal", "refused: ...", "warned: ..." where it differs with a warning, "no reference: ..." or
        "wrong: ...".
    """
    expected = all_fitted(programs, alone=True)
    ran = [n for n, left in enumerate(expected) if not isinstance(left, str)]
    rows = pool.outcomes(_over_ranks, [programs[n] for n in ran], group=False, timeout=60.0 + 20 * len(ran))
    ends = [f"no reference: {left}" for left in expected]
    for column, n in enumerate(ran):
        found = [row.value[column] if row.ok else f"crashed: {row.error}" for row in rows]
        ends[n] = _compared(found, expected[n])
    return ends


def _over_ranks(programs: list[Program]) -> list[Left | str]:
    return all_fitted(programs, alone=False)


def _compared(found: list[Any], expected: Any) -> str:
    for kind in ("crashed", "refused"):
        texts = [one for one in found if isinstance(one, str) and one.startswith(kind)]
        if texts:
            return texts[0] if kind == "refused" else f"wrong: {texts}"
    different = [
        f"rank {rank}: {text}" for rank, one in enumerate(found) if (text := _difference(one, expected))
    ]
    if not different:
        raising = [
            v for one in found for v in one.state.values() if isinstance(v, str) and v.startswith("refused")
        ]
        return raising[0] if raising else "equal"
    warned = sorted({text for one in found for text in one.warned})
    return f"warned: {warned[0]}: {different}" if warned else f"wrong: {different}"


def _difference(found: Left, expected: Left) -> str:
    for name, value in expected.weights.items():
        if not torch.allclose(found.weights[name], value, rtol=1e-9, atol=1e-9):
            return f"weight {name} by {(found.weights[name] - value).abs().max():.1e}"
    for name, value in expected.state.items():
        mine = found.state[name]
        if not (isinstance(mine, str) and mine.startswith("refused")) and not _alike(mine, value):
            return f"{name} is {str(mine)[:300]} for {str(value)[:300]}"
    if found.logs.keys() != expected.logs.keys():
        return f"logged {sorted(found.logs)} for {sorted(expected.logs)}"
    for name, number in expected.logs.items():
        if abs(found.logs[name] - number) > 1e-9 * max(1.0, abs(number)):
            return f"logged {name} {found.logs[name]} for {number}"
    return ""


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    if isinstance(one, float) and isinstance(other, int | float):
        return abs(one - other) <= 1e-9 * max(1.0, abs(other))
    return type(one) is type(other) and bool(one == other)
