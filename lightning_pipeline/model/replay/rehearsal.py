"""The step over the whole batch, without any unit: for what one device would divide by."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_pipeline.model.loss import Observer
from lightning_pipeline.model.replay.draws import Draws
from lightning_pipeline.model.replay.replay import Replay
from lightning_pipeline.model.replay.seeds import MicrobatchSeeds
from lightning_pipeline.model.tensors import Structure, TensorSpec, is_placeholder, unflatten

if TYPE_CHECKING:
    from lightning_pipeline.model.replay.stage import StageProgram

SCALAR_READS = ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero")


class Rehearsal(Replay):
    """One run of a step in which every unit only says what shape its output has.

    Args:
        program: Of the last stage.
        outputs: What each call of a unit returns.
        seeds: Of the random draws.
        observer: Sees the functions between the units.
        draws: Sees the random ones.
    """

    def __init__(
        self,
        program: "StageProgram",
        outputs: Mapping[tuple[int, int], tuple[Structure, list[TensorSpec]]],
        seeds: MicrobatchSeeds,
        observer: Observer,
        draws: Draws,
    ) -> None:
        super().__init__(program, 0, None, seeds)
        self.is_last = False  # so that nothing is logged
        self.follow, self._observer = observer.call, observer
        self._outputs, self._draws = outputs, draws
        self._host = seeds.host_place()

    def rehearse(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Call the step; it ends where a placeholder stops it."""
        try:
            with self.functions, self._poison:
                function(*args, **kwargs)
        except Exception:  # what was seen until then counts; the micro-batches raise what is wrong
            return
        finally:
            self._draws.host_at(self._host, self._seeds.host_place())

    def _answer(self, unit: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call of a unit."""
        nth = self._counts[unit]
        self._counts[unit] = nth + 1
        self._observer.unit(unit, nth)
        structure, specs = self._outputs[unit, nth]
        tensors = [self._program.placeholder((unit, nth, leaf), spec) for leaf, spec in enumerate(specs)]
        self._seeds.lose(again=unit in self._program.repeated)
        if self._program.host_random:
            self._draws.host_at(self._host, self._seeds.host_place())
            self._seeds.host(unit, nth)
            self._host = self._seeds.host_place()
        return unflatten(list(tensors), structure)

    def random(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A random call between units."""
        result = super().random(func, args, kwargs)
        self._draws.drawn(func, args, kwargs, result)
        return result

    def placeholder_operation(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]
    ) -> Any:
        """Answer where a number is read, so that the run goes on, as the trace does."""
        if func._schema.name not in SCALAR_READS:
            return super().placeholder_operation(func, args, kwargs, run)
        dtype = next(arg.dtype for arg in args if isinstance(arg, Tensor) and is_placeholder(arg))
        if func._schema.name != SCALAR_READS[0] or dtype is torch.bool:
            return False
        return _UNLIKELY if dtype.is_floating_point else 1


_UNLIKELY = 0.7310585786300049  # a number that no micro-batch has by chance
