"""What should happen in a pipeline: schedules, the plans they make, and proofs about them. No torch here."""

from lightning_pipeline.schedules.drawing import draw, draw_svg
from lightning_pipeline.schedules.plans import (
    Action,
    Costs,
    Plan,
    Schedule,
    Simulation,
    check,
    communicate,
    simulate,
)
from lightning_pipeline.schedules.registry import available_schedules, get_schedule
from lightning_pipeline.schedules.rules import (
    ZBH1,
    ZBH2,
    ZBV,
    DualPipeV,
    ForwardOnly,
    FromTable,
    FromTorch,
    GPipe,
    Interleaved1F1B,
    InterleavedZeroBubble,
    LoopedBFS,
    OneFOneB,
    VHalf,
    VMin,
)
from lightning_pipeline.schedules.search import Auto

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
