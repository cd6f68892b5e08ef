"""Who is where, what ranks do together, and what happens when one fails."""

from lightning_pipeline.ranks.alignment import Clocks, Offset
from lightning_pipeline.ranks.board import Board, on_device
from lightning_pipeline.ranks.failure import Failure, Where
from lightning_pipeline.ranks.gradients import average_gradients, sum_gradients
from lightning_pipeline.ranks.groups import Groups, Numbering
from lightning_pipeline.ranks.mesh import fit_to_devices
from lightning_pipeline.ranks.sharing import Outlet, agreed

__all__ = [
    "Board",
    "Clocks",
    "Failure",
    "Groups",
    "Numbering",
    "Offset",
    "Outlet",
    "Where",
    "agreed",
    "average_gradients",
    "fit_to_devices",
    "on_device",
    "sum_gradients",
]
