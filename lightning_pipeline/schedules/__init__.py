"""What should happen in a pipeline: schedules, the plans they make, and proofs about them. No torch here."""

from lightning_pipeline.schedules.action import Action
from lightning_pipeline.schedules.auto import Auto
from lightning_pipeline.schedules.check import check
from lightning_pipeline.schedules.communicate import communicate
from lightning_pipeline.schedules.costs import Costs
from lightning_pipeline.schedules.draw import draw
from lightning_pipeline.schedules.dualpipe_v import DualPipeV
from lightning_pipeline.schedules.forward_only import ForwardOnly
from lightning_pipeline.schedules.from_table import FromTable
from lightning_pipeline.schedules.from_torch import FromTorch
from lightning_pipeline.schedules.gpipe import GPipe
from lightning_pipeline.schedules.interleaved import Interleaved1F1B, InterleavedZeroBubble
from lightning_pipeline.schedules.looped_bfs import LoopedBFS
from lightning_pipeline.schedules.one_f_one_b import OneFOneB
from lightning_pipeline.schedules.panels import draw_svg
from lightning_pipeline.schedules.plan import Plan
from lightning_pipeline.schedules.registry import available_schedules, get_schedule
from lightning_pipeline.schedules.schedule import Schedule
from lightning_pipeline.schedules.simulate import Simulation, simulate
from lightning_pipeline.schedules.v_shape import VHalf, VMin
from lightning_pipeline.schedules.zbv import ZBV
from lightning_pipeline.schedules.zero_bubble import ZBH1, ZBH2

__all__ = [
    "ZBH1",
    "ZBH2",
    "ZBV",
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
    "available_schedules",
    "check",
    "communicate",
    "draw",
    "draw_svg",
    "get_schedule",
    "simulate",
]
