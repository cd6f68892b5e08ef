"""Rooms: imports go downwards only, through doors, and no room grows beyond what a reader can hold."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "lightning_pipeline"

# From the top, one line a room. A module may import from its own room and from the rooms below.
ROOMS = [
    "__main__",
    "commands",
    "strategy",
    "callbacks",
    "run",
    "run.setup",
    "run.batch",
    "weights",
    "hooks",
    "checkpoint",
    "checkpoint.contents",
    "checkpoint.folder",
    "measure",
    "forecast",
    "forecast.workload",
    "forecast.machine",
    "model.split",
    "model.rehearsal",
    "model.replay",
    "model.state",
    "model.rules",
    "model.cut",
    "model.trace",
    "model.places",
    "model.loss",
    "model.mixing",
    "model.construction",
    "model.random",
    "model.tensors",
    "data",
    "_lightning",
    "executor",
    "ranks",
    "wire",
    "recording",
    "registry",
    "_torch",
    "patching",
    "settings",
    "schedules",
    "schedules.search",
    "schedules.drawing",
    "schedules.rules",
    "schedules.plans",
    "errors",
]
_TRAINERS = {"lightning", "pytorch_lightning"}
# Libraries that a room must not know; a room that holds others speaks for them too.
FOREIGN = {
    "forecast": _TRAINERS,
    "model": _TRAINERS,
    "executor": {*_TRAINERS, "torchmetrics"},
    "ranks": {*_TRAINERS, "torchmetrics"},
    "wire": {*_TRAINERS, "torchmetrics"},
    "recording": {*_TRAINERS, "torchmetrics"},
    "schedules": {*_TRAINERS, "torchmetrics", "torch", "numpy"},
    "errors": {*_TRAINERS, "torchmetrics", "torch", "numpy"},
}
# Inside functions only: read when asked for.
LATE = {"schedules.rules.from_torch": {"torch"}}
FILES_IN_ROOT, FILES_IN_A_ROOM, LINES, IMPORTS, PATH = 6, 15, 600, 20, 17


def dotted(file: Path) -> str:
    """`wire/link.py` is `wire.link`; a door is its room's name, the package's own is empty."""
    return (
        ".".join(file.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").removesuffix(".")
    )


TREES = {dotted(file): ast.parse(file.read_text()) for file in sorted(PACKAGE.rglob("*.py"))}
DOORS = {dotted(file) for file in PACKAGE.rglob("__init__.py")}


def room_of(module: str) -> str:
    """The room that a module lies in; a file of the root is a room of its own."""
    return module if module in DOORS or "." not in module else module.rpartition(".")[0]


def imports_of(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Line, module and name of every import below a node, also inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name, "") for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            assert node.module is not None
            yield from ((node.lineno, node.module, name.name) for name in node.names)


def own(module: str) -> str | None:
    """The part of a dotted name below this package, None for other libraries."""
    head, _, rest = module.partition(".")
    return rest if head == "lightning_pipeline" else None


def lines_in_functions(tree: ast.AST) -> set[int]:
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {line for function in functions for line in range(function.lineno, (function.end_lineno or 0) + 1)}


def forbidden(module: str) -> set[str]:
    return FOREIGN.get(module.partition(".")[0], set())


def faults(source: ast.AST, module: str) -> Iterator[str]:
    """What a module imports that it must not."""
    late, room = lines_in_functions(source), room_of(module)
    for line, name, what in imports_of(source):
        target, top = own(name), name.partition(".")[0]
        if target is None:
            if top in forbidden(module) and not (line in late and top in LATE.get(module, set())):
                yield f"line {line}: {module} imports {top}"
            continue
        inner = f"{target}.{what}".lstrip(".")
        if inner in TREES and (target == room or what not in names_at(target)):
            target = inner
        target = target or "strategy"  # what the package's own door shows
        if room_of(target) == room and target not in DOORS:
            continue
        if ROOMS.index(room_of(target)) <= ROOMS.index(room):
            yield f"line {line}: {module} imports {target}, which is not below it"
        elif "." in target and target not in DOORS:
            yield f"line {line}: {module} imports {target} past the door {room_of(target)}"


def names_at(door: str) -> set[str]:
    """Names that a door brings in; the package's own makes its names when they are asked for."""
    return {name for _, _, name in imports_of(TREES[door])}


def defined_in(module: str, name: str) -> str:
    """The module behind a door in which a name is defined."""
    if module not in DOORS:
        return module
    for _, source, what in imports_of(TREES[module]):
        below = own(source)
        if what == name and below is not None and below != module:
            return defined_in(below, name)
    inner = f"{module}.{name}".lstrip(".")
    return inner if inner in TREES else module


def graph() -> dict[str, set[str]]:
    """Of each module but the doors, the modules that it imports from, whatever the door."""
    edges = {}
    for module, tree in TREES.items():
        if module not in DOORS:
            found = {
                defined_in(t, what) for _, name, what in imports_of(tree) if (t := own(name)) is not None
            }
            edges[module] = {one for one in found if one not in DOORS and one != module}
    return edges


def test_imports_go_downwards_through_doors() -> None:
    rooms = {module: tree for module, tree in TREES.items() if module not in DOORS}
    assert {m: found for m, tree in rooms.items() if (found := list(faults(tree, m)))} == {}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("schedules.rules.new", "import torch.distributed"),
        ("schedules.rules.new", "def late():\n    import torch"),
        ("schedules.rules.from_torch", "import torch"),
        ("schedules.plans.new", "from lightning_pipeline.wire import Channel"),
        ("schedules.plans.new", "from lightning_pipeline.schedules import GPipe"),
        ("wire.new", "def late():\n    from lightning.pytorch import Trainer"),
        ("wire.new", "from lightning_pipeline.model.split import SplitModel"),
        ("executor.new", "from lightning_pipeline.wire.channel import Channel"),
        ("executor.new", "from lightning_pipeline.wire import channel"),
        ("errors", "import lightning_pipeline"),
        ("callbacks.new", "from lightning_pipeline.strategy import PipelineStrategy"),
    ],
)
def test_an_import_upwards_or_past_a_door_is_found(module: str, source: str) -> None:
    assert len(list(faults(ast.parse(source), module))) == 1


def test_every_room_has_a_line() -> None:
    rooms = {room_of(module) for module in TREES if module not in DOORS}
    assert rooms == set(ROOMS)


def test_contributing_shows_the_rooms_in_this_order() -> None:
    shown = re.findall(r"^  (\w[\w/]*)(?:/|\.py) ", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert [name.replace("/", ".") for name in shown] == ROOMS


def test_the_table_of_moved_files_names_files_that_are_there() -> None:
    rows = re.findall(r"^\| .+ \| (\w\S+\.py(?:, \S+)*) \|$", (ROOT / "MOVED.md").read_text(), re.MULTILINE)
    assert len(rows) > 100
    for first, *others in (row.split(", ") for row in rows):
        folder = (PACKAGE / first).parent
        missing = [
            name for name in (folder / Path(first).name, *(folder / o for o in others)) if not name.exists()
        ]
        assert missing == [], first


def test_the_root_and_the_rooms_stay_small() -> None:
    files = {door: len(list((PACKAGE / door.replace(".", "/")).glob("*.py"))) for door in DOORS}
    assert files.pop("") <= FILES_IN_ROOT
    assert {room: number for room, number in files.items() if number > FILES_IN_A_ROOM} == {}


def test_no_file_is_longer_than_a_reader_can_hold() -> None:
    lengths = {file: len(file.read_text().splitlines()) for file in PACKAGE.rglob("*.py")}
    assert {file: length for file, length in lengths.items() if length > LINES} == {}


def test_no_module_imports_many_others() -> None:
    assert {module: len(found) for module, found in graph().items() if len(found) > IMPORTS} == {}


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Modules that import one another, by whatever way round, for types alone too."""
    reached = {module: below(edges, module) for module in edges}
    found = {
        module: sorted(one for one in reached[module] if module in reached.get(one, set()))
        for module in sorted(edges)
        if module in reached[module]
    }
    return [members for module, members in found.items() if module == members[0]]


def below(edges: dict[str, set[str]], module: str) -> set[str]:
    """What a module imports, and what that imports."""
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        new = edges.get(waiting.pop(), set()) - seen
        seen |= new
        waiting += new
    return seen


def longest_path(edges: dict[str, set[str]]) -> list[str]:
    """The longest way downwards; modules in a circle are on it all together."""
    members = {module: circle for circle in circles(edges) for module in circle}

    @cache
    def longest(module: str) -> tuple[str, ...]:
        own = members.get(module, [module])
        under = sorted({one for part in own for one in edges.get(part, ())} - set(own))
        return (*own, *max((longest(one) for one in under), key=len, default=()))

    return list(max((longest(module) for module in sorted(edges)), key=len))


def test_no_modules_import_one_another() -> None:
    assert circles(graph()) == []


def test_a_circle_and_a_path_are_found() -> None:
    edges = {"a": {"b", "d"}, "b": {"c"}, "c": {"b", "e"}, "d": {"e"}, "e": set()}
    assert circles(edges) == [["b", "c"]]
    assert longest_path(edges) == ["a", "b", "c", "e"]


def test_paths_of_imports_stay_short() -> None:
    path = longest_path(graph())
    assert len(path) <= PATH, " > ".join(path)
