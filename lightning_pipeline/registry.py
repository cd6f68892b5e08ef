"""What a module has registered, whatever its own methods list: a project may override `named_parameters`."""

from collections.abc import Iterator

from torch import nn


def named_parameters_of(
    module: nn.Module, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters of a module and its parts with their names, in the order of `nn.Module.named_parameters`.

    Args:
        module: The module.
        remove_duplicate: Leave out other names of a parameter, and of a part, that has several.
    """
    seen: set[int] = set()
    for prefix, part in nn.Module.named_modules(module, remove_duplicate=remove_duplicate):
        for name, parameter in part._parameters.items():
            if parameter is None or id(parameter) in seen:
                continue
            if remove_duplicate:
                seen.add(id(parameter))
            yield f"{prefix}.{name}" if prefix else name, parameter


def parameters_of(module: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters of a module and its parts, each once."""
    return (parameter for _, parameter in named_parameters_of(module))
