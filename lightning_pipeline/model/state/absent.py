"""What stands on a rank for the weights of other stages, as hooks between steps see it.

A hook may read its shape, and change it in place: the stage that has the weight does so for real. A value
that would flow into a real tensor, or out as a number, is refused.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeline._torch import DataDependentOutputException, DynamicOutputShapeException
from lightning_pipeline.errors import PlaceholderError
from lightning_pipeline.model.tensors import (
    PlaceholderMode,
    TensorSpec,
    is_placeholder,
    map_tensors,
    tensors_in,
    user_line,
    written_tensors,
)

_NO_VALUE = (DataDependentOutputException, DynamicOutputShapeException)


class AbsentTensors:
    """Makes them, and watches what is done with them while no step runs.

    Args:
        root: The LightningModule.
        mode: The placeholders' mode, whose idle watcher this becomes.
        stages_of: The stages that hold a tensor, by name.
    """

    def __init__(self, root: nn.Module, mode: PlaceholderMode, stages_of: dict[str, tuple[int, ...]]) -> None:
        self.root, self._mode, self._stages_of = root, mode, stages_of
        self._inside = False
        mode.idle = self

    def make(self, name: str, spec: TensorSpec) -> Tensor:
        """What stands for a tensor of another stage; one that is trained has a gradient that stands too.

        Args:
            name: In the whole module.
            spec: Of the tensor.
        """
        made = self._mode.make(spec._replace(requires_grad=False))
        if spec.requires_grad:
            made.requires_grad_()  # a leaf, as the parameter is
            made.grad = self._mode.make(spec._replace(requires_grad=False))
            mark(made.grad, {name})
        mark(made, {name})
        return made

    def placeholder_operation(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]
    ) -> Any:
        """Run an operation of a hook, or refuse it. See `placeholder.Watcher`."""
        names = stands_for((args, kwargs))
        if any(not is_placeholder(tensor) for tensor in written_tensors(func, args, kwargs)):
            raise self.refusal(names, "is written into a tensor of this one")
        if torch.Tag.nondeterministic_seeded in func.tags and not self._inside:
            _draw(func, args, kwargs)
        before, self._inside = self._inside, True  # an operation may be made of others
        try:
            result = run()
        except _NO_VALUE as error:
            raise self.refusal(names, "is read as a number or used in control flow") from error
        finally:
            self._inside = before
        written = [tensor for tensor in written_tensors(func, args, kwargs) if stands_for(tensor)]
        for tensor in tensors_in(result):
            if not any(tensor is one for one in written):
                mark(tensor, names)
        return result

    def refusal(self, names: set[str], what: str) -> PlaceholderError:
        """The error for a value of another stage.

        Args:
            names: Of the tensors that it comes from.
            what: Happened to it.
        """
        places = [f"{name!r} (stage {', '.join(map(str, self._stages_of[name]))})" for name in sorted(names)]
        value = f"a value of {' and '.join(places)}, which is on another stage," if places else (
            "a value of another stage"
        )  # fmt: skip
        return PlaceholderError(
            f"{value} {what} in a hook. A hook sees the weights of one stage: keep both in one unit with "
            "PipelineStrategy(units=[...]), work it out in the step, or do it after fit, when the module "
            f"is whole again [at {user_line(self.root)}]"
        )


def _draw(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Draw as many random numbers as the stage that has the tensor does, so that later draws agree."""

    def real(tensor: Tensor) -> Tensor:
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)

    func(*map_tensors(real, args), **map_tensors(real, kwargs))


def stands_for(value: Any) -> set[str]:
    """Names of the tensors of other stages that the placeholders in a value come from."""
    found: set[str] = set()
    for tensor in tensors_in(value):
        found |= getattr(tensor, "stands_for", set())
    return found


def mark(tensor: Tensor, names: set[str]) -> None:
    """Note that a placeholder comes from these tensors of other stages."""
    if names and is_placeholder(tensor):
        vars(tensor)["stands_for"] = names | vars(tensor).get("stands_for", set())


def rename(tensor: Tensor, name: str) -> None:
    """What a placeholder stands for has another name now."""
    vars(tensor)["stands_for"] = {name}
