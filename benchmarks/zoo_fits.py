"""Twelve models through fit, validate and predict on two ranks, against one device.

    python -m benchmarks.zoo_fits --page docs/models.md

Each is one of the zoo's tiny models as a LightningModule with Adam and logs: the trainer with
`PipelineStrategy(stages=2, num_microbatches=2)` in two processes, and a plain one that accumulates over the
same micro-batches. Compared: every tensor of `state_dict()`, the logged losses, and what `predict` returns.
"""

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import torch
from jsonargparse import auto_cli
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.zoo import trains
from benchmarks.zoo_page import write_page
from lightning_pipeline import PipelineStrategy
from lightning_pipeline.model.tensors.structure import tensors_in
from tests.pool import Pool

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
)
STEPS = 3


class Fitted(pl.LightningModule):
    """A model of the zoo as users write it."""

    def __init__(self, kind: str, name: str) -> None:
        super().__init__()
        found, batches, _, _ = trains(kind, name)
        self.inner = found.model
        self.microbatches = [args[0] for args, _ in batches]

    def _loss(self, batch: Any) -> Tensor:
        out = self.inner(**batch)
        loss: Tensor = out.loss if getattr(out, "loss", None) is not None else _squares(out)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The model's own loss."""
        loss = self._loss(batch)
        self.log("loss", loss, on_step=False, on_epoch=True, batch_size=2)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """The same, logged."""
        self.log("val_loss", self._loss(batch), batch_size=2)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The first tensor with rows that the model returns beside its loss."""
        out = dict(self.inner(**batch))
        out.pop("loss", None)
        return next(t for t in tensors_in(out) if t.is_floating_point() and t.dim() > 1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def _squares(out: Any) -> Tensor:
    return torch.stack([t.pow(2).mean() for t in tensors_in(out) if t.is_floating_point()]).sum()


def whole(microbatches: list[Any]) -> Any:
    """The batch of which these are the rows."""
    return {
        key: torch.cat([part[key] for part in microbatches]) if isinstance(value, Tensor) else value
        for key, value in microbatches[0].items()
    }


def fit(kind: str, name: str, stages: int) -> dict[str, Any]:
    """Fit, validate and predict, on this rank of so many; 1: plain Lightning."""
    torch.set_num_threads(1)
    module = Fitted(kind, name)
    options: dict[str, Any] = {"accumulate_grad_batches": 2}
    data = DataLoader(module.microbatches * STEPS, batch_size=None)
    if stages > 1:
        options = {"strategy": PipelineStrategy(stages=stages, num_microbatches=2)}
        data = DataLoader([whole(module.microbatches)] * STEPS, batch_size=None)
    with TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=stages,
            max_epochs=1,
            default_root_dir=folder,
            enable_model_summary=False,
            enable_progress_bar=False,
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

    pool = Pool(2)
    lines = ["| model | tensors | weights | logged | predicted | seconds |", "|---|---|---|---|---|---|"]
    for pair in MODELS:
        if only not in pair:
            continue
        kind, name = pair.split("/")
        start = time.perf_counter()
        expected = fit(kind, name, 1)
        found = pool(zoo_fits.fit, kind, name, 2, timeout=300, group=False)
        worst = difference(found[0], expected)
        shown = " | ".join("equal" if one == 0.0 else f"{one:.0e}" for one in worst)
        lines.append(f"| {name} | {len(expected['weights'])} | {shown} | {time.perf_counter() - start:.0f} |")
        print(lines[-1], flush=True)
    if page is not None:
        write_page(page, "\n".join(lines), BEGIN)


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
