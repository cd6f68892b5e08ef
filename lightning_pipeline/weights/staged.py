"""Lets `configure_model` build a module without weights."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_pipeline.model.construction import Construction, Recorder, is_whole, sizes_of
from lightning_pipeline.model.tensors import ModuleState
from lightning_pipeline.registry import parameters_of

_LARGE = 1 << 30  # bytes of a module from which on each process had better build its part


class Staging:
    """Of one strategy: what was built without weights and is in no run yet."""

    def __init__(self) -> None:
        self._recorder: Recorder | None = None

    @contextmanager
    def building(
        self, module: LightningModule | None, again: Callable[[LightningModule], None]
    ) -> Iterator[None]:
        """Inside, new tensors have no memory, and what is done to them is recorded.

        Args:
            module: Whose `configure_model` is called inside; None for other code.
            again: Calls that once more.
        """
        before = None if module is None else ModuleState(module)
        states = torch.get_rng_state(), numpy.random.get_state(), random.getstate()
        recorder = self._recorder or Recorder()
        try:
            with recorder.recording():
                yield
        except Exception as error:
            if module is None or before is None:
                error.add_note(
                    "This happened while trainer.init_module() ran it without weights. Build in "
                    "configure_model, which is run with them where it must be, or without this context"
                )
                raise
            before.restore()
            torch.set_rng_state(states[0])
            numpy.random.set_state(states[1])
            random.setstate(states[2])
            again(module)
            self._warn(module, f"{type(error).__name__}: {error}")
        else:
            self._recorder = recorder
            where = "init_module" if module is None else f"configure_model of {type(module).__name__}"
            for device, size in recorder.elsewhere.items():
                rank_zero_warn(
                    f"{where} makes {size / 2**20:,.1f} MiB on {device}, so every process builds all of it: "
                    "leave the device out, and each process builds its own part, which the run moves there"
                )
            recorder.elsewhere.clear()

    def adopt(self, module: LightningModule) -> Construction | None:
        """What the module was built with; None where it has its weights.

        Args:
            module: Of a run that begins.
        """
        recorder, self._recorder = self._recorder, None
        built = None if recorder is None else Construction(module, recorder)
        if not built and is_whole(module) and (size := sizes_of(parameters_of(module))) >= _LARGE:
            rank_zero_warn(
                f"every process built the whole {type(module).__name__}, {size / 2**30:.1f} GiB each, before "
                "it keeps its stages: build it in configure_model or under trainer.init_module(), and each "
                "process builds its own part"
            )
        return built or None

    @staticmethod
    def _warn(module: LightningModule, why: str) -> None:
        rank_zero_warn(
            f"configure_model of {type(module).__name__} cannot run without weights ({why}), so every "
            f"process built the whole module: {sizes_of(parameters_of(module)) / 2**20:,.1f} MiB each"
        )
