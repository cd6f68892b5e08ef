"""What is known of a step that is not traced: the units in their order, and who needs what lies between."""

from collections.abc import Sequence

from torch import nn

from lightning_pipeline.model.trace.record import Call, Trace
from lightning_pipeline.model.trace.units import Unit


def untraced(root: nn.Module, step: str, units: Sequence[Unit]) -> Trace:
    """A trace to choose a cut from, for a step that every rank runs whole.

    Its units cost as much as they have parameters, and are called in the order of the module tree. What is in
    none of them is needed on every stage.

    Args:
        root: The LightningModule.
        step: Its name.
        units: From `find_units`.
    """
    trace = Trace(root, step, list(units), is_made_up=True)
    for number, unit in enumerate(units):
        trace.calls.append(Call(number, number, 0, cost=float(unit.num_parameters)))
    holders = {id(module): number for number, unit in enumerate(units) for module in unit.module.modules()}
    for prefix, module in root.named_modules(remove_duplicate=False):
        for name in (*module._parameters, *module._buffers):
            full = f"{prefix}.{name}" if prefix else name
            if id(module) in holders:
                trace.state_units[full] = holders[id(module)]
            else:
                trace.everywhere.add(full)
    return trace
