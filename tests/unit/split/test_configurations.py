"""Configurations whose nodes lead back to what holds them, as OmegaConf's do."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.lightning_cases import Regression, loader, trainer

pytestmark = pytest.mark.usefixtures("no_group_is_left")


class Node:
    """A value, and the configuration that it is of."""

    def __init__(self, value: float, parent: "Configuration") -> None:
        self.value, self.parent = value, parent


class Configuration(Mapping[str, float]):
    """Numbers by name, each kept in a node; writes to a file when one is asked for."""

    def __init__(self, size: int, file: Path) -> None:
        self.file = str(file)  # a count would be put back after a look at the step
        self.nodes = {f"key{number}": Node(float(number), self) for number in range(size)}

    def __getitem__(self, key: str) -> float:
        with open(self.file, "ab") as file:
            file.write(b".")
        return self.nodes[key].value

    def __iter__(self) -> Iterator[str]:
        return iter(self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)


class Configured(Regression):
    def __init__(self, size: int, file: Path) -> None:
        super().__init__()
        self.nodes = list(Configuration(size, file).nodes.values())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.nodes[1].parent["key1"] * super().training_step(batch, batch_idx)


def asked(size: int, file: Path) -> int:
    """How often a run asks for a value of a configuration of so many."""
    run = trainer({"stages": 1, "num_microbatches": 2}, max_epochs=1, limit_train_batches=2)
    run.fit(Configured(size, file), loader(), loader())
    return file.stat().st_size


def test_what_is_looked_at_grows_with_a_configuration_and_no_faster(tmp_path: Path) -> None:
    few, more = asked(10, tmp_path / "few"), asked(40, tmp_path / "more")
    assert more < 6 * few
