"""What is around every forward of a run: the precision's context, and how many processes a run sees."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch.distributed as dist
from lightning.pytorch.plugins import Precision

from lightning_pipeline.patching import Undo, patch, patched


def around_forwards(plugin: Precision, replicas: int) -> Callable[[], AbstractContextManager[Any]]:
    """Makes the context of one forward, traced or run.

    Args:
        plugin: Whose context it is in.
        replicas: Of the pipeline. Where there is one, the step is that of one device.
    """
    if replicas > 1:
        return plugin.forward_context

    @contextmanager
    def context() -> Iterator[None]:
        with _as_one_process(), plugin.forward_context():
            yield

    return context


def told_of_no_group() -> Undo:
    """Let code of a run of one process find `torch.distributed` not initialized, as on one device.

    Loaders choose a sampler by it, and learning rates are multiplied. The group is there for what we do.
    """

    def is_initialized() -> bool:
        """Check if the default process group has been initialized."""
        return False

    return patch(dist, "is_initialized", is_initialized)


def _as_one_process() -> AbstractContextManager[None]:
    """Inside, this thread finds `torch.distributed` not initialized, as a step of one device does.

    `if dist.is_initialized(): dist.all_reduce(count)` is for replicas, and the ranks of a pipeline are none.
    """
    original, here = dist.is_initialized, threading.get_ident()

    def is_initialized() -> bool:
        """Check if the default process group has been initialized."""
        return threading.get_ident() != here and original()

    return patched(dist, {"is_initialized": is_initialized})
