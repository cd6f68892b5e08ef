"""Numbers that no micro-batch tells, such as a median: logged as the step tells them for the batch as one."""

import warnings
from collections import Counter

import pytest
import torch
from lightning.pytorch import Callback
from torch.nn.functional import mse_loss, normalize
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.functional import r2_score

from tests.ranks.lightning_cases import FEATURES, TARGETS, Regression, assert_same, loader, trainer, weights

pytestmark = pytest.mark.usefixtures("no_group_is_left")

WAYS = {
    "two": {"stages": 1, "stages_per_rank": 2, "schedule": "Interleaved1F1B", "num_microbatches": 2},
    "four": {"stages": 1, "schedule": "1F1B", "num_microbatches": 4},
}


def explained(self, out, y):
    return 1 - (y - out).var() / y.var()


def root(self, out, y):
    return mse_loss(out, y).sqrt()


def median(self, out, y):
    return (out - y).abs().median()


def quantile(self, out, y):
    return (out - y).abs().flatten().quantile(0.9)


def largest(self, out, y):
    return (out - y).abs().max()


def spread_of_features(self, out, y):
    return normalize(out, dim=1).std(0).mean()


def f1(self, out, y):
    found, there = out.argmax(1) == 1, y.argmax(1) == 1
    hits, missed = int((found & there).sum()), int((found ^ there).sum())
    return 2 * hits / (2 * hits + missed) if hits + missed else 0.0


def correlation(self, out, y):
    return torch.corrcoef(torch.stack([out[:, 0], y[:, 0]]))[0, 1]


NUMBERS = [
    explained, root, median, quantile, largest, spread_of_features, f1, correlation,
]  # fmt: skip


class Logs(Regression):
    def __init__(self, number):
        super().__init__()
        self.number = number

    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        loss = mse_loss(out, batch[1])
        self.log("loss", loss)
        self.log("number", self.number(self, out.detach(), batch[1]), on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_number", self.number(self, self.net(batch[0]), batch[1]))


class Notes(Callback):
    """What stands in the logs after each batch."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, *args):
        self.seen.append(float(trainer.callback_metrics["number_step"]))


def fitted(pipeline, number, **options):
    module, notes = Logs(number), Notes()
    run = trainer(pipeline, callbacks=[notes], max_epochs=2, **options)
    run.fit(module, loader(samples=38), loader(seed=4))
    logs = {name: float(value) for name, value in run.callback_metrics.items()}
    return weights(module), logs | {f"batch {place}": value for place, value in enumerate(notes.seen)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("number", NUMBERS)
def test_a_number_that_no_micro_batch_tells_is_one_devices(number, way):
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=r"(std|var|cov)\(\): degrees of freedom"
        )  # of one sample, by torch
        found = fitted(WAYS[way], number)
    assert_same(found, fitted(None, number), tolerance=1e-6)


def seen_most(self, out, y):
    self.kept.update(out.argmax(1).tolist())
    return float(self.kept.most_common(1)[0][1])


def predicted(self, out, y):
    self.kept |= set(out.argmax(1).tolist())
    return float(len(self.kept))


def third_worst(self, out, y):
    self.kept = sorted(self.kept + (out - y).abs().amax(1).tolist(), reverse=True)[:3]
    return self.kept[-1]


def spread_of_queue(self, out, y):
    rows = self.kept["queue"].shape[0]
    places = (self.kept["place"] + torch.arange(len(out))) % rows
    self.kept["queue"][places] = out
    self.kept["place"] = (self.kept["place"] + len(out)) % rows
    return self.kept["queue"].std()


def new_queue():
    return {"queue": torch.zeros(20, TARGETS, dtype=torch.float64), "place": 0}


class LogsWhatItKeeps(Logs):
    def __init__(self, number, kept):
        super().__init__(number)
        self.kept = kept()

    def validation_step(self, batch, batch_idx):
        pass


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("number", "kept"), [(seen_most, Counter), (predicted, set), (third_worst, list), (spread_of_queue, new_queue)],
)  # fmt: skip
def test_what_is_kept_and_logged_in_one_step_is_one_devices(number, kept, way):
    """What stands there is worked out at the batch's end, and logged as the batch's: no doubt is told."""
    found = []
    for pipeline in (WAYS[way], None):
        module, notes = LogsWhatItKeeps(number, kept), Notes()
        run = trainer(pipeline, callbacks=[notes], max_epochs=2)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*no rule puts their results together")
            run.fit(module, loader(samples=38), loader(seed=4))
        found.append((notes.seen, module.kept))
    (seen, left), (expected, of_one) = found
    assert seen == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(*(sorted(one) if isinstance(one, set) else one for one in (left, of_one)))


def test_what_is_kept_and_logged_is_warned_of_where_the_batch_is_too_large_for_a_look(monkeypatch):
    monkeypatch.setattr("lightning_pipeline.model.rehearsal.as_one._LARGEST", -1)
    run = trainer(WAYS["two"], max_epochs=1, limit_val_batches=0)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run.fit(LogsWhatItKeeps(seen_most, Counter), loader(), loader(seed=4))
    assert any("training_step logs what it has written before" in str(one.message) for one in told)


def r2(self, out, y):
    """It writes values at the places of a mask."""
    return r2_score(out[:, 0], y[:, 0])


class ValidatesWithoutGradients(Logs):
    def validation_step(self, batch, batch_idx):
        with torch.no_grad():
            out = self.net(batch[0])
            self.log("val_number", self.number(self, out, batch[1]))


def validated(pipeline):
    run = trainer(pipeline, max_epochs=1)
    run.fit(ValidatesWithoutGradients(r2), loader(samples=38), loader(seed=4))
    return float(run.callback_metrics["val_number"])


def test_what_surrounds_the_layers_ends_on_each_stage(ranks):
    """The end of `with torch.no_grad()` comes on the way out of a stage that has no more to do."""
    expected = pytest.approx(validated(None), rel=1e-6)
    assert ranks(2)(validated, {"stages": 2, "num_microbatches": 2}, group=False) == [expected] * 2


def over_ranks(pipeline):
    return [fitted(pipeline, number) for number in (median, f1)]


def test_every_rank_logs_it(ranks):
    expected = over_ranks(None)
    for on_rank in ranks(2)(over_ranks, {"stages": 2, "num_microbatches": 3}, group=False):
        for one, other in zip(on_rank, expected, strict=True):
            assert_same(one, other, tolerance=1e-6)


class PacksFrames(Regression):
    """Rows are those of a time, then those of the next, whatever sample they are of."""

    def training_step(self, batch, batch_idx):
        frames, lengths = batch
        rows = pack_padded_sequence(frames, lengths, batch_first=True).data
        loss = mse_loss(self.net(rows), rows[:, :TARGETS])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        pass


def texts():
    generator = torch.Generator().manual_seed(5)
    frames = torch.randn(16, 4, FEATURES, generator=generator, dtype=torch.float64)
    return DataLoader(TensorDataset(frames, torch.tensor([4, 4, 4, 3, 2, 2, 1, 1] * 2)), batch_size=8)


@pytest.mark.parametrize("way", WAYS)
def test_rows_in_another_order_are_not_joined_for_it(way):
    logs = []
    for pipeline in (WAYS[way], None):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module, run = PacksFrames(), trainer(pipeline, max_epochs=1)
            run.fit(module, texts(), texts())
        logs.append(float(run.callback_metrics["loss"]))
    assert logs[0] == pytest.approx(logs[1], rel=1e-6)


class DrawsBetweenLayers(Logs):
    """Of which no run for the batch as one can tell."""

    def training_step(self, batch, batch_idx):
        out = torch.nn.functional.dropout(self.net(batch[0]), 0.5)
        self.log("number", self.number(self, out.detach(), batch[1]))
        return mse_loss(out, batch[1])


def test_where_the_batch_cannot_run_as_one_it_is_warned_of():
    run = trainer(WAYS["two"], max_epochs=1, limit_val_batches=0)
    with pytest.warns(
        UserWarning, match=r"self.log\('number', ...\) is given is not seen to be a sum or mean"
    ):
        run.fit(DrawsBetweenLayers(median), loader(), loader(seed=4))
