"""Which of Lightning's own tests are not about two stages, and why: by what they fail with, or by name."""

import re

_BY_REASON = {
    "a module with one layer": ("More stages than the model has units", "but the model has 1 unit"),
    "refused by design": (),
    "about one process": (),
    "a test's own affair": (),
}
_BY_NAME: dict[str, tuple[str, ...]] = {}


def excluded(test: str, reason: str) -> str:
    """Why a test that fails on two stages is not counted; empty where it is.

    Args:
        test: Its name.
        reason: The first line of what it fails with.
    """
    for kind, patterns in _BY_REASON.items():
        if any(re.search(pattern, reason) for pattern in patterns):
            return kind
    return next((k for k, names in _BY_NAME.items() if any(re.search(name, test) for name in names)), "")
