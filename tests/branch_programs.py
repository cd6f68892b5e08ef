"""Steps in which numbers of the batch decide at random: each run equals one device, or is refused or warned of.

A program is a list of branches, each with where it stands, what it decides by and what it does. Nothing draws:
what a step draws is by micro-batches everywhere. `benchmarks/random_branches.py` runs as many as asked.
"""

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipeline.errors import PipelineError
from tests.pool import Pool
from tests.ranks.lightning_cases import trainer, weights
from tests.ranks.wrong_cases import WIDTH, Layer

LAYERS = 5
Decides = Callable[[Tensor, Tensor, int], bool]
CONDITIONS: dict[str, Decides] = {
    "first": lambda x, y, index: bool(x[0, 0] > 0),
    "last": lambda x, y, index: bool(x[-1, 0] > 0),
    "mean": lambda x, y, index: bool(x.mean() > 0),
    "item of a sum": lambda x, y, index: x[:, 0].sum().item() > 0,
    "any": lambda x, y, index: bool((x[:, 1] > 1.2).any()),
    "all": lambda x, y, index: bool((x[:, 1] > -1.0).all()),
    "largest": lambda x, y, index: float(x.max()) > 2.0,
    "place of the largest": lambda x, y, index: int(x[:, 0].argmax()) % 2 == 0,
    "count": lambda x, y, index: int((x[:, 2] > 0).sum()) > 3,
    "deviation": lambda x, y, index: bool(y.std() > 1.0),
    "list": lambda x, y, index: max(x[:, 0].tolist()) > 1.5,
    "array": lambda x, y, index: bool(x.numpy().mean() > 0),
    "equal": lambda x, y, index: torch.equal(x[:1].sign(), y[:1].sign()),
    "length": lambda x, y, index: len(torch.nonzero(x[:, 0] > 0.8)) > 1,
    "kinds": lambda x, y, index: (x[:, 0] > 0).unique().numel() > 1,
    "index and mean": lambda x, y, index: index % 2 == 1 and bool(x.mean() > 0),
    "index": lambda x, y, index: index % 2 == 1,
}
BETWEEN = (
    "eval", "frozen", "scale", "detach", "no grad", "factor", "skip", "another", "twice", "input", "mixed",
    "centred", "clamped", "buffer", "count", "read",
)  # fmt: skip
AT_END = ("factor of the loss", "part of the loss", "head", "masked", "log")
KEEPS = ("nothing", "nothing", "list", "nested", "length")


class Branch(NamedTuple):
    """One line of a program.

    Attributes:
        place: After which layer.
        condition: By what it decides.
        effect: What it does.
        number: That this may use.
    """

    place: int
    condition: str
    effect: str
    number: int


@dataclass(frozen=True)
class Program:
    """A fit as data.

    Attributes:
        branches: Of the step.
        keeps: What the step keeps of its first layer.
        microbatches: Of a batch.
    """

    branches: tuple[Branch, ...]
    keeps: str
    microbatches: int


def random_branches(seed: int) -> Program:
    """One of infinitely many, always the same for a seed."""
    choose = random.Random(seed)
    branches = [
        Branch(
            choose.randrange(LAYERS), choose.choice(list(CONDITIONS)), choose.choice(BETWEEN + AT_END),
            choose.randrange(10),
        )
        for _ in range(choose.randrange(1, 4))
    ]  # fmt: skip
    return Program(tuple(branches), choose.choice(KEEPS), choose.choice((2, 2, 4)))


class Branching(pl.LightningModule):
    """The module that runs a program."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.program = program
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS)).double()
        self.head = nn.Linear(WIDTH, WIDTH).double()
        self.register_buffer("held", torch.zeros((), dtype=torch.float64))
        self.n, self.items, self.nested = 0, list[Tensor](), {"rows": list[Tensor]()}

    def keep(self, h: Tensor) -> None:
        """What the program keeps."""
        if self.program.keeps in ("list", "length"):
            self.items.append(h)
        elif self.program.keeps == "nested":
            self.nested["rows"].append(h)
        if self.program.keeps == "length":
            len(self.items)

    def stand(self, effect: str, number: int, *, chosen: bool) -> None:
        """Flags, numbers and tensors that outlive the step."""
        if effect == "eval":
            self.layers[3].train(not chosen)
        elif effect == "frozen":
            self.layers[2].requires_grad_(not chosen)
        elif effect == "scale":
            layer: Any = self.layers[number % LAYERS]
            layer.scale = 0.5 if chosen else 1.0
        elif effect == "buffer" and chosen:
            self.held += 1
        elif effect == "count" and chosen:
            self.n += 1

    def between(self, branch: Branch, x: Tensor, h: Tensor, *, chosen: bool) -> Tensor:
        """What a later layer is given."""
        layers, effect = self.layers, branch.effect
        self.stand(effect, branch.number, chosen=chosen)
        made: dict[str, Callable[[], Tensor]] = {
            "detach": lambda: h.detach() if chosen else h,
            "factor": lambda: h * 0.5 if chosen else h,
            "skip": lambda: layers[branch.number % LAYERS](h) if chosen else h,
            "another": lambda: layers[1 if chosen else 2](h),
            "twice": lambda: layers[2](layers[2](h)) if chosen else layers[2](h),
            "input": lambda: h + x if chosen else h - x,
            "mixed": lambda: 0.7 * h + 0.3 * x.flip(0) if chosen else h,
            "centred": lambda: h - x.mean(0) if chosen else h,
            "clamped": lambda: h + (x.clamp(min=0) if chosen else x.abs()),
            "read": lambda: h * (1 + 0.1 * self.n) + 0.01 * self.held,
        }
        if effect == "no grad":
            with torch.set_grad_enabled(not chosen):
                return h + layers[4](h)
        return made[effect]() if effect in made else h

    def ended(self, effect: str, x: Tensor, h: Tensor, loss: Tensor) -> Tensor:
        """The loss, with what was chosen."""
        if effect == "factor of the loss":
            return loss * 2
        if effect == "part of the loss":
            return loss + h.abs().mean()
        if effect == "head":
            return loss + F.l1_loss(self.head(h), x)
        if effect == "log":
            self.log("chosen", h.mean())
        mask = x[:, 0] > 0
        return loss + (h[mask] ** 2).mean() if effect == "masked" and mask.any() else loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The mean squared error."""
        x, y = batch
        h = x
        for place, layer in enumerate(self.layers):
            h = layer(h)
            if not place:
                self.keep(h.detach())
            for branch in self.program.branches:
                if branch.place == place and branch.effect in BETWEEN:
                    h = self.between(branch, x, h, chosen=CONDITIONS[branch.condition](x, y, batch_idx))
        loss = F.mse_loss(h, y)
        for branch in self.program.branches:
            if branch.effect in AT_END and CONDITIONS[branch.condition](x, y, batch_idx):
                loss = self.ended(branch.effect, x, h, loss)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        """SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.05)

    def train_dataloader(self) -> Any:
        """Four batches of eight samples."""
        generator = torch.Generator().manual_seed(self.program.branches[0].number)
        x, y = (torch.randn(32, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
        return DataLoader(TensorDataset(x, y), batch_size=8)


class Left(NamedTuple):
    """What a fit leaves.

    Attributes:
        weights: Of the whole module.
        logs: At its end.
        warned: Of what this package has.
    """

    weights: dict[str, Tensor]
    logs: dict[str, float]
    warned: list[str]


def fitted(program: Program, pipeline: dict[str, Any] | None) -> Left | str:
    """Fit it for two epochs; what it leaves, or the text of an error.

    Args:
        program: The module and its data.
        pipeline: Arguments of the strategy; None is one device.
    """
    torch.set_num_threads(1)
    module = Branching(program)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            run = trainer(pipeline, enable_progress_bar=False, enable_model_summary=False)
            run.fit(module)
        except PipelineError as error:
            return f"refused: {error}"
        except RuntimeError as error:
            return f"ended: {error}"
    told = [str(one.message) for one in caught if "training_step" in str(one.message)]
    return Left(weights(module), {k: float(v) for k, v in run.callback_metrics.items()}, told)


def outcome_of(program: Program, pool: Pool | None) -> str:
    """Run a program on one device, and on one stage or over two ranks.

    Returns:
        "equal", "needless: ..." for one that is equal and warned of, "refused: ...", "ended: ...",
        "warned: ..." where it differs with a warning, "wrong: ...", or "no reference: ...".
    """
    expected = fitted(program, None)
    if isinstance(expected, str):
        return f"no reference: {expected}"
    pipeline = {"stages": 1 if pool is None else 2, "num_microbatches": program.microbatches}
    found = [fitted(program, pipeline)] if pool is None else pool(fitted, program, pipeline, group=False)
    said = ""
    for one in found:
        if isinstance(one, str):
            return one
        said = said or next(iter(one.warned), "")
    return _judged(expected, [one for one in found if isinstance(one, Left)], said)


def _judged(expected: Left, found: list[Left], said: str) -> str:
    differs = []
    for one in found:
        differs += [name for name, value in expected.weights.items()
                    if not torch.allclose(one.weights[name], value, rtol=1e-9, atol=1e-10)]  # fmt: skip
        differs += [name for name, value in expected.logs.items()
                    if abs(one.logs.get(name, float("inf")) - value) > 1e-9]  # fmt: skip
    if differs:
        return f"warned: {said}" if said else f"wrong: {sorted(set(differs))}"
    return f"needless: {said}" if said else "equal"
