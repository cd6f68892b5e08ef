"""What should happen in a pipeline: schedules, the plans they make, and proofs about them. No torch here."""

from lightning_pipeline.schedules.action import Action
from lightning_pipeline.schedules.check import check
from lightning_pipeline.schedules.communicate import communicate
from lightning_pipeline.schedules.forward_only import ForwardOnly
from lightning_pipeline.schedules.gpipe import GPipe
from lightning_pipeline.schedules.one_f_one_b import OneFOneB
from lightning_pipeline.schedules.plan import Plan
from lightning_pipeline.schedules.registry import available_schedules, get_schedule
from lightning_pipeline.schedules.schedule import Schedule

__all__ = [
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
]
