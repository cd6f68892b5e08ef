"""Random steps through random cuts: each equals its reference or is refused by one of our errors.

A program is a list of statements: units (called once or twice), glue, dropout, writes in place, regions of
activation checkpointing, seeds of the user's own, inner gradients, attributes, modes, and logs. The
reference is one process that runs the same micro-batches; where a program draws random numbers without a
seed of its own, whose numbers are documented to differ, it is the same package with one stage and without
checkpoints. Every gradient, loss, logged value and buffer is compared, in float64. Programs that one device
cannot run do not count.
"""

import collections
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_pipeline.errors import PipelineError
from tests.unit.split.pipe import Module, alone, assert_same, piped

WIDTH = 4
UNITS = 5
STATEMENTS = (
    "unit", "unit", "unit", "again", "residual", "sin", "scale", "dropout", "noise", "write", "region",
    "region of two", "region of glue", "seed", "generator", "fork", "parameter", "skip", "attribute", "read",
    "eval", "train", "no_grad target", "log", "numbers",
)  # fmt: skip
BY_VALUE = (  # what units compute steers code, or chooses rows, before other units are called
    "branch", "number", "rows", "chosen", "different", "guard", "set by value", "region by value",
)  # fmt: skip
DRAWING = frozenset({"dropout", "noise"})


class Unit(nn.Module):
    """One of several kinds of layer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.m, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.temperature = 1.0

    def forward(self, x: Tensor) -> Tensor:
        """The layer, by its kind."""
        if self.kind == "dropout":
            return F.dropout(self.m(x.tanh()), 0.3, self.training)
        if self.kind == "in place":
            return self.m(x).mul_(self.temperature).add_(x)
        if self.kind == "checkpoint":
            inner: Tensor = checkpoint(lambda v: self.norm(self.m(v)).sin(), x, use_reentrant=False)
            return inner
        if self.kind == "gradient" and torch.is_grad_enabled() and x.requires_grad:
            (force,) = torch.autograd.grad(self.m(x).pow(2).sum(), x, create_graph=True)
            return self.m(x) + 0.1 * force
        return self.norm(self.m(x)) * self.temperature


@dataclass(frozen=True)
class Program:
    """A step as data.

    Attributes:
        kinds: Of each unit.
        statements: What the step does: a name and a number that it may use.
        reentrant: The mode of its checkpoints.
        stages: To cut it into.
        num_microbatches: Per batch.
        split_backward: Whether the plan has I and W.
        folded: Whether two stages are on the first rank.
    """

    kinds: tuple[str, ...]
    statements: tuple[tuple[str, int], ...]
    reentrant: bool = False
    stages: int = 2
    num_microbatches: int = 2
    split_backward: bool = False
    folded: bool = False

    @property
    def draws(self) -> bool:
        """Whether it draws numbers that are documented to differ from those of one device."""
        return bool(DRAWING & {name for name, _ in self.statements}) or "dropout" in self.kinds

    @property
    def ranks(self) -> list[list[int]]:
        """The stages of each rank."""
        if self.folded and self.stages == 3:
            return [[0, 2], [1]]
        return [[stage] for stage in range(self.stages)]


class Step(Module):
    """The module that runs a program."""

    def __init__(self, program: Program, *, checkpoints: bool = True) -> None:
        super().__init__()
        self.program, self.checkpoints = program, checkpoints
        self.layers = nn.ModuleList(Unit(kind) for kind in program.kinds)
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("running", torch.zeros(WIDTH))
        self.temperature = 1.0
        self.double()

    def _region(self, function: Any, h: Tensor) -> Tensor:
        if not self.checkpoints:
            trains = torch.is_grad_enabled() and (h.requires_grad or not self.program.reentrant)
            with torch.set_grad_enabled(trains):
                result: Tensor = function(h)
            return result
        result = checkpoint(function, h, use_reentrant=self.program.reentrant)
        return result

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Run the statements, one after another."""
        state = _State(batch["x"] + 0, batch["x"], collections.deque(self.layers), self)
        for name, number in self.program.statements:
            getattr(state, name.replace(" ", "_"))(number)
        while state.left:
            state.unit(0)
        loss = F.mse_loss(state.h, batch["y"])
        self.log("loss", loss)
        return loss


class Alone(Step):
    """The same on one device: each micro-batch begins with the modes and attributes of the batch's start."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Run the statements, one after another."""
        self.temperature = 1.0
        self.train()
        return super().training_step(batch, batch_idx)


@dataclass
class _State:
    h: Tensor
    x: Tensor
    left: "collections.deque[nn.Module]"
    module: Step
    past: list[Tensor] = field(default_factory=list)
    used: list[nn.Module] = field(default_factory=list)

    def _next(self) -> nn.Module:
        layer = self.left.popleft() if self.left else self.module.layers[-1]
        self.used.append(layer)
        return layer

    def unit(self, number: int) -> None:
        self.past.append(self.h)
        self.h = self._next()(self.h)

    def again(self, number: int) -> None:
        if self.used:
            self.h = self.h + self.used[-1](self.h.sin())

    def residual(self, number: int) -> None:
        before = self.h
        self.unit(0)
        self.h = self.h + before

    def sin(self, number: int) -> None:
        self.h = self.h.sin()

    def scale(self, number: int) -> None:
        self.h = self.h * self.module.temperature + number / 10

    def dropout(self, number: int) -> None:
        self.h = F.dropout(self.h, 0.2, self.module.training)

    def noise(self, number: int) -> None:
        self.h = self.h + 0.1 * torch.randn_like(self.h)

    def write(self, number: int) -> None:
        self.h = self.h * 1 if number % 2 else self.h
        self.h += 0.5
        self.h[:, number % WIDTH] *= 0.7

    def region(self, number: int) -> None:
        layer = self._next()
        self.h = self.module._region(lambda v: layer(v).sin() if number % 2 else layer(v), self.h)

    def region_of_two(self, number: int) -> None:
        first, second = self._next(), self._next()
        rate = 0.2 if self.module.program.draws else 0.0
        self.h = self.module._region(lambda v: second(F.dropout(first(v).tanh(), rate)).sin(), self.h)

    def region_of_glue(self, number: int) -> None:
        self.h = self.module._region(lambda v: (v.sin() * 2).cos() * v, self.h)

    def seed(self, number: int) -> None:
        if not self.module.program.draws:
            torch.manual_seed(number)
            self.h = self.h + torch.rand(WIDTH, dtype=self.h.dtype) + F.dropout(self.h, 0.3)

    def generator(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        self.h = self.h + torch.empty_like(self.h).normal_(generator=generator)

    def fork(self, number: int) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(number)
            self.h = self.h * torch.rand_like(self.h)

    def parameter(self, number: int) -> None:
        self.h = self.h + self.module.bias

    def skip(self, number: int) -> None:
        if self.past:
            self.h = self.h + self.past[number % len(self.past)]

    def attribute(self, number: int) -> None:
        self.module.temperature = 1 + number / 10

    def read(self, number: int) -> None:
        self.h = self.h * self.module.temperature

    def eval(self, number: int) -> None:
        self.module.eval()

    def train(self, number: int) -> None:
        self.module.train()

    def no_grad_target(self, number: int) -> None:
        with torch.no_grad():
            target = self.used[-1](self.h) if self.used else self.h
        self.h = self.h + 0.1 * target

    def log(self, number: int) -> None:
        self.module.log(f"value {number}", self.h.mean())

    def numbers(self, number: int) -> None:
        self.h = self.h * self.x[:, :1].clamp(-1, 1)

    def branch(self, number: int) -> None:
        self.h = self.h * 2 if self.h.detach().mean() > number / 10 - 0.5 else self.h.sin()

    def number(self, number: int) -> None:
        self.h = self.h / (0.5 + self.h.detach().abs().max().item())

    def rows(self, number: int) -> None:
        places = torch.nonzero(self.h.detach().mean(-1) > number / 10 - 0.5)[:, 0]
        self.h = self.h.index_add(0, places, self.h[places].cos())

    def chosen(self, number: int) -> None:
        self.h = self.h + 0.1 * self.h[self.h > number / 10].sum()

    def different(self, number: int) -> None:
        classes, which = torch.unique(self.h.detach().argmax(-1), return_inverse=True)
        self.h = self.h * (1 + torch.arange(len(classes)).to(self.h)[which, None])

    def guard(self, number: int) -> None:
        assert torch.isfinite(self.h).all(), "not finite"
        if (self.h > 1e9).any():
            raise ValueError("too large")

    def set_by_value(self, number: int) -> None:
        if self.h.detach().max() > number / 10:
            self.module.temperature = 1 + number / 10

    def region_by_value(self, number: int) -> None:
        layer = self._next()
        self.h = self.module._region(lambda v: layer(v) * (2 if v.detach().mean() > 0 else 3), self.h)


def random_program(seed: int, more: Sequence[str] = ()) -> Program:
    """One of infinitely many, always the same for a seed.

    Args:
        seed: Says which.
        more: Statements that it may have beside `STATEMENTS`.
    """
    choose = random.Random(seed)
    kinds = ("plain", "plain", "dropout", "in place", "checkpoint", "gradient")
    statements = tuple(
        (choose.choice((*STATEMENTS, *more)), choose.randrange(10)) for _ in range(choose.randrange(3, 12))
    )
    return Program(
        tuple(choose.choice(kinds) for _ in range(UNITS)), statements, choose.random() < 0.3,
        choose.choice((2, 3)), choose.choice((1, 2, 4)), choose.random() < 0.4, choose.random() < 0.3,
    )  # fmt: skip


def batch_of(size: int = 4) -> dict[str, Tensor]:
    """Inputs and targets."""
    generator = torch.Generator().manual_seed(1)
    options: dict[str, Any] = {"dtype": torch.float64, "generator": generator}
    return {"x": torch.randn(size, WIDTH, **options), "y": torch.randn(size, WIDTH, **options)}


def made(program: Program, kind: type[Step] = Step, **options: Any) -> Step:
    """Its module, with weights that depend on the program only."""
    torch.manual_seed(0)
    return kind(program, **options)


def outcome_of(program: Program) -> str:
    """Run one program.

    Returns:
        "equal", "refused: ..." or "no reference" where one device cannot run it.

    Raises:
        AssertionError: The numbers are wrong.
    """
    number = program.num_microbatches
    try:
        expected = alone(made(program, Alone), batch_of(), num_microbatches=number)
        if program.draws:
            # Where modes change, one device runs a region again in the mode that the step ends in. In a
            # reentrant one that is refused where it matters.
            modes = {"eval", "train"} & {name for name, _ in program.statements}
            changes = bool(modes) and not program.reentrant
            expected = piped(made(program, checkpoints=changes), batch_of(), 1, number)
    except (RuntimeError, PipelineError):
        return "no reference"
    try:
        found = piped(
            made(program), batch_of(), program.stages, number, ranks=program.ranks,
            split_backward=program.split_backward,
        )  # fmt: skip
    except PipelineError as error:
        return f"refused: {error}"
    assert_same(found, expected)
    return "equal"
