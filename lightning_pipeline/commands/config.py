"""The arguments of `lightning-pipeline plan` that a LightningCLI config already says."""

from pathlib import Path
from typing import Any

import yaml

from lightning_pipeline.errors import ConfigurationError

STRATEGY_ARGUMENTS = ("stages", "num_microbatches", "schedule", "stages_per_rank", "partition", "units")
COUNTS = ("stages", "num_microbatches", "stages_per_rank")


def defaults_from(path: str, model: str | None, data: str | None) -> dict[str, Any]:
    """Read `model`, `data`, `trainer.strategy` and `trainer.precision` of a config.

    Args:
        path: Of the file, YAML or JSON.
        model: Class of the model, for a config that gives its arguments alone.
        data: Class of the data, likewise.

    Returns:
        Defaults for the command's own arguments.

    Raises:
        ConfigurationError: The file is not there or no config, or a class is missing.
    """
    config = _read(path)
    found: dict[str, Any] = {}
    for section, given in (("model", model), ("data", data)):
        value = _with_class(section, config.get(section), given, path)
        if value is not None:
            found[section] = value
    trainer = config.get("trainer") or {}
    if not isinstance(trainer, dict):
        raise ConfigurationError(f"--config {path}: trainer is {trainer!r}, not a section of arguments")
    if trainer.get("precision") is not None:
        found["precision"] = str(trainer["precision"])
    return found | _strategy(trainer, path)


def _read(path: str) -> dict[str, Any]:
    try:
        config = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise ConfigurationError(f"--config {path} cannot be read: {_in_a_line(error)}") from error
    if not isinstance(config, dict):
        raise ConfigurationError(f"--config {path} is no config: it has no sections such as `model`")
    nested = config.get("fit")  # what LightningCLI's --print_config of all commands writes
    return nested if isinstance(nested, dict) and "model" not in config else config


def _in_a_line(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    if isinstance(error, yaml.MarkedYAMLError) and mark is not None:
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return " ".join(str(error).split())


def _with_class(section: str, value: Any, given: str | None, path: str) -> dict[str, Any] | None:
    if value is None:
        return None
    if isinstance(value, str):
        return {"class_path": value}
    if not isinstance(value, dict) or not isinstance(value.get("class_path", ""), str):
        raise ConfigurationError(f"--config {path}: {section} is {value!r}, which names no class")
    if "class_path" in value:
        return dict(value)
    if given is None:
        if section == "data":
            return None
        raise ConfigurationError(
            f"--config {path} gives arguments of {section} but no class: name the one that its LightningCLI "
            f"has, with --{section} my_package.MyClass"
        )
    return {"class_path": given, "init_args": value}


def _strategy(trainer: dict[str, Any], path: str) -> dict[str, Any]:
    """What the config says to `PipelineStrategy`; nothing where it has another strategy."""
    strategy = trainer.get("strategy")
    if isinstance(strategy, str):
        strategy = {"class_path": strategy}
    if not isinstance(strategy, dict):
        return {}
    if str(strategy.get("class_path")).rpartition(".")[2] not in ("PipelineStrategy", "pipeline"):
        return {}
    arguments = strategy.get("init_args") or {}
    if not isinstance(arguments, dict):
        raise ConfigurationError(f"--config {path}: the strategy's init_args are {arguments!r}, not by name")
    found = {name: arguments[name] for name in STRATEGY_ARGUMENTS if name in arguments}
    for name in COUNTS:
        value = found.get(name, 1)
        if value != "auto" and (not isinstance(value, int) or isinstance(value, bool)):
            raise ConfigurationError(f"--config {path}: {name} is {value!r}, which is no whole number")
    if found.get("stages", "auto") == "auto":
        found.pop("stages", None)
        devices, nodes = trainer.get("devices"), trainer.get("num_nodes", 1)
        if isinstance(devices, int) and devices > 0 and isinstance(nodes, int):
            found["stages"] = devices * nodes
    return found
