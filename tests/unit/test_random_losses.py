"""Random losses and logs in micro-batches: one device's numbers, or a warning, or a refusal.

`benchmarks/random_losses.py` runs more of them.
"""

from dataclasses import replace
from typing import Any

import pytest

from tests.random_losses import Call, LossProgram, loss_outcome_of, loss_program

EQUAL = (
    "s.body[2].aux * (o - y).mean()",
    "o[o > 0].mean()", "(o[:, 0][o[:, 1] > 0] ** 2).sum() / (o[:, 1] > 0).sum()", "(o > -0.2).all().double()",
    "float((o[:, 0] > 0.1).any())", "m.all().double()", "torch.count_nonzero(o > 0).double()", "(o - y)[m].pow(2).mean()", "o[:, 0].exp()[m].mean().sqrt()",
    "F.mse_loss(o, y, weight=w[:, None].expand_as(o))", "F.cross_entropy(o[o[:, 0] > 0], v[o[:, 0] > 0])",
    "torch.add(F.mse_loss(o, y), loss, alpha=0.3)", "o.aminmax().max - o.amin()",
    "measures.explained_variance(o, y)",
)  # fmt: skip
UNFOLLOWED = (
    "(o - y).mean() * (o.sum().item() + 1)", "F.huber_loss(o, y, reduction='none').mean(1).argmax().double()",
    "o.sum() / (abs((o.argmax(1) == v).sum().item()) + 1)",
    "torch.pdist(o).mean()",
    "F.layer_norm(o[:, 0], (len(x),)).abs().mean()", "torch.zeros(3).index_add_(0, v, o.std(1)).max()", "max(o.mean().item(), y.mean().item())",
    "torch.stack([p.sum() for p in o])[-1]", "float(o[:, 0].detach().numpy().std())", "o[o > o.mean()].mean()",
    "1.0 if (o[:, 0] > -9).sum().item() > 2 else 0.0", "float(o.sum().item() > 0.1)",
    "(F.mse_loss(o, y) / (abs(round(o.mean().item(), 3)) + 1)).item()",
)  # fmt: skip


def program(values: tuple[str, ...], loss: str = "F.cross_entropy(o, c)", **options: object) -> LossProgram:
    logged = (("on_step", True), ("on_epoch", True), *options.items())
    calls = tuple(Call("log", (value,), logged) for value in values)
    return LossProgram(loss, calls, (8, 5), (("num_microbatches", 4),), 2, values == EQUAL)


def test_what_is_logged_is_the_number_of_the_batch() -> None:
    assert loss_outcome_of(program(EQUAL)) == "equal"


@pytest.mark.parametrize("reduce", ["'max'", "'sum'"])
def test_another_reduction_of_the_epoch_takes_numbers_of_batches(reduce: str) -> None:
    values = ("len(x) / (len(x) + 1)", "m.double().std().item()", "o[o > 0].mean()")
    assert loss_outcome_of(program(values, "F.cross_entropy(o, v, weight=q)", reduce_fx=reduce)) == "equal"


def test_a_number_that_cannot_be_followed_is_that_of_the_batch_as_one() -> None:
    assert loss_outcome_of(program(UNFOLLOWED)) == "equal"


@pytest.mark.parametrize("reduce_fx", ["'max'", "'sum'"])
def test_an_extreme_or_sum_over_batches_of_a_number_that_a_unit_computes_is_warned_of(reduce_fx: str) -> None:
    assert loss_outcome_of(program(("s.body[2].aux",), reduce_fx=reduce_fx)).startswith("warned: v0")


def test_a_deviation_that_micro_batches_have_alike_by_chance_is_not_the_batch_s() -> None:
    value = "F.cross_entropy(o, c).detach() / (((o[:, 0] > 0).double().pow(2).std() + 0.1).abs() + 0.5)"
    log = Call("log", (value,), (("on_step", True), ("on_epoch", True)))
    two = LossProgram("F.cross_entropy(o, c)", (log,), (6, 6), (("num_microbatches", 2),), 2, True)
    assert loss_outcome_of(two) == "equal"


def test_flags_after_a_loop_over_samples_are_the_batch_s_where_micro_batches_agree() -> None:
    values = ("sum(p.sum() for p in o) / len(x)", "((h[:, 0] > -9).sum() > 2).double()")
    assert loss_outcome_of(program(values)) == "equal"


def test_a_metric_given_a_python_number_has_the_batch_s() -> None:
    call = Call(
        "object", ("s.total.update(o.sum().item() / max(int(m.sum()), 1))", "total"), (("on_epoch", True),)
    )
    batches = LossProgram("(o - y)[m].pow(2).mean()", (call,), (8, 5), (("num_microbatches", 4),), 0, False)
    assert loss_outcome_of(batches) == "equal"


def test_a_metric_that_is_logged_in_a_step_has_the_step_s_value() -> None:
    call = Call("object", ("s.mean(len(o[o > 0]))", "mean"), (("on_step", True), ("on_epoch", True)))
    assert loss_outcome_of(
        LossProgram("F.mse_loss(o, y)", (call,), (8, 5), (("num_microbatches", 4),), 0, False)
    ).startswith("warned")


def test_a_metric_that_is_called_once_and_for_each_sample_is_one_devices() -> None:
    calls = ("s.mean.update(F.mse_loss(o, y))", "[s.mean.update(p) for p in o.exp().sum(1)]")
    told = tuple(Call("object", (call, "mean"), (("on_step", False), ("on_epoch", True))) for call in calls)
    batches = LossProgram("F.mse_loss(o, y)", told, (8, 8), (("num_microbatches", 3),), 0, False)
    assert loss_outcome_of(batches) == "equal"


LOSSES = (
    "F.mse_loss(o, y, weight=w[:, None].expand_as(o))", "(o[:, 0][m] / w[m]).sum() / m.sum()", "(o - y)[m].pow(2).mean()",
    "torch.sub(F.mse_loss(o, y), F.cross_entropy(o, c), alpha=0.3) + 0.1 * s.body[2].aux", "o[m].exp().mean()",
    "o.sum() / torch.sqrt(m.sum() + 1)", "torch.where(w.mean() > 0.6, o.mean(), 2 * o.mean())",
    "((o - y).pow(2).sum(0) / (((y - y.mean(0)) ** 2).sum(0) + 0.1)).mean()",
    "F.mse_loss(o, y) * y.std().clamp(min=0.5) + y.var()",
    "(o[m] @ q).mean()", "torch.einsum('ij,ij->i', o[m], y[m]).mean()", "torch.cat([o[m], o[~m]]).pow(2).mean()",
    "(F.cross_entropy(o[m], v[m], reduction='none') * w[m]).sum() / w[m].sum()",
    "F.cross_entropy(o[m], v[m], reduction='none').sum() / m.sum()",
)  # fmt: skip


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_is_that_of_the_batch(loss: str) -> None:
    assert loss_outcome_of(program(("loss",), loss)) == "equal"


@pytest.mark.parametrize(
    "loss",
    [
        "F.mse_loss(o, y, reduction='sum').sqrt()",
        "o.pow(2).mean().sqrt()",
        "(F.l1_loss(o, y, reduction='sum') + s.body[2].aux) * (1 - o.sum())",
    ],
)
def test_a_loss_that_is_no_sum_over_samples_is_warned_of(loss: str) -> None:
    assert loss_outcome_of(program(("y.mean()",), loss)).startswith("warned")


def test_a_loss_times_a_number_that_was_read_is_refused() -> None:
    found = loss_outcome_of(program(("loss",), "F.mse_loss(o, y) * (o.sum().item() + 1)"))
    assert found.startswith("refused: what training_step returns is divided by what differs")


@pytest.mark.parametrize("seed", [0, 1, 2, 300_328, 400_007, 700_009])
def test_a_random_loss_is_that_of_the_batch_or_said_to_be_none(seed: int) -> None:
    loss_outcome_of(loss_program(seed))


def _of_what_is_not_kept(how: str, **changes: Any) -> LossProgram:
    """Code reads values of a layer where the model decides so, which nobody knows before."""
    rows = "F.binary_cross_entropy_with_logits(o[:, 0], m.double(), reduction='none')"
    hidden = "h.abs().mean(1).masked_fill(~m, 0.0).detach() > 0.3"
    chosen = f"({rows}[{hidden}].mean() if ((o[:, 0] > 0).double() > 0.8).any() else o.sum() * 0)"
    drawn = loss_program(300_328)
    value = how.format(f"({chosen} > 1 - F.gaussian_nll_loss(o, y, torch.ones_like(o)))")
    call = drawn.calls[0]._replace(values=(value,))
    return replace(drawn, loss="F.mse_loss(o, y)", calls=(call,), **changes)


def test_what_was_not_kept_for_the_batch_as_one_is_not_guessed() -> None:
    assert loss_outcome_of(_of_what_is_not_kept("{}")).startswith("warned")


def test_a_number_that_is_read_of_it_is_that_of_the_micro_batches() -> None:
    """It is 0 for all of them and for the batch, and 1 for values that are made up."""
    assert loss_outcome_of(_of_what_is_not_kept("float({})", validates=False)) == "equal"


@pytest.mark.parametrize(
    "update",
    [
        "s.total.update(w * o.std())", "s.total.update(q[v] * (o[:, 0] > 0).double().sum() / len(x))",
        "s.mean.update(o[:, 0] / o[:, 0].abs().max(), w)", "s.r2.update(o[:, 0] - o[:, 0].mean(), y[:, 0])",
        "s.mean.update(o[:, 0], torch.stack([p.sum() for p in o]).abs() / torch.stack([p.sum() for p in o]).abs().max())",
        "s.mean.update(o[:, 0].softmax(0))",
    ],
)  # fmt: skip
def test_metrics_are_given_values_of_samples_with_the_numbers_of_the_batch(update: str) -> None:
    call = Call("object", (update, update[2:].partition(".")[0]), (("on_step", False), ("on_epoch", True)))
    given = LossProgram("F.cross_entropy(o, c)", (call,), (8, 5, 8), (("num_microbatches", 4),), 2, True)
    assert loss_outcome_of(given) == "equal"


@pytest.mark.parametrize(
    "loss",
    [
        "0.5 * (o.norm(2).pow(2) + h.norm(2).pow(2)) / len(x)", "torch.linalg.vector_norm(o - y) ** 2",
        "(lambda norm: norm * norm)(h.norm()) + F.mse_loss(o, y)", "o.norm(1) / len(x)", "o[m].norm() ** 2 / m.sum().clamp(min=1)",
        "o.norm().square() * s.head.weight.norm() ** 2", "o.norm() ** 2 + (h.abs() ** w[:, None]).mean()",
    ],
)  # fmt: skip
def test_squares_of_norms_are_sums_over_samples(loss: str) -> None:
    logs = ("o.norm()", "h.norm(1)", "torch.linalg.vector_norm(o, 3)", "o.norm() / h.norm()", "loss")
    assert loss_outcome_of(program(logs, loss)) == "equal"


def test_a_call_of_a_metric_with_such_values_is_warned_of() -> None:
    call = Call("object", ("s.total(w * o.std())", "total"), (("on_step", True), ("on_epoch", True)))
    given = LossProgram("F.cross_entropy(o, c)", (call,), (8, 5), (("num_microbatches", 4),), 2, False)
    assert loss_outcome_of(given).startswith("warned: total_0")
