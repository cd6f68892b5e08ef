"""What the user's hooks see and call of a module that is cut."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipeline.model.state import Meeting, Residence, Sources
from lightning_pipeline.model.tensors import tensors_in
from lightning_pipeline.model.trace import Runner, UnitPatches

R = TypeVar("R", bound=Runner)


class OutsideSteps:
    """Between the steps of a split model. `SplitModel` inherits this."""

    root: nn.Module
    _residence: Residence
    _patches: UnitPatches
    _stage_of: list[int]

    def meeting(
        self, rank_of: Callable[[int], int], num_ranks: int, gather: Callable[[str, Any], list[Any]],
        optimizers: Callable[[], Iterable[Optimizer]], leave: Callable[[], None] = lambda: None,
    ) -> Meeting:  # fmt: skip
        """What completes values of several stages in the user's hooks.

        Args:
            rank_of: The pipeline rank of a stage.
            num_ranks: Of the pipeline.
            gather: Collects an object of each pipeline rank; told for what.
            optimizers: Of the run.
            leave: Called at the end of a hook.
        """
        holders = {name: frozenset(map(rank_of, stages)) for name, stages in self._residence.needed.items()}
        partly = {name: ranks for name, ranks in holders.items() if len(ranks) < num_ranks}

        def listed() -> Iterator[tuple[str, list[Tensor]]]:
            states = list(optimizers())
            for name, tensor in self.root.named_parameters():
                kept = [t for o in states for t in tensors_in(o.state.get(tensor, ()))]
                yield name, [tensor, *([] if tensor.grad is None else [tensor.grad]), *kept]
            yield from ((name, [buffer]) for name, buffer in self.root.named_buffers())

        sources = Sources(lambda: ((name, found) for name, found in listed() if name in partly))
        return Meeting(
            self._residence.absent, sources, partly, num_ranks, gather, self._residence.show_gradients, leave
        )

    @contextmanager
    def whole(self, states: Mapping[str, Tensor]) -> Iterator[None]:
        """Inside, this rank has the whole module, whose units run here.

        Args:
            states: Parameters and buffers of other stages, by name.
        """
        idle, self._patches.idle = self._patches.idle, None
        try:
            with self._residence.filled(states):
                yield
        finally:
            self._patches.idle = idle

    def answer_calls(self, answered: Callable[[UnitPatches, Runner, Sequence[int]], R]) -> R:
        """Let someone else answer calls of units outside of steps.

        Args:
            answered: Given the units, who answers now, and the stage of each unit.
        """
        idle = self._patches.idle
        assert idle is not None, "the split installs one"
        answers = answered(self._patches, idle, self._stage_of)
        self._patches.idle = answers
        return answers

    def note_gradients(self, made: bool) -> None:
        """Let the next hook see a gradient at each trained parameter of other stages, or at none.

        Args:
            made: Whether a backward has run; otherwise `.grad` was set to None with no hook in between.
        """
        self._residence.has_gradients = made
