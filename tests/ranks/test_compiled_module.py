"""`torch.compile(module)`, given to the Trainer: over stages the units are compiled, and compute the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.backends.debugging
from torch import Tensor

from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, assert_same, loader, trainer, weights

Ranks = Callable[[int], Pool]


class Silent(Regression):
    """What torch compiles on one device as a whole: with `self.log` in it, it gives up with an error."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)


def fit_compiled(pipeline: dict[str, Any] | None, make: Any, compiles: bool = True) -> Any:
    """As `fit`, and how often a compiled graph has run."""
    torch._dynamo.reset()
    ran: list[None] = []

    def noted(graph: Any, inputs: Any) -> Any:  # traces and differentiates as inductor does
        compiled = torch._dynamo.backends.debugging.aot_eager(graph, inputs)
        return lambda *args: (ran.append(None), compiled(*args))[1]

    module, run = make(), trainer(pipeline, max_epochs=1)
    given: Any = torch.compile(module, backend=noted) if compiles else module
    run.fit(given, loader(), loader(seed=4))
    run.validate(given, loader(seed=4), verbose=False)
    logs = {name: float(value) for name, value in run.callback_metrics.items()}
    return (weights(module), logs), len(ran)


@pytest.mark.parametrize(("stages", "make"), [(1, Silent), (2, Regression)])
def test_a_compiled_module_trains_as_an_uncompiled_one(ranks: Ranks, stages: int, make: Any) -> None:
    expected, _ = fit_compiled(None, make, compiles=False)
    pipeline = {"stages": stages, "num_microbatches": stages}
    for found, count in ranks(stages)(fit_compiled, pipeline, make, group=False):
        assert_same(found, expected)
        assert count >= 3, "three batches, in a graph at least"
