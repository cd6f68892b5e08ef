"""Models through fit, validate and predict on two ranks, against one device.

    python -m benchmarks.zoo_fits --page docs/models.md

Each is a tiny model of the zoo, of transformers or of another library, as a LightningModule with Adam and
logs, run with Lightning's defaults (progress bar, summary, logger, checkpoints): the trainer with
`PipelineStrategy(stages=2, num_microbatches=2)` in two processes, and a plain one that accumulates over the
same micro-batches. Compared: every tensor of `state_dict()`, the logged losses, and what `predict` returns.
"""

from benchmarks import torchvision_operators  # noqa: F401  # before Lightning imports torchvision

# isort: split
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import torch
from jsonargparse import auto_cli
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.zoo import trains
from benchmarks.zoo_libraries import CASES, trains_case
from benchmarks.zoo_page import write_page
from lightning_pipeline import PipelineStrategy
from lightning_pipeline.model.tensors.structure import tensors_in
from tests.pool import PRELOAD, Pool

BEGIN = "<!-- written by benchmarks/zoo_fits.py -->"
MODELS = (
    "gpt2/GPT2LMHeadModel",
    "llama/LlamaForCausalLM",
    "mixtral/MixtralForCausalLM",
    "mamba/MambaForCausalLM",
    "bert/BertForMaskedLM",
    "t5/T5ForConditionalGeneration",
    "vit/ViTForImageClassification",
    "convnext/ConvNextForImageClassification",
    "wav2vec2/Wav2Vec2ForSequenceClassification",
    "llava/LlavaForConditionalGeneration",
    "patchtst/PatchTSTForClassification",
    "segformer/SegformerForImageClassification",
    "diffusers/UNet2DConditionModel",
    "timm/mobilenetv3_small_050",
    "torchvision/fcos_resnet50_fpn",
    "segmentation_models_pytorch/Unet",
    "lightly/MoCo",
    "peft/LoRA",
    "torch_geometric/graphs",
    "sentence-transformers/mean pooling",
)
STEPS = 3
ASKED: dict[str, Any] = {
    "torch_geometric/graphs": {"loss_weighting": "samples"}
}  # code that loops over samples


class Fitted(pl.LightningModule):
    """A model of the zoo as users write it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner: Any
        self.microbatches: list[Any]

    def loss_of(self, batch: Any) -> Tensor:
        """What it trains by."""
        raise NotImplementedError

    def rows_of(self, batch: Any) -> Tensor:
        """What it predicts, by rows."""
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The model's own loss."""
        loss = self.loss_of(batch)
        self.log("loss", loss, on_step=False, on_epoch=True, prog_bar=True, batch_size=2)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """What it predicts, as a number."""
        self.log("val_square", self.rows_of(batch).pow(2).mean(), batch_size=2)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """What it predicts."""
        return self.rows_of(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class OfTransformers(Fitted):
    """A model of transformers."""

    def __init__(self, kind: str, name: str) -> None:
        super().__init__()
        found, batches, _, _ = trains(kind, name)
        self.inner = found.model
        self.microbatches = [args[0] for args, _ in batches]

    def loss_of(self, batch: Any) -> Tensor:
        """Its own, or the mean square of everything that it returns."""
        out = self.inner(**batch)
        loss: Tensor = out.loss if getattr(out, "loss", None) is not None else _squares(out)
        return loss

    def rows_of(self, batch: Any) -> Tensor:
        """The first tensor with rows beside the loss."""
        out = dict(self.inner(**batch))
        out.pop("loss", None)
        return next(t for t in tensors_in(out) if t.is_floating_point() and t.dim() > 1)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """The same loss, logged."""
        self.log("val_loss", self.loss_of(batch), batch_size=2)


class OfLibrary(Fitted):
    """A model of another library."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        step, batches, _, _ = trains_case(*CASES[name]())
        self.inner, self._loss = step.model, step.loss
        self._rows = next(rows for start, rows in ROWS.items() if name.startswith(start))
        self.microbatches = [args[0] for args, _ in batches]

    def loss_of(self, batch: Any) -> Tensor:
        """The case's."""
        return self._loss(self.inner, batch)

    def rows_of(self, batch: Any) -> Tensor:
        """Of the library's kind."""
        return self._rows(self.inner, batch)


def _found(model: Any, batch: Any) -> Tensor:
    """Boxes and scores of a detector."""
    return torch.cat([torch.cat([one["boxes"], one["scores"][:, None]], 1) for one in model(list(batch[0]))])


ROWS: dict[str, Callable[[Any, Any], Tensor]] = {
    "timm/": lambda model, batch: model(batch[0]),
    "segmentation_models_pytorch/": lambda model, batch: model(batch[0]),
    "torchvision/": _found,
    "diffusers/": lambda model, batch: model(**batch).sample,
    "peft/": lambda model, batch: model(**batch).logits,
    "lightly/": lambda model, batch: model.head(model.backbone(batch[0])),
    "torch_geometric/": lambda model, batch: model(batch),
    "sentence-transformers/": lambda model, batch: model(
        {"input_ids": batch[0], "attention_mask": torch.ones_like(batch[0])}
    )["sentence_embedding"],
}


def _squares(out: Any) -> Tensor:
    return torch.stack([t.pow(2).mean() for t in tensors_in(out) if t.is_floating_point()]).sum()


def whole(parts: list[Any]) -> Any:
    """The batch of which these are the rows."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(parts)
    if isinstance(first, dict):
        return {key: whole([part[key] for part in parts]) for key in first}
    if isinstance(first, tuple):
        return tuple(map(whole, zip(*parts, strict=True)))
    return [item for part in parts for item in part] if isinstance(first, list) else first


def fit(pair: str, stages: int) -> dict[str, Any]:
    """Fit, validate and predict, on this rank of so many; 1: plain Lightning."""
    torch.set_num_threads(1)
    module = OfLibrary(pair) if pair in CASES else OfTransformers(*pair.split("/"))
    options: dict[str, Any] = {"accumulate_grad_batches": 2}
    data = DataLoader(module.microbatches * STEPS, batch_size=None)
    if stages > 1:
        options = {"strategy": PipelineStrategy(stages=stages, num_microbatches=2, **ASKED.get(pair, {}))}
        data = DataLoader([whole(module.microbatches)] * STEPS, batch_size=None)
    with TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=stages,
            max_epochs=1,
            default_root_dir=folder,
            **options,
        )
        trainer.fit(module, data, data)
        weights = {key: value.detach().clone() for key, value in module.state_dict().items()}
        metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
        trainer.validate(module, data, verbose=False)
        metrics |= {f"validate {key}": float(value) for key, value in trainer.callback_metrics.items()}
        outputs: list[Any] = trainer.predict(module, data) or []  # of the whole batch, on rank 0
        predicted = torch.cat([output for output in outputs if output is not None] or [torch.zeros(0)])
    return {"weights": weights, "metrics": metrics, "predicted": predicted}


def difference(found: dict[str, Any], expected: dict[str, Any]) -> tuple[float, float, float]:
    """Of weights, logged values and predictions, relative to the largest entry."""
    weights = max(_relative(found["weights"][k], v) for k, v in expected["weights"].items())
    metrics = max(
        _relative(torch.tensor(found["metrics"][k]), torch.tensor(v)) for k, v in expected["metrics"].items()
    )
    return weights, metrics, _relative(found["predicted"], expected["predicted"])


def _relative(found: Tensor, expected: Tensor) -> float:
    if not expected.numel():
        return 0.0
    scale = max(float(expected.double().abs().max()), 1e-30)
    return float((found.double() - expected.double()).abs().max()) / scale


def main(only: str = "", page: Path | None = None) -> None:
    """Run them and print a table.

    Args:
        only: Part of `type/class`.
        page: Is given the table, between two marks.
    """
    from benchmarks import zoo_fits  # what a rank calls must not be of `__main__`

    PRELOAD.insert(0, "benchmarks.torchvision_operators")
    pool = Pool(2)
    lines = ["| model | tensors | weights | logged | predicted | seconds |", "|---|---|---|---|---|---|"]
    for pair in MODELS:
        if only not in pair:
            continue
        start = time.perf_counter()
        expected = fit(pair, 1)
        found = pool(zoo_fits.fit, pair, 2, timeout=300, group=False)
        worst = difference(found[0], expected)
        shown = " | ".join("equal" if one == 0.0 else f"{one:.0e}" for one in worst)
        lines.append(f"| {pair} | {len(expected['weights'])} | {shown} | {time.perf_counter() - start:.0f} |")
        print(lines[-1], flush=True)
    if page is not None:
        write_page(page, "\n".join(lines), BEGIN)


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
