"""What hooks log outside of steps: the same on every rank, completed where one stage has it, or refused.

Each rank runs every hook with the weights of its own stages. So `self.log` may be called with a value that
another rank has not, or with different values. A step's own calls are settled elsewhere; see `logging.py`.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from inspect import BoundArguments
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torchmetrics import Metric

from lightning_pipeline import _lightning
from lightning_pipeline.errors import SplitError
from lightning_pipeline.hooks.step_logs import SIGNATURE, log_options
from lightning_pipeline.model.tensors import is_placeholder, user_line
from lightning_pipeline.patching import all_undone, patch

_ENDS = ("on_train_epoch_end", "on_validation_epoch_end", "on_test_epoch_end")
_EVALUATED = (
    "on_validation_batch_end",
    "on_validation_batch_start",
    "on_test_batch_end",
    "on_test_batch_start",
)
_TOLERANCE = 1e-6  # of float32, which ranks may add up in different orders

Key = tuple[str, str, int]  # hook, name, how many times before


@dataclass
class _Call:
    """One call of `self.log`.

    Attributes:
        value: None where it is on another stage.
        dtype: Of the tensor that was logged; None for a Python number.
        options: The other arguments.
        place: Where Lightning stood.
        line: Of the user's code.
    """

    value: Any
    dtype: torch.dtype | None
    options: dict[str, Any]
    place: _lightning.LogPlace
    line: str


class HookLogs:
    """Watches `self.log` for the time of a run.

    Args:
        trainer: Whose callbacks may log too.
        gather: Collects an object of every rank of this replica.
        batch_ended: Told at the end of a training batch whether this rank's hooks logged; tells whether any
            rank's did.
        later: Calls a function with a value of other stages, once that is complete on all ranks.
    """

    def __init__(
        self, trainer: Trainer, gather: Callable[[Any], list[Any]], batch_ended: Callable[[bool], bool],
        later: Callable[[Tensor, Callable[[Any], None]], None],
    ) -> None:  # fmt: skip
        self._module: LightningModule = trainer.lightning_module
        self._gather, self._batch_ended, self._later = gather, batch_ended, later
        self._calls: dict[Key, _Call] = {}
        self._seen: Counter[tuple[str, str]] = Counter()
        self._warned: set[tuple[str, str]] = set()
        self._log = self._module.log
        self._callbacks = [c for c in trainer.callbacks if "log" in vars(c)]  # type: ignore[attr-defined]
        self._undo = _lightning.before_loader_results(trainer, self.settle)
        self._install()

    def _install(self) -> None:
        module = self._module

        def log(
            *args: Any, **kwargs: Any
        ) -> None:  # a hook may copy callbacks, and a method would bring us along
            self.log(*args, **kwargs)

        undo = [patch(one, "log", log) for one in (module, *self._callbacks)]
        undo += [patch(module, name, self._then(getattr(module, name), self.settle)) for name in _ENDS]
        end = self._then(module.on_train_batch_end, self._end_batch)
        undo.append(patch(module, "on_train_batch_end", end))
        self._undo = all_undone([self._undo, *undo])

    def restore(self) -> None:
        """Give module and callbacks their own methods back."""
        self._undo()

    @staticmethod
    def _then(hook: Callable[..., Any], after: Callable[[], None]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            result = hook(*args, **kwargs)
            after()
            return result

        return run

    def _end_batch(self) -> None:
        if self._batch_ended(bool(self._calls)):
            self.settle()

    def log(self, *args: Any, **kwargs: Any) -> None:
        """In the place of `self.log`, outside of steps."""
        bound = SIGNATURE.bind(self._module, *args, **kwargs)
        value, line = bound.arguments["value"], user_line(self._module)

        def log(value: Any) -> None:
            bound.arguments["value"] = value
            self._log_here(bound, line)

        if isinstance(value, Tensor) and not bound.arguments.get("rank_zero_only"):
            self._later(value, log)
        else:
            log(value)

    def _log_here(self, bound: BoundArguments, line: str) -> None:
        given = bound.arguments
        name, value = given["name"], given["value"]
        elsewhere = is_placeholder(value)
        if not elsewhere:
            self._log(*bound.args[1:], **bound.kwargs)
        if given.get("rank_zero_only") or isinstance(value, Metric):
            return
        place = _lightning.log_place(self._module)
        dtype = value.dtype if isinstance(value, Tensor) else None
        held = None if elsewhere else value.detach().clone() if isinstance(value, Tensor) else value
        nth = self._seen[place.hook, name]
        self._seen[place.hook, name] += 1
        options = {**dict(log_options(given)), "batch_size": given.get("batch_size") or place.batch_size}
        self._calls[place.hook, name, nth] = _Call(held, dtype, options, place, line)

    def settle(self) -> None:
        """Compare what the ranks logged since the last time; log what only others have.

        Raises:
            SplitError: Values differ, or need the weights of several stages.
        """
        own, self._calls = self._calls, {}
        self._seen.clear()
        _to_numbers([call for call in own.values() if isinstance(call.value, Tensor)])
        parts: list[dict[Key, _Call]] = self._gather(own)
        monitored = _monitored(self._module.trainer)
        for key in dict.fromkeys(key for part in parts for key in part):
            text = _check(key, [part.get(key) for part in parts], monitored=key[1] in monitored)
            if text is not None and key[:2] not in self._warned:
                self._warned.add(key[:2])
                rank_zero_warn(text)
        hooks = {hook for (hook, _, _), call in own.items() if call.value is not None}
        for key in dict.fromkeys(key for part in parts for key in part):
            real = [part[key] for part in parts if key in part and part[key].value is not None]
            if real and any(key not in part or part[key].value is None for part in parts):
                _refuse_on_step(key, real[0])
            if real and (key not in own or own[key].value is None):
                self._repeat(key[1], real[0], reset=key[0] not in hooks)
                hooks.add(key[0])

    def _repeat(self, name: str, call: _Call, *, reset: bool) -> None:
        value = call.value if call.dtype is None else torch.tensor(call.value, dtype=call.dtype)
        with _lightning.logging_at(self._module, call.place, reset=reset):
            self._log(name, value, **call.options)


def _monitored(trainer: Trainer) -> set[Any]:
    """Keys that decide about training: ranks must agree on them."""
    configs = getattr(trainer, "lr_scheduler_configs", ())
    callbacks = getattr(trainer, "callbacks", ())
    return {config.monitor for config in configs} | {getattr(one, "monitor", None) for one in callbacks}


def _to_numbers(calls: list[_Call]) -> None:
    """Bring values to the host, all of a device at once."""
    for device in {call.value.device for call in calls}:
        here = [call for call in calls if isinstance(call.value, Tensor) and call.value.device == device]
        stacked = torch.stack([call.value.double().reshape(()) for call in here])
        for call, value in zip(here, stacked.tolist(), strict=True):
            call.value = value


def _check(key: Key, calls: list[_Call | None], *, monitored: bool) -> str | None:
    """Refuse values that differ; say so where they are plain numbers, as times are, that decide nothing."""
    hook, name, _ = key
    made = [call for call in calls if call is not None]
    real = [float(call.value) for call in made if call.value is not None]
    where = f"self.log({name!r}, ...) in {hook}"
    if not real and len(made) == len(calls):
        raise SplitError(
            f"{where} got a value that needs weights of several stages, so that no rank has it: work it out "
            f"in the step, or gather its parts with self.trainer.strategy.gather_from_pipeline "
            f"[at {made[0].line}]"
        )
    if real and not all(_alike(value, real[0]) for value in real):
        told = {call.dtype for call in made if call.value is not None}
        values = ", ".join(
            f"{call.value:g} on pipeline rank {rank}"
            for rank, call in enumerate(calls)
            if call is not None and call.value is not None
        )
        text = (
            f"{where} got different values: {values}. In a hook each rank sees the parameters of its own "
            "stages only: put the parts together with self.trainer.strategy.gather_from_pipeline, or log one "
            "key per parameter. A value that is each rank's own, such as a time: self.log(..., "
            f"rank_zero_only=True) logs that of rank 0 [at {made[0].line}]"
        )
        if told == {None} and not monitored:
            return text
        raise SplitError(text)
    return None


def _refuse_on_step(key: Key, call: _Call) -> None:
    """Lightning has handed the value of an evaluated batch to loggers when the ranks compare theirs."""
    if key[0] in _EVALUATED and call.options.get("on_step"):
        raise SplitError(
            f"self.log({key[1]!r}, ..., on_step=True) in {key[0]} was called with a value that one stage "
            f"alone has: leave on_step out, or log it in the step [at {call.line}]"
        )


def _alike(value: float, other: float) -> bool:
    return math.isclose(value, other, rel_tol=_TOLERANCE, abs_tol=1e-12) or (
        value != value and other != other
    )
