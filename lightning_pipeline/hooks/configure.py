"""`configure_optimizers` on one stage: the groups that it makes for the whole module, with this stage's part.

The hook sees the parameters of its own stages. What it makes of their number or order, such as one learning
rate per layer, it would make wrong. So it is called before, on trial, with the other parameters in their
places as names and shapes. Where that gives this stage's parameters another group, other options, or more
groups for schedulers to count, the optimizers of the trial are the ones that train.
"""

import io
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, redirect_stdout
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipeline import _lightning
from lightning_pipeline.errors import ConfigurationError
from lightning_pipeline.hooks.optimizers import keep_only, nothing_to_optimize_allowed, refuse_unserved

Group = tuple[dict[str, Any], list[int]]  # its options, and the identities of this rank's parameters


@dataclass
class Configured:
    """What `configure_optimizers` made.

    Attributes:
        optimizers: In its order.
        schedulers: As Lightning keeps them.
    """

    optimizers: list[Optimizer]
    schedulers: list[Any]

    def groups(self, own: set[int]) -> list[list[Group]]:
        """The groups of each optimizer.

        Args:
            own: Identities of the parameters to list.
        """
        return [
            [
                (
                    {name: value for name, value in group.items() if name != "params"},
                    [id(parameter) for parameter in group["params"] if id(parameter) in own],
                )
                for group in optimizer.param_groups
            ]
            for optimizer in self.optimizers
        ]


def configure(
    module: LightningModule,
    parameters: Iterable[Tensor],
    whole: Callable[[], AbstractContextManager[None]] | None,
    gather: Callable[[Any], list[Any]],
) -> Configured:
    """Call the user's `configure_optimizers`; no optimizer keeps anything of other stages.

    Args:
        module: Whose hook it is.
        parameters: This rank's.
        whole: Puts stand-ins for the parameters of other stages into the module, and takes everything
            back; None where the module is whole.
        gather: Collects an object of every rank of this replica.

    Raises:
        ConfigurationError: The groups differ between ranks, and the call for the whole module failed, or an
            optimizer that cannot be served.
    """
    kept = list(parameters)
    own = {id(parameter) for parameter in kept}
    trial, trial_failure = (None, None) if whole is None else _on_trial(module, whole)
    made, failure = _attempt(module)  # the last, so that what it leaves in the module's objects stays
    if whole is not None:
        if trial is not None and (made is None or not _alike(made.groups(own), trial.groups(own))):
            _replace_attributes(module, made, trial)
            made = trial
        if made is not None:
            _agree(made.groups(own), trial_failure, gather)
    if made is None:
        assert failure is not None, "one of the two is there"
        raise failure
    keep_only(made.optimizers, kept)
    refuse_unserved(made.optimizers)
    return made


def _attempt(module: LightningModule) -> tuple[Configured | None, Exception | None]:
    try:
        with nothing_to_optimize_allowed():
            return Configured(*_lightning.init_optimizers(module)), None
    except Exception as error:  # raised by the caller, unless the trial goes well
        return None, error


def _on_trial(
    module: LightningModule, whole: Callable[[], AbstractContextManager[None]]
) -> tuple[Configured | None, Exception | None]:
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()), whole():
        warnings.simplefilter("ignore")
        return _attempt(module)


def _alike(some: list[list[Group]], others: list[list[Group]]) -> bool:
    if [len(groups) for groups in some] != [len(groups) for groups in others]:
        return False
    pairs = [
        pair for mine, theirs in zip(some, others, strict=True) for pair in zip(mine, theirs, strict=True)
    ]
    return all(ids == other_ids and _equal(a, b) for (a, ids), (b, other_ids) in pairs)


def _equal(some: Any, other: Any) -> bool:
    if isinstance(some, dict) and isinstance(other, dict):
        return some.keys() == other.keys() and all(_equal(some[name], other[name]) for name in some)
    if isinstance(some, Tensor) and isinstance(other, Tensor):
        return torch.equal(some, other)
    return repr(some) == repr(other)


def _replace_attributes(module: LightningModule, made: Configured | None, trial: Configured) -> None:
    """The module may keep an optimizer or scheduler that it made."""
    if made is None:
        return
    schedulers = zip(made.schedulers, trial.schedulers, strict=False)
    pairs = [*zip(made.optimizers, trial.optimizers, strict=False)]
    pairs += [(old.scheduler, new.scheduler) for old, new in schedulers]
    replaced = {id(old): new for old, new in pairs}
    for name, value in list(vars(module).items()):
        if id(value) in replaced:
            vars(module)[name] = replaced[id(value)]


def _agree(groups: list[list[Group]], failure: Exception | None, gather: Callable[[Any], list[Any]]) -> None:
    """Where the trial failed on a rank, all ranks must have made the same groups by themselves."""
    options = [[sorted((k, repr(v)) for k, v in given.items()) for given, _ in one] for one in groups]
    text = None if failure is None else f"{type(failure).__name__}: {failure}"
    parts = gather((options, text))
    texts = [text for _, text in parts if text is not None]
    if texts and any(other != parts[0][0] for other, _ in parts):
        raise ConfigurationError(
            "configure_optimizers makes other parameter groups on each stage, and could not be called for "
            f"the whole module, where it sees names and shapes only: {texts[0]}. Choose groups and their "
            "options by the names of parameters, not by their number, order or values"
        )
