"""Who has the whole module after a run, and that a run goes on from weights that were left where they are."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_pipeline import load_from_checkpoint
from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, assert_same, fit, loader, trainer, weights

Ranks = Callable[[int], Pool]
PIPELINE = {"stages": 2, "num_microbatches": 2}


def fit_gathering(how: str, replicas: int = 1) -> tuple[dict[str, Any], bool]:
    """What this rank has after fit, and whether that is all."""
    module, run = (
        Regression(),
        trainer({**PIPELINE, "gather_weights": how, "data_parallel_size": replicas}, max_epochs=1),
    )
    run.fit(module, loader(), loader(seed=4))
    held = {name: value for name, value in weights(module).items() if not value.is_meta}
    assert all(
        tuple(p.shape) == tuple(q.shape)
        for p, q in zip(module.parameters(), Regression().parameters(), strict=True)
    )
    return held, len(held) == len(list(module.parameters()))


@pytest.mark.parametrize(
    ("how", "whole"),
    [("auto", [True, True]), ("all", [True, True]), ("rank_zero", [True, False]), ("none", [False, False])],
)
def test_the_ranks_that_are_named_have_the_whole_module(ranks: Ranks, how: str, whole: list[bool]) -> None:
    expected, _ = fit(None, max_epochs=1)
    found = ranks(2)(fit_gathering, how)
    assert [one for _, one in found] == whole
    together: dict[str, Any] = {}
    for held, _ in found:
        for name, value in held.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-10)
        together.update(held)
    assert together.keys() == expected.keys()


def test_each_replica_keeps_its_stages(ranks: Ranks) -> None:
    found = ranks(4)(fit_gathering, "rank_zero", 2)
    assert [whole for _, whole in found] == [True, False, False, False]


def fit_again(how: str, partition: list[str]) -> Any:
    """Fit, evaluate and fit on, with stages that are cut elsewhere."""
    module = Regression()
    run = trainer({**PIPELINE, "gather_weights": how}, max_epochs=1)
    run.fit(module, loader(), loader(seed=4))
    run.validate(module, loader(seed=4), verbose=False)
    again = trainer({**PIPELINE, "gather_weights": "all", "partition": partition}, max_epochs=1)
    again.fit(module, loader(), loader(seed=4))
    return weights(module), {name: float(value) for name, value in again.callback_metrics.items()}


@pytest.mark.parametrize("partition", [["net.2"], ["net.6"]])
def test_runs_go_on_from_weights_that_were_left_on_their_ranks(ranks: Ranks, partition: list[str]) -> None:
    module = Regression()
    trainer(None, max_epochs=1).fit(module, loader(), loader(seed=4))
    again = trainer(None, max_epochs=1)
    again.fit(module, loader(), loader(seed=4))
    expected = weights(module), {name: float(value) for name, value in again.callback_metrics.items()}
    for found in ranks(2)(fit_again, "none", partition):
        assert_same(found, expected)


def save_after(folder: str) -> None:
    module, run = Regression(), trainer({**PIPELINE, "gather_weights": "none"}, max_epochs=1)
    run.fit(module, loader(), loader(seed=4))
    run.save_checkpoint(f"{folder}/after.ckpt")


def test_a_save_after_the_run_has_the_weights_of_all_ranks(ranks: Ranks, tmp_path: Any) -> None:
    ranks(2)(save_after, str(tmp_path))
    expected, _ = fit(None, max_epochs=1)
    module = load_from_checkpoint(Regression, tmp_path / "after.ckpt")
    for name, value in weights(module).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-10)
