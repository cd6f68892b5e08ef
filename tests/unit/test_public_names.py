"""What users may import is written down here; a change of it is a change of the interface."""

import importlib

import pytest

PUBLIC = {
    "lightning_pipeline": [
        "PipelineStrategy",
    ],
    "lightning_pipeline.callbacks": [
        "BubbleMonitor",
        "StageMemoryMonitor",
    ],
    "lightning_pipeline.errors": [
        "BatchMismatchError",
        "CheckpointError",
        "ConfigMismatchError",
        "ConfigurationError",
        "MessageError",
        "PartitionError",
        "PipelineError",
        "PlaceholderError",
        "ScheduleError",
        "SplitError",
        "StageFailedError",
        "StageTimeoutError",
    ],
    "lightning_pipeline.schedules": [
        "Action",
        "ForwardOnly",
        "GPipe",
        "OneFOneB",
        "Plan",
        "Schedule",
        "available_schedules",
        "check",
        "communicate",
        "get_schedule",
    ],
}


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_are_these_and_exist(module: str) -> None:
    imported = importlib.import_module(module)
    assert sorted(imported.__all__) == PUBLIC[module]
    assert [name for name in PUBLIC[module] if not hasattr(imported, name)] == []
