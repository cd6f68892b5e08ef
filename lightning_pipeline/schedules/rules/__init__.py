"""The rules that make a plan: one schedule a file."""

from lightning_pipeline.schedules.rules.dualpipe_v import DualPipeV
from lightning_pipeline.schedules.rules.forward_only import ForwardOnly
from lightning_pipeline.schedules.rules.from_table import FromTable
from lightning_pipeline.schedules.rules.from_torch import FromTorch
from lightning_pipeline.schedules.rules.gpipe import GPipe
from lightning_pipeline.schedules.rules.interleaved import Interleaved1F1B, InterleavedZeroBubble
from lightning_pipeline.schedules.rules.looped_bfs import LoopedBFS
from lightning_pipeline.schedules.rules.one_f_one_b import OneFOneB
from lightning_pipeline.schedules.rules.v_shape import VHalf, VMin
from lightning_pipeline.schedules.rules.zbv import ZBV
from lightning_pipeline.schedules.rules.zero_bubble import ZBH1, ZBH2

__all__ = [
    "ZBH1",
    "ZBH2",
    "ZBV",
    "DualPipeV",
    "ForwardOnly",
    "FromTable",
    "FromTorch",
    "GPipe",
    "Interleaved1F1B",
    "InterleavedZeroBubble",
    "LoopedBFS",
    "OneFOneB",
    "VHalf",
    "VMin",
]
