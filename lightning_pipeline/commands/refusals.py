"""What jsonargparse refuses, in a line or two, with the name that was probably meant."""

import difflib
import importlib
import inspect
import re
from collections.abc import Iterable
from typing import Any, NoReturn

from jsonargparse import ArgumentParser
from typing_extensions import override

from lightning_pipeline.errors import ConfigurationError

# Lines of its messages that say nothing to a user: types of ours, and what the line above says already.
_NOISE = re.compile(
    r"Does not validate|Subtypes:|Errors:|Given value|Expected a path|Expected a <class 'NoneType'>"
)
_KEY = re.compile(r'(?:Parser key|Problem with) "([\w.]+)":')
_CLASS = re.compile(r"Problem with given class_path '([\w.]+)':")
_OPTION = re.compile(r"Option '(\w+)' is not accepted")
_CHOICE = re.compile(r"argument (?:sub)?command: invalid choice: '(\S+)' \(choose from (.*)\)")
_LITERAL = re.compile(r"Expected a typing\.Literal\[(.*?)\]")
_REQUIRED = re.compile(r"the following arguments are required: (?:\w+\.)?")
_ATTRIBUTE = re.compile(r"module '([\w.]+)' has no attribute '(\w+)'")


class BriefParser(ArgumentParser):
    """Refuses with one of our errors instead of the usage and twenty lines."""

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:  # of a class within the command, whose error the command tells
            super().error(message, ex)
        options = [option for action in self._actions for option in action.option_strings]
        raise ConfigurationError(brief(message, options)) from ex


def brief(message: str, options: Iterable[str]) -> str:
    """The part of a message that says what is wrong, and what may have been meant.

    Args:
        message: Of jsonargparse.
        options: Of the command.
    """
    lines = [line.strip(" -") for line in message.splitlines() if line.strip(" -")]
    keys = [key for line in lines for key in _KEY.findall(line)]
    told = [line for line in lines if not _NOISE.match(line) and not _KEY.fullmatch(line)]
    said = _CLASS.sub(r"\1:", " ".join(told)).replace("<class '", "").replace("'>.", ";").replace("'>", "")
    said = _CHOICE.sub(r"there is no command '\1', but \2", said)
    said = _REQUIRED.sub("missing: ", _LITERAL.sub(r"expected one of \1", said))
    where = f"--{'.'.join(dict.fromkeys(keys))}: " if keys else ""
    return f"{where}{said}{_meant(message, options)}"


def _meant(message: str, options: Iterable[str]) -> str:
    wrong, known = _names(message, options)
    close = difflib.get_close_matches(wrong, known, n=1) if wrong else []
    return f"; did you mean {close[0]}?" if close else ""


def _names(message: str, options: Iterable[str]) -> tuple[str, list[str]]:
    """The name that is not there, and those that are."""
    choice = _CHOICE.search(message)
    if choice is not None:
        return choice[1], re.findall(r"'(\w+)'", choice[2])
    attribute, option = _ATTRIBUTE.search(message), _OPTION.search(message)
    if attribute is not None:
        return attribute[2], dir(importlib.import_module(attribute[1]))
    path = _CLASS.search(message)
    if option is not None and path is not None:
        return option[1], list(inspect.signature(_loaded(path[1])).parameters)
    unknown = re.search(r"unrecognized arguments: (--[\w.]+)", message, flags=re.IGNORECASE)
    return (unknown[1], list(options)) if unknown is not None else ("", [])


def _loaded(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)
