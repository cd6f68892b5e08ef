"""LightningModules of public libraries, for benchmarks/projects.py: modules as they are, made-up data.

pip install pytorch-forecasting gluonts mlcolvar
"""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

Project = tuple[Callable[[], pl.LightningModule], Callable[[], dict[str, Any]], dict[str, Any]]

CONTEXT, HORIZON, STATES = 24, 6, 3


def libraries() -> dict[str, Callable[[], Project]]:
    """By name."""
    return {
        "pytorch-forecasting: NBeats": _nbeats,
        "pytorch-forecasting: NHiTS": _nhits,
        "pytorch-forecasting: TemporalFusionTransformer": _tft,
        "pytorch-forecasting: DeepAR": _forecasting_deepar,
        "gluonts: SimpleFeedForward": _feed_forward,
        "gluonts: PatchTST": _patch_tst,
        "gluonts: DeepAR": _gluonts_deepar,
        "mlcolvar: AutoEncoderCV": _autoencoder_cv,
        "mlcolvar: RegressionCV": _regression_cv,
    }


# ---- pytorch-forecasting


def _series(**options: Any) -> Any:
    from pytorch_forecasting import TimeSeriesDataSet
    from pytorch_forecasting.data import NaNLabelEncoder
    from pytorch_forecasting.data.examples import generate_ar_data

    table = generate_ar_data(seasonality=10.0, timesteps=40, n_series=3, seed=42)
    table["series"] = table.series.astype(str)
    return TimeSeriesDataSet(
        table, time_idx="time_idx", target="value", group_ids=["series"],
        categorical_encoders={"series": NaNLabelEncoder().fit(table.series)},
        min_encoder_length=CONTEXT, max_encoder_length=CONTEXT, min_prediction_length=HORIZON,
        max_prediction_length=HORIZON, time_varying_unknown_reals=["value"], **options,
    )  # fmt: skip


def _forecast(kind: str, series: Any, **options: Any) -> Project:
    import pytorch_forecasting

    def loaders() -> dict[str, Any]:
        load = series.to_dataloader(train=False, batch_size=8, num_workers=0)
        return {"train_dataloaders": load, "val_dataloaders": load}

    make = getattr(pytorch_forecasting, kind).from_dataset
    return lambda: make(series, learning_rate=0.01, **options), loaders, {"gradient_clip_val": 0.1}


def _nbeats() -> Project:
    return _forecast("NBeats", _series(), widths=[16, 16], dropout=0.0)


def _nhits() -> Project:
    return _forecast("NHiTS", _series(), hidden_size=16, dropout=0.0)


def _tft() -> Project:
    series = _series(static_categoricals=["series"], add_relative_time_idx=True)
    return _forecast(
        "TemporalFusionTransformer", series, hidden_size=8, hidden_continuous_size=4, dropout=0.0
    )


def _forecasting_deepar() -> Project:
    return _forecast("DeepAR", _series(static_categoricals=["series"]), hidden_size=8, dropout=0.0)


# ---- gluonts


def _windows(**shapes: tuple[int, ...]) -> DataLoader[Any]:
    drawn = torch.Generator().manual_seed(3)

    def one(number: int) -> dict[str, Tensor]:
        parts = {name: torch.randn(shape, generator=drawn) for name, shape in shapes.items()}
        seen = {name: torch.ones(shapes[name]) for name in shapes if name.endswith("observed_values")}
        cats = {name: torch.zeros(shapes[name], dtype=torch.long) for name in shapes if name.endswith("cat")}
        return {**parts, **seen, **cats}

    return DataLoader([one(number) for number in range(32)], batch_size=8)  # type: ignore[arg-type]


def _gluonts(module: str, kind: str, data: dict[str, tuple[int, ...]], **model: Any) -> Project:
    from importlib import import_module

    make = getattr(import_module(f"gluonts.torch.model.{module}.lightning_module"), kind)
    sizes = {"prediction_length": HORIZON, "context_length": CONTEXT}

    def loaders() -> dict[str, Any]:
        future = {"future_target": (HORIZON,), "future_observed_values": (HORIZON,)}
        return {
            "train_dataloaders": _windows(**data, **future),
            "val_dataloaders": _windows(**data, **future),
        }

    return lambda: make(model_kwargs={**sizes, **model}), loaders, {}


def _feed_forward() -> Project:
    data = {"past_target": (CONTEXT,)}
    return _gluonts(
        "simple_feedforward", "SimpleFeedForwardLightningModule", data, hidden_dimensions=[16, 16, 16]
    )


def _patch_tst() -> Project:
    data = {"past_target": (CONTEXT,), "past_observed_values": (CONTEXT,)}
    return _gluonts(
        "patch_tst", "PatchTSTLightningModule", data, patch_len=8, stride=4, padding_patch="end", d_model=16,
        nhead=2, dim_feedforward=32, num_feat_dynamic_real=0, dropout=0.0, activation="relu",
        norm_first=False, num_encoder_layers=2, scaling="mean",
    )  # fmt: skip


def _gluonts_deepar() -> Project:
    past = CONTEXT + 2  # the longest lag before the context
    data = {
        "feat_static_cat": (1,), "feat_static_real": (1,), "past_time_feat": (past, 1),
        "past_target": (past,), "past_observed_values": (past,), "future_time_feat": (HORIZON, 1),
    }  # fmt: skip
    return _gluonts(
        "deepar", "DeepARLightningModule", data, freq="h", lags_seq=[1, 2], hidden_size=8, dropout_rate=0.0
    )


# ---- mlcolvar


def _states(**keys: Callable[[Tensor], Tensor]) -> Callable[[], dict[str, Any]]:
    def data() -> dict[str, Any]:
        from mlcolvar.data import DictDataset, DictModule

        x = torch.randn(60, 8, generator=torch.Generator().manual_seed(4))
        dataset = DictDataset({"data": x, **{key: make(x) for key, make in keys.items()}})
        return {"datamodule": DictModule(dataset, lengths=[0.8, 0.2], batch_size=16, random_split=False)}

    return data


def _autoencoder_cv() -> Project:
    from mlcolvar.cvs import AutoEncoderCV

    return lambda: AutoEncoderCV([8, 6, 4, 2]), _states(), {}


def _regression_cv() -> Project:
    from mlcolvar.cvs import RegressionCV

    return lambda: RegressionCV([8, 6, 4, 1]), _states(target=lambda x: x.square().sum(1)), {}
