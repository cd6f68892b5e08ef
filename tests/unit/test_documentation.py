"""What README and docs show is code that exists: it parses, its names are there, its files are there."""

import ast
import importlib
import inspect
import re
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_pipeline import PipelineStrategy
from tests.pages import ROOT, blocks, pages

ARGUMENTS = set(inspect.signature(PipelineStrategy).parameters)


def python_nodes(page: str) -> Iterator[tuple[int, ast.AST]]:
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(textwrap.dedent(block.text), page)):
            yield block.line, node


def unknown_names(page: str) -> list[str]:
    unknown = []
    for line, node in python_nodes(page):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning_pipeline"):
            module = importlib.import_module(node.module or "")
            unknown += [f"{line}: {name.name}" for name in node.names if not hasattr(module, name.name)]
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "PipelineStrategy":
            given = {keyword.arg for keyword in node.keywords if keyword.arg}
            unknown += [f"{line}: {name}=" for name in sorted(given - ARGUMENTS)]
    return unknown


@pytest.mark.parametrize("page", pages())
def test_python_of_a_page_parses_and_uses_names_that_exist(page: str) -> None:
    assert unknown_names(page) == []


def test_a_name_that_does_not_exist_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "page.md").write_text(
        "```python\nfrom lightning_pipeline import Gone\nPipelineStrategy(stages=2, chunks=4)\n```\n"
    )
    monkeypatch.setattr("tests.pages.ROOT", tmp_path)
    assert unknown_names("page.md") == ["2: Gone", "2: chunks="]


def test_shell_blocks_are_the_shells_language_and_name_files_that_exist() -> None:
    missing = []
    for page in pages():
        text = "\n".join(block.text for block in blocks(page, "bash"))
        done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
        assert done.returncode == 0, f"{page}: {done.stderr}"
        named = re.findall(r"\b(?:examples|benchmarks|docs)/[\w/]+\.(?:py|yaml)", text)
        missing += [f"{page}: {name}" for name in named if not (ROOT / name).exists()]
    assert missing == []


def test_links_between_pages_lead_somewhere() -> None:
    broken = []
    for page in pages():
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / page).read_text()):
            if not ((ROOT / page).parent / target).exists():
                broken.append(f"{page}: {target}")
    assert broken == []


def test_digits_of_pictures_are_nine_pixels_high_or_more() -> None:
    pictures = sorted((ROOT / "docs").rglob("*.svg"))
    assert pictures
    small = [
        f"{path.name}: {size}"
        for path in pictures
        if "_build" not in path.parts
        for size in re.findall(r'font-size="([\d.]+)"', path.read_text())
        if float(size) < 9
    ]
    assert small == []
    # a page shows them as large as they were drawn, and scrolls one that is wider than its column
    assert re.search(r"article img \{ max-width: none;", (ROOT / "docs/_static/pages.css").read_text())


def test_methods_that_pages_tell_of_are_in_the_reference() -> None:
    named = {
        name
        for page in pages()
        for name in re.findall(r"\bstrategy\.([a-z]\w+)\(", (ROOT / page).read_text())
        if hasattr(PipelineStrategy, name)
    }
    reference = (ROOT / "docs/reference.md").read_text()
    assert {"save_weights", "load_weights", "stage_index"} <= named
    assert [name for name in sorted(named) if f"PipelineStrategy.{name}\n" not in reference] == []
