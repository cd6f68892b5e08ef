"""Dictionaries of the standard library that a step fills: of lists, of counts, with keys that come later."""

import warnings
from collections import Counter, OrderedDict, defaultdict, deque

import pytest
import torch
from torch.nn.functional import mse_loss

from tests.ranks.lightning_cases import Regression, loader, trainer
from tests.unit.split.test_logged_as_one import WAYS

pytestmark = pytest.mark.usefixtures("no_group_is_left")


def of_lists(kept, out, y, index):
    kept["loss"].append(mse_loss(out, y).item())
    kept["samples"].append(len(out))


def of_tensors(kept, out, y, index):
    kept["loss"].append(mse_loss(out, y))
    kept["rows"].append(out)


def by_setdefault(kept, out, y, index):
    kept.setdefault("loss", []).append(mse_loss(out, y).item())
    kept["last"] = out.sum().item()
    kept["samples"] = kept.get("samples", 0) + len(out)


def of_numbers(kept, out, y, index):
    kept["error"] += (out - y).abs().sum().item()
    kept["samples"] += len(out)


def in_dictionaries(kept, out, y, index):
    kept["train"]["loss"] += mse_loss(out, y).item()
    kept["train"]["samples"] += len(out)


def by_class(kept, out, y, index):
    for key, error in zip(y.argmax(1).tolist(), (out - y).square().mean(1).tolist(), strict=True):
        kept[key].append(error)


def of_sets(kept, out, y, index):
    for key, number in zip(y.argmax(1).tolist(), (1000 * y[:, 0]).long().tolist(), strict=True):
        kept[key].add(number)


def pairs(kept, out, y, index):
    for key in zip(y.argmax(1).tolist(), out.argmax(1).tolist(), strict=True):
        kept[key] += 1


def updated(kept, out, y, index):
    kept.update(out.argmax(1).tolist())


def of_deques(kept, out, y, index):
    kept["loss"].append(mse_loss(out, y).item())


def each_batch_anew(kept, out, y, index):
    kept["errors"] = (out - y).square().mean(0).tolist()  # as many as a micro-batch may have samples


FILLED = {
    of_lists: lambda: defaultdict(list),
    of_tensors: lambda: defaultdict(list),
    by_setdefault: OrderedDict,
    of_numbers: lambda: defaultdict(float),
    in_dictionaries: lambda: defaultdict(lambda: defaultdict(float)),
    by_class: lambda: defaultdict(list),
    of_sets: lambda: defaultdict(set),
    pairs: Counter,
    updated: Counter,
    of_deques: lambda: defaultdict(lambda: deque(maxlen=4)),
    each_batch_anew: dict,
}


class Fills(Regression):
    def __init__(self, fills):
        super().__init__()
        self.fills, self.kept, self.seen = fills, FILLED[fills](), []

    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        self.fills(self.kept, out.detach(), batch[1], batch_idx)
        return mse_loss(out, batch[1])

    def validation_step(self, batch, batch_idx):
        self.fills(self.kept, self.net(batch[0]), batch[1], batch_idx)

    def on_train_batch_end(self, *args):
        if self.trainer.world_size == 1:  # over ranks a step's lists are everywhere at the epoch's end
            self.seen.append(plain(self.kept))

    def on_train_epoch_end(self):
        self.seen.append(plain(self.kept))
        if isinstance(self.kept, defaultdict):
            self.seen.append(type(self.kept["another"]).__name__)
        self.kept.clear()


def plain(value):
    if isinstance(value, dict):
        return type(value).__name__, {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | deque):
        return type(value).__name__, [plain(item) for item in value]
    if isinstance(value, set):
        return sorted(value)
    if isinstance(value, torch.Tensor):
        return plain(value.tolist())
    return round(value, 7) if isinstance(value, float) else value


def fitted(pipeline, fills):
    module = Fills(fills)
    trainer(pipeline, max_epochs=2).fit(module, loader(samples=38), loader(samples=30, seed=4))
    return module.seen


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fills", FILLED)
def test_a_dictionary_is_filled_as_on_one_device(fills, way):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = fitted(WAYS[way], fills)
    assert not [one for one in map(str, said) if "micro-batch" in one or "rank" in one]
    assert found == fitted(None, fills)


RANKS = (of_lists, in_dictionaries, pairs)


def over_ranks(pipeline):
    return [fitted(pipeline, fills)[-1:] for fills in RANKS]


def test_every_rank_has_it_at_the_epochs_end(ranks):
    expected = over_ranks(None)
    for on_rank in ranks(2)(over_ranks, {"stages": 2, "num_microbatches": 3}, group=False):
        assert on_rank == expected
