"""What is too large for a pipeline to be of use, why it cannot be shared out, and what would free it."""

from lightning_pipeline.model.cut.graph import CIRCLE, Atom
from lightning_pipeline.model.cut.partitioning import Partition, unit_costs
from lightning_pipeline.model.cut.table import units_text
from lightning_pipeline.model.trace import finer_names

_HALF = 0.5
_WAYS = (
    ("segment of activation checkpointing", "checkpoint each of them by itself"),
    ("calls units in its forward", "call them outside of it, and checkpoint each of them"),
    ("changes something that the end", "return that from its forward"),
    ("changes beside its output", "return that from its forward"),
    ("between units", "write it in a hook such as on_train_batch_end, or inside a unit"),
    (CIRCLE, "nothing does while a unit works again on what came after it"),
)


def too_large(cut: Partition) -> str | None:
    """A sentence on the units that hold more than half of the cost and stay together; None where none do.

    Args:
        cut: Of at least two stages.
    """
    costs = unit_costs(cut.trace)
    total = sum(costs)
    if cut.num_stages < 2 or not total:
        return None
    share, atom = max(
        ((sum(costs[unit] for unit in atom.units) / total, atom) for atom in cut.atoms),
        key=lambda one: one[0],
    )
    if share <= _HALF:
        return None
    units = [cut.trace.units[unit] for unit in atom.units]
    names = tuple(unit.name for unit in units)
    several = len(units) > 1
    return (
        f"unit{'s' if several else ''} {units_text(names)} hold{'' if several else 's'} {share:.0%} of the "
        "estimated cost and "
        f"stay{'' if several else 's'} on one stage, so that any number of stages is at most {1 / share:.1f} "
        f"times as fast as one: {_why(cut, atom)}"
    )


def _why(cut: Partition, atom: Atom) -> str:
    if atom.reason:
        way = next((way for part, way in _WAYS if part in atom.reason), "")
        return atom.reason + (f"; what frees them: {way}" if way else "")
    finer = finer_names([cut.trace.units[atom.units[0]]])
    if finer:
        return f"it is kept whole; units={finer} splits it"
    return "it has no parts that could be on stages of their own; divide its layer into several modules"
