"""What could be kept whole, or split finer, so that a refused step works: found by trying it."""

from collections import defaultdict
from collections.abc import Callable, Sequence

from torch import nn

from lightning_pipeline.errors import SplitError
from lightning_pipeline.model.cut.circles import opened
from lightning_pipeline.model.cut.graph import atoms_of
from lightning_pipeline.model.trace import Trace, Unit, find_units, silence
from lightning_pipeline.registry import parameters_of

_MOST = 8  # traces: each takes as long as the first one


class Trials:
    """Other units of a module that is whole, tried by tracing its step with them.

    Args:
        root: The LightningModule.
        num_stages: That are asked for.
        keep_whole: Patterns that the user has given.
        trace: Traces the step with given units.
    """

    def __init__(
        self,
        root: nn.Module,
        num_stages: int,
        keep_whole: Sequence[str] | None,
        trace: Callable[[list[Unit]], Trace],
    ) -> None:
        self._root, self._num_stages, self._trace = root, num_stages, trace
        self._given = tuple(keep_whole or ())

    def whole(self, units: Sequence[Unit]) -> tuple[str, ...]:
        """Patterns for `units=` with which the step goes one way that can be shared out; empty: none found.

        Modules around the units are tried, all of a class at once, those first that keep least together.

        Args:
            units: With which it does not.
        """
        for around in self._around(units)[:_MOST]:
            patterns = (*self._given, *around)
            if self._goes(patterns, units):
                return patterns
        return ()

    def explained(self, error: SplitError, units: Sequence[Unit]) -> SplitError:
        """A refusal of the step with these units, with what works beside."""
        works = self.whole(units)
        said = f"; what works, as a trial has shown: PipelineStrategy(units={list(works)})" if works else ""
        return SplitError(
            f"{error}{said}; or PipelineStrategy(whole_steps=True) runs the step whole on all ranks, one "
            "stage after the other"
        )

    def finer(self, patterns: Sequence[str]) -> bool:
        """Whether there are enough units for the stages with these patterns in place of the given ones."""
        return self._goes(patterns, ())

    def _goes(self, patterns: Sequence[str], but: Sequence[Unit]) -> bool:
        found = find_units(self._root, at_least=self._num_stages, keep_whole=patterns)
        if {unit.name for unit in found} == {unit.name for unit in but}:
            return False
        try:
            with silence():
                trace = opened(found, self._num_stages, self._trace)
        except SplitError:
            return False
        return not trace.divided_at and len(atoms_of(trace)) >= self._num_stages

    def _around(self, units: Sequence[Unit]) -> list[list[str]]:
        """Names of modules with a forward of their own around units, by class; small ones first."""
        own, sizes = {unit.name for unit in units}, defaultdict[type, int](int)
        above = {name.rsplit(".", deep)[0] for name in own for deep in range(1, name.count(".") + 1)}
        names: dict[type, list[str]] = defaultdict(list)
        for name, module in self._root.named_modules():
            kind = type(module)
            if name in above - own and kind.forward is not nn.Module.forward:  # that of a list, for one
                names[kind].append(name)
                sizes[kind] = max(sizes[kind], sum(p.numel() for p in parameters_of(module)))
        return [names[kind] for kind in sorted(names, key=lambda kind: sizes[kind])]
