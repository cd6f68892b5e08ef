"""Random losses of sums, masks, reductions and constants: equal to the whole batch on one device, or refused."""

from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_pipeline.errors import SplitError
from lightning_pipeline.model.loss import Follower, Observer, Whole

SAMPLES, LENGTH, CLASSES = 6, 3, 4
NUMBERS = st.sampled_from([-2.0, 0.5, 1.0, 3.0])


def elements() -> st.SearchStrategy[Any]:
    """Values of shape (samples, length)."""
    base = st.sampled_from([("tokens",), ("squares",), ("masked tokens",), ("masked squares",)])
    return st.recursive(
        base,
        lambda inner: st.one_of(
            st.tuples(st.just("scaled"), inner, NUMBERS),
            st.tuples(st.just("plus"), inner, inner),
            st.tuples(
                st.just("over"), inner, st.sampled_from(["count", "samples", "number", "tokens of each"])
            ),
        ),
        max_leaves=3,
    )


def terms() -> st.SearchStrategy[Any]:
    """Numbers."""
    base = st.one_of(
        st.tuples(
            st.sampled_from(["sum", "mean", "mean of sums", "sum of means", "picked", "dot"]), elements()
        ),
        st.tuples(st.just("cross entropy"), st.booleans(), st.sampled_from([0.0, 0.1]), st.booleans()),
        st.tuples(st.just("penalty")),
    )
    return st.recursive(
        base,
        lambda inner: st.one_of(
            st.tuples(st.just("scaled"), inner, NUMBERS),
            st.tuples(st.just("plus"), inner, inner),
            st.tuples(st.just("minus"), inner, inner),
            st.tuples(st.just("and"), inner, NUMBERS),
            st.tuples(st.just("over"), inner, st.sampled_from(["count", "safe count", "samples", "number", "item"])),
            st.tuples(st.just("in place"), inner, inner),
            st.tuples(st.just("stacked"), inner, inner),
            st.tuples(st.just("bent"), inner),
        ),
        max_leaves=4,
    )  # fmt: skip


def divisor(name: str, batch: dict[str, Tensor]) -> Any:
    return {
        "count": lambda: batch["mask"].sum(),
        "safe count": lambda: batch["mask"].sum().clamp(min=1),
        "samples": lambda: len(batch["mask"]),
        "number": lambda: batch["number"],
        "item": lambda: batch["mask"].sum().item() + 0.5,
        "tokens of each": lambda: batch["mask"].sum(1, keepdim=True) + 1,
    }[name]()


def tensor_of(tree: Any, y: Tensor, batch: dict[str, Tensor]) -> Tensor:
    kind, *rest = tree
    if kind in ("tokens", "masked tokens", "squares", "masked squares"):
        flat = F.cross_entropy(y.reshape(-1, CLASSES), batch["target"].reshape(-1), reduction="none")
        value = flat.view(-1, LENGTH) if "tokens" in kind else y.pow(2).sum(-1)
        return value * batch["mask"] if "masked" in kind else value
    value = tensor_of(rest[0], y, batch)
    if kind == "scaled":
        return rest[1] * value
    if kind == "plus":
        return value + tensor_of(rest[1], y, batch)
    return value / divisor(rest[1], batch)


def number_of(tree: Any, y: Tensor, w: Tensor, batch: dict[str, Tensor]) -> Tensor:
    kind, *rest = tree
    if kind == "penalty":
        return w.pow(2).sum()
    if kind == "cross entropy":
        weight, smoothing, summed = rest
        flat = y.reshape(-1, CLASSES), batch["target"].reshape(-1)
        weights = torch.linspace(0.5, 2, CLASSES).double() if weight else None
        how = "sum" if summed else "mean"
        return F.cross_entropy(*flat, weight=weights, label_smoothing=smoothing, reduction=how)
    if kind in REDUCTIONS:
        return REDUCTIONS[kind](tensor_of(rest[0], y, batch), batch)
    value = number_of(rest[0], y, w, batch)
    if kind in ("scaled", "and"):
        return value * rest[1] if kind == "scaled" else value + rest[1]
    if kind == "over":
        return value / divisor(rest[1], batch)
    return value.square() if kind == "bent" else JOINED[kind](value, number_of(rest[1], y, w, batch))


REDUCTIONS = {
    "sum": lambda t, b: t.sum(),
    "mean": lambda t, b: t.mean(),
    "mean of sums": lambda t, b: t.sum(1).mean(),
    "sum of means": lambda t, b: t.mean(1).sum(),
    "picked": lambda t, b: t[b["mask"] > 0].sum(),
    "dot": lambda t, b: torch.dot(t.sum(1), b["mask"].sum(1)),
}
JOINED = {
    "plus": lambda a, b: a + b,
    "minus": lambda a, b: a - b,
    "in place": lambda a, b: a.clone().add_(b),
    "stacked": lambda a, b: torch.stack([a, b]).mean(),
}


class _Functions(torch.overrides.TorchFunctionMode):
    """What the glue of a replay does: every function goes to the one that follows."""

    def __init__(self, see: Any) -> None:
        super().__init__()
        self.see = see

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.see(func, args, kwargs or {}, lambda f, a, k: f(*a, **k))


def parts_of(batch: dict[str, Tensor], sizes: list[int]) -> list[dict[str, Tensor]]:
    columns = {
        name: value.split(sizes) if value.dim() else [value] * len(sizes) for name, value in batch.items()
    }
    return [{name: column[i] for name, column in columns.items()} for i in range(len(sizes))]


def made(seed: int, empty: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.rand(SAMPLES, LENGTH, generator=generator) > 0.4).double()
    mask[-1] = 1
    if empty:
        mask[:2] = 0
    target = torch.randint(0, CLASSES, (SAMPLES, LENGTH), generator=generator)
    x = torch.randn(SAMPLES, LENGTH, CLASSES, generator=generator, dtype=torch.float64)
    return {
        "x": x, "target": target.masked_fill(mask == 0, -100), "mask": mask,
        "number": torch.tensor(7.0, dtype=torch.float64),
    }  # fmt: skip


def bends(tree: Any) -> bool:
    return isinstance(tree, tuple) and (tree[0] == "bent" or any(map(bends, tree)))


@settings(max_examples=60, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@example(tree=("stacked", *[("sum", ("over", ("tokens",), "count"))] * 2), seed=0, sizes=[1] * 6, empty=False)
@example(tree=("picked", ("over", ("tokens",), "count")), seed=0, sizes=[2, 4], empty=True)
@given(terms(), st.integers(0, 99), st.sampled_from([[2, 4], [1, 1, 4], [2, 2, 2], [1] * 6]), st.booleans())
def test_a_loss_is_that_of_the_whole_batch_or_refused(
    tree: Any, seed: int, sizes: list[int], empty: bool
) -> None:
    batch = made(seed, empty)
    w = torch.linspace(-1, 1, CLASSES, dtype=torch.float64).requires_grad_()

    def loss(part: dict[str, Tensor]) -> Tensor:
        return number_of(tree, part["x"] * w, w, part)

    expected = loss(batch)
    (gradient,) = torch.autograd.grad(expected, w)
    follower = Follower(torch.nn.Module(), "training_step")

    def rehearse() -> list[Whole]:
        observer = Observer(list(batch.values()))
        with _Functions(observer.call):
            loss(batch)
        return [observer.whole] * len(sizes)

    follower.begin([size / SAMPLES for size in sizes], list(batch.values()), rehearse)
    total, found = torch.zeros((), dtype=torch.float64), torch.zeros_like(w)
    for index, (part, size) in enumerate(zip(parts_of(batch, sizes), sizes, strict=True)):
        shares = follower.microbatch(index)
        with _Functions(shares.call):
            value = loss(part)
        try:
            share = follower.loss(value)
        except SplitError as refusal:
            assert bends(tree), refusal
            return
        roots = [(value, size / SAMPLES)] if share is None else [(t, f) for f, t in share.terms if f]
        for tensor, factor in roots:
            total += tensor.detach().sum() * factor
            if tensor.requires_grad:
                found += torch.autograd.grad(tensor.sum(), w, retain_graph=True)[0] * factor
    if bends(tree) and not torch.allclose(found, gradient, rtol=1e-9):
        return  # what shapes alone divide is averaged over samples, as accumulation would
    torch.testing.assert_close(total, expected.detach(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found, gradient, rtol=1e-9, atol=1e-9)
