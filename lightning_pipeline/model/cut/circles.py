"""Small units that are called at both ends of others, such as a normalisation that is undone at the end."""

from collections.abc import Callable, Sequence

from lightning_pipeline.errors import SplitError
from lightning_pipeline.model.cut.graph import CIRCLE, Atom, atoms_of
from lightning_pipeline.model.trace import Trace, Unit

_SMALL = 20  # so many times fewer parameters than what it keeps together


def opened(units: Sequence[Unit], num_stages: int, trace: Callable[[list[Unit]], Trace]) -> Trace:
    """A trace whose units can be shared out over stages, where few of them close a circle.

    A unit that is called at the beginning and again at the end keeps all between on its stage. A small one
    without buffers is then left to the code between units, which every stage runs.

    Args:
        units: All of the module.
        num_stages: That are asked for.
        trace: Traces the step with given units.
    """
    first = trace(list(units))
    atoms = atoms_of(first)
    closing = {unit for atom in atoms for unit in _closing(first, atom)}
    if len(atoms) >= num_stages or not closing:
        return first
    try:
        other = trace([unit for number, unit in enumerate(first.units) if number not in closing])
    except SplitError:
        return first  # whose refusal is the one to read
    return other if len(atoms_of(other)) >= num_stages else first


def _closing(trace: Trace, atom: Atom) -> list[int]:
    """Units of an atom that are called again and are small beside it."""
    if not atom.reason.startswith(CIRCLE):
        return []
    called = [call.unit for call in trace.calls]
    whole = sum(trace.units[unit].num_parameters for unit in atom.units)
    return [
        unit
        for unit in atom.units
        if called.count(unit) > 1
        and trace.units[unit].num_parameters * _SMALL <= whole
        and not any(True for _ in trace.units[unit].module.buffers())
    ]
