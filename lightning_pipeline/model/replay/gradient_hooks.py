"""Hooks on gradients, and backwards of users: whether they do to micro-batches what they would to the batch.

A backward has the gradient of a micro-batch. A hook that works by numbers or by samples (`g * 0.5`,
`g.clamp(-1, 1)`) makes of it what it would make of these samples in the batch; one that takes a norm over
all of them does not, nor does one that keeps what it is given.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from lightning_pipeline._torch import TorchDispatchMode, in_a_transform
from lightning_pipeline.model.tensors import map_tensors, operands_of, written_tensors
from lightning_pipeline.patching import patched

Hook = Callable[[Tensor], Tensor | None]
_LIBRARIES = ("torch", __name__.partition(".")[0])  # whose functions are known not to


class TriedHook:
    """A hook that, when it is called, is compared with what it would do where other samples are others.

    The hook itself is called once. Each operation that it runs on the gradient is run a second time, on a
    copy of the gradient in which all samples but the first are others; a micro-batch of one sample gets
    another one beside it.

    Args:
        hook: The user's.
        samples: Of the micro-batch.
        line: Where the step registers it.
        tried: Lines of those that were compared; a hook is compared when the first of its line is called.
    """

    def __init__(self, hook: Hook, samples: int, line: str, tried: set[str]) -> None:
        self._hook, self._samples, self._line, self._tried = hook, samples, line, tried

    def __call__(self, gradient: Tensor) -> Tensor | None:
        rows = _rows_of_a_sample(gradient, self._samples)
        if not rows or self._line in self._tried:
            return self._hook(gradient)
        self._tried.add(self._line)
        beside = _Beside([(gradient, _with_others(gradient, rows))])
        with beside:
            result = self._hook(gradient)
        if result is None and not beside.changes(gradient):
            self._warn("gives nothing back, so that what it keeps is of a micro-batch each time")
        elif beside.differs(gradient if result is None else result, rows):
            self._warn("mixes the samples of its gradient, which are those of a micro-batch each time")
        return result

    def _warn(self, what: str) -> None:
        warnings.warn(
            f"a hook on a gradient, registered at {self._line}, {what}: on one device it is called once, "
            "with the gradient of the whole batch. num_microbatches=1 does so; what concerns the gradients "
            "of parameters belongs into `on_after_backward`",
            stacklevel=2,
        )


class TriedModuleHook:
    """A module's hook on gradients, compared likewise; one that gives nothing back changes no gradient.

    Args:
        hook: The user's.
        samples: Of the micro-batch.
        key: Tells its module, and where it is written, from others.
        tried: Keys of those that were compared; a hook is compared when the first of its key is called.
        root: The LightningModule, for the module's name.
    """

    def __init__(
        self, hook: Callable[..., Any], samples: int, key: str, tried: set[str], root: nn.Module
    ) -> None:
        self._hook, self._samples, self._key, self._tried, self._root = hook, samples, key, tried, root

    def __call__(self, module: nn.Module, *gradients: Any) -> Any:
        given = [one for one in operands_of(gradients) if _rows_of_a_sample(one, self._samples)]
        if not given or self._key in self._tried:
            return self._hook(module, *gradients)
        self._tried.add(self._key)
        beside = _Beside([(one, _with_others(one, self._rows(one))) for one in given])
        with beside:
            result = self._hook(module, *gradients)
        if any(beside.differs(one, self._rows(one)) for one in operands_of((result,)) if self._rows(one)):
            name = next((path for path, part in self._root.named_modules() if part is module), "a module")
            warnings.warn(
                f"a hook on gradients, {getattr(self._hook, '__qualname__', self._hook)} of module {name!r}, "
                "mixes the samples of a gradient, which are those of a micro-batch each time: on one device "
                "it is called once, with the gradients of the whole batch. num_microbatches=1 does so",
                stacklevel=2,
            )
        return result

    def _rows(self, gradient: Tensor) -> int:
        return _rows_of_a_sample(gradient, self._samples)


@contextmanager
def trying_functions(samples: int, tried: set[str]) -> Iterator[None]:
    """Inside, `autograd.Function`s that are applied have their backward compared likewise, once each.

    Args:
        samples: Of the micro-batch.
        tried: Keys of those that were compared.
    """
    plain: Any = Function.apply.__func__  # type: ignore[attr-defined]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        is_own = cls.__module__.partition(".")[0] in _LIBRARIES
        return plain(cls if is_own else _tried(cls, args, samples, tried), *args, **kwargs)

    with patched(Function, {"apply": classmethod(apply)}):
        yield


def _tried(cls: Any, args: Sequence[Any], samples: int, tried: set[str]) -> Any:
    """Such a class whose backward is compared when it is first called with gradients of samples."""
    name = "vjp" if cls.vjp is not Function.vjp else "backward"
    backward = getattr(cls, name)
    code = getattr(unwrap(backward), "__code__", None)
    key = f"{cls.__qualname__} {id(code)}"
    if code is None or key in tried or in_a_transform():
        return cls
    # How long the arguments are that have samples; a weight has none, whatever its shape.
    lengths = [len(one) if isinstance(one, Tensor) and _rows_of_a_sample(one, samples) else 0 for one in args]

    def compared(ctx: Any, *gradients: Any) -> Any:
        given = [one for one in operands_of(gradients) if _rows_of_a_sample(one, samples)]
        if not given or key in tried:
            return backward(ctx, *gradients)
        tried.add(key)
        beside = _Beside([(one, _with_others(one, _rows_of_a_sample(one, samples))) for one in given])
        with beside:
            result = backward(ctx, *gradients)
        results = result if isinstance(result, tuple) else (result,)
        alike = {len(one) for one in given}
        if any(
            length in alike and beside.differs(one, length // samples)
            for one, length in zip(results, lengths, strict=False)
        ):
            warnings.warn(
                f"the backward of {cls.__qualname__}, a function of autograd ({code.co_filename}:"
                f"{code.co_firstlineno}), mixes the samples of its gradient, which are those of a "
                "micro-batch each time: on one device it is called once, with the gradient of the whole "
                "batch. num_microbatches=1 does so",
                stacklevel=2,
            )
        return result

    return type(cls)(cls.__name__, (cls,), {name: staticmethod(compared), "__module__": cls.__module__})


def _rows_of_a_sample(gradient: Tensor, samples: int) -> int:
    """How many rows of the first dimension a sample has; 0 where that is not seen."""
    plain = type(gradient) is Tensor and gradient.layout is torch.strided
    if not plain or not gradient.dim() or not gradient.numel() or not samples or len(gradient) % samples:
        return 0
    return len(gradient) // samples


def _with_others(gradient: Tensor, rows: int) -> Tensor:
    largest = gradient.abs().max()
    made = 1.5 * gradient + torch.where(largest > 0, largest, 1)
    return torch.cat([gradient[:rows], made[rows:] if len(gradient) > rows else made])


class _Beside(TorchDispatchMode):
    """Runs what is run on some tensors on others, too.

    Args:
        pairs: Each of them with the other one.
    """

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._others = {id(tensor): (tensor, other) for tensor, other in pairs}  # held, with their ids
        self._versions = {id(tensor): tensor._version for tensor, _ in pairs}
        self._reads, self._lost = False, False

    def changes(self, tensor: Tensor) -> bool:
        """Whether the tensor was written."""
        return tensor._version != self._versions[id(tensor)]

    def differs(self, result: Any, rows: int) -> bool:
        """Whether the first rows of a result are others beside other rows. What is unknown is not."""
        if self._lost or not isinstance(result, Tensor) or id(result) not in self._others:
            return self._reads
        first, other = result[:rows], self._others[id(result)][1][:rows]
        if first.shape != other.shape:
            return self._reads
        return self._reads or not torch.allclose(first, other, rtol=1e-6, atol=0, equal_nan=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operands = list(operands_of(args, kwargs))
        if self._lost or not any(id(one) in self._others for one in operands):
            return func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:  # it would draw once more
            self._lost = True
            return func(*args, **kwargs)
        for written in written_tensors(func, args, kwargs):
            self._others.setdefault(id(written), (written, written.clone()))
        others = map_tensors(self._other, (args, kwargs))
        result = func(*args, **kwargs)
        self._run_beside(func, others, result)
        return result

    def _other(self, tensor: Tensor) -> Tensor:
        return self._others[id(tensor)][1] if id(tensor) in self._others else tensor

    def _run_beside(self, func: Any, others: tuple[Any, Any], result: Any) -> None:
        try:
            found = func(*others[0], **others[1])
        except Exception:  # such as sizes that do not fit: then nothing is known of it
            self._lost = True
            return
        made, beside = list(operands_of((result,))), list(operands_of((found,)))
        if not made:
            self._reads |= bool(result != found)
        for one, other in zip(made, beside, strict=True):
            self._others.setdefault(id(one), (one, other))
