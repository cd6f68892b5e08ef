"""Words that arguments may be."""

from typing import Literal

Copying = Literal["never", "only", "faster"]
PARTITIONS = ("auto", "uniform", "parameters")
DATA = ("auto", "replicate", "broadcast")
TRANSPORTS = ("auto", "nccl", "ipc", "host")
START_METHODS = ("popen", "fork", "spawn", "forkserver")
LOSS_WEIGHTING = ("auto", "samples", "sum")
GATHER_WEIGHTS = ("auto", "all", "rank_zero", "none")
FORWARDS_FIRST = ("GPipe", "LoopedBFS")  # serve loss_over_batch
NONFINITE = ("ignore", "skip", "raise")
INTEGRITY = ("sha256", "crc32", "off")
