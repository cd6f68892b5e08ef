"""R15, R13 and R8: several kinds of steps, logs, metrics, lists, and how the batch is split."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchmetrics import MeanMetric, MeanSquaredError, MetricCollection

from lightning_pipeline.data.microbatch import split_batch
from lightning_pipeline.errors import PipelineError, PlaceholderError, SplitError
from tests.unit.split.nets import WIDTH, Net, assert_works, batch_of, seeded
from tests.unit.split.pipe import Outcome, _collect, _run_batch, alone, assert_same, piped, split_arguments


class Logging(Net):
    def training_step(self, batch, batch_idx):
        self.log("inputs", batch["x"].mean())
        h = self.emb(batch["x"])
        self.log("early", h.norm())
        h = self.body(h)
        loss = self.loss(h, batch)
        loss = loss + self.head(h).pow(2).mean()
        self.log("item", h.mean().item() + loss.item())
        self.log("loss", loss)
        self.log("plain", 3)
        return loss


class ItemThenLoss(Net):
    """A number read at the end does not hide what is read after it."""

    def training_step(self, batch, batch_idx):
        early = self.emb(batch["x"])
        loss = self.loss(self.body(early), batch)
        if loss.item() > -1.0:
            self.log("value", float(loss))
        return loss + early.pow(2).mean()


class AccuracyBranch(Net):
    def training_step(self, batch, batch_idx):
        early = self.emb(batch["x"])
        out = self.head(self.body(early))
        right = (out.argmax(1) == batch["y"].argmax(1)).float().mean().item()
        assert 0.0 <= right <= 1.0
        self.log("acc", right)
        values = out.detach().numpy().tolist()
        self.log("rows", len(values))
        return F.mse_loss(out, batch["y"]) + early.abs().mean()


@pytest.mark.parametrize("kind", [Logging, ItemThenLoss, AccuracyBranch])
def test_logged_values_are_those_of_one_process(kind):
    assert_works(kind, num_microbatches=4, steps=2)


class Metrics(Net):
    def __init__(self) -> None:
        super().__init__()
        self.error = MeanSquaredError()
        self.early = MeanMetric()
        self.inputs = MeanMetric()
        self.both = MetricCollection({"a": MeanSquaredError(), "b": MeanSquaredError(squared=False)})

    def training_step(self, batch, batch_idx):
        self.inputs.update(batch["x"])
        h = self.emb(batch["x"])
        self.early.update(h.detach().abs())
        out = self.head(self.body(h))
        self.log("now", self.error(out, batch["y"]))
        self.both.update(out.detach(), batch["y"])
        return F.mse_loss(out, batch["y"])


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_metrics_count_each_value_once_on_the_last_stage(stages):
    import copy

    module = seeded(Metrics)
    reference = copy.deepcopy(module)
    for args, _ in split_arguments(batch_of(), 2)[0]:
        reference.training_step(*args)
    last = piped(module, batch_of(), stages=stages).splits[-1].root
    for name in ("error", "early", "inputs"):
        torch.testing.assert_close(getattr(last, name).compute(), getattr(reference, name).compute())
    torch.testing.assert_close(last.both.compute(), reference.both.compute())


class Collecting(Net):
    def __init__(self) -> None:
        super().__init__()
        self.outputs, self.large = [], []
        self.names = []
        self.sums = {}
        self.best = None

    def validation_step(self, batch, batch_idx):
        h = self.emb(batch["x"])
        self.names.append(batch_idx)
        out = self.head(self.body(h))
        self.outputs.append(out)
        self.large.append(out.repeat(1, 5000))
        self.sums["loss"] = self.sums.get("loss", 0.0) + F.mse_loss(out, batch["y"])
        self.best = out.max()
        return {"out": out, "early": h.mean()}


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_lists_that_a_step_fills_are_whole_on_all_stages_and_large_ones_guarded_but_on_the_last(stages):
    module = seeded(Collecting)
    import copy

    reference = copy.deepcopy(module)
    with torch.no_grad():
        reference.validation_step(batch_of(), 0)
    outcome = piped(module, batch_of(), stages=stages, step="validation_step", split_by="training_step")
    last = outcome.splits[-1].root
    torch.testing.assert_close(last.outputs, reference.outputs)
    torch.testing.assert_close(last.sums, reference.sums)
    torch.testing.assert_close(last.best, reference.best)
    assert last.names == reference.names
    for split in outcome.splits[:-1]:
        for read in (len, list, lambda v: v[0], torch.stack, lambda v: sum(v), bool):
            with pytest.raises(PlaceholderError, match="attribute 'large' of the LightningModule"):
                read(split.root.large)
        torch.testing.assert_close(split.root.sums, reference.sums)
        torch.testing.assert_close(split.root.best, reference.best)
        torch.testing.assert_close(split.root.outputs, reference.outputs)
        split.root.large.clear()
        split.root.large = []


def run_on(splits, batch, step: str, key: int) -> Outcome:
    for split in splits:
        for _, parameter in split.owned_parameters():
            parameter.grad = None
        split.root.train(step == "training_step")
    outcome = Outcome(splits=splits)
    microbatches, weights = split_arguments(batch, 2)
    _run_batch(splits, microbatches, weights, step, key, outcome, False)
    _collect(splits, outcome)
    return outcome


class AllSteps(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.double()

    def body(self, h):
        return super().body(self.norm(h))

    def validation_step(self, batch, batch_idx):
        return self.loss(self.body(self.emb(batch["x"])), batch)

    def predict_step(self, batch, batch_idx):
        return self.head(self.body(self.emb(batch["x"])))


def test_training_after_evaluation_and_evaluation_after_training():
    module = seeded(AllSteps)
    splits = piped(module, batch_of(), stages=3, step="validation_step", split_by="training_step").splits
    for split in splits:
        split.root.norm.reset_running_stats()
    for key, (size, step) in enumerate([(4, "training_step"), (6, "validation_step"), (5, "training_step")]):
        batch = batch_of(size)
        whole = seeded(AllSteps)
        for split in splits:
            whole.load_state_dict(dict(split.owned_states()), strict=False)
        whole.train(step == "training_step")
        expected = alone(whole, batch, step=step)
        outcome = run_on(splits, batch, step, key)
        if step == "training_step":
            assert_same(outcome, expected)
        for mine, theirs in zip(outcome.outputs, expected.outputs, strict=True):
            torch.testing.assert_close(mine, theirs)
    for split in splits:
        whole.load_state_dict(dict(split.owned_states()), strict=False)
    whole.eval()
    torch.testing.assert_close(
        torch.cat(run_on(splits, batch_of(), "predict_step", 9).outputs),
        torch.cat(alone(whole, batch_of(), step="predict_step").outputs),
    )


class EvalOrder(AllSteps):
    """Evaluation walks the units in an order that training's cut does not allow."""

    def validation_step(self, batch, batch_idx):
        h = self.emb(batch["x"])
        for layer in reversed(self.layers):
            h = layer(h)
        return self.loss(h, batch)


def test_an_evaluation_against_the_order_of_the_cut_is_refused():
    with pytest.raises(PipelineError, match="in validation_step the output of 'layers"):
        piped(seeded(EvalOrder), batch_of(), stages=2, step="validation_step", split_by="training_step")


# ---- R13: which parts of a batch are split


def parts_of(batch, count=2):
    return [part for part, _ in split_batch(batch, count)]


def test_class_weights_of_another_length_are_handed_on_whole():
    weights = torch.rand(3)
    assert all(part["w"] is weights for part in parts_of({**batch_of(), "w": weights}))


def test_a_mask_of_the_sequence_is_handed_on_whole():
    mask = torch.ones(5, 5).tril()
    assert all(part["mask"] is mask for part in parts_of({**batch_of(4, 5), "mask": mask}))


@pytest.mark.parametrize(
    "extra", [torch.rand(4), torch.ones(4, 4).tril()], ids=["class weights", "square mask"]
)
def test_a_shared_tensor_that_has_the_batchs_length_by_chance_is_split_as_documented(extra):
    assert [part["extra"].shape[0] for part in parts_of({**batch_of(4, 4), "extra": extra})] == [2, 2]


def test_unequal_micro_batches_weigh_by_samples():
    assert_works(Net, batch=batch_of(5), num_microbatches=2)
    assert_works(Net, batch=batch_of(3), num_microbatches=7)


def test_micro_batches_give_the_mean_of_the_batch():
    module = seeded(Net)
    whole = alone(module, batch_of(7), num_microbatches=1)
    parts = piped(module, batch_of(7), stages=2, num_microbatches=3)
    for name, gradient in whole.gradients.items():
        torch.testing.assert_close(parts.gradients[name], gradient)


@pytest.mark.parametrize(
    "batch",
    [(*batch_of(4).values(), *batch_of(6).values()), [torch.rand(2, 3), torch.rand(3, 3), torch.rand(5, 1)]],
)
def test_parts_with_different_batch_sizes_are_refused(batch):
    with pytest.raises(PipelineError, match="split_batch"):
        split_batch(batch, 2)


class GraphData:
    """Like PyG's Data: an object with tensors that no rule splits."""

    def __init__(self):
        self.x, self.edge_index = torch.rand(4, 3), torch.zeros(2, 9, dtype=torch.long)


def test_an_object_that_cannot_be_split_is_one_micro_batch():
    graph = GraphData()
    assert split_batch(graph, 2) == [(graph, 1)]


class Branches(Net):
    """A layer, or a head, for each kind of input; the second micro-batch takes the other one."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.heads = nn.ModuleList([nn.Linear(WIDTH, 2) for _ in range(2)]).double()

    def body(self, h):
        for index, layer in enumerate(self.layers):
            if self.where != "layer" or index != 1 or len(h) == 2:
                h = layer(h)
            if self.where == "twice" and index == 3 and len(h) == 1:
                h = layer(h)
        return h

    def loss(self, h, batch):
        chosen = self.heads[len(h) == 1 and self.where == "head"]
        return F.mse_loss(chosen(h), batch["y"])


@pytest.mark.parametrize("where", ["head", "twice", "layer"])
def test_a_way_that_the_number_of_samples_decides_is_refused_with_what_to_do(where):
    text = r"is called \d times for a micro-batch of \d samples and \d times for the batch of 3.*units="
    with pytest.raises(SplitError, match=text):
        piped(seeded(lambda: Branches(where)), batch_of(3), how=["layers.3"], as_one=True)


class SampleBySample(Branches):
    """A layer is called as often as there are samples."""

    def __init__(self) -> None:
        super().__init__("")

    def body(self, h):
        for layer in self.layers:
            h = torch.cat([layer(h[index : index + 1]) for index in range(len(h))])
        return h


def test_a_layer_that_is_called_for_each_sample_is_that_of_one_device():
    module = seeded(SampleBySample)
    found = piped(module, batch_of(3), how=["layers.3"], as_one=True)
    for name, gradient in alone(module, batch_of(3), num_microbatches=1).gradients.items():
        torch.testing.assert_close(found.gradients[name], gradient)
