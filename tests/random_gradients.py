"""Random modules that read and change gradients in hooks, to run on one device and over stages.

A case says which parameters an optimizer has, which are frozen, what hooks do with gradients and when they are zeroed;
hooks note the norm of each parameter's gradient, None where there is none. `tests/ranks/test_random_gradients.py` runs
a few, `benchmarks/random_gradients.py` as many as asked.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_

from tests.ranks.lightning_cases import FEATURES, TARGETS, loader, trainer

_HOOKS = (
    "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_zero_grad", "on_before_backward",
    "on_after_backward", "on_before_optimizer_step", "on_train_batch_end", "on_validation_start",
    "on_validation_epoch_end", "on_train_epoch_end", "on_train_end",
)  # fmt: skip
_TOUCHED = _HOOKS[2:8]
_PARTS = ("first", "last", "scale")
Notes = list[Any]


@dataclass(frozen=True)
class Case:
    """What a run is given.

    Attributes:
        seed: It was drawn from.
        has: Which parameters the optimizer has.
        optimizer: Its kind.
        manual: When manual optimization zeroes gradients; empty: it is automatic.
        skips: What is left out in some batches.
        frozen: A layer without gradients, or "epoch": one that changes with the epoch.
        zeroes: What `optimizer_zero_grad` does; empty: it is Lightning's.
        hooked: Hooks on gradients.
        backward: What the module's own does; empty: it is Lightning's.
        touches: A hook that changes gradients, and how.
        clips_all: Whether gradients of all parameters are clipped in a hook.
        reads: Hooks that note gradients.
        options: Of the Trainer.
    """

    seed: int
    has: str
    optimizer: str
    manual: str
    skips: str
    frozen: str
    zeroes: str
    hooked: str
    backward: str
    touches: tuple[str, str]
    clips_all: bool
    reads: tuple[str, ...]
    options: dict[str, Any]


def drawn(seed: int) -> Case:
    """A case; the same for the same seed."""
    draw = random.Random(seed)

    def one(*values: str, chance: float) -> str:
        return draw.choice(values) if draw.random() < chance else ""

    manual = one("before", "after", "accumulated", chance=0.25)
    options: dict[str, Any] = {"max_epochs": 2}
    if not manual and draw.random() < 0.3:
        options["accumulate_grad_batches"] = draw.choice([2, 3])
    if not manual and draw.random() < 0.3:
        options.update(gradient_clip_val=0.05, gradient_clip_algorithm=draw.choice(["norm", "value"]))
    if draw.random() < 0.2:
        options["max_steps"] = 4
    return Case(
        seed,
        draw.choice(["all", "all", "layers", "head", "groups", "trained"]),
        draw.choice(["SGD", "momentum", "Adam", "AdamW"]),
        manual,
        one("layer", "freezes", *(() if manual else ("none",)), chance=0.5),
        one("first", "third", "epoch", chance=0.4),
        one("every second", "to zero", "module", "nothing", chance=0.4),
        one("doubles", "clamps", "after", chance=0.4),
        "" if manual else one("keeps", "scales", "some", chance=0.2),
        (draw.choice(_TOUCHED), one("none", "halves", "sets", "adds", "zeroes", chance=0.5)),
        draw.random() < 0.2,
        tuple(draw.sample(_HOOKS, draw.choice([1, 2, 3, 6]))),
        options,
    )


class Drawn(pl.LightningModule):
    """Layers with parameters between them, one that is never called, and one that some batches call."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(case.seed)
        self.case, self.notes = case, Notes()
        self.automatic_optimization = not case.manual
        self.first, self.second, self.third = nn.Linear(FEATURES, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.last, self.beside, self.unused = nn.Linear(8, TARGETS), nn.Linear(8, TARGETS), nn.Linear(2, 2)
        self.norm, self.scale = nn.LayerNorm(8), nn.Parameter(torch.ones(8))
        self.double()
        if case.frozen in ("first", "third"):
            getattr(self, case.frozen).requires_grad_(False)
        self._hook()

    def _hook(self) -> None:
        if self.case.hooked == "doubles":
            self.second.weight.register_hook(lambda gradient: gradient * 2)
        if self.case.hooked == "clamps":
            for parameter in filter(lambda one: one.requires_grad, self.parameters()):
                parameter.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))
        if self.case.hooked == "after":
            self.norm.weight.register_post_accumulate_grad_hook(_halve)

    def loss(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.norm(self.second(torch.tanh(self.first(batch[0])))) * self.scale
        hidden = torch.relu(self.third(hidden))
        loss = mse_loss(self.last(hidden), batch[1])
        if self.case.skips == "layer" and batch_idx % 2 == 0:
            loss = loss + mse_loss(self.beside(hidden), batch[1])
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if self.case.skips == "none" and batch_idx == 1:
            return None
        if self.case.skips == "freezes":
            self.first.requires_grad_(batch_idx % 2 == 0)
        loss = self.loss(batch, batch_idx)
        self.log("loss", loss)
        if not self.case.manual:
            return loss
        optimizer: Any = self.optimizers()
        if self.case.manual == "before":
            optimizer.zero_grad()
        self.manual_backward(loss)
        if self.case.manual != "accumulated" or batch_idx % 2:
            optimizer.step()
        if self.case.manual == "after" or (self.case.manual == "accumulated" and batch_idx % 2):
            optimizer.zero_grad()
        return None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch, 0))

    def configure_optimizers(self) -> Any:
        named = dict(self.named_parameters())
        layers = [one for name, one in named.items() if "." in name and not name.startswith("norm")]
        groups: Any = {
            "all": list(named.values()),
            "layers": layers,
            "head": list(self.last.parameters()),
            "groups": [{"params": list(self.first.parameters()), "lr": 0.01}, {"params": [self.scale]}],
            "trained": [one for one in named.values() if one.requires_grad],
        }[self.case.has]
        made: dict[str, Callable[[], Any]] = {
            "SGD": partial(torch.optim.SGD, groups, 0.1),
            "momentum": partial(torch.optim.SGD, groups, 0.1, momentum=0.9),
            "Adam": partial(torch.optim.Adam, groups, 0.01),
            "AdamW": partial(torch.optim.AdamW, groups, 0.01, weight_decay=0.1),
        }
        return made[self.case.optimizer]()

    def at(self, hook: str) -> None:
        """What the case does in a hook."""
        if hook == "on_train_epoch_start" and self.case.frozen == "epoch":
            self.second.weight.requires_grad_(self.current_epoch % 2 == 0)
        if hook in self.case.reads:
            norms = {name: _norm(parameter) for name, parameter in self.named_parameters()}
            self.notes.append((hook, self.trainer.global_step, norms))
        if hook == self.case.touches[0]:
            for name, parameter in self.named_parameters():
                if name.startswith(_PARTS) and parameter.grad is not None:
                    _touch(parameter, self.case.touches[1])
        if hook == "on_before_optimizer_step" and self.case.clips_all:
            self.notes.append(float(clip_grad_norm_(self.parameters(), 0.1)))


def _norm(parameter: Tensor) -> float | None:
    return None if parameter.grad is None else float(parameter.grad.norm())


def _halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad / 2


def _touch(parameter: Tensor, how: str) -> None:
    gradient = parameter.grad
    assert gradient is not None
    if how == "none":
        parameter.grad = None
    elif how == "halves":
        gradient.mul_(0.5)
    elif how == "sets":
        parameter.grad = gradient * 0.25
    elif how == "adds":
        gradient += 0.01
    elif how == "zeroes":
        gradient.zero_()


def _zero_grad(module: Drawn, epoch: int, batch_idx: int, optimizer: Any) -> None:
    how = module.case.zeroes
    if how == "module":
        module.zero_grad()
    elif how == "to zero":
        optimizer.zero_grad(set_to_none=False)
    elif how == "every second" and batch_idx % 2 == 0:
        optimizer.zero_grad()


def _backward(module: Drawn, loss: Tensor, *args: Any, **options: Any) -> None:
    how = module.case.backward
    if how == "keeps":
        loss.backward(retain_graph=True)
    elif how == "scales":
        (3 * loss + 0.01 * module.scale.square().sum()).backward()
    elif module.trainer.fit_loop.batch_idx != 1:
        loss.backward()


def made(seed: int) -> Drawn:
    """The module of a case: with the hooks alone that it asks for, as others change nothing on one device."""
    case = drawn(seed)
    asked = {*case.reads, *((case.touches[0],) if case.touches[1] else ())}
    asked |= {"on_train_epoch_start"} if case.frozen == "epoch" else set()
    asked |= {"on_before_optimizer_step"} if case.clips_all else set()
    methods: dict[str, Any] = {name: _calls(name) for name in asked}
    methods.update({"optimizer_zero_grad": _zero_grad} if case.zeroes else {})
    methods.update({"backward": _backward} if case.backward else {})
    found: Drawn = type("DrawnWithHooks", (Drawn,), methods)(case)
    return found


def _calls(name: str) -> Callable[..., None]:
    return lambda module, *args: module.at(name)


def run(pipeline: dict[str, Any] | None, seed: int) -> tuple[Any, Notes]:
    """Weights and logs of a case after fit, and what hooks have noted."""
    module = made(seed)
    fit = trainer(pipeline, **module.case.options)
    fit.fit(module, loader(), loader(seed=4))
    logs = {name: float(value) for name, value in fit.callback_metrics.items()}
    return (dict(module.state_dict()), logs), module.notes
