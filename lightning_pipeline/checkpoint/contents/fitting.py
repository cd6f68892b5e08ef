"""Whether a checkpoint fits a module, judged on all stages together, with every misfit told at once."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from lightning_pipeline.checkpoint.contents.optimizers import is_like_parameter, names_of
from lightning_pipeline.checkpoint.folder import MODEL, optimizer_key
from lightning_pipeline.errors import CheckpointError

_SHOWN = 8


class Entries(Protocol):
    """What is stored."""

    def under(self, prefix: str) -> dict[str, Any]:
        """Entries by key below a prefix; tensors have `size` and `properties.dtype`."""
        ...


@dataclass(frozen=True)
class StateEntries:
    """The tensors of a `state_dict`, as `compare` asks for them.

    Attributes:
        states: May hold other values too.
        rest: Of all else.
    """

    states: Mapping[str, Any]
    rest: Entries | None = None

    def under(self, prefix: str) -> dict[str, Any]:
        """Each tensor; of optimizers what the rest has."""
        if prefix == MODEL:
            return {name: _Entry(value) for name, value in self.states.items() if isinstance(value, Tensor)}
        return self.rest.under(prefix) if self.rest is not None else {}


class _Entry:
    def __init__(self, tensor: Tensor) -> None:
        self.size, self.properties = tensor.shape, tensor


@dataclass
class Misfits:
    """What one rank saw.

    Attributes:
        stored: Names in the checkpoint.
        expected: Names that this rank holds.
        shapes: Tensors of another shape.
        dtypes: Tensors of another data type.
        optimizers: Parameters of an optimizer without stored state.
        kept: Parameters that an optimizer had when it was stored, `optimizer_0.` or the like first.
        optimized: Parameters of this rank's optimizers, named alike.
        later: Of optimizers that are filled once hooks have run, which may add groups to them: told of only
            where something else does not fit.
    """

    stored: set[str]
    expected: set[str]
    shapes: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    optimizers: list[str] = field(default_factory=list)
    kept: set[str] = field(default_factory=set)
    optimized: set[str] = field(default_factory=set)
    later: "Misfits | None" = None

    def look_at(self, name: str, entry: Any, tensor: Tensor) -> None:
        """Compare one stored tensor with what it is for.

        Args:
            name: For messages.
            entry: With `size` and `properties.dtype`.
            tensor: Of the shape and data type that are expected.
        """
        if tuple(entry.size) != tuple(tensor.shape):
            self.shapes.append(f"{name} ({tuple(entry.size)} stored, {tuple(tensor.shape)} here)")
        elif entry.properties.dtype != tensor.dtype:
            self.dtypes.append(f"{name} ({entry.properties.dtype} stored, {tensor.dtype} here)")

    @staticmethod
    def refuse(found: Sequence["Misfits"], path: Path, *, strict: bool) -> None:
        """Raise when any rank saw a misfit.

        Args:
            found: By rank.
            path: Of the checkpoint.
            strict: Whether names and data types count.

        Raises:
            CheckpointError: With all misfits by name.
        """
        expected = set().union(*(rank.expected for rank in found))
        stored = set().union(*(rank.stored for rank in found))
        kept = set().union(*(rank.kept for rank in found))
        optimized = set().union(*(rank.optimized for rank in found))
        problems = {"wrong shape": _joined(rank.shapes for rank in found)}
        if strict:
            problems = {
                "missing": sorted(expected - stored),
                "unexpected": sorted(stored - expected),
                **problems,
                "wrong dtype": _joined(rank.dtypes for rank in found),
                "missing in the optimizers": _joined(rank.optimizers for rank in found),
                "in no optimizer here": sorted(kept - optimized),
            }
        if any(problems.values()):
            later = [rank.later for rank in found if rank.later is not None]
            for kind, lists in (
                ("wrong shape", (rank.shapes for rank in later)),
                ("missing in the optimizers", (rank.optimizers for rank in later if strict)),
            ):
                problems[kind] = sorted({*problems.get(kind, ()), *_joined(lists)})
        told = [f"{kind}: {_some(names)}" for kind, names in problems.items() if names]
        if told:
            raise CheckpointError(
                f"checkpoint {path} does not fit this module. {'; '.join(told)}. Load the module it was "
                "saved from, or set strict_loading=False on the LightningModule to load what fits by name"
            )


def _joined(lists: Iterable[list[str]]) -> list[str]:
    return sorted({name for names in lists for name in names})


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def compare(
    entries: Entries, own: Mapping[str, Tensor] | None, optimizers: Sequence[Optimizer],
    names: Mapping[int, str],
) -> Misfits:  # fmt: skip
    """Compare what is stored with what one rank holds.

    Args:
        entries: Of the checkpoint.
        own: This rank's tensors, by name; `None` where only optimizers are wanted.
        optimizers: This rank's; empty when only weights are wanted.
        names: Of this rank's parameters, by `id`.
    """
    stored = {} if own is None else entries.under(MODEL)
    own = own or {}
    misfits = Misfits(set(stored), set(own))
    for name in sorted(set(stored) & set(own)):
        misfits.look_at(name, stored[name], own[name])
    for index, optimizer in enumerate(optimizers):
        key = optimizer_key(index)
        own_names = [f"{key}.{name}" for name in names_of(optimizer, names)]
        kept = {f"{key}.{entry.split('.', 1)[1].rpartition('.')[0]}" for entry in entries.under(key)}
        if kept or entries.under(optimizer_key(0)):  # else saved with weights only: Lightning says so
            misfits.kept |= kept
            misfits.optimized.update(own_names)
            misfits.optimizers += [name for name in own_names if name not in kept]
        _compare_state(misfits, entries, key, optimizer, names)
    return misfits


def _compare_state(
    misfits: Misfits, entries: Entries, key: str, optimizer: Optimizer, names: Mapping[int, str]
) -> None:
    """Compare state that is like its parameter with that."""
    own = [p for group in optimizer.param_groups for p in group["params"] if id(p) in names]
    parameters = {names[id(parameter)]: parameter for parameter in own}
    for entry, stored in entries.under(f"{key}.state").items():
        name, _, kind = entry.rpartition(".")
        if name in parameters and is_like_parameter(optimizer, kind) and hasattr(stored, "size"):
            misfits.look_at(f"{key}.state.{entry}", stored, parameters[name])
