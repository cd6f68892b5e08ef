"""A plan: the actions of each rank in order, checked, simulated and priced."""

from lightning_pipeline.schedules.plans.action import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    RECV_F,
    SEND_B,
    SEND_F,
    Action,
)
from lightning_pipeline.schedules.plans.check import check
from lightning_pipeline.schedules.plans.communicate import communicate
from lightning_pipeline.schedules.plans.costs import Costs, StageCosts
from lightning_pipeline.schedules.plans.plan import Plan
from lightning_pipeline.schedules.plans.schedule import Schedule, require_sizes, training_plan
from lightning_pipeline.schedules.plans.simulation import Simulation, Timed, peak_memory, simulate, summarize
from lightning_pipeline.schedules.plans.slots import Slots, pull_cool_down, pull_warm_up
from lightning_pipeline.schedules.plans.waits import Wait, waits

__all__ = [
    "BACKWARD",
    "BACKWARD_INPUT",
    "BACKWARD_WEIGHT",
    "FORWARD",
    "RECV_F",
    "SEND_B",
    "SEND_F",
    "Action",
    "Costs",
    "Plan",
    "Schedule",
    "Simulation",
    "Slots",
    "StageCosts",
    "Timed",
    "Wait",
    "check",
    "communicate",
    "peak_memory",
    "pull_cool_down",
    "pull_warm_up",
    "require_sizes",
    "simulate",
    "summarize",
    "training_plan",
    "waits",
]
