"""Batches of other lengths: what units return for them follows from other batches, and is not traced each time."""

import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_pipeline.model.rehearsal.size_laws import SizeLaws
from lightning_pipeline.model.split import known_steps
from lightning_pipeline.model.tensors import TensorSpec
from lightning_pipeline.model.trace import Call
from tests.ranks.lightning_cases import trainer, weights

Rule = Callable[[int, int], int]
RULES: dict[str, Callable[[int, int], Rule]] = {
    "length": lambda part, more: lambda samples, length: length,
    "samples": lambda part, more: lambda samples, length: samples,
    "one more": lambda part, more: lambda samples, length: length + more,
    "part": lambda part, more: lambda samples, length: (length + more) // part,
    "filled up": lambda part, more: lambda samples, length: -(-length // part) * part,
    "at most": lambda part, more: lambda samples, length: min(length, 100 + more),
    "joined": lambda part, more: lambda samples, length: samples * length,
    "at least": lambda part, more: lambda samples, length: max(length, 70),
    "cut": lambda part, more: lambda samples, length: length // part * part,
    "pairs": lambda part, more: lambda samples, length: length * length,
    "together": lambda part, more: lambda samples, length: samples + length,
    "up again": lambda part, more: lambda samples, length: 2 * ((length + more) // part) + 1,
    "root": lambda part, more: lambda samples, length: int(length**0.5),
}


def traced(rule: Rule, samples: int, length: int) -> Any:
    shape = samples, rule(samples, length), 16
    stride = torch.empty(shape, device="meta").transpose(0, 1).stride()
    spec = TensorSpec((shape[1], samples, 16), stride, torch.float32, "cpu", True)
    call = Call(0, 0, 0, inputs=(((samples, length), torch.int64),), specs=[spec])
    return SimpleNamespace(arguments=(("list", ((samples, length), "int64", "cpu")), ()), calls=[call])


def answers(seed: int, name: str) -> Iterator[tuple[Any, Any]]:
    """What laws say for batches of random lengths, and what is so; what they do not say they learn."""
    draw = random.Random(seed)
    rule = RULES[name](draw.choice([2, 3, 4, 8, 16, 64]), draw.choice([0, 1, 2, 5, 10]))
    step, least, width = draw.choice([1, 1, 2, 8]), draw.randrange(30, 80), draw.choice([8, 40, 120])
    laws, samples = SizeLaws(), draw.choice([8, 8, 8, None])
    laws.learn(traced(rule, 2, least))
    for number in range(40):
        length = least + step * draw.randrange(width // step + 1)
        if draw.random() < 0.05:
            length = draw.randrange(least, least + width)
        many = 3 if number % 10 == 9 else samples or draw.randrange(1, 9)
        now = traced(rule, many, length)
        said = laws.calls(now.arguments)
        if said is None:
            laws.learn(now)
        yield said, now.calls


@pytest.mark.parametrize("name", RULES)
def test_laws_say_nothing_that_is_not_so(name: str) -> None:
    every = [pair for seed in range(60) for pair in answers(seed, name)]
    said = [(one, true) for one, true in every if one is not None]
    assert all(one == true for one, true in said)
    if name in ("length", "samples", "one more", "joined", "pairs", "together"):
        assert len(said) > len(every) / 2


class Text(nn.Module):
    """A layer with attention over the tokens of each sample.

    Args:
        fills_up: To a multiple of which length; the fill is cut off by the step.
    """

    def __init__(self, fills_up: int = 1) -> None:
        super().__init__()
        self.fills_up, self.own = fills_up, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, 0, 0, -x.shape[1] % self.fills_up))
        return x + self.own((x @ x.mT / x.shape[1]).softmax(-1) @ x)


class Padded(pl.LightningModule):
    """A language model over batches that are padded to their longest text."""

    def __init__(self, fills_up: int = 1) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList([Text(fills_up) for _ in range(3)])
        self.head = nn.Linear(8, 11)
        self.double()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        length = batch["tokens"].shape[1]
        h = self.embed(batch["tokens"])
        for layer in self.layers:
            h = layer(h)[:, :length]
        loss = F.cross_entropy(self.head(h).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def texts(lengths: list[int]) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(4)
    batches = []
    for length in lengths:
        tokens = torch.randint(11, (6, length), generator=draw)
        ends = torch.randint(1, length + 1, (6, 1), generator=draw)
        batches.append({"tokens": tokens, "labels": tokens.where(torch.arange(length) < ends, -100)})
    return batches


LENGTHS = [9, 14, 5, 12, 16, 8, 7, 10, 11, 6, 13, 15, 9, 5, 16]


def fit(pipeline: dict[str, Any] | None, fills_up: int) -> tuple[dict[str, Tensor], float]:
    module, run = Padded(fills_up), trainer(pipeline, max_epochs=1)
    run.fit(module, torch.utils.data.DataLoader(texts(LENGTHS), batch_size=None))  # type: ignore[arg-type]
    return weights(module), float(run.callback_metrics["loss_epoch"])


@pytest.mark.parametrize("fills_up", [1, 4])
def test_padded_texts_are_traced_for_some_lengths_alone(
    fills_up: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, loss = fit(None, fills_up)
    traces, trace_step = [], known_steps.trace_step
    monkeypatch.setattr(known_steps, "trace_step", lambda *a, **k: traces.append(1) or trace_step(*a, **k))
    pipeline = {"stages": 1, "stages_per_rank": 2, "schedule": "Interleaved1F1B", "num_microbatches": 3}
    found, logged = fit(pipeline, fills_up)
    assert logged == pytest.approx(loss, rel=1e-12)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-10, msg=name)
    of_ways = 2  # where layers' sizes follow no rule, a walk through the step may not fit and be traced
    assert len(traces) == (6 if fills_up == 1 else len({*LENGTHS}) + of_ways), "with whole batches"
