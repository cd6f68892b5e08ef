"""Modules that hooks add, move or take away while a run is on: which units they are, and of which stage."""

from collections.abc import Iterator, Mapping, Sequence
from operator import is_
from typing import Any

from torch import nn

from lightning_pipeline.model.trace import Unit, find_new_units


class ModuleTree:
    """What the module was made of when it was looked at last.

    Args:
        root: The LightningModule.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self.look()

    def look(self) -> None:
        """Remember what there is now."""
        self._modules = list(self._root.modules())
        held = [one for module in self._modules for one in (module._modules, module._parameters)]
        self._held = [(one, list(one.values())) for one in held if one]
        self._empty = [one for one in held if not one] + [m._buffers for m in self._modules if not m._buffers]
        self._buffers = [(m._buffers, _filled(m._buffers)) for m in self._modules if m._buffers]

    def has_changed(self) -> bool:
        """Whether a module, a parameter or a buffer has come or gone, or another taken its place."""
        return (
            any(self._empty)
            or any(len(one) != len(was) or not all(map(is_, one.values(), was)) for one, was in self._held)
            or any(_filled(buffers) != was for buffers, was in self._buffers)
        )

    def new_units(
        self, units: Sequence[Unit], stage_of: Sequence[int], copies: Mapping[int, int]
    ) -> Iterator[tuple[Unit, int]]:
        """Modules with parameters that have come and are in no unit, each with the stage that it goes to.

        That is the stage of the unit that it was copied from, of the unit whose name it has taken, or of the
        one before it in the module tree.

        Args:
            units: Those of the cut.
            stage_of: The stage of each.
            copies: The number of the unit that a module was copied from, by `id`.
        """
        before = set(map(id, self._modules))
        of_name = {unit.name: stage for unit, stage in zip(units, stage_of, strict=True)}
        stages = {id(unit.module): stage for unit, stage in zip(units, stage_of, strict=True)}
        for unit in find_new_units(self._root, [one.module for one in units], before, copies):
            in_use = any(unit.name == name and id(m) in stages for name, m in self._root.named_modules())
            taken = None if in_use else of_name.get(unit.name)
            if id(unit.module) in copies:
                taken = stage_of[copies[id(unit.module)]]
            stages[id(unit.module)] = _beside(self._root, unit.name, stages) if taken is None else taken
            yield unit, stages[id(unit.module)]


def _filled(buffers: dict[str, Any]) -> list[str]:
    """Names of those that are there; steps replace their values."""
    return [name for name, buffer in buffers.items() if buffer is not None]


def _beside(root: nn.Module, name: str, stages: dict[int, int]) -> int:
    """The stage of the last unit before a module of its parent, or the first after it, or further up."""
    while name:
        parent, _, own = name.rpartition(".")
        before, after, here = list[int](), list[int](), False
        for child_name, child in root.get_submodule(parent).named_children():
            if child_name == own:
                here = True
            else:
                (after if here else before).extend(stages[id(m)] for m in child.modules() if id(m) in stages)
        if before or after:
            return before[-1] if before else after[0]
        name = parent
    return max(stages.values())
