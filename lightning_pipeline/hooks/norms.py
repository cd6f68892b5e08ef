"""Norms that user code takes around a step, over the gradients of all stages instead of one."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from lightning_pipeline.model.replay import SplitModel

GRAD_NORM = "lightning.pytorch.utilities.grads"  # home of `grad_norm`

Gather = Callable[[Any], list[Any]]


class _Norm:
    """Stands for a gradient of another stage where only its norm is asked for."""

    def __init__(self, value: float, dtype: torch.dtype) -> None:
        self._value, self._dtype = value, dtype
        self.grad = self.data = self

    def norm(self, norm_type: float) -> Tensor:
        """The norm that the other stage computed."""
        return torch.tensor(self._value, dtype=self._dtype)


class GlobalNorms:
    """Makes `torch.nn.utils.clip_grad_norm_` and Lightning's `grad_norm` mean the whole model.

    All ranks call them, because all run the same hooks; the calls are collective.

    Args:
        split: This rank's stages.
        not_counted: Identities of the parameters that another stage counts (tied weights).
        gather: Collects an object of every pipeline rank.
    """

    def __init__(self, split: SplitModel, not_counted: set[int], gather: Gather) -> None:
        self._split, self._not_counted, self._gather = split, not_counted, gather
        self._local: Callable[..., Tensor] | None = None
        split.answer_parameters(GRAD_NORM, self._named_norms)

    def install(self) -> None:
        """Take the place of torch's local norm, until `remove`."""
        if self._local is None:
            self._local = clip_grad._get_total_norm
            clip_grad._get_total_norm = self._total  # type: ignore[assignment]  # called with a list only

    def remove(self) -> None:
        """Give torch its own back."""
        if self._local is not None:
            clip_grad._get_total_norm = self._local
            self._local = None

    def _total(
        self,
        gradients: Sequence[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        assert self._local is not None, "only installed, this is called"
        skipped = {id(p.grad) for _, p in self._split.owned_parameters() if id(p) in self._not_counted}
        counted = [gradient for gradient in gradients if id(gradient) not in skipped]
        own = float(self._local(counted, norm_type, False, foreach)) if counted else 0.0
        norms, dtypes = zip(*self._gather((own, gradients[0].dtype if gradients else None)), strict=True)
        norm = torch.tensor(norms, dtype=torch.float64).norm(float(norm_type))
        if error_if_nonfinite and not bool(torch.isfinite(norm)):
            raise RuntimeError(f"the total norm of the gradients of all stages is {norm.item()}")
        dtype = next((dtype for dtype in dtypes if dtype is not None), torch.float32)
        result: Tensor = norm.to(gradients[0]) if gradients else norm.to(dtype)
        return result

    def _named_norms(self, module: nn.Module) -> list[tuple[str, _Norm]]:
        """All stages' parameters with a gradient, by name, for `grad_norm`, which asks from its frame."""
        norm_type = float(sys._getframe(2).f_locals["norm_type"])
        own = {
            name: (float(parameter.grad.norm(norm_type)), parameter.grad.dtype)
            for name, parameter in self._split.owned_parameters()
            if parameter.grad is not None and id(parameter) not in self._not_counted
        }
        merged: dict[str, tuple[float, torch.dtype]] = {}
        for part in self._gather(own):
            merged.update(part)
        inside = {id(m): name for name, m in self._split.root.named_modules()}.get(id(module), "")
        prefix = f"{inside}." if inside else ""
        return [
            (name.removeprefix(prefix), _Norm(*merged[name]))
            for name in self._split.parameter_names()
            if name in merged and name.startswith(prefix)
        ]
