"""How far long work has come, on a terminal."""

import sys
from types import TracebackType
from typing import Any

from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm


class Progress:
    """A bar on the error stream, where that is a terminal; nothing elsewhere, and nothing is left of it.

    Args:
        unit: Of what is counted; large numbers of bytes, `B`, are written as MB and GB.
    """

    def __init__(self, unit: str = "it") -> None:
        self._bar: Any = None
        self._unit = unit

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def tell(self, what: str, done: int, of: int) -> None:
        """So much is done.

        Args:
            what: The work.
            done: Parts of it.
            of: All of them.
        """
        if self._bar is None or self._bar.desc != what:
            self._close()
            self._bar = Tqdm(
                total=of, desc=what, leave=False, disable=not sys.stderr.isatty(), file=sys.stderr,
                unit=self._unit, unit_scale=self._unit == "B",
            )  # fmt: skip
            self._bar.desc = what
        self._bar.total = of
        self._bar.update(done - self._bar.n)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
