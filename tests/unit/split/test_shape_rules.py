"""Units whose shapes torch cannot work out without values, in later traces too."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.unit.split.nets import MORE_CUTS, WIDTH, Block, Net, assert_works, batch_of, seeded
from tests.unit.split.pipe import alone, assert_same, piped


class Experts(nn.Module):
    """As `transformers` computes a mixture of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, WIDTH, WIDTH))

    def forward(self, x):
        ends = torch.tensor([1, x.shape[0]], dtype=torch.int32)
        return x + F.grouped_mm(torch.tanh(x), self.weight, offs=ends)


class Mixture(Net):
    def __init__(self) -> None:
        super().__init__(Experts)
        self.float()

    def validation_step(self, batch, batch_idx):
        return self.training_step(batch, batch_idx)


def test_experts_in_float32_are_traced_after_the_split_too():
    torch.manual_seed(0)
    module = Mixture()
    batch = {name: tensor.float() for name, tensor in batch_of().items()}
    assert_same(piped(module, batch, 3), alone(module, batch), exact=True)
    expected = alone(module, batch, step="validation_step")
    mine = piped(module, batch, 2, step="validation_step", split_by="training_step")
    for one, other in zip(mine.outputs, expected.outputs, strict=True):
        torch.testing.assert_close(one, other)


class Steered(Block):
    def forward(self, x):
        return super().forward(x if float(x.detach().sum()) < 1e9 else -x)


class Twice(Net):
    """Two passes through units that look at values: later stages' outputs are met half way."""

    def __init__(self) -> None:
        super().__init__(Steered)

    def training_step(self, batch, batch_idx):
        first = self.body(self.emb(batch["x"]))
        return self.loss(self.body(self.emb(2 * batch["x"])) + first, batch)

    validation_step = training_step


def test_a_unit_that_looks_at_values_and_is_called_twice_works():
    assert_works(Twice, cuts=MORE_CUTS)


def test_a_unit_that_looks_at_values_can_be_validated():
    module, batch = seeded(Twice), batch_of()
    mine = piped(module, batch, 2, step="validation_step", split_by="training_step")
    expected = alone(module, batch, step="validation_step")
    for one, other in zip(mine.outputs, expected.outputs, strict=True):
        torch.testing.assert_close(one, other)


class Transcribes(Net):
    """Its loss is known before its last units are called; lengths are the batch's, or follow from a unit."""

    def __init__(self, of_units: bool) -> None:
        super().__init__()
        self.of_units = of_units

    def training_step(self, batch, batch_idx):
        h = self.layers[1](self.layers[0](self.emb(batch["x"])))
        scores = F.log_softmax(h, -1).transpose(0, 1)
        lengths = torch.full((len(h),), h.shape[1])
        targets = torch.arange(2 * len(h)).reshape(len(h), 2) % (WIDTH - 1) + 1
        found = 1 + (h.detach().mean((1, 2)) > 0).long() if self.of_units else 1 + torch.arange(len(h)) % 2
        loss = F.ctc_loss(scores, targets, lengths, found)
        return loss + self.loss(self.layers[3](self.layers[2](h)), batch)


@pytest.mark.parametrize("of_units", [False, True])
def test_a_ctc_loss_may_come_before_other_units(of_units):
    assert_works(lambda: Transcribes(of_units), batch=batch_of(4, 6), num_microbatches=2)


@pytest.fixture(scope="module")
def suppression():
    """The operator of torchvision, or one of its name and form: the boxes that score above the mean."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    if not hasattr(torch.ops.torchvision, "nms"):
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.impl("nms", lambda dets, scores, limit: (scores > scores.mean()).nonzero()[:, 0], "CPU")

        @torch.library.register_fake("torchvision::nms", lib=library)
        def _(dets, scores, limit):
            return dets.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.long)

    return library  # what it declares is gone with it


class Detector(Net):
    """Boxes that the first layers propose are chosen by their scores before the others see them."""

    def body(self, h):
        h = self.layers[1](self.layers[0](h))
        chosen = torch.ops.torchvision.nms(h[:, :4].detach(), h.mean(1).detach(), 0.5)
        return self.layers[3](self.layers[2](h[chosen]))

    def loss(self, h, batch):
        return self.head(h).pow(2).sum() + self.head(h).mean() * len(batch["x"]) / 100


def test_boxes_that_are_suppressed_between_units_may_come_before_others(suppression):
    assert_works(Detector, cuts=[["layers.1"], ["layers.1", "layers.3"]], num_microbatches=1)
