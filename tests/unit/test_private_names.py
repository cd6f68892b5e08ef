"""Private names of torch stand in one file, and what replaces attributes in one other."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "lightning_pipeline"
FILES = sorted(PACKAGE.rglob("*.py"))
TORCH = PACKAGE / "_torch.py"
_PRIVATE = re.compile(r"_(?!_)\w+")
# Where an attribute is written past `setattr`'s usual ways, and what of: nothing that a run puts back.
WRITES = {
    "_lightning/trainer.py": "as Lightning's own strategies do: rank zero, the device that a module says it is on",
    "hooks/call_values.py": "what a unit that ran on another rank has set, for good",
    "hooks/loggers.py": "what hooks set on the `experiment` of a logger, passed on to it",
    "hooks/precision.py": "a copy of a plugin, made anew",
    "model/construction/construction.py": "weights of a module that is built in parts, for good",
    "model/construction/places.py": "the same",
    "model/loss/metric_objects.py": "what stands for a metric's methods, away while the metric is copied",
    "model/state/absent.py": "a mark on a placeholder of ours",
    "model/state/elsewhere.py": "methods of our own classes",
    "model/state/parameters.py": "a buffer that a stage has not",
    "model/places/metrics.py": "a metric that the user's step makes, for good",
    "model/places/owners.py": "what the user's step has set",
    "model/places/decisions.py": "comparisons of a class of ours, when it is made",
    "model/trace/ports.py": "what the user's step has set, put back or set",
    "patching/ledger.py": "the one way",
    "run/one_device.py": "a decorator of methods, when the class is made",
    "run/setup/trainer.py": "attributes that a trace has set, put back",
}


def dotted(node: ast.expr) -> str:
    """`torch._C._nn` of an attribute chain; empty for others."""
    if isinstance(node, ast.Name):
        return node.id
    before = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{before}.{node.attr}" if before and isinstance(node, ast.Attribute) else ""


def private_names(source: str) -> Iterator[str]:
    """Private names of torch in a file, by import or as an attribute of one of its modules."""
    tree, modules = ast.parse(source), {"torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            for name in node.names:
                if any(_PRIVATE.fullmatch(part) for part in f"{node.module}.{name.name}".split(".")):
                    yield f"{node.module}.{name.name}"
                if name.name[0].islower():
                    modules.add(name.asname or name.name)
        elif isinstance(node, ast.Import):
            modules |= {one.asname for one in node.names if one.asname and one.name.startswith("torch.")}
            yield from (one.name for one in node.names if re.match(r"torch\..*\b_[a-z]", one.name))
    for node in ast.walk(tree):
        name = dotted(node) if isinstance(node, ast.Attribute) else ""
        head, *rest = name.split(".")
        ours = head in modules | {"F", "nn", "dist"} and not name.startswith("torch.ops.")
        if ours and rest and _PRIVATE.fullmatch(rest[-1]):
            yield name


def test_private_names_of_torch_stand_in_one_file() -> None:
    found = {str(file.relative_to(PACKAGE)): sorted(set(private_names(file.read_text()))) for file in FILES}
    assert {file: names for file, names in found.items() if names and file != TORCH.name} == {}
    assert found[TORCH.name]


@pytest.mark.parametrize(
    "source",
    [
        "from torch.utils._python_dispatch import TorchDispatchMode",
        "from torch.overrides import _push_mode",
        "import torch._dynamo",
        "import torch\ntorch._C._nn.linear(1)",
        "import torch.nn.functional as F\nF._pad(1)",
        "from torch import nn\nnn.modules.batchnorm._BatchNorm",
    ],
)
def test_a_private_name_is_found(source: str) -> None:
    assert list(private_names(source))


def replacements(source: str) -> Iterator[int]:
    """Lines that write attributes by name: `vars(x)[...] =`, `vars(x).update(...)`, `setattr` and their like."""
    for node in ast.walk(ast.parse(source)):
        targets = node.targets if isinstance(node, ast.Assign) else []
        held = [one.value for one in targets if isinstance(one, ast.Subscript)]
        held += [one for one in targets if isinstance(one, ast.Attribute) and one.attr == "__class__"]
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Attribute) and called.attr in ("update", "pop", "clear", "setdefault"):
            held.append(called.value)
        for one in held:
            is_vars = isinstance(one, ast.Call) and isinstance(one.func, ast.Name) and one.func.id == "vars"
            if is_vars or (isinstance(one, ast.Attribute) and one.attr in ("__dict__", "__class__")):
                yield node.lineno
        if isinstance(called, ast.Name) and called.id in ("setattr", "delattr"):
            yield called.lineno


def test_what_a_run_replaces_goes_through_the_ledger() -> None:
    found = {str(file.relative_to(PACKAGE)): sorted(set(replacements(file.read_text()))) for file in FILES}
    assert {file: lines for file, lines in found.items() if lines and file not in WRITES} == {}
    assert sorted(file for file, lines in found.items() if lines) == sorted(WRITES)


@pytest.mark.parametrize(
    "source",
    [
        "vars(x)['forward'] = f",
        "x.__dict__['f'] = f",
        "setattr(x, 'f', f)",
        "vars(x).update(f=f)",
        "x.__class__ = f",
    ],
)
def test_a_replacement_is_found(source: str) -> None:
    assert list(replacements(source)) == [1]
