"""Where in the user's code something happens, for messages."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

from torch import nn

_LIBRARIES = {
    "torch",
    "lightning",
    "lightning_pipeline",
    "lightning_fabric",
    "lightning_utilities",
    "pytorch_lightning",
    "torchmetrics",
    *sys.stdlib_module_names,
}


def user_line(root: nn.Module | None = None) -> str:
    """Where in the user's code we are: `file:line in function`, and the module whose method that is."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in _LIBRARIES:
            function = named_function(frame)
            first = function.f_code.co_varnames[:1] if function.f_code.co_argcount else ()
            owner = _module_name(root, function.f_locals.get(*first) if first else None)
            place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {function.f_code.co_name}"
            return f"{place} ({owner})" if owner else place
        frame = frame.f_back
    return "code outside the module"


def named_function(frame: FrameType) -> FrameType:
    """Of a comprehension or generator the function around it, where that is what runs it."""
    outer: FrameType | None = frame
    while outer is not None and outer.f_code.co_filename == frame.f_code.co_filename:
        if not outer.f_code.co_name.startswith("<"):
            return outer
        outer = outer.f_back
    return frame


def _module_name(root: nn.Module | None, owner: Any) -> str:
    if not isinstance(owner, nn.Module):
        return ""
    if root is not None:
        for name, module in root.named_modules():
            if module is owner:
                return f"module '{name}'" if name else type(owner).__name__
    return type(owner).__name__
