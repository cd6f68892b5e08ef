"""Imports inside the package go downwards only, and the lower layers do not know the libraries above them."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "lightning_pipeline"

# From the top. A module may import from its own layer and from the layers below. SIDE is every module beside
# strategy.py that has no layer of its own: precision, logging, checkpoint and the like.
SIDE = "side"
LAYERS = ["__init__", "strategy", SIDE, "callbacks", "planning", "split", "runtime", "schedules", "errors"]
FOREIGN = {
    "planning": {"lightning", "pytorch_lightning"},
    "split": {"lightning", "pytorch_lightning"},
    "runtime": {"lightning", "pytorch_lightning", "torchmetrics"},
    "schedules": {"lightning", "pytorch_lightning", "torchmetrics", "torch", "numpy"},
    "errors": {"lightning", "pytorch_lightning", "torchmetrics", "torch", "numpy"},
}
# Inside functions only: read when asked for.
LATE = {"schedules/from_torch.py": {"torch"}}
FILES = sorted(PACKAGE.rglob("*.py"))


def part_of(file: Path) -> str:
    """The part of the package that a file belongs to: a folder or a module at the top."""
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def layer_of(part: str) -> int:
    return LAYERS.index(part if part in LAYERS else SIDE)


def exists(name: str) -> bool:
    return (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file()


def imports_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import below a node, also inside functions and TYPE_CHECKING."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            assert node.module is not None
            yield from ((node.lineno, f"{node.module}.{name.name}") for name in node.names)


def lines_in_functions(tree: ast.AST) -> set[int]:
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {line for function in functions for line in range(function.lineno, (function.end_lineno or 0) + 1)}


def faults(source: str, file: str) -> list[str]:
    """What a file of the package imports that it must not."""
    found, tree, part = [], ast.parse(source), part_of(PACKAGE / file)
    late = lines_in_functions(tree)
    for line, name in imports_of(tree):
        top, *rest = name.split(".")
        if top == "lightning_pipeline":
            target = rest[0] if rest and exists(rest[0]) else "__init__"
            if layer_of(target) < layer_of(part):
                found.append(f"line {line}: {part} imports {name}, which is above it")
        elif top in FOREIGN.get(part, set()) and not (line in late and top in LATE.get(file, set())):
            found.append(f"line {line}: {part} imports {top}")
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_go_downwards(file: Path) -> None:
    assert faults(file.read_text(), str(file.relative_to(PACKAGE))) == []


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("schedules/new.py", "import torch.distributed"),
        ("schedules/new.py", "def late():\n    import torch"),
        ("schedules/from_torch.py", "import torch"),
        ("schedules/new.py", "from lightning_pipeline.runtime.channel import Channel"),
        ("runtime/new.py", "def late():\n    from lightning.pytorch import Trainer"),
        ("runtime/new.py", "from lightning_pipeline import split"),
        ("errors.py", "import lightning_pipeline"),
        ("callbacks/new.py", "from lightning_pipeline import PipelineStrategy"),
    ],
)
def test_an_import_upwards_is_found(file: str, source: str) -> None:
    assert len(faults(source, file)) == 1


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_no_file_is_longer_than_400_lines(file: Path) -> None:
    assert len(file.read_text().splitlines()) <= 400
