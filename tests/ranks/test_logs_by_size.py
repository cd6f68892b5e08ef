"""What a step logs for a whole batch, and for none of its micro-batches, which have fewer samples."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.pool import Pool
from tests.ranks.lightning_cases import Regression, loader, trainer

Ranks = Callable[[int], Pool]


class Spread(Regression):
    """A deviation asks for several samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        output = self.net(batch[0])
        if len(output) > 5:
            self.log("spread", output.detach().std(0).mean(), on_step=True, on_epoch=True, prog_bar=True)
            self.log_dict({"both/low": output.min(), "both/high": output.max()}, batch_size=3)
        return torch.nn.functional.mse_loss(output, batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        output = self.net(batch[0])
        if len(output) > 5:
            self.log("val_spread", output.std(0).mean())
        self.log("val_loss", output.square().mean())

    def train_dataloader(self) -> Any:
        return loader(24, batch_size=8)

    def val_dataloader(self) -> Any:
        return loader(20, batch_size=8)  # the last four log nothing


class Alone(Spread):
    """Logs nothing else, so that no micro-batch shows what it is made of."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        output = self.net(batch[0])
        if len(output) > 5:
            self.log("val_spread", output.std(0).mean())


def logged(pipeline: dict[str, Any] | None) -> dict[str, float]:
    run = trainer(pipeline, max_epochs=2)
    run.fit(Spread())
    return {name: float(value) for name, value in run.callback_metrics.items()}


def test_what_only_the_whole_batch_logs_is_logged(ranks: Ranks) -> None:
    expected = logged(None)
    assert "spread_epoch" in expected
    found = [logged({"stages": 1, "num_microbatches": 2})]
    found += ranks(2)(logged, {"stages": 2, "num_microbatches": 2}, group=False)
    for own in found:
        assert own == pytest.approx(expected, rel=1e-6)


def test_what_cannot_be_known_of_it_is_warned_of() -> None:
    run = trainer({"stages": 1, "num_microbatches": 2})
    with pytest.warns(UserWarning, match="logs 'val_spread' for a batch of so many samples"):
        run.validate(Alone(), verbose=False)
