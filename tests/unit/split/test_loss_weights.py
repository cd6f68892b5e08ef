"""A loss that is divided by what it finds in its samples is that of the whole batch, term by term."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.loss.loss_utils import fixed_cross_entropy

from lightning_pipeline.errors import SplitError
from lightning_pipeline.model.loss import Follower, Observer, Whole
from tests.unit.split.models import VOCABULARY, hugging_face
from tests.unit.split.pipe import Module, assert_whole, piped

pytestmark = pytest.mark.usefixtures("float64")


SAMPLES, LENGTH, CLASSES = 7, 5, 6


def batch(empty: int | None = 2) -> dict[str, Tensor]:
    """Targets, some of -100, and a mask of the same; `empty`: a sample that has none."""
    generator = torch.Generator().manual_seed(3)
    target = torch.randint(0, CLASSES, (SAMPLES, LENGTH), generator=generator)
    for sample in range(SAMPLES):
        target[sample, LENGTH - sample % 4 :] = -100
    if empty is not None:
        target[empty] = -100
    return {
        "x": torch.randn(SAMPLES, LENGTH, 4, generator=generator), "target": target,
        "mask": (target != -100).double(), "number": torch.tensor(11.0),
    }  # fmt: skip


class Step(Module):
    """Any loss of logits of shape (samples, length, classes)."""

    def __init__(self, loss: Callable[["Step", Tensor, dict[str, Tensor]], Any]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)), nn.Linear(4, CLASSES))
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("weights", torch.rand(CLASSES))
        self.loss = loss

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = self.loss(self, self.net(batch["x"]), batch)
        self.log("loss", loss)
        self.log("number", loss.item())
        return loss


def flat(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return logits.reshape(-1, CLASSES), batch["target"].reshape(-1)


def tokens(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(*flat(logits, batch), reduction="none").view(SAMPLES_ANY, LENGTH)


SAMPLES_ANY = -1
LOSSES: dict[str, Callable[[Step, Tensor, dict[str, Tensor]], Any]] = {
    "mean": lambda m, y, b: y.pow(2).mean(),
    "cross entropy": lambda m, y, b: F.cross_entropy(*flat(y, b)),
    "of classes with weights": lambda m, y, b: F.cross_entropy(*flat(y, b), weight=m.weights),
    "smoothed": lambda m, y, b: F.cross_entropy(*flat(y, b), label_smoothing=0.1),
    "smoothed with weights": lambda m, y, b: nn.CrossEntropyLoss(m.weights, label_smoothing=0.1)(*flat(y, b)),
    "likelihood": lambda m, y, b: F.nll_loss(F.log_softmax(y, -1).transpose(1, 2), b["target"]),
    "sum": lambda m, y, b: F.cross_entropy(*flat(y, b), reduction="sum"),
    "sum over the batch's count": lambda m, y, b: F.cross_entropy(*flat(y, b), reduction="sum") / b["number"],
    "sum over tokens": lambda m, y, b: F.cross_entropy(*flat(y, b), reduction="sum") / b["mask"].sum(),
    "sum over a number of tokens": lambda m, y, b: tokens(y, b).sum() / int(b["mask"].sum() + 1),
    "sum over samples": lambda m, y, b: 0.1 * tokens(y, b).sum() / y.shape[0],
    "with a small number": lambda m, y, b: (tokens(y, b) * b["mask"]).sum() / (b["mask"].sum() + 1e-3),
    "at least one": lambda m, y, b: (tokens(y, b) * b["mask"]).sum() / b["mask"].sum().clamp(min=1),
    "divided before": lambda m, y, b: (tokens(y, b) * b["mask"] / b["mask"].sum()).sum(),
    "per sample": lambda m, y, b: (tokens(y, b).sum(1) / (b["mask"].sum(1) + 1)).mean(),
    "mean times count": lambda m, y, b: tokens(y, b).mean() * len(y),
    "picked": lambda m, y, b: tokens(y, b)[b["mask"] > 0].mean(),
    "picked by select": lambda m, y, b: torch.masked_select(tokens(y, b), b["mask"] > 0).sum(),
    "two terms": lambda m, y, b: F.cross_entropy(*flat(y, b)) + 0.3 * y.pow(2).mean(),
    "three terms": lambda m, y, b: (
        2 * F.cross_entropy(*flat(y, b)) - y.abs().sum() / b["number"] + m.scale.pow(2) * 0.1 + 1.5
    ),
    "terms in place": lambda m, y, b: added(y.mean(), F.cross_entropy(*flat(y, b)), 0.1 * y.pow(2).sum()),
    "a sum of a list": lambda m, y, b: sum([F.cross_entropy(*flat(y, b)), y.pow(2).mean(), y.sum()]),
    "a stack": lambda m, y, b: torch.stack([F.cross_entropy(*flat(y, b)), y.pow(2).mean()]).mean(),
    "learned weights": lambda m, y, b: F.cross_entropy(*flat(y, b)) * torch.exp(-m.scale) + m.scale,
    "guarded": lambda m, y, b: torch.nan_to_num(F.cross_entropy(*flat(y, b))) + y.mean(),
    "where": lambda m, y, b: torch.where(
        b["mask"].sum() > 0, (tokens(y, b) * b["mask"]).sum() / b["mask"].sum(), torch.zeros(())
    ),
    "weighted by a dot": lambda m, y, b: torch.dot(tokens(y, b).sum(1), b["mask"].sum(1)) / b["mask"].sum(),
    "penalty alone": lambda m, y, b: y.mean() + sum(p.pow(2).sum() for p in [m.scale]),
}


def added(total: Tensor, *others: Tensor) -> Tensor:
    for other in others:
        total += other
    total /= 2
    return total


def test_a_sum_over_as_many_samples_as_there_are_micro_batches_is_no_mean() -> None:
    """Of a micro-batch that keeps none, nothing by the batch's count has a mean's factor, and the value is 0/0."""

    def loss(module: Step, logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
        kept = batch["x"][:, 0, 0] == 1
        return (logits.square().mean((1, 2)) * kept).sum() / kept.sum()

    data = {name: value[:6] if value.dim() else value for name, value in batch().items()}
    data["x"][:, 0, 0] = torch.tensor([1, 1, 1, 0, 0, 0])
    assert_whole(Step(loss), data, 2, 3)


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_that_of_the_whole_batch(name: str) -> None:
    assert_whole(Step(LOSSES[name]), batch(), 2, 7 if len(name) % 2 else 3)


def test_what_cannot_be_followed_is_refused_with_the_line_and_the_ways_out() -> None:
    text = r"(?s)training_step returns is divided by .*cannot be followed from test_loss_weights.py:\d+ in "
    with pytest.raises(SplitError, match=text + r".*microbatch_weight\(batch\).*loss_weighting='samples'"):
        assert_whole(Step(lambda m, y, b: F.cross_entropy(*flat(y, b)).sqrt()), batch(), 2, 3)


def _repeated(logits: Tensor) -> Tensor:
    """As predicted durations do: how many rows the batch has is known to no micro-batch."""
    return logits.repeat_interleave(1 + (logits.detach()[:, 0, 0] > 0).long(), 0).square()


def test_a_sum_over_rows_that_are_repeated_by_what_the_model_says_is_that_of_the_whole_batch() -> None:
    assert_whole(Step(lambda module, logits, batch: _repeated(logits).sum() / 8), batch(), 2, 3)


class Silent(Step):
    """Logs nothing."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return self.loss(self, self.net(batch["x"]), batch)


def _guarded(module: Step, logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    count = int(batch["mask"].sum())
    if count == 0:
        return logits.sum() * 0
    return (tokens(logits, batch) * batch["mask"]).sum() / count


def _looped(module: Step, logits: Tensor, batch: dict[str, Tensor]) -> Any:
    total = logits.sum() * 0
    for row, target in zip(logits, batch["target"], strict=True):
        kept = target != -100
        if kept.any():
            total = total + F.cross_entropy(row[kept], target[kept], reduction="sum")
    return total / max(int(batch["mask"].sum()), 1)


def _nearest(module: Step, logits: Tensor, batch: dict[str, Tensor]) -> Any:
    """As detectors do: matched by what the model says, over all objects of the batch."""
    losses = []
    for row, target, mask in zip(logits, batch["target"], batch["mask"], strict=True):
        objects = F.one_hot(target[mask.bool()], CLASSES).to(row.dtype)
        nearest = torch.cdist(row, objects).argmin(0)
        losses.append(F.l1_loss(row[nearest], objects, reduction="sum"))
    return 3 * torch.stack(losses).sum() / batch["mask"].sum()


@pytest.mark.parametrize("loss", [_guarded, _looped, _nearest])
def test_a_loss_that_micro_batches_compute_by_other_functions_is_that_of_the_batch(loss: Any) -> None:
    assert_whole(Silent(loss), batch(), 2, 7)
    assert_whole(Silent(loss), batch(empty=None), 3, 2)


def _squares(logits: Tensor, batch: dict[str, Tensor]) -> Any:
    rows = zip(logits, batch["x"], strict=True)
    return sum(F.mse_loss(y, x.sum(-1, keepdim=True).expand_as(y)) for y, x in rows) / len(logits)


@pytest.mark.parametrize(
    "bend",
    [torch.sqrt, lambda loss: F.relu(loss - 1), lambda loss: loss.clamp(min=0.14), lambda loss: loss * (loss > 2)],
    ids=["root", "hinge", "free bits", "threshold"],
)  # fmt: skip
def test_a_loop_over_samples_whose_sum_is_bent_is_taken_for_a_mean_with_a_warning(bend: Any) -> None:
    def loss(module: Step, logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return bend(_squares(logits, batch))

    with pytest.warns(UserWarning, match="taken for a mean over samples"):
        piped(Step(loss), batch(), 2, 3, follow=True)


def _by_balance(logits: Tensor, batch: dict[str, Tensor]) -> Any:
    there = batch["mask"]
    weight = (there == 0).sum() / (there == 1).sum()
    return F.binary_cross_entropy_with_logits(logits[..., 0], there, pos_weight=weight)


def _by_numbers(logits: Tensor, batch: dict[str, Tensor]) -> Any:
    there = batch["mask"]
    weight = torch.tensor((there == 0).sum().item() / (there == 1).sum().item(), dtype=there.dtype)
    return F.binary_cross_entropy_with_logits(logits[..., 0], there, pos_weight=weight)


def _by_array(logits: Tensor, batch: dict[str, Tensor]) -> Any:
    there = batch["mask"].numpy()
    weight = torch.as_tensor((there == 0).mean() / there.mean())
    return F.binary_cross_entropy_with_logits(logits[..., 0], batch["mask"], None, None, None, "mean", weight)


def _by_classes(logits: Tensor, batch: dict[str, Tensor]) -> Any:
    target = batch["target"].clamp(min=0)
    weights = torch.stack([len(target) / (1 + (target == one).sum()) for one in range(CLASSES)])
    return F.cross_entropy(logits.transpose(1, 2), target, weights.to(logits.dtype))


def _by_deviation(logits: Tensor, batch: dict[str, Tensor]) -> Any:
    return F.huber_loss(logits[..., 0], batch["mask"], delta=batch["mask"].std().item())


@pytest.mark.parametrize("loss", [_by_balance, _by_numbers, _by_array, _by_classes, _by_deviation])
def test_a_loss_weighted_by_what_the_whole_batch_has_is_warned_of(loss: Any) -> None:
    """`pos_weight` and the like are a micro-batch's own, and no divisor."""
    with pytest.warns(UserWarning, match="in another way than by adding up"):
        piped(Silent(lambda module, *given: loss(*given)), batch(), 2, 3, follow=True)


def _mined(logits: Tensor, batch: dict[str, Tensor]) -> Any:
    """The farthest of its class and the nearest of another, for each sample."""
    rows, kinds = logits.mean(1), batch["target"][:, -1]
    far, alike = torch.cdist(rows, rows), kinds[:, None] == kinds[None]
    return F.relu((far * alike).amax(1) - (far + 9 * alike).amin(1) + 0.2).mean()


def _far_apart(logits: Tensor, batch: dict[str, Tensor]) -> Any:
    rows = logits.mean(1)
    return -torch.cdist(rows, rows).mean(1).mean()


@pytest.mark.parametrize("loss", [_mined, _far_apart])
def test_a_loss_of_pairs_of_samples_is_warned_of(loss: Any) -> None:
    with pytest.warns(UserWarning, match="in another way than by adding up"):
        piped(Silent(lambda module, *given: loss(*given)), batch(), 2, 3, follow=True)


def _by_a_constant(module: Step, logits: Tensor, batch: dict[str, Tensor]) -> Any:
    weight = torch.tensor(2.5, dtype=logits.dtype)
    return F.binary_cross_entropy_with_logits(logits[..., 0], batch["mask"], pos_weight=weight)


def test_a_loss_with_a_constant_weight_is_a_mean() -> None:
    assert_whole(Silent(_by_a_constant), batch(), 2, 3)


def test_memory_that_a_run_without_units_resizes_is_put_back() -> None:
    def loss(module: Step, logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return logits.square().mean() + torch.add(batch["mask"], 1.0, out=torch.empty(0)).sum() * 0

    assert_whole(Silent(loss), batch(), 2, 3)


@pytest.mark.parametrize("later", [2, None])
def test_plain_means_are_looked_at_once_and_targets_left_out_later_are_seen(later: int | None) -> None:
    """The second batch has nothing to count, or has: the divisor is found anew only then."""
    module, plain, masked = Step(LOSSES["cross entropy"]), batch(None), batch(2)
    plain["target"] = plain["target"].clamp(min=0)
    follower = Follower(module, "training_step")
    seen: list[int] = []
    for count, one in enumerate((plain, plain if later is None else masked)):
        whole = list(one.values())

        def rehearse(one: dict[str, Tensor] = one, count: int = count) -> list[Whole]:
            observer = Observer(list(one.values()))
            seen.append(count)
            call(observer.call, one)
            return [observer.whole] * 2

        follower.begin([3 / 7, 4 / 7], whole, rehearse)
        half = {name: value[:3] if value.dim() else value for name, value in one.items()}
        follower.loss(call(follower.microbatch(0).call, half))
        follower.end()
    assert seen == ([0] if later is None else [0, 1])


SHIFTS: dict[str, tuple[Callable[[Any, Tensor], Tensor], int]] = {
    "copied": (lambda see, ids: see(Tensor.flatten, ids[:, 1:]), 1),
    "copied twice": (lambda see, ids: see(torch.clone, see(Tensor.contiguous, ids[:, 1:])), 1),
    "as it is": (lambda see, ids: ids, 1),
    "changed": (lambda see, ids: see(Tensor.masked_fill, ids, ids == 2, -100), 3),
    "copied and changed": (lambda see, ids: see(Tensor.masked_fill_, see(Tensor.clone, ids), ids == 2, -100), 3),
    "changed in place": (lambda see, ids: see(Tensor.masked_fill_, ids, ids == 2, -100), 3),
    "added in place": (lambda see, ids: see(Tensor.add_, see(Tensor.clone, ids), 0), 3),
    "of another type": (lambda see, ids: see(Tensor.long, see(Tensor.float, ids)), 3),
}  # fmt: skip


@pytest.mark.parametrize("name", SHIFTS)
def test_targets_that_the_step_copies_from_the_batch_are_known_to_be_complete(name: str) -> None:
    """A language model's labels are the ids, one further; what changes them may leave out any."""
    shifted, looks = SHIFTS[name]
    follower, seen = Follower(Step(LOSSES["cross entropy"]), "training_step"), []

    def step(follow: Any, ids: Tensor) -> Tensor:
        def see(func: Any, *args: Any) -> Tensor:
            return follow(func, args, {}, lambda f, a, k: f(*a, **k))

        target = shifted(see, ids)
        return see(F.cross_entropy, torch.ones(target.numel(), 4, requires_grad=True), target.flatten())

    for number in range(3):
        ids = torch.full((7, 6), number % 2)

        def rehearse(ids: Tensor = ids) -> list[Whole]:
            observer = Observer([ids])
            step(observer.call, ids)
            seen.append(ids)
            return [observer.whole] * 2

        follower.begin([3 / 7, 4 / 7], [ids], rehearse)
        for microbatch, rows in enumerate((ids[:3], ids[3:])):
            follower.loss(step(follower.microbatch(microbatch).call, rows))
            follower.left()
        follower.end()
    assert len(seen) == looks


def call(see: Any, one: dict[str, Tensor]) -> Tensor:
    logits = one["x"].repeat(1, 1, 2)[..., :CLASSES].reshape(-1, CLASSES)
    return see(F.cross_entropy, (logits, one["target"].view(-1)), {}, lambda f, a, k: f(*a, **k))


MODELS = ("gpt2", "llama", "t5", "bert")


def next_token_loss(logits: Tensor, labels: Tensor, vocab_size: int, **options: Any) -> Tensor:
    shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return fixed_cross_entropy(logits.view(-1, vocab_size), shifted.view(-1), **options)


def padded(name: str) -> tuple[Any, dict[str, Tensor]]:
    """A language model from a config, and 7 samples with padding; the third has no label at all."""
    torch.manual_seed(7)
    module = hugging_face("bert-tokens" if name == "bert" else name)
    if name in ("gpt2", "llama"):
        module.model.loss_function = next_token_loss  # theirs, but for a cast to float32
    ids = torch.randint(3, VOCABULARY, (7, 6))
    mask = torch.ones(7, 6, dtype=torch.long)
    for sample in range(7):
        mask[sample, 6 - sample % 4 :] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[2] = -100
    return module, {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize("num_microbatches", [1, 4, 7])
@pytest.mark.parametrize("name", MODELS)
def test_a_padded_language_model_trains_as_on_the_whole_batch(name: str, num_microbatches: int) -> None:
    module, data = padded(name)
    stages, split_backward = {1: (2, False), 4: (3, True), 7: (3, False)}[num_microbatches]
    assert_whole(module, data, stages, num_microbatches, how="auto", split_backward=split_backward)


class OwnLoss(Module):
    """The way out of a loss inside the model by weights of classes: the step computes it from the logits."""

    def __init__(self, inner: Any, causal: bool) -> None:
        super().__init__()
        self.model, self.causal = inner.model, causal
        self.register_buffer("weights", torch.linspace(0.5, 2.0, VOCABULARY))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits, labels = self.model(**batch).logits, batch["labels"]
        if self.causal:
            logits, labels = logits[:, :-1], labels[:, 1:]
        options = {"weight": self.weights, "label_smoothing": 0.1}
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **options)
        self.log("loss", loss)
        return loss


@pytest.mark.parametrize("name", MODELS)
def test_weights_of_classes_and_smoothing_in_the_step_are_those_of_the_whole_batch(name: str) -> None:
    inner, data = padded(name)
    module = OwnLoss(inner, causal=name in ("gpt2", "llama"))
    stages, number = {"gpt2": (2, 4), "llama": (3, 7), "t5": (3, 4), "bert": (2, 7)}[name]
    assert_whole(module, data, stages, number, how="auto")


class OfEachSample(Module):
    """Its loss has a value for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = layer(batch)
        return batch.pow(2).mean(1)


def test_a_loss_of_several_values_is_refused_as_by_torch() -> None:
    with pytest.raises(SplitError, match=r"returned a loss of shape \(2,\); a backward begins at one number"):
        piped(OfEachSample(), torch.randn(4, 4))
