"""How a line of the user's code changes an attribute: by something constant, by adding, or otherwise.

A step runs once for each micro-batch. `self.steps += 1` must count once per batch, `self.seen += len(x)` must
add up, and no value tells these apart; the source does.
"""

import ast
import functools
import linecache
from types import FrameType
from typing import Literal

How = Literal["constant", "samples", "sum", "other"]

_PURE = ("min", "max", "abs", "round", "int", "float")
_SIZES = ("len", "size", "shape", "numel", "batch_size")


def how_changed(frame: FrameType, name: str) -> How | None:
    """How the statement that runs changes the attribute `name` of what it belongs to.

    Args:
        frame: That of a function whose first argument is the object.
        name: Of the attribute.

    Returns:
        `constant`: from its old value and constants alone. `samples`: a number of samples is added. `sum`:
        something else is added. `other`: none of these, or the source is not known. None: the new value does
        not come from the old one.
    """
    code = frame.f_code
    line, _, column, _ = list(code.co_positions())[frame.f_lasti // 2]
    found = _assignments(code.co_filename, "".join(linecache.getlines(code.co_filename)))
    statement = found.get((line, column))
    own = code.co_varnames[0] if code.co_varnames else ""
    if isinstance(statement, ast.AugAssign):
        return _how(isinstance(statement.op, ast.Add), statement.value, own, name)
    if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is None:
        return "other"
    value = statement.value
    if not any(_is_own(node, own, name) for node in ast.walk(value)):
        return None
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add) and _is_own(value.left, own, name):
        return _how(True, value.right, own, name)
    return _how(False, value, own, name)


def _how(adds: bool, value: ast.expr, own: str, name: str) -> How:
    if _is_constant(value, own, name):
        return "constant"
    if not adds:
        return "other"
    names = {n.id for n in ast.walk(value) if isinstance(n, ast.Name)}
    names |= {n.attr for n in ast.walk(value) if isinstance(n, ast.Attribute)}
    return (
        "samples" if isinstance(value, ast.Call | ast.Subscript | ast.Name) and names & {*_SIZES} else "sum"
    )


def _is_own(node: ast.AST, own: str, name: str) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr == name
        and isinstance(node.value, ast.Name)
        and node.value.id == own
    )


def _is_constant(node: ast.expr, own: str, name: str) -> bool:
    if isinstance(node, ast.Constant) or _is_own(node, own, name):
        return True
    parts: list[ast.expr] | None = None
    if isinstance(node, ast.BinOp):
        parts = [node.left, node.right]
    elif isinstance(node, ast.UnaryOp):
        parts = [node.operand]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _PURE:
        parts = list(node.args)
    return parts is not None and all(_is_constant(part, own, name) for part in parts)


@functools.lru_cache(maxsize=16)
def _assignments(file: str, source: str) -> dict[tuple[int | None, int | None], ast.stmt]:
    """The assignments of a file, by line and column of each attribute that they set."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return {}
    found: dict[tuple[int | None, int | None], ast.stmt] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for part in ast.walk(target):
                    if isinstance(part, ast.Attribute):
                        found[part.lineno, part.col_offset] = node
    return found
