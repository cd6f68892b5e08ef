"""Activations are counted to the byte: measured and foreseen agree with a count by hand."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from lightning_pipeline.model.cut.activations import stage_activations
from lightning_pipeline.model.split import SplitModel
from lightning_pipeline.model.tensors.saved import Held, SavedCount, counting_hooks, storage_bytes
from tests.unit.split import pipe
from tests.unit.split.pipe import Module, alone, assert_same, piped

SAMPLES, MICROBATCHES = 8, 2
N = SAMPLES // MICROBATCHES  # of a micro-batch
FLOAT = 4


class MLP(Module):
    """Linear, ReLU, Linear, ReLU, Linear, and the mean squared error. ReLU has no parameters: it is glue."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.net = nn.Sequential(
            nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 3)
        )  # fmt: skip

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)


class Reentrant(MLP):
    """A segment of checkpointing around each unit but the first."""

    use_reentrant = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden, y = batch
        for layer in self.net:
            if isinstance(layer, nn.Linear) and hidden.requires_grad:
                hidden = checkpoint(layer, hidden, use_reentrant=self.use_reentrant)
            else:
                hidden = layer(hidden)
        return nn.functional.mse_loss(hidden, y)


class NonReentrant(Reentrant):
    use_reentrant = False


class Block(nn.Module):
    """Two layers; what is between them is recomputed."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 7), nn.Linear(7, width)

    def inner(self, x: Tensor) -> Tensor:
        return self.second(nn.functional.gelu(self.first(x)))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


class Halves(Block):
    """Both factors of a product are views of one output; the layer after it saves the product."""

    def forward(self, x: Tensor) -> Tensor:
        left, right = torch.cat([self.first(x), self.first(x)], -1).chunk(2, -1)
        return self.second(left * right)


class OnCPU(Block):
    """What it saves is kept elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        with save_on_cpu():
            return self.inner(x)


class Transformed(Block):
    """Takes a gradient inside, which refuses hooks on saved tensors, and then runs layers."""

    def forward(self, x: Tensor) -> Tensor:
        slope = torch.func.grad(lambda t: t.square().sum())(torch.ones(3))
        return self.inner(x) + slope.sum()


class WithBlock(MLP):
    """The third layer is a block."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.net[2] = nn.Linear(8, 5)
        self.net.insert(4, block)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[int, Held]]]:
    """What each stage held after all forwards, filled by `piped`."""
    counts: list[SavedCount] = []
    found: list[dict[int, Held]] = []
    begin, backward = SplitModel.begin, pipe._run_backward

    def counting(self: SplitModel, *args: Any, **kwargs: Any) -> None:
        self.counts_next = True
        begin(self, *args, **kwargs)
        assert self.count is not None
        counts.append(self.count)

    def first_backward(splits: Any, index: int, *rest: Any) -> None:
        if index == 0:
            for count in counts:
                count.settle()
                found.append(copy.deepcopy(dict(count.held())))
        backward(splits, index, *rest)

    monkeypatch.setattr(SplitModel, "begin", counting)
    monkeypatch.setattr(pipe, "_run_backward", first_backward)
    yield found
    for count in counts:
        count.settle()
        assert {stage: (one.num_bytes, one.microbatches) for stage, one in count.held().items()} == {}, (
            "nothing is held after the last backward"
        )


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(5)
    return torch.randn(SAMPLES, 6), torch.randn(SAMPLES, 3)


def check(module: Module, held: list[dict[int, Held]], by_hand: list[int], **options: Any) -> None:
    """Run over two stages; compare bytes per micro-batch with the count by hand, and gradients with one."""
    expected = alone(module, batch(), MICROBATCHES)
    outcome = piped(module, batch(), 2, MICROBATCHES, how=["net.2"], **options)
    assert_same(outcome, expected)
    measured = [one[stage].num_bytes / MICROBATCHES for stage, one in enumerate(held)]
    foreseen = [one.until_backward for one in stage_activations(outcome.splits[0].cut)]
    assert measured == [FLOAT * N * numbers for numbers in by_hand]
    assert foreseen == measured
    assert [one[stage].microbatches for stage, one in enumerate(held)] == [MICROBATCHES] * 2


def test_an_mlp_holds_what_a_count_by_hand_says(held: list[dict[int, Held]]) -> None:
    # Stage 0: its layer saves the batch, which is there anyway. Stage 1: the 8 numbers that it was sent, the
    # ReLU's 8, which are also what the second layer saves, the second ReLU's 5, and the loss' input of 3.
    check(MLP(), held, [0, 8 + 8 + 5 + 3])


@pytest.mark.parametrize("kind", [Reentrant, NonReentrant])
def test_what_is_recomputed_is_not_held(held: list[dict[int, Held]], kind: type[Reentrant]) -> None:
    check(kind(), held, [0, 8 + 8 + 5 + 3])  # the inputs of each segment are what the layers save anyway
    assert held


@pytest.mark.parametrize(
    ("block", "numbers"),
    [
        (Block(), 5),  # its input alone; that is the last ReLU's output, saved by it as well
        (Halves(), 5 + 14 + 7),  # its input, both halves as one piece of memory, their product
        (OnCPU(), 5),
        (Transformed(), 5 + 7 + 7),
    ],
    ids=["checkpoint", "views", "save_on_cpu", "torch.func"],
)
def test_blocks_hold_what_a_count_by_hand_says(
    held: list[dict[int, Held]], block: nn.Module, numbers: int
) -> None:
    check(WithBlock(block), held, [0, 8 + 8 + numbers + 5 + 3])


def test_a_split_backward_keeps_inputs_and_gradients_of_layers_until_the_weight_half(
    monkeypatch: pytest.MonkeyPatch, held: list[dict[int, Held]]
) -> None:
    from lightning_pipeline.model.replay.stage import StageProgram

    kept: dict[int, int] = {}
    weight = StageProgram.backward_weight

    def before_weight(self: StageProgram, microbatch: int) -> None:
        step = self.view.current_step()
        assert step.count is not None
        if microbatch == MICROBATCHES - 1:
            step.count.settle()
            kept[self.view.index] = step.count.held()[self.index].num_bytes
        weight(self, microbatch)

    monkeypatch.setattr(StageProgram, "backward_weight", before_weight)
    module = MLP()
    check(module, held, [0, 8 + 8 + 5 + 3], split_backward=True)
    # stage 0: the gradient of its layer's output; stage 1: inputs of 8 and 5, gradients of 5 and 3
    assert kept == {0: FLOAT * N * 8, 1: FLOAT * N * (8 + 5 + 5 + 3)}
    cut = piped(module, batch(), 2, MICROBATCHES, how=["net.2"], split_backward=True).splits[0].cut
    assert [one.until_weight for one in stage_activations(cut)] == [kept[0], kept[1]]


def test_hooks_of_the_user_around_everything_go_on_working(held: list[dict[int, Held]]) -> None:
    packed: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.numel())
        return tensor.detach().clone()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        outcome = piped(MLP(), batch(), 2, MICROBATCHES, how=["net.2"])
    assert_same(outcome, alone(MLP(), batch(), MICROBATCHES))
    assert packed
    assert held[1][1].num_bytes > MICROBATCHES * FLOAT * N * (8 + 8 + 5 + 3)  # what they keep: copies


def test_a_saved_tensor_that_was_changed_in_place_raises_as_without_the_count() -> None:
    def run(counting: bool) -> str:
        x = torch.ones(3, requires_grad=True)
        with counting_hooks(lambda tensor: None) if counting else torch.enable_grad():
            y = x * 2
            z = y.sin()
        y.detach().mul_(5)
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as error:
            z.sum().backward()
        return str(error.value).partition(" is at version")[2].partition("Hint")[0]

    assert run(counting=True) == run(counting=False)


def test_no_hooks_are_left_behind() -> None:
    before = torch.autograd.graph.disable_saved_tensors_hooks
    with pytest.raises(ValueError, match="stop"), counting_hooks(lambda tensor: None):
        raise ValueError("stop")
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert torch.autograd.graph.disable_saved_tensors_hooks is before


def test_memory_is_counted_once_however_many_tensors_share_it() -> None:
    base = torch.zeros(10)
    assert storage_bytes([base, base[:3], base.view(2, 5), torch.zeros(2)]) == 40 + 8
