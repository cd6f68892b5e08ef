"""Models of libraries that people train with Lightning, tiny, over stages against one process.

    python -m benchmarks.zoo_libraries --records libraries.jsonl  # what is not in there yet
    python -m benchmarks.zoo_libraries --records libraries.jsonl --only timm
    python -m benchmarks.zoo_libraries --records libraries.jsonl --run false --page docs/models.md

Nothing of these is a dependency: a library that is not installed is left out and said so. A case is a
function in `zoo_images.py`, `zoo_words.py` and their like that gives a model, a loss of (model, batch), and
what makes a batch; `@case("library/name")` adds one.
"""

import json
import time
import warnings
from collections import Counter
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from jsonargparse import auto_cli
from torch import Tensor, nn

from benchmarks import (  # noqa: F401  # which fill CASES
    torchvision_operators,  # before Lightning, which imports torchvision
    zoo_diffusion,
    zoo_images,
    zoo_modules,
    zoo_torchvision,
    zoo_words,
)
from benchmarks.zoo import limited
from benchmarks.zoo_cases import CASES, Case, Loss
from benchmarks.zoo_compare import Arguments, alone, compared, cut_alone, has_drawn, short
from benchmarks.zoo_page import told, write_page
from lightning_pipeline.model.tensors.structure import map_tensors

BEGIN = "<!-- written by benchmarks/zoo_libraries.py -->"
PACKAGES = {
    "timm": "timm",
    "torchvision": "torchvision",
    "diffusers": "diffusers",
    "peft": "peft",
    "sentence-transformers": "sentence-transformers",
    "open_clip": "open_clip_torch",
    "torch_geometric": "torch_geometric",
    "x-transformers": "x-transformers",
    "segmentation_models_pytorch": "segmentation-models-pytorch",
    "pytorch-metric-learning": "pytorch-metric-learning",
    "lightly": "lightly",
    "pytorch-forecasting": "pytorch-forecasting",
    "neuralforecast": "neuralforecast",
    "anomalib": "anomalib",
    "torch_uncertainty": "torch-uncertainty",
}


# Parameters, from which on numbers of four bytes are compared: copies take ten times the model's memory.
_LARGE = 40_000_000
_TWO_UNITS = "3 stages were asked for, but the model has 2 units to share out: use"  # that it can be cut into


class Step(nn.Module):
    """A model and its loss as a LightningModule has them."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def log(self, name: str, value: Any) -> None:
        """Takes nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss of a micro-batch."""
        return self.loss(self.model, batch)


# ---- running them


def run_case(name: str) -> dict[str, Any]:
    """What becomes of one model on 2 and 3 stages."""
    record: dict[str, Any] = {"name": name}
    if name in zoo_torchvision.WITHOUT_WEIGHTS:
        model, loss, make = _without_weights(name)
        return record | cut_alone(Step(model, loss).train(), ((make(), 0), {}))
    try:
        torch.manual_seed(0)
        model, loss, make = CASES[name]()
        module, batches, expected, draws = trains_case(model, loss, make)
    except ImportError as error:
        return record | {"outcome": "not run", "why": f"not installed: {short(error)}"}
    except Exception as error:
        return record | {"outcome": "not run", "why": short(error)}
    found = compared(module, batches, expected, draws)
    if _TWO_UNITS in found.get("why", ""):
        found = compared(module, batches, expected, draws, counts=(2,))
    return record | found


def _without_weights(name: str) -> Case:
    try:
        with torch.device("meta"):
            return CASES[name]()
    except NotImplementedError:  # which asks tensors for its widths
        model, loss, make = CASES[name]()
        return model.to("meta"), loss, make


def trains_case(model: nn.Module, loss: Loss, make: Callable[[], Any]) -> Any:
    """The step, the micro-batches, what one process gives, and whether it draws."""
    failed: Exception = ValueError("no batch")
    made = [make(), make()]
    large = sum(parameter.numel() for parameter in model.parameters()) > _LARGE
    for dtype in (torch.float32,) if large else (torch.float64, torch.float32):
        module = Step(model.to(dtype), loss).train()
        batches: list[Arguments] = [((_cast(batch, dtype), 0), {}) for batch in made]
        try:
            expected = alone(module, batches)
        except Exception as error:
            failed = error
        else:
            return module, batches, expected, has_drawn()
    raise failed


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)


def text(known: dict[str, dict[str, Any]]) -> str:
    """One line for each library, and what is not equal."""
    lines = ["| library | tried | equal | otherwise | not in one process here |", "|---|---|---|---|---|"]
    for library in dict.fromkeys(name.partition("/")[0] for name in known):
        own = {n.partition("/")[2]: r for n, r in known.items() if n.startswith(f"{library}/")}
        counts = Counter(record["outcome"] for record in own.values())
        names = [[n for n, r in own.items() if r["outcome"] == "equal"]]
        names.append([n for n, r in own.items() if r["outcome"] not in ("equal", "not run", "cut")])
        names.append([n for n, r in own.items() if r["outcome"] == "not run"])
        cut = [n for n, r in own.items() if r["outcome"] == "cut"]
        names[0] += [f"traced and cut {len(cut)}: {', '.join(cut)}"] if cut else []
        try:
            title = f"{library} {version(PACKAGES[library])}"
        except PackageNotFoundError:
            title = library
        lines.append(
            f"| {title} | {len(own)} | {counts['equal']}: {', '.join(names[0])} | {', '.join(names[1])} | "
            f"{', '.join(names[2])} |"
        )
    rest = [
        f"* {n}, {r['outcome']}: {told(r)}" for n, r in known.items() if r["outcome"] not in ("equal", "cut")
    ]
    return "\n".join([*lines, *(["", *rest] if rest else [])])


def main(
    records: Path = Path("libraries.jsonl"),
    only: str = "",
    again: list[str] | None = None,
    run: bool = True,
    seconds: int = 60,
    page: Path | None = None,
) -> None:
    """Run what is not recorded yet and print a table.

    Args:
        records: One line for each case; what is in there is not run again.
        only: Part of a case's name.
        again: Outcomes that are run again.
        run: Whether anything is run.
        seconds: Longest CPU time for a case.
        page: Is given the table, between two marks.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    lines = records.read_text().splitlines() if records.exists() else []
    known = {record["name"]: record for record in map(json.loads, lines)}
    for name in CASES if run else ():
        if only not in name or (name in known and known[name]["outcome"] not in (again or ())):
            continue
        start = time.process_time()
        try:
            with limited(seconds):
                known[name] = run_case(name)
        except TimeoutError as error:
            known[name] = {"name": name, "outcome": "slow", "why": str(error)}
        known[name]["cpu_s"] = round(time.process_time() - start, 1)
        print(name, known[name]["outcome"], known[name].get("why", "")[:150], flush=True)
        with records.open("a") as file:
            file.write(json.dumps(known[name]) + "\n")
    shown = text({name: known[name] for name in CASES if name in known})
    print(shown)
    if page is not None:
        write_page(page, shown, BEGIN)


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
