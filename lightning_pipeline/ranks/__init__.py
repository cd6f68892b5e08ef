"""Who is where, what ranks do together, and what happens when one fails."""

from lightning_pipeline.ranks.alignment import Clocks, Offset
from lightning_pipeline.ranks.board import Board, on_device
from lightning_pipeline.ranks.cause import Cause, Where
from lightning_pipeline.ranks.collectives import Company, Failed, Outlet
from lightning_pipeline.ranks.crash import write_crash
from lightning_pipeline.ranks.edges import nccl_version
from lightning_pipeline.ranks.failure import Failure, all_end_alike
from lightning_pipeline.ranks.gradients import average_gradients, clip_by_norm, gather_rows, sum_shared
from lightning_pipeline.ranks.groups import Groups, Within
from lightning_pipeline.ranks.lookout import Lookout, break_off, closed_peers
from lightning_pipeline.ranks.mesh import Numbering, RankMap, fit_to_devices
from lightning_pipeline.ranks.notes import CAUSE, Notes
from lightning_pipeline.ranks.roll_call import RollCall, reach_store

__all__ = [
    "CAUSE",
    "Board",
    "Cause",
    "Clocks",
    "Company",
    "Failed",
    "Failure",
    "Groups",
    "Lookout",
    "Notes",
    "Numbering",
    "Offset",
    "Outlet",
    "RankMap",
    "RollCall",
    "Where",
    "Within",
    "all_end_alike",
    "average_gradients",
    "break_off",
    "clip_by_norm",
    "closed_peers",
    "fit_to_devices",
    "gather_rows",
    "nccl_version",
    "on_device",
    "reach_store",
    "sum_shared",
    "write_crash",
]
