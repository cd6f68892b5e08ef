"""Modules of `tests/unit/construction/built.py`, built in `configure_model` and trained for three steps."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.ranks.lightning_cases import trainer, weights
from tests.unit.construction.built import TORCH, hugging_face

Outputs = Callable[[Any, Tensor], Tensor]
IMAGES = ("vit", "swin", "convnext")


def _recurrent(net: Any, x: Tensor) -> Tensor:
    for part in net:
        x = part(x)[0]
    return x


def _mixed(net: Any, x: Tensor) -> Tensor:
    attention, bilinear, prelu, bag, norm = net
    h = attention(x, x, x)[0]
    h = prelu(bilinear(h[..., :3], h[..., 3:7]))[..., :4]
    tokens = (x[..., 0] > 0).long() + 1
    return norm(h + bag(tokens)[:, None, :4])


def _values(net: Any, x: Tensor) -> Tensor:
    first, second, third, rest, tied = net
    for part in (first, second, third, *rest, tied):
        x = torch.tanh(part(x)) * net.from_numpy
    return x


# By module of torch: the sizes of a batch, and what is computed from it.
USES: dict[str, tuple[tuple[int, ...], Outputs]] = {
    "transformer": ((5, 2, 16), lambda net, x: net(x, x)),
    "encoder": ((5, 2, 8), lambda net, x: net(x)),
    "recurrent": ((5, 2, 8), _recurrent),
    "convolutions": ((2, 3, 8, 8), lambda net, x: net(x)),
    "mixed": ((2, 3, 8), _mixed),
    "applied": ((2, 5), lambda net, x: net((x.abs() * 3).long().clamp(max=8))),
    "norms": ((4, 8), lambda net, x: net(x)),
    "by values": ((2, 4, 8), lambda net, x: net(x)),
    "values": ((3, 4), _values),
}


class Staged(pl.LightningModule):
    """One of these modules in float64, without dropout, which is drawn anew for each part of the module."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.model = name, None

    def configure_model(self) -> None:
        if self.model is None:
            made = TORCH[self.name]() if self.name in TORCH else hugging_face()[self.name]()
            self.model = made if self.name == "mixtral" else made.double()  # grouped products have no float64
            for part in (*self.model.modules(), getattr(self.model, "config", None)):
                for key, value in vars(part).copy().items() if part is not None else ():
                    if isinstance(value, float) and ("drop" in key or isinstance(part, nn.Dropout)):
                        setattr(part, key, 0.0)
                    if key == "apply_spec_augment":
                        setattr(part, key, False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.name in TORCH:
            loss = USES[self.name][1](self.model, batch[0]).square().mean()
        else:
            loss = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def batches(name: str) -> list[Any]:
    """Three, as the module takes them."""
    drawn = torch.Generator().manual_seed(1)

    def one() -> Any:
        if name in TORCH:
            return [torch.randn(USES[name][0], generator=drawn, dtype=torch.float64)]
        if name in IMAGES:
            images = torch.randn(2, 3, 32, 32, generator=drawn, dtype=torch.float64)
            return {"pixel_values": images, "labels": torch.randint(0, 2, (2,), generator=drawn)}
        if name == "wav2vec2":
            sound = torch.randn(2, 400, generator=drawn, dtype=torch.float64)
            return {"input_values": sound, "labels": torch.randint(2, 30, (2, 5), generator=drawn)}
        tokens = torch.randint(2, 90, (2, 5), generator=drawn)
        return {"input_ids": tokens, "labels": tokens}

    return [one() for _ in range(3)]


def train(name: str, pipeline: dict[str, Any] | None) -> tuple[dict[str, Tensor], list[str]]:
    """Weights that this rank holds after three steps, and the names of all."""
    pl.seed_everything(5, verbose=False)
    module, run = Staged(name), trainer(pipeline, max_epochs=1)
    run.fit(module, DataLoader(batches(name), batch_size=None))  # type: ignore[arg-type]
    assert run.global_step == 3
    held = {key: value for key, value in weights(module).items() if not value.is_meta}
    return held, [key for key, _ in module.named_parameters()]


def differences(expected: dict[str, Tensor], found: list[tuple[dict[str, Tensor], list[str]]]) -> str:
    """What is not as on one device after training; empty where nothing is."""
    wrong = []
    for held, names in found:
        if names != found[0][1] or len(held) >= len(names):
            wrong.append("a rank that is whole")
        for key, value in held.items():
            far = (value - expected[key]).abs().max() / expected[key].abs().max().clamp(min=1e-6)
            if far > (1e-9 if value.dtype == torch.float64 else 1e-5):
                wrong.append(f"{key} by {far:.0e}")
    lost = expected.keys() - {key for held, _ in found for key in held}
    return ", ".join([*wrong[:4], *sorted(lost)[:3]])
