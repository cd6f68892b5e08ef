"""Numbers of the whole batch that a step uses by way of what it leaves behind: buffers, attributes, lists."""

from collections import deque

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tests.ranks.lightning_cases import assert_same, fit
from tests.unit.split.test_mixing import STAGED, Mixed, told

MSE = nn.functional.mse_loss


def by_a_buffer(self, x, y):
    self.shift.copy_(x.mean(0))
    return MSE(self.net(x - 0.5 * self.shift), y)


def by_a_number_in_a_buffer(self, x, y):
    self.shift.fill_(x.mean().item())
    return MSE(self.net(x - self.shift), y)


def by_a_number_in_a_buffer_between(self, x, y):
    h = self.net[:3](x)
    self.shift.fill_(x.mean().item())
    return MSE(self.net[3:](h) - self.shift.mean(), y)


def by_another_buffer(self, x, y):
    self.shift = x.mean(0)
    return MSE(self.net(x - 0.5 * self.shift), y)


def by_a_moving_average(self, x, y):
    self.shift.mul_(0.9).add_(x.mean(0), alpha=0.1)
    return MSE(self.net(x - self.shift), y)


def by_the_average_before(self, x, y):
    h = x - self.shift
    self.shift.mul_(0.9).add_(h.mean(0), alpha=0.1)
    return MSE(self.net(h), y)


def by_an_attribute(self, x, y):
    self.kept = x.mean(0)
    return MSE(self.net(x - 0.5 * self.kept), y)


def by_a_sum_in_an_attribute(self, x, y):
    self.total = self.total + x.sum()
    return MSE(self.net(x) - 0.01 * self.total, y)


def by_a_running_mean(self, x, y):
    self.steps += len(x)
    self.shift += (x - self.shift).sum(0) / self.steps
    return MSE(self.net(x - self.shift), y)


def by_the_last_item(self, x, y):
    self.items.append(x.mean(0))
    return MSE(self.net(x - 0.5 * self.items[-1]), y)


def by_the_last_item_while_sums_are_noted(self, x, y):
    self.items.append(x.sum().item())
    return MSE(self.net(x - 0.5 * x.mean(0)), y)


def by_the_batch_before(self, x, y):
    mean = 0.0 if self.kept is None else self.kept.mean(0)
    self.kept = x
    return MSE(self.net(x - 0.5 * mean), y)


def by_what_units_gave_before(self, x, y):
    out = self.net(x - x.mean(0) - self.shift)
    self.shift = 0.9 * self.shift + 0.1 * out.detach().mean()
    return MSE(out, y)


def by_a_condition_with_an_effect(self, x, y):
    if x.sum() > 0:
        self.steps += 1
    return MSE(self.net(x), y)


def while_losses_are_noted(self, x, y):
    loss = MSE(self.net(x - x.mean(0)), y)
    self.items.append(loss.detach())
    return loss


def while_what_units_gave_is_kept(self, x, y):
    out = self.net(x - x.mean(0))
    self.items.append(out.detach())
    self.named["last"] = out.detach()
    self.latest.append(MSE(out, y).item())
    return MSE(out, y)


def while_losses_are_read(self, x, y):
    before = self.items[-1] if self.items else 1.0
    loss = MSE(self.net(x - x.mean(0)), y)
    self.items.append(loss.detach())
    return loss * before


def by_a_condition_beside_a_count(self, x, y):
    h = self.net[:3](x)
    if x.sum() > 0:
        h = h * 1.1
    self.shift = self.shift + len(x)
    return MSE(self.net[3:](h), y)


def by_a_condition_beside_a_sum_in_place(self, x, y):
    h = self.net[:3](x)
    if x.sum() > 0:
        h = h * 1.1
    self.shift += x.sum(0)
    return MSE(self.net[3:](h), y)


class Stateful(Mixed):
    """Leaves something behind."""

    def __init__(self, function):
        super().__init__(function)
        self.kept, self.total, self.steps, self.items = None, 0.0, 0, []
        self.named, self.latest = {}, deque(maxlen=2)

    def left(self):
        """All of it."""
        kept = [self.shift, self.kept, self.total, self.steps, self.items, self.named, list(self.latest)]
        return [
            torch.as_tensor(value, dtype=torch.float64).clone()
            for value in tree_leaves(kept)
            if value is not None
        ]


def run(function, pipeline):
    made = []
    found = fit(
        pipeline, lambda: made.append(Stateful(function)) or made[-1], max_epochs=2, num_sanity_val_steps=0,
        limit_val_batches=0, enable_progress_bar=False,
    )  # fmt: skip
    return found, made[-1].left()


@pytest.mark.parametrize("number", [3, 8])
@pytest.mark.parametrize(
    "function",
    [
        by_a_buffer, by_a_number_in_a_buffer, by_a_number_in_a_buffer_between, by_another_buffer,
        by_a_moving_average, by_the_average_before, by_an_attribute, by_a_sum_in_an_attribute,
        by_a_running_mean, by_the_last_item, by_the_last_item_while_sums_are_noted, by_the_batch_before,
        by_what_units_gave_before, by_a_condition_with_an_effect, while_losses_are_noted,
        while_what_units_gave_is_kept, by_a_condition_beside_a_count, by_a_condition_beside_a_sum_in_place,
    ],
)  # fmt: skip
def test_numbers_of_the_batch_in_a_state_are_one_devices(function, number, recwarn):
    found, left = run(function, {**STAGED, "num_microbatches": number})
    assert not told(recwarn)
    expected, left_alone = run(function, None)
    assert_same(found, expected)
    torch.testing.assert_close(left, left_alone)


def test_a_list_that_is_read_is_none_that_is_filled_alone(recwarn):
    found, left = run(while_losses_are_read, {**STAGED, "num_microbatches": 3})
    expected, left_alone = run(while_losses_are_read, None)
    if not told(recwarn):
        assert_same(found, expected)
        torch.testing.assert_close(left, left_alone)


def runs(pipeline):
    return [run(function, pipeline) for function in (while_losses_are_noted, while_what_units_gave_is_kept)]


def test_ranks_that_fill_lists_have_their_samples_of_what_is_mixed(ranks):
    expected = runs(None)
    for on_rank in ranks(2)(runs, {"stages": 2, "num_microbatches": 3}, group=False):
        for (found, _), (alone, _) in zip(on_rank, expected, strict=True):
            assert_same(found, alone)
