"""Hooks at an epoch's end that read what steps left behind, such as `torch.stack(self.outputs).mean()`.

What the end of a step fills is on the last stage only, and reading it elsewhere raises. So before the first
such hook, a callback's too, the last stage tells all ranks, and every rank runs the hooks with the same
values. What is too large for that, or cannot be sent, stays there: the module's hook then counts on the last
stage, what it logs there is logged on every rank, and on the others it ends at its first read of a value that
is not there.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_debug, rank_zero_warn
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_pipeline import _lightning
from lightning_pipeline.hooks.metrics import SharedMetrics
from lightning_pipeline.model.state import ElsewhereError, InUnits, Sent, Told
from lightning_pipeline.model.trace import Stand
from lightning_pipeline.patching import all_undone, patch
from lightning_pipeline.ranks import Company, Outlet

HOOKS = ("on_train_epoch_end", "on_validation_epoch_end", "on_test_epoch_end", "on_predict_epoch_end")
LARGEST = 2**28
"""Bytes that all ranks are told, at most."""

Call = tuple[str, tuple[Any, ...], dict[str, Any]]  # `log` or `log_dict`, and its arguments


class LeavesBehind(Protocol):
    """A rank's part of a module; see `SplitModel`."""

    begun: int
    in_units: InUnits

    @property
    def leaves_late(self) -> bool: ...

    def left_so_far(self, largest: int | None = None) -> tuple[dict[str, Sent], list[str]]: ...

    def take(self, left: Mapping[str, Sent]) -> None: ...


def tell_of_units(units: InUnits, company: Company, largest: int | None = None) -> None:
    """Let ranks have what units of others keep, and say what no rule puts together; all ranks call.

    Args:
        units: Of this rank.
        company: Of the ranks.
        largest: Bytes that one rank may tell; None: what is little, as after each batch.
    """
    own = units.told(largest, after_batch=largest is None)
    told = [own]
    if company.group is not None:
        told = list(company.gather("telling what units keep", own).values())
    for label, line in units.take(told).items():
        rank_zero_warn(
            f"the {line} works out {label!r} once for each micro-batch of a batch, and "
            "no rule is known that puts their results together to what one device has: return what it is "
            "made of, and keep it in on_train_batch_end"
        )


def units_at_end(units: InUnits, company: Company, gets: Callable[[int], bool]) -> list[Told]:
    """At the end of a run: what units of all ranks keep, for ranks that get it; all ranks call.

    Args:
        units: Of this rank.
        company: Of the ranks.
        gets: Whether a global rank does.
    """
    if not any(map(gets, company.ranks)):
        return []
    told = company.gather("gathering what units keep", units.told(LARGEST))
    return list(told.values()) if gets(company.rank) else []


class LeftBySteps:
    """Tells all ranks what steps left on the last stage, once after each last batch.

    Args:
        split: This rank's part of the module.
        outlet: From the last stage's rank of this replica to the others.
        meet: Called before a collective: ranks that are in a hook yet learn that this one is not.
    """

    def __init__(self, split: LeavesBehind, outlet: Outlet, meet: Callable[[], None]) -> None:
        self._split, self._outlet, self._meet = split, outlet, meet
        self._told_after = -1
        self._warned = False
        self.is_everywhere = True
        """Whether every rank has all of it."""

    def tell(self) -> None:
        """Let all ranks have it; all call this before hooks at an epoch's end."""
        if self._told_after == self._split.begun:
            return
        self._told_after, self.is_everywhere = self._split.begun, True
        self._meet()
        tell_of_units(self._split.in_units, self._outlet.company, LARGEST)
        if not self._split.leaves_late:
            return
        left, unsent = self._outlet.share(
            lambda: self._split.left_so_far(LARGEST), "telling what steps left on the last stage"
        )
        if not self._outlet.is_source:
            self._split.take(left)
        self.is_everywhere = not unsent
        if unsent and not self._warned:
            self._warned = True
            rank_zero_warn(
                f"{', '.join(unsent)}: filled by a step, and at the epoch's end too large to be told to all "
                f"ranks ({LARGEST >> 20} MiB), or no tensor, array or constant. So hooks at the epoch's end "
                "run whole where the last stage is, on global rank 0, and their logs are on all ranks; on "
                "other ranks they end at the first read of it, and what they would set after it is not set"
            )


class EpochEndHooks:
    """Wraps the user's hooks for the time of a run.

    Args:
        trainer: Of the run.
        split: This rank's part of the module.
        sinks_to: Makes a context in which what is logged goes to a function.
        outlet: From the last stage's rank of this replica to the others.
        metrics: Those of the module.
        aside: Makes a context in which nothing is completed over the ranks.
        place: Makes one in which ranks call units of each other.
        meet: Called before a collective.
    """

    def __init__(
        self, trainer: Trainer, split: LeavesBehind,
        sinks_to: Callable[[Callable[..., None]], AbstractContextManager[None]], outlet: Outlet,
        metrics: SharedMetrics, aside: Callable[[], AbstractContextManager[None]],
        place: Callable[[], AbstractContextManager[None]], meet: Callable[[], None],
    ) -> None:  # fmt: skip
        self._aside, self._place = aside, place
        module: LightningModule = trainer.lightning_module
        self._module, self._outlet, self._metrics = module, outlet, metrics
        self._left, self._sinks_to = LeftBySteps(split, outlet, meet), sinks_to
        kinds = ("Callback", "LightningModule")
        tells = {(kind, name): self._left.tell for kind in kinds for name in HOOKS}
        own = [n for n in HOOKS if getattr(type(module), n) is not getattr(LightningModule, n)]
        wraps = [patch(module, n, Stand(module, n, self._wrapped(n))) for n in own]
        self.restore = all_undone([_lightning.before_hooks(trainer, tells), *wraps])
        """Gives the module its own hooks back."""

    def _wrapped(self, name: str) -> Callable[[], None]:
        hook = getattr(self._module, name)

        def run() -> None:
            if self._left.is_everywhere:
                hook()
                return
            with self._aside():  # the last stage alone runs the hook to its end
                with self._place():
                    here = self._run_here(hook) if self._outlet.is_source else self._run_elsewhere(name, hook)
                calls = self._outlet.share(lambda: here)
            for method, args, kwargs in calls:
                getattr(self._module, method)(*self._found(args), **kwargs)

        return run

    def _run_here(self, hook: Callable[[], None]) -> list[Call]:
        calls: list[Call] = []
        with self._metrics.local(), self._sinks_to(lambda *call: calls.append(self._portable(*call))):
            hook()
        return calls

    def _run_elsewhere(self, name: str, hook: Callable[[], None]) -> list[Call]:
        with self._metrics.elsewhere(), self._sinks_to(lambda *call: None):
            try:
                hook()
            except ElsewhereError as error:
                rank_zero_debug(
                    f"{name} ends here on this rank, as the values are on the last stage: {error}"
                )
        return []

    def _portable(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """A logged torchmetrics object travels as its name; every rank logs its own."""
        names = {
            id(m): n for n, m in self._module.named_modules() if isinstance(m, Metric | MetricCollection)
        }

        def pack(value: Any) -> Any:
            if isinstance(value, nn.Module):
                return _Named(names[id(value)])
            if isinstance(value, dict):
                return {key: pack(item) for key, item in value.items()}
            return value.detach().cpu() if isinstance(value, Tensor) else value

        return method, tuple(map(pack, args)), {key: pack(value) for key, value in kwargs.items()}

    def _found(self, args: tuple[Any, ...]) -> list[Any]:
        def unpack(value: Any) -> Any:
            if isinstance(value, _Named):
                return self._module.get_submodule(value.path)
            return {key: unpack(item) for key, item in value.items()} if isinstance(value, dict) else value

        return [unpack(value) for value in args]


class _Named:
    """A metric of the module, by its path."""

    def __init__(self, path: str) -> None:
        self.path = path
