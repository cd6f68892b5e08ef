"""State that a step carries from batch to batch is that of one device, wherever it is made and read."""

import copy
from collections import deque
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_pipeline.errors import PlaceholderError
from tests.unit.split.nets import WIDTH, Block, Net, batch_of, seeded
from tests.unit.split.pipe import Module, alone, piped

SIZES = pytest.mark.parametrize(("stages", "num_microbatches"), [(2, 1), (2, 4), (3, 2)])
LARGE = 1100  # times a row of the net: more than the ranks tell each other without need


def assert_carried(module: Any, sizes: Any = (8, 8, 8), reset: Any = None, **options: Any) -> None:
    """Gradients, losses and what is left after these batches are those of whole batches on one device."""

    def each(root: Any, number: int) -> Any:
        if reset is not None:
            reset(root, number)
        return module.batch(sizes[number], number)

    mine = piped(module, each(copy.deepcopy(module), 0), steps=len(sizes), each=each, **options)
    theirs = alone(module, None, num_microbatches=1, steps=len(sizes), each=each)
    for name, gradient in theirs.gradients.items():
        found = mine.gradients[name]
        assert (found is None) == (gradient is None), name
        if gradient is not None:
            torch.testing.assert_close(
                found, gradient, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
            )
    for name, buffer in theirs.buffers.items():
        torch.testing.assert_close(mine.buffers[name], buffer, rtol=1e-10, atol=1e-12)


class Words(Module):
    """A recurrent net as Lightning's demo has it: the hidden state, with its graph, in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Embedding(11, WIDTH)
        self.rnn = nn.LSTM(WIDTH, LARGE, batch_first=True, proj_size=WIDTH)  # large cells, few weights
        self.decoder = nn.Linear(WIDTH, 11)
        self.hidden = None

    def batch(self, size: int, number: int) -> Any:
        generator = torch.Generator().manual_seed(number)
        return list(torch.randint(0, 11, (2, size, 2), generator=generator))

    def start(self, size: int) -> Any:
        weight = next(self.parameters())
        return weight.new_zeros(1, size, WIDTH), weight.new_zeros(1, size, LARGE)

    def training_step(self, batch, batch_idx):
        inputs, target = batch
        if self.hidden is None or self.hidden[0].shape[1] != len(inputs):
            self.hidden = self.start(len(inputs))
        self.hidden = tuple(part.detach() for part in self.hidden)
        output, self.hidden = self.rnn(self.encoder(inputs), self.hidden)
        return F.cross_entropy(self.decoder(output).flatten(0, 1), target.flatten())


@pytest.mark.parametrize("how", [["rnn"], ["decoder"], ["rnn", "decoder"]])
@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_a_hidden_state_goes_on_from_batch_to_batch(how, num_microbatches):
    assert_carried(seeded(Words), stages=len(how) + 1, how=how, num_microbatches=num_microbatches)


def anew(root: Any, number: int) -> None:
    """A hook at the start of an epoch of two batches."""
    if number % 2 == 0:
        root.hidden = root.start(8) if number else None


@pytest.mark.parametrize("how", [["rnn"], ["decoder"]])
def test_a_hidden_state_is_made_anew_by_a_hook(how):
    assert_carried(seeded(Words), how=how, num_microbatches=4, sizes=(8, 8, 8, 8), reset=anew)


@pytest.mark.parametrize("how", [["rnn"], ["decoder"]])
def test_the_first_batch_finds_a_state_with_all_its_rows(how):
    def given(root: Any, number: int) -> None:
        if not number:
            root.hidden = tuple(0.5 + part for part in root.start(8))

    assert_carried(seeded(Words), how=how, num_microbatches=4, reset=given)


@pytest.mark.parametrize("how", [["rnn"], ["decoder"]])
def test_a_batch_of_another_size_begins_anew_where_one_device_does(how):
    # In micro-batches of 2 the rows that a batch of 2 has left would seem to fit.
    assert_carried(seeded(Words), how=how, num_microbatches=4, sizes=(8, 8, 2, 8, 8))


class Memories(Net):
    """What each layer got last time, in a list of the root's, beside what it gets now; large."""

    def __init__(self) -> None:
        super().__init__()
        self.memories: list[Tensor] = []

    def batch(self, size: int, number: int) -> Any:
        return batch_of(size, seed=number)

    def body(self, h: Tensor) -> Tensor:
        kept = []
        for number, layer in enumerate(self.layers):
            kept.append(h.detach().repeat(1, LARGE // WIDTH))
            before = self.memories[number][:, :WIDTH] if self.memories else torch.zeros_like(h)
            h = layer(h + before)
        self.memories = kept
        return h


STAGES = {2: ["layers.1"], 3: ["layers.0", "layers.2"]}


@SIZES
def test_memories_of_the_root_are_those_of_one_device(stages, num_microbatches):
    module = seeded(Memories)
    assert_carried(module, stages=stages, how=STAGES[stages], num_microbatches=num_microbatches)


class Lasting(Memories):
    """The last outputs of the layers, in a list that grows or a deque that is full, added to what comes."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.memories = kind()

    def body(self, h: Tensor) -> Tensor:
        for memory in list(self.memories)[-2:]:
            h = h + memory[:, :WIDTH]
        h = Net.body(self, h)
        self.memories.append(h.detach().repeat(1, LARGE // WIDTH))
        return h


@pytest.mark.parametrize(("stages", "num_microbatches"), [(2, 4), (3, 2)])
@pytest.mark.parametrize("kind", [list, partial(deque, maxlen=2)], ids=["list", "deque"])
def test_a_list_that_grows_by_rows_of_the_samples_is_that_of_one_device(kind, stages, num_microbatches):
    module = seeded(lambda: Lasting(kind))
    options = {"stages": stages, "how": STAGES[stages], "num_microbatches": num_microbatches}
    assert_carried(module, sizes=(8, 8, 8, 8), **options)


class Chained(Memories):
    """A cell goes from sample to sample, and on from where the batch before has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.state = nn.GRUCell(WIDTH, WIDTH), None

    def body(self, h: Tensor) -> Tensor:
        state, found = h.new_zeros(WIDTH) if self.state is None else self.state, []
        for row in h:
            state = self.cell(row[None], state[None])[0]
            found.append(state)
        self.state = state.detach()
        return Net.body(self, torch.stack(found))


def test_a_state_that_is_chained_over_samples_is_refused_with_the_way_out_on_every_stage():
    module = seeded(Chained)
    assert_carried(module, how=["layers.1"], num_microbatches=1)
    with pytest.raises(
        PlaceholderError,
        match=r"'state'.* cannot be merged.*num_microbatches=1, or whole_steps=True.* \[at test_ca",
    ):
        assert_carried(module, how=["layers.1"], num_microbatches=4)


class Codebook(Net):
    """Vectors of a codebook are averages of what is nearest to them, and the counts decay."""

    def __init__(self) -> None:
        super().__init__()
        codes = torch.randn(512, WIDTH, generator=torch.Generator().manual_seed(3))
        self.register_buffer("codes", F.normalize(codes))
        self.register_buffer("counts", torch.ones(512))

    def loss(self, h: Tensor, batch: Any) -> Tensor:
        chosen = F.one_hot((h @ self.codes.T).argmax(1), 512).to(h)
        with torch.no_grad():
            self.counts.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
            self.codes.lerp_(F.normalize(chosen.T @ h / self.counts[:, None]), 0.1)
        return super().loss(h, batch) + 0.2 * F.mse_loss(h, chosen @ self.codes)


def test_counts_that_decay_are_those_of_accumulated_batches_where_few_rows_add_to_them():
    module = seeded(Codebook)
    options = {"num_microbatches": 4, "steps": 3, "each": lambda root, number: batch_of(8, seed=number)}
    mine = piped(module, batch_of(8), how=["layers.1"], **options)
    theirs = alone(module, None, **options)
    for name, buffer in theirs.buffers.items():
        torch.testing.assert_close(mine.buffers[name], buffer, rtol=1e-10, atol=1e-12)


class Remembers(Block):
    """Keeps what it gave, in an attribute or a buffer of its own, and adds it the next time."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = None

    def forward(self, x: Tensor) -> Tensor:
        if self.memory is not None and len(self.memory) == len(x):
            x = x + self.memory
        out = super().forward(x)
        self.memory = out.detach()
        return out


class InUnits(Memories):
    def __init__(self) -> None:
        Net.__init__(self, Remembers)

    def body(self, h: Tensor) -> Tensor:
        return Net.body(self, h)


@SIZES
def test_memories_of_units_are_those_of_one_device(stages, num_microbatches):
    sizes = (8, 8, 2, 8)
    module = seeded(InUnits)
    assert_carried(module, stages=stages, how=STAGES[stages], num_microbatches=num_microbatches, sizes=sizes)


class Shares(nn.Linear):
    """Gives numbers between 0 and 1."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sigmoid()


class Checked(InUnits):
    """Leaves a figure at its end, on the last stage, where made-up values end it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = Shares(WIDTH, 2)
        self.total = 0.0

    def loss(self, h: Tensor, batch: dict[str, Any]) -> Tensor:
        out = self.head(h)
        if (out < 0).any():
            raise ValueError("no share")
        self.total = self.total + out.detach().mean()
        return F.mse_loss(out, batch["y"])


def test_memories_of_units_are_known_where_the_end_of_the_step_cannot_be_tried_out():
    assert_carried(seeded(Checked), stages=2, how=STAGES[2], num_microbatches=4, sizes=(8, 8, 6, 8))


def test_memories_of_units_are_those_of_one_device_with_two_stages_on_a_rank():
    assert_carried(seeded(InUnits), stages=4, ranks=[[0, 2], [1, 3]], num_microbatches=4)


def test_memories_of_the_root_are_those_of_one_device_with_two_stages_on_a_rank():
    assert_carried(seeded(Memories), stages=4, ranks=[[0, 2], [1, 3]], num_microbatches=4)


class Stacked(Module):
    """Recurrent layers whose hidden states stand in a list or a dictionary, item by item."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.encoder = nn.Linear(WIDTH, WIDTH)
        self.rnns = nn.ModuleList(nn.GRU(WIDTH, WIDTH, batch_first=True) for _ in range(3))
        self.decoder = nn.Linear(WIDTH, 2)
        self.states: Any = {0: None, 1: None, 2: None} if how == "filled" else {}
        if how == "list":
            self.states = [None] * 3

    def batch(self, size: int, number: int) -> Any:
        generator = torch.Generator().manual_seed(number)
        return [torch.randn(size, 4, width, generator=generator, dtype=torch.float64) for width in (WIDTH, 2)]

    def training_step(self, batch, batch_idx):
        x = self.encoder(batch[0])
        for number, rnn in enumerate(self.rnns):
            found = number < len(self.states)
            x, state = rnn(x, self.states[number] if found else None)
            self.states[number] = state.detach()
        return F.mse_loss(self.decoder(x), batch[1])


@pytest.mark.parametrize(("how", "first"), [("list", "rnns.0"), ("empty", "rnns.2"), ("filled", "rnns.0")])
def test_hidden_states_go_on_in_a_container_that_stays(how, first):
    assert_carried(seeded(lambda: Stacked(how)), how=[first], num_microbatches=4)
