"""Runs the command in this process, from the examples' folder."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_pipeline.__main__ import main

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
CONFIG = str(EXAMPLES / "gpt.yaml")
GPT = ["--model", "gpt.GPT"]
CLASSES = ["--model", "gpt.GPT", "--data", "gpt.StandardLibrary"]


@pytest.fixture(autouse=True)
def in_examples(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("gpt", None)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main(["plan", *arguments])
    return capsys.readouterr().out


def refusal(*arguments: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", *arguments])
    return str(stopped.value.code)
