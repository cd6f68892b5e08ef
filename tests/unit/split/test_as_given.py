"""Steps that take their batch as it stands: there is nothing to exchange in it to see what mixes its samples."""

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lightning_pipeline.model.mixing import Comparison
from lightning_pipeline.model.mixing.looks import AsGiven
from tests.ranks.lightning_cases import Regression, loader, trainer

STAGED = {"stages": 1, "stages_per_rank": 2, "schedule": "Interleaved1F1B", "num_microbatches": 2}


class Calls(TorchFunctionMode):
    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return self.seen.call(func, args, kwargs or {}, lambda func, args, kwargs: func(*args, **kwargs))


ROOT = nn.Module()
ROOT.register_buffer("scale", torch.full((4, 3), 2.0))
NUMPY = torch.ones(4, 3).numpy()


def tanh_for_each_row(x, y, unit):
    h = unit(x)
    for _ in x.unbind():
        h = h.tanh()
    return h.sum()


def tanh_where_no_other_form_fits(x, y, unit):
    h = unit(x)
    try:
        x.view(5, 3)
    except RuntimeError:
        h = h.tanh()
    return h.sum()


def looked_at(step, more=None, ends=True):
    """Whether a step that gives a unit `x` and has `h` from it takes all as it stands."""
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    batch = {"x": x, "y": y} if more is None else {"x": x, "y": y, "more": more}
    seen = AsGiven(ROOT, (), ((batch, 0), {}))

    given = [torch.randn(4, 3, requires_grad=True) for _ in range(2)]

    def unit(value):
        seen.unit(0, ((value,), {}), None)
        return given.pop()

    with Calls(seen):
        step(x, y, unit)
    if ends:
        seen.end(None)
    return seen.is_so


AS_GIVEN = {
    "a loss": lambda x, y, unit: nn.functional.mse_loss(unit(x), y),
    "two units": lambda x, y, unit: (unit(unit(x).tanh()) - y).square().mean(),
    "half a loss": lambda x, y, unit: 0.5 * (unit(x) - y).square().mean(),
    "a buffer": lambda x, y, unit: (unit(x) * ROOT.scale).sum(),
    "a mean of the batch for a log": lambda x, y, unit: (y.mean(), (unit(x) - y).sum()),
}
NOT_AS_GIVEN = {
    "a mean": lambda x, y, unit: (unit(x) - y.mean()).sum(),
    "a mean for a unit": lambda x, y, unit: unit(x - x.mean(0)).sum(),
    "a number": lambda x, y, unit: (unit(x) * y.mean().item()).sum(),
    "a number in a list": lambda x, y, unit: (unit(x) * y.tolist()[0][0]).sum(),
    "how many samples": lambda x, y, unit: (unit(x) / len(y)).sum(),
    "how many samples of units": lambda x, y, unit: unit(x).shape[0],
    "numbers of samples": lambda x, y, unit: (unit(x) * torch.arange(4)[:, None]).sum(),
    "a factor": lambda x, y, unit: (unit(x) * 0.5).sum(),
    "a whole factor": lambda x, y, unit: (unit(x) * 2).sum(),
    "an array": lambda x, y, unit: (unit(x) * torch.from_numpy(NUMPY)).sum(),
    "a write": lambda x, y, unit: (y.sub_(1), (unit(x) - y).sum()),
    "a write into a view": lambda x, y, unit: (y[:, 0].zero_(), (unit(x) - y).sum()),
    "a draw": lambda x, y, unit: (unit(x) + torch.randn(4, 3)).sum(),
    "how many rows": tanh_for_each_row,
    "what a function refuses": tanh_where_no_other_form_fits,
    "a condition": lambda x, y, unit: unit(x).sum() if y.sum() > 0 else unit(x).mean(),
}  # fmt: skip


@pytest.mark.parametrize("name", AS_GIVEN)
def test_a_step_takes_its_batch_as_it_stands(name):
    assert looked_at(AS_GIVEN[name])


@pytest.mark.parametrize("name", NOT_AS_GIVEN)
def test_what_is_made_of_it_is_seen(name):
    assert not looked_at(NOT_AS_GIVEN[name])


def test_texts_are_as_many_as_samples_and_a_step_that_broke_off_says_nothing():
    assert not looked_at(AS_GIVEN["a loss"], more=["a", "b", "c", "d"])
    assert not looked_at(AS_GIVEN["a loss"], ends=False)


class Scaled(Regression):
    """Its step leaves something behind, too."""

    def __init__(self, factor):
        super().__init__()
        self.factor, self.steps = factor, 0

    def training_step(self, batch, batch_idx):
        self.steps += 1
        out = self.net(batch[0])
        return nn.functional.mse_loss(out if self.factor is None else out * self.factor, batch[1])


@pytest.mark.parametrize(("factor", "compared"), [(None, 0), (1.0, 1)])
def test_runs_of_such_a_step_are_not_compared(factor, compared, monkeypatch):
    asked, lines = [], Comparison.lines
    monkeypatch.setattr(Comparison, "lines", lambda *given, **more: asked.append(1) or lines(*given, **more))
    trainer(STAGED, max_epochs=1, limit_val_batches=0).fit(Scaled(factor), loader(8))
    torch.distributed.destroy_process_group()
    assert len(asked) == compared
