"""State that a step carries from batch to batch, in whole runs: Lightning's own demo, schedules, resumes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.demos.lstm import LightningLSTM, SequenceSampler, SimpleLSTM
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.pool import Pool
from tests.ranks.lightning_cases import assert_same, trainer, weights

Ranks = Callable[[int], Pool]
WORDS, ROWS = 11, 8


class Demo(LightningLSTM):
    """Lightning's demo with another size and other data; its hidden state is larger than its messages."""

    def __init__(self) -> None:
        super().__init__(WORDS)
        torch.manual_seed(1)
        self.model = SimpleLSTM(WORDS, ninp=8, nhid=80, nlayers=2, dropout=0.0).double()

    def prepare_data(self) -> None:
        """Nothing is downloaded."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, target = batch
        output, _ = self.model(inputs, self.model.init_hidden(len(inputs)))
        self.log("val_loss", nn.functional.nll_loss(output, target.view(-1)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


def text(rows: int = ROWS, batches: int = 3) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(2)
    words = torch.randint(0, WORDS, (rows * batches, 4), generator=generator)
    data = TensorDataset(words, words.roll(1, 1))
    return DataLoader(data, batch_sampler=SequenceSampler(data, rows))


def trained(
    pipeline: dict[str, Any] | None, folder: Path, make: Callable[[], Any] = Demo, **options: Any
) -> tuple[dict[str, Tensor], dict[str, float]]:
    module = make()
    run = trainer(pipeline, writes=True, default_root_dir=folder, **options)
    run.fit(module, text(), text(batches=1))
    return weights(module), {name: float(value) for name, value in run.callback_metrics.items()}


@pytest.mark.parametrize(
    ("ranks_", "options"),
    [
        (2, {"num_microbatches": 1}),
        (2, {"num_microbatches": 4}),
        (3, {"num_microbatches": 4, "schedule": "GPipe"}),
        (2, {"num_microbatches": 4, "schedule": "ZBH1", "partition": ["model.decoder"]}),
        (2, {"num_microbatches": 4, "partition": ["model.decoder"]}),
    ],
)
def test_lightnings_recurrent_demo_is_that_of_one_device(
    ranks: Ranks, tmp_path: Path, ranks_: int, options: dict[str, Any]
) -> None:
    expected = trained(None, tmp_path / "one")
    for found in ranks(ranks_)(trained, {"stages": ranks_, **options}, tmp_path, group=False):
        assert_same(found, expected)
