"""Where a step tells something (logs, prints), replaced for the time of a trace or replay."""

import io
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from contextvars import ContextVar
from threading import get_ident
from typing import Any

import numpy
from torch import nn

from lightning_pipeline.patching import patched

Logged = tuple[str, tuple[Any, ...], dict[str, Any]]
"""The method that was called, and with what."""
_logged: ContextVar[list[Logged] | None] = ContextVar("logged", default=None)


def logged_in_run() -> Sequence[Logged]:
    """What the run of a step in this thread has logged so far; nothing outside of steps."""
    return _logged.get() or ()


def note_logged(call: Logged) -> None:
    """The run of a step logs something, which is no one's yet."""
    held = _logged.get()
    if held is not None:
        held.append(call)


@contextmanager
def one_run() -> Iterator[None]:
    """Around a run of a step, which has logged nothing yet."""
    token = _logged.set([])
    try:
        yield
    finally:
        _logged.reset(token)


@contextmanager
def stub_sinks(root: nn.Module, names: Sequence[str], on_value: Callable[[Any], None]) -> Iterator[None]:
    """Let `root.log(...)` and the like only tell what they were given."""

    def sink(name: str) -> Callable[..., None]:
        def log(*args: Any, **kwargs: Any) -> None:
            on_value((args, kwargs))
            note_logged((name, args, kwargs))

        return log

    with patched(root, {name: sink(name) for name in names}), one_run():
        yield


@contextmanager
def silence() -> Iterator[None]:
    """Inside, nothing is printed to the standard output, logged or warned of."""
    disabled = logging.root.manager.disable
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(disabled)


@contextmanager
def printed_once(root: nn.Module) -> Iterator[None]:
    """Inside, what a step prints, logs as information or warns of is dropped: it is run again.

    A debugger is heard.

    Args:
        root: The LightningModule, whose `print` goes to a progress bar.
    """
    is_heard, warned, thread = logging.Logger.isEnabledFor, warnings.warn, get_ident()

    def is_enabled(logger: logging.Logger, level: int) -> bool:
        return level > logging.INFO and is_heard(logger, level)

    def warn(*args: Any, **kwargs: Any) -> None:
        if get_ident() != thread:
            warned(*args, **kwargs)

    told_by_numpy: Any = {kind: "ignore" for kind, way in numpy.geterr().items() if way in ("warn", "print")}
    with (
        redirect_stdout(_Dropped(sys.stdout)),
        patched(warnings, {"warn": warn}),  # a filter would let Python tell again what it has told
        numpy.errstate(**told_by_numpy),  # which warns without asking there
        patched(logging.Logger, {"isEnabledFor": is_enabled}),  # `disable` clears a cache of every logger
        _own_print(root, lambda *args, **kwargs: None),
    ):
        yield


def _own_print(root: nn.Module, instead: Callable[..., None]) -> AbstractContextManager[Any]:
    """Inside, `self.print` is this."""
    return patched(root, {"print": instead} if hasattr(root, "print") else {})


class ToldOnce:
    """What a step prints and logs: what a micro-batch has told, the others do not repeat."""

    def __init__(self) -> None:
        self._told: Counter[Any] = Counter()
        self._own: Counter[Any] = Counter()
        self._thread: int | None = None
        self._out: _Once | None = None

    @contextmanager
    def batch(self, root: nn.Module) -> Iterator[None]:
        """Around the runs of a batch's step.

        Args:
            root: The LightningModule.
        """
        original, own = logging.Logger.handle, getattr(root, "print", None)

        def show(*args: Any, **kwargs: Any) -> None:
            if own is not None and (not self.runs or self.is_new(("print", " ".join(map(str, args))))):
                own(*args, **kwargs)

        def handle(logger: logging.Logger, record: logging.LogRecord) -> None:
            if not self.runs or self.is_new((logger.name, record.levelno, record.getMessage())):
                original(logger, record)

        self._told.clear()
        self._out = _Once(sys.stdout, self)
        with (
            redirect_stdout(self._out),
            patched(logging.Logger, {"handle": handle}),
            _own_print(root, show),
        ):
            yield
        self._out = None

    @contextmanager
    def run(self) -> Iterator[None]:
        """Around one run, by this thread, of the step on a micro-batch."""
        self._own.clear()
        self._thread = get_ident()
        try:
            with one_run():
                yield
        finally:
            if self._out is not None:
                self._out.end_line()
            self._thread = None

    @property
    def runs(self) -> bool:
        """Whether it is the step that asks, and no other thread or hook."""
        return self._thread == get_ident()

    def is_new(self, what: Any) -> bool:
        """Whether no micro-batch before has told this as often."""
        self._own[what] += 1
        if self._own[what] <= self._told[what]:
            return False
        self._told[what] = self._own[what]
        return True


class _Through(io.TextIOBase):
    """A standard output that is as the real one, but for what is written.

    Args:
        real: The one that it stands before.
    """

    def __init__(self, real: Any) -> None:
        super().__init__()
        self._real = real

    @property
    def encoding(self) -> Any:  # type: ignore[override]  # the base's may be set
        """As the real one; `errors` and all that is of files rather than of text, too."""
        return self._real.encoding

    @property
    def errors(self) -> Any:  # type: ignore[override]
        """As the real one."""
        return self._real.errors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def isatty(self) -> bool:
        """As the real one."""
        return bool(self._real.isatty())

    def fileno(self) -> int:
        """As the real one."""
        return int(self._real.fileno())


class _Once(_Through):
    """Writes whole lines, or what is flushed, where that is new. A debugger is heard.

    Args:
        real: Where it goes.
        told: Knows what is new.
    """

    def __init__(self, real: Any, told: ToldOnce) -> None:
        super().__init__(real)
        self._told, self._line = told, ""

    def write(self, text: str) -> int:
        """Write the lines that are complete."""
        if not self._told.runs or sys.gettrace() is not None:
            return int(self._real.write(text))
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            if self._told.is_new(line):
                self._real.write(f"{line}\n")
        return len(text)

    def flush(self) -> None:
        """What is written so far counts as a line."""
        self.end_line()
        self._real.flush()

    def end_line(self) -> None:
        """Write what has no end yet."""
        line, self._line = self._line, ""
        if line and self._told.is_new((line, "unfinished")):
            self._real.write(line)


class _Dropped(_Through):
    """Drops what is written, unless a debugger runs."""

    def write(self, text: str) -> int:
        """Drop, or pass on."""
        return len(text) if sys.gettrace() is None else int(self._real.write(text))

    def flush(self) -> None:
        """Of a debugger's prompt, too."""
        if sys.gettrace() is not None:
            self._real.flush()
