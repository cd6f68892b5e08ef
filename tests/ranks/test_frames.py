"""How deep the user's own unit, and the send to the next stage, lie below the strategy's hook."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_pipeline.wire import Link
from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, loader, trainer

Ranks = Callable[[int], Pool]
PACKAGE = Path(sys.modules["lightning_pipeline"].__file__ or "").parent
TO_THE_UNIT, TO_THE_SEND = 8, 7


def own_frames() -> list[str]:
    """Our functions on the stack, from the strategy's hook down."""
    found, frame = [], sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if PACKAGE in Path(code.co_filename).parents:
            found.append(f"{Path(code.co_filename).relative_to(PACKAGE)}: {code.co_qualname}")
        frame = frame.f_back  # type: ignore[assignment]
    names = [name.rpartition(".")[2] for name in found]
    last = max(index for index, name in enumerate(names) if name in ("training_step", "validation_step"))
    return found[: last + 1][::-1]


class Looks(nn.Linear):
    """A unit that notes what is above it."""

    def __init__(self) -> None:
        super().__init__(8, 8, dtype=torch.float64)
        self.seen: list[list[str]] = []

    def forward(self, x: Tensor) -> Tensor:
        found = own_frames() if sys.modules.get("tests.ranks.test_frames") and in_a_step(self) else []
        if found:
            self.seen.append(found)
        return super().forward(x)


def in_a_step(part: nn.Module) -> bool:
    frame, names = sys._getframe(1), set()
    while frame is not None:
        names.add(frame.f_code.co_qualname)
        frame = frame.f_back  # type: ignore[assignment]
    return "Executor.run" in names


class Model(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net[2] = Looks()
        self.net[4] = Looks()
        self.sent: list[list[str]] = []

    def on_fit_start(self) -> None:
        real = Link.send

        def send(link: Link, *args: Any, **kwargs: Any) -> None:
            if in_a_step(self):
                self.sent.append(own_frames() + ["wire/link.py: Link.send"])
            real(link, *args, **kwargs)

        for channel in self.trainer.strategy._pipeline.split.executor.channels.values():
            channel.link.send = send.__get__(channel.link)  # type: ignore[method-assign]


def deepest(step: str) -> tuple[list[str], list[str]]:
    module = Model()
    run = trainer({"stages": 2, "num_microbatches": 2}, max_epochs=1, num_sanity_val_steps=0)
    run.fit(module, loader(), loader(seed=4))
    units: list[pl.LightningModule] = [module.net[2], module.net[4]]
    seen = [one for unit in units for one in unit.seen if one[0].endswith(step)]  # type: ignore[union-attr]
    sent = [one for one in module.sent if one[0].endswith(step)]
    return max(seen, key=len, default=[]), max(sent, key=len, default=[])


@pytest.mark.parametrize("step", ["training_step", "validation_step"])
def test_few_frames_lie_between_the_hook_and_the_users_unit_or_the_send(ranks: Ranks, step: str) -> None:
    found = ranks(2)(deepest, step, group=False)
    for unit, _ in found:
        assert 3 < len(unit) <= TO_THE_UNIT, "\n".join(unit)
    sent = max((sent for _, sent in found), key=len)
    assert 3 < len(sent) <= TO_THE_SEND, "\n".join(sent)
