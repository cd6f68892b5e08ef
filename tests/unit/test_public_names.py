"""What users may import is written down here; a change of it is a change of the interface."""

import importlib

import pytest

PUBLIC = {
    "lightning_pipeline": [
        "PipelineStrategy",
        "alias_pytorch_lightning",
        "load_from_checkpoint",
    ],
    "lightning_pipeline.callbacks": [
        "BubbleMonitor",
        "PipelineTimeline",
        "StageMemoryMonitor",
    ],
    "lightning_pipeline.errors": [
        "BatchMismatchError",
        "CheckpointCorruptError",
        "CheckpointError",
        "CheckpointNotFoundError",
        "CheckpointWriteError",
        "ConfigMismatchError",
        "ConfigurationError",
        "MessageError",
        "NonFiniteError",
        "PartitionError",
        "PipelineError",
        "PlaceholderError",
        "ScheduleError",
        "SplitError",
        "StageFailedError",
        "StageTimeoutError",
        "UnsafeCheckpointError",
    ],
    "lightning_pipeline.schedules": [
        "Action",
        "Auto",
        "Costs",
        "DualPipeV",
        "ForwardOnly",
        "FromTable",
        "FromTorch",
        "GPipe",
        "Interleaved1F1B",
        "InterleavedZeroBubble",
        "LoopedBFS",
        "OneFOneB",
        "Plan",
        "Schedule",
        "Simulation",
        "VHalf",
        "VMin",
        "ZBH1",
        "ZBH2",
        "ZBV",
        "available_schedules",
        "check",
        "communicate",
        "draw",
        "draw_svg",
        "get_schedule",
        "simulate",
    ],
}


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_are_these_and_exist(module: str) -> None:
    imported = importlib.import_module(module)
    assert sorted(imported.__all__) == PUBLIC[module]
    assert [name for name in PUBLIC[module] if not hasattr(imported, name)] == []


def test_what_plan_takes_and_gives_can_be_imported() -> None:
    assert {"Assumptions", "Forecast"} <= set(importlib.import_module("lightning_pipeline.forecast").__all__)
