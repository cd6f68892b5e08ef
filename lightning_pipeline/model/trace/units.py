"""Find the units of a module: the largest sub-modules that are worth keeping whole."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from lightning_pipeline.errors import PartitionError
from lightning_pipeline.registry import parameters_of

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
# A layer dressed up, not a container. The last is of every adapter of peft, beside its `base_layer`.
_ADAPTER_ATTRIBUTES = ("parametrizations", "lora_A", "adapter_layer_names")


@dataclass(frozen=True, slots=True)
class Unit:
    """A module that is never cut.

    Attributes:
        name: Its first name in the LightningModule, such as `model.layers.3`.
        module: The module itself.
    """

    name: str
    module: nn.Module

    def named(self, name: str) -> "Unit":
        """The same under another name."""
        return self if name == self.name else Unit(name, self.module)

    @property
    def num_parameters(self) -> int:
        """Parameters of the unit, tied ones counted in each unit that holds them."""
        return sum(parameter.numel() for parameter in parameters_of(self.module))


def find_units(root: nn.Module, *, at_least: int = 1, keep_whole: Sequence[str] | None = None) -> list[Unit]:
    """Walk the module tree and stop at elements of `ModuleList`, `ModuleDict` and `Sequential`.

    A module that holds such a container is expanded; what is left between (embeddings, norms, heads) are
    units too. Modules without parameters are no units: they are glue. Where this gives fewer than
    `at_least` units, the largest that has parts is expanded, again and again.

    Args:
        root: The LightningModule, whole or on the meta device.
        at_least: The number of stages to serve.
        keep_whole: `fnmatch` patterns of module names that are units whatever they contain.

    Returns:
        Units in the order of the module tree, each module once.

    Raises:
        PartitionError: A pattern of `keep_whole` matches no module, or the module has no parameters.
    """
    patterns = tuple(keep_whole or ())
    _check_patterns(root, patterns)
    seen: set[int] = set()
    units = list(_walk(root, "", patterns, seen, is_root=True))
    if not units:
        raise PartitionError(
            f"{type(root).__name__} has no sub-module with parameters, so there is nothing to share out "
            "over stages: put the layers into sub-modules (nn.Linear, nn.Sequential, ...)"
        )
    while len(units) < at_least:
        finer = _expand_largest(units, patterns)
        if finer is None:
            break
        units = finer
    return units


def _check_patterns(root: nn.Module, patterns: Sequence[str]) -> None:
    names = [name for name, _ in root.named_modules() if name]
    lost = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)]
    if lost:
        raise PartitionError(
            f"units={lost} matches no module; the modules are {', '.join(names[:20])}"
            f"{', ...' if len(names) > 20 else ''}"
        )


def _walk(
    module: nn.Module,
    name: str,
    patterns: Sequence[str],
    seen: set[int],
    *,
    is_root: bool = False,
    element: bool = False,
) -> Iterator[Unit]:
    if id(module) in seen or not _has_parameters(module):
        return
    seen.add(id(module))
    if _is_unit(module, name, patterns, is_root=is_root, element=element):
        seen.update(id(child) for child in module.modules())
        yield Unit(name, module)
        return
    inside = isinstance(module, _CONTAINERS)
    for child_name, child in module.named_children():
        yield from _walk(
            child, f"{name}.{child_name}" if name else child_name, patterns, seen, element=inside
        )


def _is_unit(module: nn.Module, name: str, patterns: Sequence[str], *, is_root: bool, element: bool) -> bool:
    if is_root:
        return False
    if any(fnmatchcase(name, pattern) for pattern in patterns):
        return True
    if patterns and any(
        fnmatchcase(f"{name}.{part}", p) for part, _ in module.named_modules() if part for p in patterns
    ):
        return False
    if isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward:
        return False
    if _is_dressed(module):
        return True
    return element or not _holds_container(module)


def _is_dressed(module: nn.Module) -> bool:
    return any(hasattr(module, attribute) for attribute in _ADAPTER_ATTRIBUTES)


def _holds_container(module: nn.Module) -> bool:
    stack = [module]
    while stack:
        current = stack.pop()
        if isinstance(current, _CONTAINERS) and _has_parameters(current):
            return True
        if not _is_dressed(current):
            stack.extend(current.children())
    return False


def _has_parameters(module: nn.Module) -> bool:
    return next(parameters_of(module), None) is not None


def _parts(unit: Unit, patterns: Sequence[str]) -> list[Unit]:
    if _is_dressed(unit.module) or any(fnmatchcase(unit.name, pattern) for pattern in patterns):
        return []
    parts: list[Unit] = []
    for name, child in unit.module.named_children():
        if _has_parameters(child):
            inner = Unit(f"{unit.name}.{name}", child)
            hollow = isinstance(child, nn.ModuleList | nn.ModuleDict)
            parts.extend(_parts(inner, patterns) if hollow else [inner])
    return parts


def _expand_largest(units: list[Unit], patterns: Sequence[str]) -> list[Unit] | None:
    order = sorted(range(len(units)), key=lambda index: -units[index].num_parameters)
    for index in order:
        parts = _parts(units[index], patterns)
        if parts:
            taken = {id(unit.module) for unit in units}
            return (
                units[:index] + [part for part in parts if id(part.module) not in taken] + units[index + 1 :]
            )
    return None


def find_new_units(
    root: nn.Module, units: Sequence[nn.Module], before: Collection[int], copies: Collection[int]
) -> Iterator[Unit]:
    """The largest modules with parameters that have come since a look and are in no unit.

    Args:
        root: The LightningModule.
        units: The modules of the units that there are.
        before: The modules that there were, by `id`.
        copies: Those copied from a unit, by `id`: they are units by themselves.
    """
    known = {id(unit) for unit in units}

    def is_apart(module: nn.Module) -> bool:
        inside = [part for part in module.modules() if part is not module]
        return any(id(part) in known or id(part) in copies for part in inside)

    def walk(module: nn.Module, prefix: str) -> Iterator[Unit]:
        for name, child in module.named_children():
            full = f"{prefix}.{name}" if prefix else name
            if id(child) in known or not _has_parameters(child):
                continue
            hollow = isinstance(child, nn.ModuleList | nn.ModuleDict)
            if id(child) in before or hollow or (id(child) not in copies and is_apart(child)):
                yield from walk(child, full)
            else:
                known.add(id(child))
                yield Unit(full, child)

    yield from walk(root, "")


def finer_names(units: Sequence[Unit]) -> list[str]:
    """Names of units that could be split finer, largest first, for the advice in an error."""
    ordered = sorted(units, key=lambda unit: -unit.num_parameters)
    return [f"{unit.name}.*" for unit in ordered if _parts(unit, ())]
