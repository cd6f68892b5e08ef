"""Every exception this package raises, as one tree under `PipelineError`."""

__all__ = [
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
]


class PipelineError(RuntimeError):
    """Anything that this package refuses or that went wrong in a pipeline."""


class ConfigurationError(PipelineError, ValueError):
    """Settings that cannot work. The message lists every problem found, not the first."""


class ConfigMismatchError(PipelineError):
    """Ranks disagree about a setting, the code or a version. Names the field and each rank's value."""


class SplitError(PipelineError):
    """The module does something that cannot be cut into stages. Names the module and the line."""


class PartitionError(SplitError, ValueError):
    """The asked-for boundaries do not exist, are out of order, or are more than the units allow."""


class PlaceholderError(SplitError):
    """A value that lives on another stage reached a place that needs the real one."""


class ScheduleError(PipelineError, ValueError):
    """A plan that is incomplete, illegal, would deadlock, or a size the schedule does not serve."""


class MessageError(PipelineError):
    """A message between stages is not the one that was expected."""


class NonFiniteError(PipelineError):
    """A gradient is inf or nan, and `on_nonfinite="raise"`. Names rank, stage and parameter on every rank."""


class StageFailedError(PipelineError):
    """A rank failed. Names rank, stage, micro-batch and action, and carries the first cause's traceback."""


class StageTimeoutError(StageFailedError):
    """A rank waited longer than `step_timeout`. Names what it waited for, from whom, and its last actions."""


class BatchMismatchError(PipelineError):
    """The ranks of one replica were given different batches."""


class CheckpointError(PipelineError):
    """A checkpoint could not be written or read."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is nothing where a checkpoint is to be read. Names the path; raised on every rank."""


class CheckpointWriteError(CheckpointError):
    """A checkpoint was not written. Names the rank, the path and the cause; the one before it stands."""


class CheckpointCorruptError(CheckpointError):
    """A checkpoint is not what was written, or not complete. Names the file; nothing live was touched."""


class UnsafeCheckpointError(CheckpointError):
    """A checkpoint holds what could run code when read, or reaches outside its folder. Nothing was run."""
