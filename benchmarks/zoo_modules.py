"""LightningModules that libraries bring along, tiny: forecasters, detectors of anomalies, uncertainty."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor, nn

from benchmarks.zoo_cases import Case, case


def own_step(module: nn.Module, batch: Any) -> Tensor:
    """The loss of the module's own training step."""
    step: Any = module.training_step
    found = step(batch, 0) if step.__code__.co_argcount > 2 else step(batch)
    loss: Tensor = found["loss"] if isinstance(found, dict) else found
    return loss


# ---- pytorch-forecasting

_SERIES: dict[str, Any] = {
    "TemporalFusionTransformer": {"hidden_size": 8, "attention_head_size": 2, "hidden_continuous_size": 4},
    "NBeats": {"widths": [8, 16], "num_blocks": [2, 2], "num_block_layers": [2, 2]},
    "NBeatsKAN": {"widths": [8, 16], "num_blocks": [1, 1], "num_block_layers": [1, 1]},
    "NHiTS": {"hidden_size": 16, "n_blocks": [1, 1, 1]},
    "RecurrentNetwork": {"hidden_size": 8, "rnn_layers": 2},
    "DeepAR": {"hidden_size": 8, "rnn_layers": 2},
    "DecoderMLP": {"hidden_size": 8, "n_hidden_layers": 3},
    "TiDEModel": {"hidden_size": 8},
    "xLSTMTime": {"input_size": 1, "hidden_size": 8, "output_size": 1},
}


def series_of(name: str) -> Any:
    """A data set of three made-up series that a forecaster of pytorch-forecasting can be made from."""
    import numpy
    import pandas
    from pytorch_forecasting import TimeSeriesDataSet
    from pytorch_forecasting.data import GroupNormalizer

    draws = numpy.random.default_rng(0)
    frame = pandas.DataFrame(
        {
            "time": list(range(30)) * 3,
            "series": [one for one in "abc" for _ in range(30)],
            "value": draws.standard_normal(90).astype("float64"),
        }
    )
    alone = name.startswith("NBeats")  # takes no covariates
    return TimeSeriesDataSet(
        frame,
        time_idx="time",
        target="value",
        group_ids=["series"],
        max_encoder_length=8,
        min_encoder_length=8,
        max_prediction_length=4,
        min_prediction_length=4,
        time_varying_unknown_reals=["value"],
        time_varying_known_reals=[] if alone or name == "xLSTMTime" else ["time"],
        target_normalizer=GroupNormalizer(groups=["series"]),
        add_relative_time_idx=False,
    )


def _forecaster(name: str, options: dict[str, Any]) -> None:
    @case(f"pytorch-forecasting/{name}")
    def make() -> Case:
        import pytorch_forecasting
        import pytorch_forecasting.models.nbeats
        import pytorch_forecasting.models.xlstm

        data = series_of(name)
        found = [pytorch_forecasting, pytorch_forecasting.models.nbeats, pytorch_forecasting.models.xlstm]
        cls = next(getattr(place, name) for place in found if hasattr(place, name))
        module = cls.from_dataset(data, **_undropped(cls), **options)
        in_training = {"trainer": _InTraining(), "log": _nothing}
        module.__class__ = type(name, (cls,), in_training)
        loader = iter(data.to_dataloader(train=True, batch_size=4))
        return module, own_step, lambda: next(loader)


class _InTraining:
    """What these modules ask of their trainer in a step."""

    state = SimpleNamespace(stage=RunningStage.TRAINING)
    callbacks: tuple[Any, ...] = ()
    current_epoch = global_step = 0


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Takes what is logged."""


def _undropped(cls: type) -> dict[str, float]:
    import inspect

    return {"dropout": 0.0} if "dropout" in inspect.signature(cls).parameters else {}


for _name, _options in _SERIES.items():
    _forecaster(_name, _options)


# ---- neuralforecast

_HIDDEN: dict[str, Any] = {"hidden_size": 8, "n_head": 2, "conv_hidden_size": 8}
_MLP: dict[str, Any] = {"mlp_units": [[8, 8]] * 3}
_NEURAL: dict[str, Any] = {
    "RNN": {"encoder_hidden_size": 8, "decoder_hidden_size": 8},
    "GRU": {"encoder_hidden_size": 8, "decoder_hidden_size": 8},
    "LSTM": {"encoder_hidden_size": 8, "decoder_hidden_size": 8},
    "TCN": {"encoder_hidden_size": 8, "decoder_hidden_size": 8},
    "DeepAR": {"lstm_hidden_size": 8},
    "DilatedRNN": {"encoder_hidden_size": 8, "decoder_hidden_size": 8},
    "MLP": {"hidden_size": 16, "num_layers": 3},
    "NHITS": _MLP,
    "NBEATS": _MLP,
    "NBEATSx": _MLP,
    "DLinear": {},
    "NLinear": {},
    "TFT": {"hidden_size": 8, "n_head": 2},
    "VanillaTransformer": _HIDDEN,
    "Informer": _HIDDEN,
    "Autoformer": _HIDDEN,
    "FEDformer": _HIDDEN | {"n_head": 8},
    "PatchTST": {"hidden_size": 8, "n_heads": 2, "linear_hidden_size": 8, "patch_len": 4, "stride": 2},
    "BiTCN": {"hidden_size": 8},
    "TiDE": {"hidden_size": 8, "decoder_output_dim": 4, "temporal_decoder_dim": 8},
    "DeepNPTS": {"hidden_size": 8},
    "KAN": {"hidden_size": 8},
    "TimesNet": {"hidden_size": 8, "conv_hidden_size": 8, "top_k": 2},
    "xLSTM": {"encoder_hidden_size": 8, "decoder_hidden_size": 8},
    "StemGNN": {"n_series": 3},
    "MLPMultivariate": {"n_series": 3, "hidden_size": 16, "num_layers": 3},
    "TSMixer": {"n_series": 3, "ff_dim": 8},
    "TSMixerx": {"n_series": 3, "ff_dim": 8},
    "iTransformer": {"n_series": 3, "hidden_size": 8, "n_heads": 2, "d_ff": 8},
    "SOFTS": {"n_series": 3, "hidden_size": 8, "d_core": 8, "d_ff": 8},
    "TimeMixer": {"n_series": 3, "d_model": 8, "d_ff": 8},
    "TimeXer": {"n_series": 3, "hidden_size": 8, "n_heads": 2, "d_ff": 8, "patch_len": 4},
    "RMoK": {"n_series": 3},
    "XLinear": {"n_series": 3, "hidden_size": 8, "temporal_ff": 8, "channel_ff": 8},
}


def _neural(name: str, options: dict[str, Any]) -> None:
    @case(f"neuralforecast/{name}")
    def make() -> Case:
        import inspect

        import neuralforecast.models
        import pandas

        cls = getattr(neuralforecast.models, name)
        dropouts = {part: 0.0 for part in inspect.signature(cls).parameters if "dropout" in part}
        module = cls(
            h=4, input_size=8, max_steps=1, windows_batch_size=None, accelerator="cpu", **dropouts, **options
        )
        module.val_size = module.test_size = 0
        columns = pandas.Index(["y", "available_mask"])

        def batch() -> Any:
            values = torch.stack([torch.randn(3, 24), torch.ones(3, 24)], dim=1)
            return {"temporal": values, "temporal_cols": columns, "y_idx": 0}

        return module, own_step, batch


for _name, _options in _NEURAL.items():
    _neural(_name, _options)


# ---- anomalib

_DETECTORS: dict[str, tuple[int, dict[str, Any]]] = {
    "Fastflow": (64, {"pre_trained": False, "flow_steps": 2}),
    "Stfpm": (64, {}),
    "ReverseDistillation": (64, {"backbone": "resnet18", "pre_trained": False}),
    "Csflow": (64, {"cross_conv_hidden_channels": 8, "n_coupling_blocks": 2}),
    "Fre": (64, {"backbone": "resnet18", "pre_trained": False, "input_dim": 1024, "latent_dim": 16}),
    "UniNet": (64, {"student_backbone": "resnet18", "teacher_backbone": "resnet18"}),
    "Supersimplenet": (64, {"backbone": "resnet18"}),
    "Uflow": (448, {"backbone": "resnet18", "flow_steps": 1}),
    "L2BT": (224, {}),
    "Dinomaly": (224, {"encoder_name": "vit_small_patch14_dinov2", "bottleneck_dropout": 0.0}),
    "Cfa": (64, {"backbone": "resnet18"}),
    "GeneralAD": (
        518,
        {
            "backbone": "vit_tiny_patch16_224",
            "layers": (6, 12),
            "hidden_dim": 16,
            "pre_trained": False,
            "dsc_dropout": 0.0,
        },
    ),
}
_SIZED = ("Fastflow", "ReverseDistillation", "Csflow", "Uflow")  # their layers have the size of an image


def _detector(name: str, side: int, options: dict[str, Any]) -> None:
    @case(f"anomalib/{name}")
    def make() -> Case:
        import anomalib.models
        import timm
        from anomalib.data import ImageBatch

        create = timm.create_model

        def untrained(*args: Any, **kwargs: Any) -> Any:
            return create(*args, **kwargs | {"pretrained": False})  # weights are not downloaded

        timm.create_model = untrained
        try:
            parts = dict.fromkeys(("pre_processor", "post_processor", "evaluator", "visualizer"), False)
            cls = getattr(anomalib.models, name)
            if name in _SIZED:
                parts["pre_processor"] = cls.configure_pre_processor((side, side))
            module = cls(**parts, **options)
        finally:
            timm.create_model = create

        def batch() -> Any:
            return ImageBatch(
                image=torch.randn(2, 3, side, side),
                gt_label=torch.zeros(2, dtype=torch.bool),
                gt_mask=torch.zeros(2, side, side, dtype=torch.bool),
            )

        return module, own_step, batch


for _name, (_side, _options) in _DETECTORS.items():
    _detector(_name, _side, _options)


# ---- torch_uncertainty


def _layers(last: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, last))


def _rows(targets: Callable[[], Tensor], *shape: int) -> Callable[[], Any]:
    return lambda: (torch.randn(4, *shape), targets())


@case("torch_uncertainty/ClassificationRoutine")
def _classifies() -> Case:
    from torch_uncertainty.routines import ClassificationRoutine

    module = ClassificationRoutine(_layers(3), num_classes=3, loss=nn.CrossEntropyLoss())
    return module, own_step, _rows(lambda: torch.randint(0, 3, (4,)), 8)


@case("torch_uncertainty/ensemble")
def _ensemble() -> Case:
    from torch_uncertainty.methods import deep_ensembles
    from torch_uncertainty.routines import ClassificationRoutine
    from torch_uncertainty.transforms import RepeatTarget

    module = ClassificationRoutine(
        deep_ensembles([_layers(3), _layers(3)]),
        num_classes=3,
        loss=nn.CrossEntropyLoss(),
        is_ensemble=True,
        format_batch_fn=RepeatTarget(2),
    )
    return module, own_step, _rows(lambda: torch.randint(0, 3, (4,)), 8)


@case("torch_uncertainty/packed")
def _packed() -> Case:
    from torch_uncertainty.layers import PackedConv2d, PackedLinear
    from torch_uncertainty.routines import ClassificationRoutine
    from torch_uncertainty.transforms import RepeatTarget

    sizes: dict[str, Any] = {"alpha": 2, "num_estimators": 2, "padding": 1}
    model = nn.Sequential(
        PackedConv2d(3, 8, 3, first=True, **sizes),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        PackedConv2d(8, 8, 3, **sizes),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        PackedLinear(8, 3, alpha=2, num_estimators=2, last=True),
    )
    module = ClassificationRoutine(
        model,
        num_classes=3,
        loss=nn.CrossEntropyLoss(),
        is_ensemble=True,
        format_batch_fn=RepeatTarget(2),
    )
    return module, own_step, _rows(lambda: torch.randint(0, 3, (4,)), 3, 8, 8)


@case("torch_uncertainty/batch ensemble")
def _batched() -> Case:
    from torch_uncertainty.layers import BatchLinear
    from torch_uncertainty.routines import ClassificationRoutine
    from torch_uncertainty.transforms import RepeatTarget

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = (
                BatchLinear(8, 16, num_estimators=2),
                BatchLinear(16, 16, num_estimators=2),
                BatchLinear(16, 3, num_estimators=2),
            )

        def forward(self, x: Tensor) -> Tensor:
            x = F.relu(self.first(x.repeat(2, 1)))
            found: Tensor = self.third(F.relu(self.second(x)))
            return found

    module = ClassificationRoutine(
        Net(), num_classes=3, loss=nn.CrossEntropyLoss(), is_ensemble=True, format_batch_fn=RepeatTarget(2)
    )
    return module, own_step, _rows(lambda: torch.randint(0, 3, (4,)), 8)


@case("torch_uncertainty/RegressionRoutine")
def _regresses() -> Case:
    from torch_uncertainty.routines import RegressionRoutine

    module = RegressionRoutine(_layers(2), output_dim=2, loss=nn.MSELoss())
    return module, own_step, _rows(lambda: torch.randn(4, 2), 8)


@case("torch_uncertainty/normal distribution")
def _distribution() -> Case:
    from torch_uncertainty.layers.distributions import NormalLinear
    from torch_uncertainty.losses import DistributionNLLLoss
    from torch_uncertainty.routines import RegressionRoutine

    model = nn.Sequential(
        nn.Linear(8, 16),
        nn.ReLU(),
        nn.Linear(16, 16),
        nn.ReLU(),
        NormalLinear(nn.Linear, event_dim=1, in_features=16),
    )
    module = RegressionRoutine(model, output_dim=1, loss=DistributionNLLLoss(), dist_family="normal")
    return module, own_step, _rows(lambda: torch.randn(4, 1), 8)


@case("torch_uncertainty/bayesian")
def _bayesian() -> Case:
    from torch_uncertainty.layers import BayesLinear
    from torch_uncertainty.losses import ELBOLoss
    from torch_uncertainty.routines import RegressionRoutine

    model = nn.Sequential(BayesLinear(8, 16), nn.ReLU(), BayesLinear(16, 16), nn.ReLU(), BayesLinear(16, 1))
    loss = ELBOLoss(model, nn.MSELoss(), kl_weight=0.01, num_samples=2)
    return RegressionRoutine(model, output_dim=1, loss=loss), own_step, _rows(lambda: torch.randn(4, 1), 8)


@case("torch_uncertainty/SegmentationRoutine")
def _segments() -> Case:
    from torch_uncertainty.routines import SegmentationRoutine

    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 1)
    )
    module = SegmentationRoutine(model, num_classes=3, loss=nn.CrossEntropyLoss())
    return module, own_step, _rows(lambda: torch.randint(0, 3, (4, 8, 8)), 3, 8, 8)


@case("torch_uncertainty/PixelRegressionRoutine")
def _pixels() -> Case:
    from torch_uncertainty.routines import PixelRegressionRoutine

    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 1)
    )
    module = PixelRegressionRoutine(model, output_dim=1, loss=nn.MSELoss())
    return module, own_step, _rows(lambda: torch.rand(4, 8, 8), 3, 8, 8)
