"""More kinds of random steps than `programs.py` has, which stays as it is so that its seeds mean what they meant.

Hooks, flags and gradient modes toggled in the step, nested regions, weights written through `.data`, lists and
counters kept by the module, stopped gradients, auxiliary losses, views written in place, layers that run as often
as an attribute says, and batches of other sizes from step to step. The reference is one process with the same
micro-batches, or, where a program draws or leaves something behind in several micro-batches, the package with
one stage. What the step leaves behind is compared too.

`whole_outcome_of` runs steps whose losses are divided by counts; each equals the whole batch on one device.
"""

import collections
import random
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_pipeline.errors import PipelineError, PlaceholderError
from tests.unit.split.pipe import Outcome, alone, assert_same, assert_whole, piped
from tests.unit.split.programs import DRAWING, UNITS, WIDTH, Program, Step, Unit, _State

KINDS = (
    "plain", "plain", "plain", "dropout", "in place", "checkpoint", "gradient", "pair", "forward hook",
    "backward hook", "counts",
)  # fmt: skip
ALIKE = (
    "unit", "unit", "unit", "again", "residual", "sin", "scale", "write", "region", "region of two",
    "region of glue", "parameter", "skip", "numbers", "nested region", "gradient hook", "forward hook", "pre hook",
    "frozen", "no_grad unit", "grad mode", "detach", "stop", "aux", "loop", "view", "clone", "choose", "chunk",
    "log twice", "in place on output", "looked at",
)  # fmt: skip
LEAVING = (
    "append", "last", "count", "weight data", "weights of two", "weight in place", "buffer", "eval unit",
    "attribute", "read", "eval", "train", "unit attribute",
)  # fmt: skip
OTHERS = ("dropout", "noise", "seed", "generator", "fork", "log", "no_grad target")


class WideUnit(Unit):
    """More kinds."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.calls = 0
        if kind == "forward hook":
            self.m.register_forward_hook(lambda module, args, output: output * 0.9)
        if kind == "backward hook":
            self.register_full_backward_hook(_halve)

    def forward(self, x: Tensor) -> Any:
        """The layer, by its kind."""
        if self.kind == "pair":
            return self.norm(self.m(x)), x.mean(-1, keepdim=True)
        if self.kind == "counts":
            self.calls += 1
        return super().forward(x)


def _halve(module: nn.Module, before: Any, after: Any) -> Any:
    return None if before[0] is None else (before[0] * 0.5,)


@dataclass(frozen=True)
class WideProgram(Program):
    """A step as data.

    Attributes:
        sizes: Samples of the batch of each step.
        depths: How often a loop runs in each step.
        loss: What the step's loss is divided by.
    """

    sizes: tuple[int, ...] = (4,)
    depths: tuple[int, ...] = (0,)
    loss: str = "mean"

    @property
    def leaves(self) -> bool:
        """Whether a step leaves something behind that micro-batches put together."""
        return "counts" in self.kinds or bool({name for name, _ in self.statements} & set(LEAVING))


class WideStep(Step):
    """The module that runs a wide program."""

    program: WideProgram

    def __init__(self, program: WideProgram, *, checkpoints: bool = True) -> None:
        super().__init__(program, checkpoints=checkpoints)
        self.layers = nn.ModuleList(WideUnit(kind) for kind in program.kinds)
        self.history: list[Tensor] = []
        self.count = self.depth = 0
        self.double()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Run the statements, one after another."""
        state = _Wide(batch["x"] + 0, batch["x"], collections.deque(self.layers), self)
        for name, number in self.program.statements:
            getattr(state, name.replace(" ", "_"))(number)
        while state.left:
            state.unit(0)
        loss = _LOSSES[self.program.loss](state.h, batch) + sum(state.losses)
        self.log("loss", loss)
        return loss


@dataclass
class _Wide(_State):
    losses: list[Tensor] = field(default_factory=list)

    def _run(self, layer: nn.Module, h: Tensor) -> Tensor:
        out = layer(h)
        return out[0] + 0.1 * out[1] if isinstance(out, tuple) else out

    def _next(self) -> Any:
        layer = super()._next()
        return lambda h: self._run(layer, h)

    def again(self, number: int) -> None:
        if self.used:
            self.h = self.h + self._run(self.used[-1], self.h.sin())

    def no_grad_target(self, number: int) -> None:
        with torch.no_grad():
            target = self._run(self.used[-1], self.h) if self.used else self.h
        self.h = self.h + 0.1 * target

    def nested_region(self, number: int) -> None:
        first, second = self._next(), self._next()
        region = self.module._region
        self.h = region(lambda v: region(lambda w: second(w).cos(), first(v).sin()) * v, self.h)

    def gradient_hook(self, number: int) -> None:
        self.unit(0)
        if self.h.requires_grad:
            self.h.register_hook(lambda gradient: gradient * (1 + number / 10))

    def _hooked(self, register: str, hook: Any) -> None:
        run = self._next()
        handle = getattr(self.used[-1], register)(hook)
        self.h = run(self.h)
        handle.remove()

    def forward_hook(self, number: int) -> None:
        self._hooked(
            "register_forward_hook", lambda module, args, out: None if isinstance(out, tuple) else out * 0.9
        )

    def pre_hook(self, number: int) -> None:
        self._hooked("register_forward_pre_hook", lambda module, args: (args[0] * 1.1,))

    def frozen(self, number: int) -> None:
        run = self._next()
        self.used[-1].requires_grad_(False)
        self.h = run(self.h)
        self.used[-1].requires_grad_(True)

    def no_grad_unit(self, number: int) -> None:
        run = self._next()
        with torch.no_grad():
            self.h = run(self.h)

    def grad_mode(self, number: int) -> None:
        run = self._next()
        torch.set_grad_enabled(False)
        target = run(self.h)
        torch.set_grad_enabled(True)
        self.h = self.h + 0.1 * target

    def detach(self, number: int) -> None:
        self.h = self.h.detach() if number % 2 else self.h + self.h.detach().sin()

    def stop(self, number: int) -> None:
        self.h = self.h + (self.h.sin() - self.h).detach()

    def aux(self, number: int) -> None:
        self.losses.append(0.1 * self.h.pow(2).mean())

    def loop(self, number: int) -> None:
        run = self._next()
        for _ in range(1 + self.module.depth):
            self.h = run(self.h)

    def view(self, number: int) -> None:
        self.h = self.h * 1
        self.h[:, :2].mul_(0.5)

    def clone(self, number: int) -> None:
        copy = self.h.clone()
        copy[:, number % WIDTH] = 0.0
        self.h = copy

    def choose(self, number: int) -> None:
        self.h = torch.where(self.x > 0, self.h, self.h * 0.5)

    def chunk(self, number: int) -> None:
        one, other = self.h.chunk(2, -1)
        self.h = torch.cat([other.sin(), one], -1)

    def log_twice(self, number: int) -> None:
        self.module.log("twice", self.h.mean(), on_step=True, on_epoch=True)
        self.module.log("number", float(number))

    def in_place_on_output(self, number: int) -> None:
        self.unit(0)
        self.h.mul_(0.9)

    def looked_at(self, number: int) -> None:
        if self.h.requires_grad and torch.is_grad_enabled():
            self.h = self.h * 1.1

    # ---- what is left behind

    def append(self, number: int) -> None:
        self.module.history.append(self.h.detach().mean())

    def last(self, number: int) -> None:
        if self.module.history:
            self.h = self.h + self.module.history[-1]

    def count(self, number: int) -> None:
        self.module.count += 1

    def _weight(self, number: int) -> Any:
        return self.module.layers[number % UNITS].m.weight

    def weight_data(self, number: int) -> None:
        self._weight(number).data = self._weight(number).data * 0.9

    def weights_of_two(self, number: int) -> None:
        one, other = self._weight(number), self._weight(number + 1)
        one.data = one.data * 0.5 + other.data * 0.5

    def weight_in_place(self, number: int) -> None:
        self._weight(number).data.mul_(0.95)

    def buffer(self, number: int) -> None:
        self.module.running.mul_(0.9).add_(0.1 * self.h.detach().mean(0))

    def eval_unit(self, number: int) -> None:
        run = self._next()
        self.used[-1].eval()
        with torch.no_grad():
            target = run(self.h)
        self.used[-1].train()
        self.h = self.h + 0.1 * target

    def unit_attribute(self, number: int) -> None:
        self.module.layers[number % UNITS].temperature = 1 + number / 10


def _masked(h: Tensor, batch: dict[str, Tensor]) -> Tensor:
    each = (h - batch["y"]).pow(2).mean(-1)
    return (each * batch["mask"]).sum() / batch["mask"].sum()


_WEIGHTS = torch.tensor([0.5, 1.0, 2.0, 0.25], dtype=torch.float64)
_LOSSES: dict[str, Any] = {
    "mean": lambda h, b: F.mse_loss(h, b["y"]),
    "sum": lambda h, b: F.mse_loss(h, b["y"], reduction="sum"),
    "ignored": lambda h, b: F.cross_entropy(h, b["labels"]),
    "classes": lambda h, b: F.cross_entropy(h, b["labels"], weight=_WEIGHTS),
    "smoothed": lambda h, b: F.cross_entropy(h, b["labels"], label_smoothing=0.1),
    "masked": _masked,
    "counted": lambda h, b: (
        F.cross_entropy(h, b["labels"], reduction="sum") / (b["labels"] != -100).sum().clamp(min=1)
    ),
    "two": lambda h, b: F.cross_entropy(h, b["labels"]) + 0.5 * _masked(h, b),
    "scaled": lambda h, b: 0.3 * F.nll_loss(F.log_softmax(h, -1), b["labels"], weight=_WEIGHTS),
}


class _Alone(WideStep):
    """On one device: each micro-batch begins with the modes and attributes of the batch's start."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Run the statements, one after another."""
        if not self.program.leaves:
            self.temperature = 1.0
            self.train()
        return super().training_step(batch, batch_idx)


def wide_batch(size: int = 4) -> dict[str, Tensor]:
    """Inputs, targets, labels of which about a third is left out, and a mask."""
    generator = torch.Generator().manual_seed(size)
    options: dict[str, Any] = {"dtype": torch.float64, "generator": generator}
    labels = torch.randint(0, WIDTH, (size,), generator=generator)
    labels[torch.rand(size, generator=generator) < 0.3] = -100
    labels[0] = 1
    mask = (torch.rand(size, generator=generator) < 0.6).double()
    mask[0] = 1.0
    return {"x": torch.randn(size, WIDTH, **options), "y": torch.randn(size, WIDTH, **options),
            "labels": labels, "mask": mask}  # fmt: skip


def wide_program(seed: int) -> WideProgram:
    """One of infinitely many, always the same for a seed."""
    choose = random.Random(seed + 10**6)
    names = ALIKE + choose.choice(((), (), LEAVING, OTHERS, LEAVING + OTHERS))
    statements = tuple((choose.choice(names), choose.randrange(10)) for _ in range(choose.randrange(3, 12)))
    steps = choose.choice((1, 1, 2))
    return WideProgram(
        tuple(choose.choice(KINDS) for _ in range(UNITS)), statements, choose.random() < 0.3,
        choose.choice((2, 3)), choose.choice((1, 2, 4)), choose.random() < 0.4, choose.random() < 0.3,
        tuple(choose.choice((4, 4, 5, 6)) for _ in range(steps)), tuple(choose.randrange(2) for _ in range(steps)),
    )  # fmt: skip


def whole_program(seed: int) -> WideProgram:
    """One without draws and effects, with a loss that is divided by something, and ragged micro-batches."""
    choose = random.Random(seed + 2 * 10**6)
    statements = tuple((choose.choice(ALIKE), choose.randrange(10)) for _ in range(choose.randrange(2, 9)))
    kinds = ("plain", "plain", "in place", "checkpoint", "pair")
    return WideProgram(
        tuple(choose.choice(kinds) for _ in range(UNITS)),
        tuple(pair for pair in statements if pair[0] not in ("aux", "log twice")),
        False, choose.choice((2, 3)), choose.choice((1, 2, 4, 7)), choose.random() < 0.3, False,
        (choose.randrange(4, 12),), (choose.randrange(2),), choose.choice(sorted(_LOSSES)),
    )  # fmt: skip


def _made(program: WideProgram, kind: type[WideStep] = WideStep, **options: Any) -> WideStep:
    torch.manual_seed(0)
    return kind(program, **options)


def wide_outcome_of(program: WideProgram) -> str:
    """Run one program.

    Returns:
        "equal", "refused: ..." or "no reference" where one device cannot run it.

    Raises:
        AssertionError: The numbers, or what the step leaves behind, are wrong.
    """

    def each(module: Any, step: int) -> dict[str, Tensor]:
        module.depth = program.depths[step]
        return wide_batch(program.sizes[step])

    number, first = program.num_microbatches, wide_batch(program.sizes[0])
    options: dict[str, Any] = {"steps": len(program.sizes), "each": each}
    draws = program.draws or bool(DRAWING & {name for name, _ in program.statements})
    names = {name for name, _ in program.statements}
    try:
        expected = alone(_made(program, _Alone), first, num_microbatches=number, **options)
        if draws or (program.leaves and number > 1):  # where modes change, a region runs again in another
            checkpoints = bool(names & {"eval", "train", "eval unit", "attribute", "unit attribute"})
            expected = piped(
                _made(program, checkpoints=checkpoints or not draws), first, 1, number, **options
            )
    except (RuntimeError, PipelineError):
        return "no reference"
    try:
        found = piped(
            _made(program), first, program.stages, number, ranks=program.ranks,
            split_backward=program.split_backward, **options,
        )  # fmt: skip
    except PipelineError as error:
        return f"refused: {error}"
    assert_same(found, expected)
    try:
        _assert_left_alike(found, expected)
    except PlaceholderError as error:  # it says that it cannot be what one device has
        return f"refused: {error}"
    return "equal"


def _assert_left_alike(found: Outcome, expected: Outcome) -> None:
    """Modes, flags, attributes and weights after the last step."""
    for split in dict.fromkeys(found.splits):
        mine, theirs = split.root, expected.module or expected.splits[0].root
        for name, part in theirs.named_modules():
            assert mine.get_submodule(name).training == part.training, f"mode of {name!r}"
        flags = {name: tensor.requires_grad for name, tensor in theirs.named_parameters()}
        assert {name: tensor.requires_grad for name, tensor in mine.named_parameters()} == flags
        assert (mine.temperature, mine.count) == (theirs.temperature, theirs.count)
        own = {name: tensor.detach() for name, tensor in split.owned_parameters()}
        for name, tensor in theirs.named_parameters():
            if name in own:
                torch.testing.assert_close(
                    own[name], tensor.detach(), rtol=1e-10, atol=1e-10, msg=f"weight {name}"
                )
        if split.has_last_stage:
            assert len(mine.history) == len(theirs.history), "the list"
            for one, other in zip(mine.history, theirs.history, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10, msg="the list")


def whole_outcome_of(program: WideProgram) -> str:
    """Run a program whose gradients, loss and logs are to be those of the whole batch on one device.

    Returns:
        "equal", "refused: ..." or "no reference".

    Raises:
        AssertionError: The numbers are wrong.
    """
    module, batch = _made(program), wide_batch(program.sizes[0])
    module.depth = program.depths[0]
    try:
        alone(module, batch, num_microbatches=1)
    except RuntimeError:
        return "no reference"
    try:
        assert_whole(
            module, batch, program.stages, program.num_microbatches, split_backward=program.split_backward
        )
    except PipelineError as error:
        return f"refused: {error}"
    return "equal"
