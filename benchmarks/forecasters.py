"""Forecasters of darts, which make their Trainer themselves, of `pytorch_lightning`: one device and stages.

    pip install darts
    python benchmarks/forecasters.py

Models are as darts gives them, with few features and without dropout; each is trained by its own `fit` on
made-up series. Weights after two epochs are compared, as shares of the largest value of a tensor. `--only`
names models.
"""

import argparse
import os
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from lightning_pipeline import PipelineStrategy, alias_pytorch_lightning

sys.path.insert(0, str(Path(__file__).parent))
from projects import difference

LENGTH, SERIES, CONTEXT, HORIZON = 60, 3, 8, 4
DEPTH: dict[str, Any] = {"num_stacks": 2, "num_blocks": 1, "num_layers": 2, "layer_widths": 16}
ATTENTION: dict[str, Any] = {
    "nhead": 2,
    "num_encoder_layers": 1,
    "num_decoder_layers": 1,
    "dim_feedforward": 8,
}
RECURRENT: dict[str, Any] = {"model": "LSTM", "hidden_dim": 8, "n_rnn_layers": 2, "dropout": 0.0}
AHEAD: dict[str, Any] = {"output_chunk_length": HORIZON}
MODELS: dict[str, dict[str, Any]] = {
    "NBEATSModel": {**AHEAD, **DEPTH},
    "NHiTSModel": {**AHEAD, **DEPTH, "dropout": 0.0},
    "TCNModel": {**AHEAD, "num_filters": 3, "num_layers": 2, "dropout": 0.0},
    "TransformerModel": {**AHEAD, "d_model": 8, **ATTENTION, "dropout": 0.0},
    "TFTModel": {
        **AHEAD, "hidden_size": 8, "lstm_layers": 1, "num_attention_heads": 2, "dropout": 0.0,
        "add_relative_index": True,
    },
    "TiDEModel": {**AHEAD, "hidden_size": 8, "dropout": 0.0},
    "TSMixerModel": {**AHEAD, "hidden_size": 8, "ff_size": 8, "num_blocks": 2, "dropout": 0.0},
    "DLinearModel": {**AHEAD},
    "BlockRNNModel": {**AHEAD, **RECURRENT},
    "RNNModel": {**RECURRENT, "training_length": 12},
}  # fmt: skip


def trained(name: str, stages: int) -> dict[str, Tensor]:
    """Weights after the library's own `fit`; no stages: one device."""
    options: dict[str, Any] = {"accelerator": "cpu", "devices": max(1, stages), "precision": "64-true"}
    if stages:
        options["strategy"] = PipelineStrategy(stages=stages, start_method="fork")
    draws = numpy.random.default_rng(0)
    values = [draws.standard_normal(LENGTH).cumsum()[:, None] for _ in range(SERIES)]
    series = [import_module("darts").TimeSeries.from_values(one) for one in values]
    make = getattr(import_module("darts.models"), name)
    model = make(
        input_chunk_length=CONTEXT, n_epochs=2, batch_size=8, random_state=3, pl_trainer_kwargs=options,
        model_name=f"{name}-{stages}", work_dir=os.getcwd(), force_reset=True, **MODELS[name],
    )  # fmt: skip
    model.fit(series)
    return {key: value.detach() for key, value in model.model.state_dict().items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--only", nargs="+", default=[""], help="parts of names")
    options = parser.parse_args()
    torch.set_num_threads(1)
    alias_pytorch_lightning()
    os.chdir(tempfile.mkdtemp())
    for name in MODELS:
        if any(part in name for part in options.only):
            apart = difference(trained(name, options.stages), trained(name, 0))
            print(f"| darts: {name} | {apart} |", flush=True)


if __name__ == "__main__":
    main()
