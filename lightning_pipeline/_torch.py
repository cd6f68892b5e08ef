"""Every private name of torch that this package uses: why, since when, and what would let us delete it.

An upgrade of torch means reading this file. Checked against torch 2.13; "since" is as far as torch's history
was known when this was written, and older versions were not run. What needs no line here: operators by their
names in `torch.ops`, and what hangs on objects (`module._parameters`, `tensor._version`).
"""

from collections.abc import Callable
from typing import Any

import torch

# Tensors with shapes and no values: what a trace runs on, and what stands for values of other stages. Since
# 1.13. To be deleted when torch gives fake tensors a public name.
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

# What a checkpoint written by torch may hold beside tensors: an enumeration. Since 2.0. Until it is public.
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as MEMORY_FORMAT

# How long a group waits, changed after it was made: a hook may take longer than a message. Since 2.2. Until a
# group has a public setter.
from torch.distributed.distributed_c10d import _set_pg_timeout as set_group_timeout

# The old arguments `size_average` and `reduce` of loss functions, as torch reads them. Since 0.4. Until torch
# drops these arguments.
from torch.nn._reduction import legacy_get_string

# What a batch norm of any dimension is an instance of: training one takes two samples. Since 0.1.
from torch.nn.modules.batchnorm import _BatchNorm as AnyBatchNorm

# The name under which `get_extra_state` stands in a `state_dict`. Since 1.10.
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX as EXTRA_STATE_SUFFIX

# Takes our own mode off the stack while a unit runs, and puts it back. Since 2.0. Until a mode can be left
# for the length of a call in public.
from torch.overrides import _get_current_function_mode as current_function_mode
from torch.overrides import _pop_mode as pop_function_mode
from torch.overrides import _push_mode as push_function_mode

# Sees every operation below autograd; torch documents the class and not its place. Since 1.12. Collectives
# step out of all modes, which would take their tensors for the user's. Since 2.0.
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
)
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode as current_dispatch_mode

# Trees of the kinds that a batch may be, extended by what others register. Since 1.8. Until
# `torch.utils.pytree` is public.
from torch.utils._pytree import (
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)

_C: Any = torch._C
Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]

# What `F.linear` is. `F.linear` itself may be replaced while it is called. Since 1.8.
plain_linear: Callable[..., torch.Tensor] = _C._nn.linear

# Tensors of subclasses are tensors inside. Since 1.13. Until `torch.overrides` has it.
DisableTorchFunctionSubclass = _C.DisableTorchFunctionSubclass

# Without function modes, too. Since 1.13. Until `torch.overrides` has it.
DisableTorchFunction = _C.DisableTorchFunction

# Without dispatch modes, for tensors that a mode makes itself. Since 1.13. Until `torch.utils` has it.
NoDispatch = _C._DisableTorchDispatch


def has_composite_kernel(operator: Any) -> bool:
    """Whether an operator is put together from others, and may give what it is given. Since 1.11."""
    key = _C.DispatchKey.CompositeImplicitAutograd
    return bool(_C._dispatch_has_kernel_for_dispatch_key(operator.name(), key))


def in_a_transform() -> bool:
    """Whether this runs in `torch.func.vmap`, `grad` and the like. Since 2.0. Until torch tells in public."""
    return _C._functorch.maybe_current_level() is not None


def beneath_transforms(tensor: torch.Tensor) -> torch.Tensor:
    """What `torch.func.vmap`, `grad` and the like have wrapped. Since 2.0. Until torch tells in public."""
    while _C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _C._functorch.get_unwrapped(tensor)
    return tensor


def in_forward_mode() -> bool:
    """Whether forward-mode derivatives are computed. Since 1.8. Until torch tells in public."""
    forward: Any = torch.autograd.forward_ad
    level: int = forward._current_level
    return level >= 0


def function_modes() -> list[Any]:
    """The modes that see functions, the innermost last. Since 2.0. Until torch lists them in public."""
    return [_C._get_function_stack_at(position) for position in range(_C._len_torch_function_stack())]


def backward_number() -> int:
    """The backward that runs in this thread; -1 outside. Since 2.0. Until a hook is told by torch."""
    number: int = _C._current_graph_task_id()
    return number


def is_profiled() -> bool:
    """Whether a profiler runs, so that naming an action is worth its price. Since 1.9."""
    profiled: Any = torch.autograd
    return bool(profiled._profiler_enabled())


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Let a tensor say that it was not changed: what a trace did to it is undone. Since 2.0.

    Until `torch.autograd._unsafe_preserve_version_counter` is public and takes a version.
    """
    _C._autograd._unsafe_set_version_counter((tensor,), (version,))


def refuses_saved_hooks() -> bool:
    """Whether hooks on saved tensors are forbidden here, as inside `torch.func`. Since 1.13."""
    return _C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None


def top_saved_hooks() -> Hooks | None:
    """The hooks on saved tensors that are in force. Since 2.1. Until they have a public name."""
    found: Hooks | None = _C._autograd._top_saved_tensors_default_hooks(True)
    return found


def may_take_data_of(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether `tensor.data = other` works: not between devices of an extension of torch. Since 1.3."""
    has: Any = torch._has_compatible_shallow_copy_type
    return bool(has(tensor, other))


# Gradients are clipped all at once where every one is a plain tensor, and one by one where a placeholder is
# among them. One rank may hold copies of what stands for others' on the next, and all are to do the same.
# Since 2.0. Until `clip_grad_norm_` asks the tensors alone.
ONE_BY_ONE: dict[str, Any] = {"_has_foreach_support": lambda *args, **kwargs: False}
"""For `torch.nn.utils.clip_grad`."""

__all__ = [
    "EXTRA_STATE_SUFFIX",
    "MEMORY_FORMAT",
    "ONE_BY_ONE",
    "AnyBatchNorm",
    "DataDependentOutputException",
    "DisableTorchFunction",
    "DisableTorchFunctionSubclass",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "NoDispatch",
    "TorchDispatchMode",
    "UnsupportedFakeTensorException",
    "UnsupportedOperatorException",
    "backward_number",
    "current_dispatch_mode",
    "current_function_mode",
    "disable_current_modes",
    "function_modes",
    "has_composite_kernel",
    "in_a_transform",
    "in_forward_mode",
    "is_profiled",
    "is_traceable_wrapper_subclass",
    "legacy_get_string",
    "may_take_data_of",
    "plain_linear",
    "pop_function_mode",
    "push_function_mode",
    "refuses_saved_hooks",
    "set_group_timeout",
    "set_version",
    "top_saved_hooks",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
]
