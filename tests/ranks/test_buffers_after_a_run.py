"""After a run the module is whole on every rank, buffers that no checkpoint holds included."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, loader, trainer

Ranks = Callable[[int], Pool]


class Scaled(nn.Module):
    """Its scale is not persistent, as position ids and masks of `transformers` are; it also counts."""

    def __init__(self, inside: int, outside: int, scale: float) -> None:
        super().__init__()
        self.linear = nn.Linear(inside, outside)
        self.register_buffer("scale", torch.tensor(scale), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return torch.tanh(self.linear(x)) * self.scale


class ScaledLayers(Regression):
    def __init__(self) -> None:
        super().__init__()
        sizes = [(6, 8), (8, 8), (8, 8), (8, 3)]
        self.net = nn.Sequential(*(Scaled(i, o, n + 1.0) for n, (i, o) in enumerate(sizes))).double()


def fit_then_predict(stages: int | None) -> tuple[dict[str, Tensor], Tensor, list[Tensor] | None]:
    module = ScaledLayers()
    settings: list[Any] = [None, None]
    if stages is not None:
        settings = [
            {"stages": stages, "num_microbatches": 1, "partition": [cut]} for cut in ("net.1", "net.3")
        ]
    trainer(settings[0]).fit(module, loader(24))
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    whole = module.net(torch.ones(2, 6, dtype=torch.float64)).detach()
    predict = trainer(settings[1])
    predictions = predict.predict(module, loader(24))
    return buffers, whole, predictions if predict.is_global_zero else None  # type: ignore[return-value]


def test_buffers_that_no_checkpoint_holds_outlive_a_run_and_another_cut(ranks: Ranks) -> None:
    buffers, whole, predictions = fit_then_predict(None)
    assert predictions is not None
    found = ranks(2)(fit_then_predict, 2)
    for its_buffers, its_whole, _ in found:
        torch.testing.assert_close(its_buffers, buffers)
        torch.testing.assert_close(its_whole, whole)
    torch.testing.assert_close(found[0][2], predictions)
