"""Names of arguments that a class does not have."""

import difflib
import inspect
from collections.abc import Iterable
from typing import Any, Self

from lightning_pipeline.errors import ConfigurationError


class KnownArguments:
    """A class whose wrong argument names are refused with those that were probably meant.

    Raises:
        ConfigurationError: An argument that the class does not have; all of them are named.
    """

    def __new__(cls, *args: Any, **named: Any) -> Self:
        refuse_unknown(cls, named)
        return super().__new__(cls)


def refuse_unknown(cls: type, given: Iterable[str]) -> None:
    """Compare names with the arguments of a class.

    Args:
        cls: To be made.
        given: Names of arguments.

    Raises:
        ConfigurationError: Some of them are not among its arguments.
    """
    parameters = inspect.signature(cls).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    wrong = [name for name in given if name not in parameters]
    if wrong:
        told = "; ".join(f"{name}{_meant(name, list(parameters))}" for name in wrong)
        raise ConfigurationError(f"{cls.__name__} does not have the argument {told}")


def _meant(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f", did you mean {close[0]}?" if close else ""
