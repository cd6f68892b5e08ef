"""Every gradient, loss, logged value and buffer is that of one process."""

import pytest
import torch

from tests.unit.split.models import module_and_batch
from tests.unit.split.pipe import alone, assert_same, piped

NAMES = ("perceptron", "residual", "unet", "gpt2", "llama", "bert", "t5")


pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_all_stages_are_those_of_one_process(name: str, stages: int) -> None:
    module, batch = module_and_batch(name)
    microbatches = {2: 4, 3: 7, 4: 1}[stages]
    mine = piped(module, batch, stages=stages, num_microbatches=microbatches, how="auto")
    assert_same(mine, alone(module, batch, microbatches))
    assert sum(len(list(split.owned_parameters())) for split in mine.splits) >= len(list(module.parameters()))


@pytest.mark.parametrize("name", ["perceptron", "residual", "gpt2"])
def test_a_batch_smaller_than_the_number_of_microbatches(name: str) -> None:
    module, batch = module_and_batch(name, size=3)
    mine = piped(module, batch, stages=2, num_microbatches=7)
    assert len(mine.losses) == 3
    assert_same(mine, alone(module, batch, 7))


@pytest.mark.parametrize("name", ["perceptron", "unet", "residual"])
def test_float32_is_equal_to_the_last_bit(name: str) -> None:
    torch.set_default_dtype(torch.float32)
    module, batch = module_and_batch(name)
    assert_same(piped(module, batch, stages=3, num_microbatches=4), alone(module, batch, 4), exact=True)


@pytest.mark.parametrize("how", ["auto", "uniform", "parameters"])
def test_every_way_to_cut_gives_the_same_gradients(how: str) -> None:
    module, batch = module_and_batch("t5")
    assert_same(piped(module, batch, stages=3, num_microbatches=2, how=how), alone(module, batch, 2))


@pytest.mark.parametrize("name", NAMES)
def test_a_split_backward_gives_the_same_bits(name: str) -> None:
    torch.set_default_dtype(torch.float32)
    module, batch = module_and_batch(name)
    fused = piped(module, batch, stages=2, num_microbatches=3)
    split = piped(module, batch, stages=2, num_microbatches=3, split_backward=True)
    for key, gradient in fused.gradients.items():
        assert (gradient is None and split.gradients[key] is None) or torch.equal(
            gradient, split.gradients[key]
        ), key
