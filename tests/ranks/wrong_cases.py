"""Ordinary code that once trained other numbers than one device in silence: one small module for each kind.

Each is fitted as it stands on one device, or, where it draws, with one stage and the same micro-batches.
"""

import copy
import os
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Subset, TensorDataset
from torchmetrics import MeanSquaredError

from lightning_pipeline.errors import PipelineError
from tests.ranks.lightning_cases import trainer, weights

WIDTH, LAYERS, SAMPLES = 5, 7, 16


class Layer(nn.Module):
    """A residual layer with an attribute and a flag."""

    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """`x` and a part of it, smaller in evaluation."""
        return x + self.scale * (1.0 if self.training else 0.5) * self.linear(x).tanh()


class Data(pl.LightningDataModule):
    """Counts what steps tell it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def train_dataloader(self) -> Any:
        """Sixteen samples in batches of eight."""
        generator = torch.Generator().manual_seed(3)
        x, y = (torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
        return DataLoader(TensorDataset(x, y), batch_size=8)


class Case(pl.LightningModule):
    """A plain fit; each case changes what it is about."""

    draws = False
    """Whether its numbers depend on random ones, so that it is compared with one stage."""
    layer: Callable[[], nn.Module] = Layer
    data: type[Data] = Data
    options: ClassVar[dict[str, Any]] = {}
    """Of the Trainer."""
    interrupted = -1
    """The step after which another Trainer goes on from a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(type(self).layer() for _ in range(LAYERS)).double()
        self.seen: list[Any] = []

    def run_layers(self, x: Tensor) -> Tensor:
        """All of them."""
        for layer in self.layers:
            x = layer(x)
        return x

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The mean squared error."""
        loss = F.mse_loss(self.run_layers(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        """SGD with momentum."""
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def left(self) -> list[Any]:
        """What is compared beside weights and logs."""
        return self.seen


class Checkpointed(Layer):
    """With dropout, run again in the backward."""

    def forward(self, x: Tensor) -> Tensor:
        """As above, with dropout."""
        return super().forward(F.dropout(x, 0.3, self.training))


class A1NotReentrant(Case):
    draws, layer, reentrant, again = True, Checkpointed, False, True

    def run_layers(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant) if self.again else layer(x)
        return x


class A1Reentrant(A1NotReentrant):
    reentrant = True

    def run_layers(self, x: Tensor) -> Tensor:
        return super().run_layers(x.requires_grad_())


class InnerGradient(Layer):
    """Its own gradient with respect to its input is in its output."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            inner = x if x.requires_grad else x.requires_grad_()
            energy = self.linear(inner).tanh().square().sum()
            (force,) = torch.autograd.grad(energy, inner, create_graph=True)
        return x - 0.1 * force


class A2(Case):
    layer = InnerGradient


class A3(Case):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        y = self.run_layers(batch[0])
        self.eval()
        with torch.no_grad():
            target = self.run_layers(batch[0] * 0.9)
        self.train()
        return F.mse_loss(y, batch[1]) + F.mse_loss(y, target)


class A4(Case):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        y = self.run_layers(batch[0])
        self.layers[0].requires_grad_(False)
        z = self.run_layers(batch[0] * 0.5)
        self.layers[0].requires_grad_(True)
        return F.mse_loss(y, batch[1]) + z.square().mean()


class A5(Case):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        torch.set_grad_enabled(False)
        target = self.run_layers(batch[0] * 0.9)
        torch.set_grad_enabled(True)
        y = self.run_layers(batch[0])
        return F.mse_loss(y, batch[1]) + F.mse_loss(y, target)


class A6(Case):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        handle = self.layers[1].register_forward_hook(lambda module, args, out: out * 0.9)
        loss = super().training_step(batch, batch_idx)
        handle.remove()
        return loss


class A7Annealed(Case):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        for layer in self.layers:
            layer.scale = layer.scale * 0.9
        return loss


class A7SetAndBack(Case):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for layer in self.layers:
            layer.scale = 0.0
        with torch.no_grad():
            reference = self.run_layers(batch[0])
        for layer in self.layers:
            layer.scale = 1.0
        return super().training_step(batch, batch_idx) + 0.1 * F.mse_loss(
            self.run_layers(batch[0]), reference
        )


class A8(Case):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        for group in self.optimizers().param_groups:  # type: ignore[union-attr]
            group["lr"] = 0.1 / (2 + self.global_step)
        return loss


class A9(Case):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.register_full_backward_hook(lambda module, before, after: (before[0] * 0.5,))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step([batch[0].requires_grad_(), batch[1]], batch_idx)


class A10(Case):
    def on_fit_start(self) -> None:
        generator = torch.Generator().manual_seed(9)
        self.unlabelled: Iterator[Tensor] = iter(
            [torch.randn(8, WIDTH, generator=generator, dtype=torch.float64) for _ in range(9)]
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (
            super().training_step(batch, batch_idx) + self.run_layers(next(self.unlabelled)).square().mean()
        )


COUNTED = 0


class A11(Case):
    counted = 0

    def on_fit_start(self) -> None:
        global COUNTED
        COUNTED = type(self).counted = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        global COUNTED
        COUNTED += 1
        type(self).counted += 1
        self.trainer.datamodule.count += 1  # type: ignore[attr-defined]
        return super().training_step(batch, batch_idx) * (1 + 0.1 * COUNTED)

    def left(self) -> list[Any]:
        return [COUNTED, type(self).counted, self.trainer.datamodule.count]  # type: ignore[attr-defined]


class A12(Case):
    draws = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        torch.manual_seed(42)
        features = torch.randn(WIDTH, WIDTH, dtype=torch.float64)
        noise = torch.randn(WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
        return super().training_step([batch[0] @ features + noise, batch[1]], batch_idx)


@torch.jit.script
def _scripted_noise(x: Tensor) -> Tensor:
    return x + 0.1 * torch.rand_like(x)


class A13(Case):
    draws = True

    def run_layers(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = _scripted_noise(layer(x))
        return x


class A14(Case):
    def __init__(self) -> None:
        super().__init__()
        self.metrics = {"a": MeanSquaredError().set_dtype(torch.float64)}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.run_layers(batch[0])
        self.metrics["a"].update(out.detach(), batch[1])
        return F.mse_loss(out, batch[1])

    def on_train_epoch_end(self) -> None:
        self.log("error", self.metrics["a"].compute())


class A15(Case):
    def on_train_start(self) -> None:
        total = sum(parameter.detach().square().sum() for parameter in self.parameters()) ** 0.5
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(3.0 / total)


class A16Weights(Case):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for layer in self.layers:
            layer.linear.weight.data.mul_(0.95)  # type: ignore[union-attr, operator]
        return super().training_step(batch, batch_idx)


class A16Attribute(Case):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for layer in self.layers:
            layer.scale *= 0.9  # type: ignore[operator]
        return super().training_step(batch, batch_idx)


class A17(Case):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out, kept = self.run_layers(batch[0]), batch[1][:, 0] > 0
        return ((out - batch[1]).square().mean(-1) * kept).sum() / kept.sum()


class A17Sum(Case):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return 0.05 * F.mse_loss(self.run_layers(batch[0]), batch[1], reduction="sum")


class A18(Case):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.mse_loss(self.run_layers(batch[0]), batch[1])
        self.log("loss", loss, batch_size=3, on_epoch=True)
        return loss


class Mapped(Layer):
    """Under `vmap` and `jvp`."""

    def forward(self, x: Tensor) -> Tensor:
        def run(one: Tensor) -> Tensor:
            return F.linear(one, self.linear.weight, self.linear.bias).tanh()

        return x + torch.vmap(run)(x) + 0.1 * torch.func.jvp(run, (x,), (torch.ones_like(x),))[1]


class C1(Case):
    layer = Mapped


class C2(Case):
    def on_train_start(self) -> None:
        self.copied = [copy.deepcopy(self.layers)]

    def left(self) -> list[Any]:
        return [len(self.copied)]


class C3(Case):
    def run_layers(self, x: Tensor) -> Tensor:
        def several(h: Tensor) -> Tensor:
            for layer in self.layers[:2]:
                h = layer(h).tanh()
            return h

        x = checkpoint(several, x, use_reentrant=False)
        for layer in self.layers[2:]:
            x = layer(x)
        return x


class C4(Case):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.hidden = self.layers[0](batch[0])
        self.hidden.retain_grad()
        h = self.hidden
        for layer in self.layers[1:]:
            h = layer(h)
        return F.mse_loss(h, batch[1])

    def on_after_backward(self) -> None:
        self.seen.append(float(self.hidden.grad.norm()))  # type: ignore[union-attr]


class C5(Case):
    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            torch.manual_seed(5)
            self.layers.append(Layer().double())
            self.trainer.optimizers[0].add_param_group({"params": list(self.layers[-1].parameters())})


class C6(Case):
    """Two views in one tensor: twice as many rows as there are targets."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return torch.cat([batch[0], batch[0] * 0.9]), batch[1]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        one, other = self.run_layers(batch[0]).chunk(2)
        return F.mse_loss(one, batch[1]) + F.mse_loss(one, other)


class Users(pl.Callback):
    """The user's first."""

    told = 0


class C7(Case):
    def configure_callbacks(self) -> Any:
        return []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.trainer.callbacks[0].told += 1  # type: ignore[attr-defined]
        return super().training_step(batch, batch_idx)

    def left(self) -> list[Any]:
        return [self.trainer.callbacks[0].told]  # type: ignore[attr-defined]


class FromTheModel(Data):
    """Drops what the model has seen last, which one rank knows."""

    def train_dataloader(self) -> Any:
        module: Any = self.trainer.lightning_module  # type: ignore[union-attr]
        samples = 8 if sum(float(item.sum()) for item in module.hidden) < 1000 else SAMPLES
        return DataLoader(Subset(super().train_dataloader().dataset, range(samples)), batch_size=8)


class C8(Case):
    data, options = FromTheModel, {"reload_dataloaders_every_n_epochs": 1}

    def __init__(self) -> None:
        super().__init__()
        self.hidden: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.run_layers(batch[0])
        self.hidden.append(out.detach())
        return F.mse_loss(out, batch[1])


class A19(Case):
    """Resumed in mid-epoch, it goes on with the next batch; one device that is not interrupted is the reference."""

    interrupted = 3


class C9(Case):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        weight: Any = self.layers[0].linear.weight  # type: ignore[union-attr]
        held, weight.data = weight.data, weight.data * 0.5
        with torch.no_grad():
            target = self.layers[0](batch[0])
        weight.data = held
        return super().training_step(batch, batch_idx) + target.square().mean()


class D1(Case):
    """What is done only where the loss is below a bound, which no trace knows."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.below = False, 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.mse_loss(self.run_layers(batch[0]) * (0.9 if self.reached else 1.0), batch[1])
        if loss.detach() < 1e9:
            self.reached = True
            self.below += 1
        return loss

    def left(self) -> list[Any]:
        return [self.reached, self.below]


class D2(Case):
    """Rows are counted by what early layers compute, and other layers follow."""

    def __init__(self) -> None:
        super().__init__()
        self.positive, self.clipped = 0, False

    def run_layers(self, x: Tensor) -> Tensor:
        for layer in self.layers[:5]:
            x = layer(x)
        above = x.detach().sum(-1) > 0
        self.positive += int(above.sum())
        if above.any():
            self.clipped = True
            x = torch.where(above[:, None], 0.5 * x, x)
        for layer in self.layers[5:]:
            x = layer(x)
        return x

    def left(self) -> list[Any]:
        return [self.positive, self.clipped]


class D3(Case):
    """Rows are repeated by predicted durations: the sum is over more rows than targets."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.layers[1](self.layers[0](batch[0]))
        times = 1 + (h.detach()[:, 0] > 0).long()
        h, y = h.repeat_interleave(times, 0), batch[1].repeat_interleave(times, 0)
        for layer in self.layers[2:]:
            h = layer(h)
        return (h - y).square().sum() / 8


CASES: dict[str, type[Case]] = {
    name: value
    for name, value in list(globals().items())
    if isinstance(value, type) and issubclass(value, Case) and value is not Case
}


def fitted(name: str, pipeline: dict[str, Any] | None, attributes: dict[str, Any] | None = None) -> Any:
    """Weights, logs and what is left after two epochs; the text of a refusal.

    Args:
        name: Of the case.
        pipeline: Arguments of the strategy; None is one device.
        attributes: Of the module, to be set first.
    """
    torch.manual_seed(0)
    module, data = CASES[name](), CASES[name].data()
    vars(module).update(attributes or {})
    options = {"enable_progress_bar": False, "enable_model_summary": False, **module.options}
    run, path = trainer(pipeline, callbacks=[Users()], **options), None
    try:
        if pipeline is not None and module.interrupted > 0:
            folder = Path(tempfile.gettempdir(), f"interrupted-{os.getppid()}")
            saves = pl.callbacks.ModelCheckpoint(
                folder, "there", save_top_k=-1, every_n_train_steps=module.interrupted,
                enable_version_counter=False,
            )  # fmt: skip
            writes = {"enable_checkpointing": True, "max_steps": module.interrupted}
            first = trainer(pipeline, callbacks=[Users(), saves], **options, **writes)
            first.fit(CASES[name](), data)
            path = folder / "there.ckpt"
        run.fit(module, data, ckpt_path=path)
    except PipelineError as error:
        return f"{type(error).__name__}: {error}"
    logs = {key: float(value) for key, value in run.callback_metrics.items()}
    return types.SimpleNamespace(weights=weights(module), logs=logs, left=module.left())


def difference(found: Any, expected: Any) -> str:
    """In words, where the first is not what the second is; empty where it is."""
    for key, value in expected.weights.items():
        if not torch.allclose(found.weights[key], value, rtol=1e-9, atol=1e-9):
            return (
                f"weight {key} by {(found.weights[key] - value).abs().max():.1e} of {value.abs().max():.1e}"
            )
    if found.logs.keys() != expected.logs.keys():
        return f"logged {sorted(found.logs)} instead of {sorted(expected.logs)}"
    for key, value in expected.logs.items():
        if abs(found.logs[key] - value) > 1e-9 * max(1.0, abs(value)):
            return f"logged {key} {found.logs[key]} for {value}"
    if any(abs(a - b) > 1e-9 for a, b in zip(found.left, expected.left, strict=True)):
        return f"left {found.left} for {expected.left}"
    return ""
