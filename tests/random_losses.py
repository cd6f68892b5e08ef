"""Random losses and logs: expressions drawn from a seed, to fit on one device and in micro-batches.

`tests/unit/split/test_random_losses.py` runs a few, `benchmarks/random_losses.py` as many as asked. An expression
is Python text over a batch of `N` samples:

* `x` (N, 6) inputs, `y` (N, 3) targets, `c` (N) classes of which -100 are left out, `v` (N) classes, `m` (N) a mask,
  `w` (N) weights above 0;
* `h` (N, 8) hidden values, `o` (N, 3) outputs, `loss` what the step returns;
* `s` the module, `q` (3) weights of classes.

From seed `WEIGHTED_FROM` on losses are weighted by numbers of the batch alone, too. From `TOLD_FROM` on the user says
what micro-batches' losses count for, so that the loss is put together of theirs; all else is that of the batch. Where
the step mixes samples the loss may be the batch's, too.
"""

import math
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import functional as measures

from lightning_pipeline.data import split_batch
from lightning_pipeline.errors import PipelineError
from tests.ranks.lightning_cases import trainer

_ROWS = (
    "F.cross_entropy(o, v, reduction='none')", "F.cross_entropy(o, c, reduction='none')",
    "(o - y).pow(2).mean(1)", "F.mse_loss(o, y, reduction='none').sum(-1)", "o[:, 0]", "h.abs().mean(1)",
    "F.binary_cross_entropy_with_logits(o[:, 0], m.double(), reduction='none')", "o.softmax(1).amax(1)",
    "-(o.softmax(1) * o.log_softmax(1)).sum(1)", "F.cosine_similarity(o, y)", "o.norm(dim=1)",
    "F.kl_div(o.log_softmax(1), y.softmax(1), reduction='none').sum(1)", "o.logsumexp(1)", "(o * y).sum(1)",
    "F.huber_loss(o, y, reduction='none').mean(1)", "o.gather(1, v[:, None]).squeeze(1)", "o.std(1)",
    "o.topk(2, 1).values.mean(1)", "F.nll_loss(o.log_softmax(1), v, weight=q, reduction='none')",
    "F.normalize(o, dim=1).sum(1)", "torch.stack([p.sum() for p in o])", "torch.vstack([o, o])[:len(x), 1]",
)  # fmt: skip
_MEASURED = (
    "(o.argmax(1) == v).double()", "(o[:, 0] > 0).double()", "(o > y).double().mean(1)", "y[:, 1]", "m.double()",
    "(o.topk(2, 1).indices == v[:, None]).any(1).double()",
)  # fmt: skip
_OF_ROWS = (
    "(R * w)", "(R * m)", "R.clamp(max=1.0)", "R.pow(2)", "torch.where(m, R, 0.0)", "(R + R)", "(R / w)",
    "(R).masked_fill(~m, 0.0)", "(0.5 * R)", "R.exp()", "(R - 0.3)", "R.relu()", "(R.detach() * R)", "q[v] * R",
)  # fmt: skip
_NUMBERS = (
    "R.mean()", "R.mean()", "R.sum()", "(R * m).sum() / m.sum()", "(R * m).sum() / m.sum().clamp(min=1)",
    "(R * m).sum() / max(int(m.sum()), 1)", "R.sum() / len(x)", "(R * w).sum() / w.sum()", "(R * w).mean()",
    "R[m].mean()", "R[m].sum() / max(m.sum().item(), 1)", "F.cross_entropy(o, c)", "F.cross_entropy(o, c, weight=q)",
    "F.cross_entropy(o, c, weight=q, label_smoothing=0.1)", "F.cross_entropy(o, c, reduction='sum')",
    "F.cross_entropy(o, c, reduction='sum') / (c != -100).sum()", "F.cross_entropy(o, v, label_smoothing=0.2)",
    "F.nll_loss(o.log_softmax(-1), c, ignore_index=-100)", "F.cross_entropy(o, v, ignore_index=1)",
    "F.mse_loss(o, y)", "F.l1_loss(o, y, reduction='sum')", "F.smooth_l1_loss(o, y)", "h.pow(2).mean()",
    "F.kl_div(o.log_softmax(1), y.softmax(1), reduction='batchmean')", "torch.dot(R, w)", "(R @ w) / len(x)",
    "torch.einsum('i,i->', R, w)", "R.mean(0)", "(R * m).sum() / (m.sum() + 1e-6)", "R[m].sum() / len(R)",
    "F.binary_cross_entropy_with_logits(o[:, 1], m.double())", "R.masked_select(m).mean()", "torch.sum(R, 0)",
    "F.cross_entropy(o[m], v[m])", "sum(p for p in R) / len(R)", "(R * w / w.sum()).sum()", "(o - y)[m].pow(2).mean()",
    "F.gaussian_nll_loss(o, y, torch.ones_like(o))", "F.margin_ranking_loss(o[:, 0], o[:, 1], y[:, 0].sign())",
    "F.mse_loss(o, y, weight=w[:, None].expand_as(o))", "torch.mean(R * (v == 1)) * 3", "s.scale * R.mean()",
    "R.mean() * (1 + s.global_step)", "R.sum() / s.samples", "(R * m.double()).mean() / m.double().mean()",
    "R[v == 1].sum() / (v == 1).sum().clamp(min=1)", "torch.nansum(R) / R.numel()", "R.view(-1, 1).mean(0).squeeze()",
    "(o - y)[m].pow(2).mean()", "(R[m] * w[m]).sum() / w[m].sum()", "R[m].exp().mean()", "(R[m] / w[m]).sum() / m.sum()",
)  # fmt: skip
_BENT = (
    "N.abs().sqrt()", "N.exp()", "(N.abs() + 0.1).log()", "N.pow(2)", "N.abs()", "(N - 0.5).abs()", "N.clamp(min=0.4)",
    "N.tanh()", "(N * N)", "N / (N.abs() + 0.5)", "torch.maximum(N, N)", "torch.where(N > N, N, N)", "N.relu()",
    "(R.sum() / (R.abs().sum() + 1))", "2 * (R * m).sum() / (R.sum() + m.sum())", "N.sigmoid()", "1 / (1 + N.abs())",
    "torch.stack([N, N]).max()", "torch.stack([N, N]).norm()", "(N.abs() ** 0.5)", "torch.logaddexp(N, N)",
    "torch.addcmul(N, N, N)", "(o.softmax(1).mean(0) * o.softmax(1).mean(0).clamp(min=1e-9).log()).sum()",
    "torch.lerp(N, N, 0.3)", "N ** 2",
)  # fmt: skip
_LINEAR = (
    "(N + N)", "(N + 0.5 * N)", "2.0 * N", "N / 3", "(N - N)", "-N", "torch.stack([N, N]).mean()", "N + 0.1",
    "sum([N, N])", "(N + 0.01 * s.head.weight.pow(2).sum())", "N * s.beta", "torch.add(N, N, alpha=0.3)", "(1 - N)",
    "N.detach() * 0.5 + N", "N.double()", "torch.nan_to_num(N)",
    "(N + 0.1 * s.body[2].aux)", "s.body[2].aux", "(N + s.body[2].aux)",
)  # fmt: skip
_MIXING = (
    "F.cross_entropy(o @ y.T / 0.5, torch.arange(len(x)))", "(o @ o.T).mean()", "torch.cdist(o, y).mean()", "R.std()",
    "o.var(0).mean()", "R.max()", "R.min()", "R.median()", "R.quantile(0.7)", "R.topk(1).values.mean()", "R.norm()",
    "R.logsumexp(0)", "R.sort().values[0]", "R.cumsum(0).mean()", "(R - R.mean()).pow(2).mean()", "R[0]", "R[-1]",
    "(R.softmax(0) * R).sum()", "F.normalize(o, dim=0).sum()", "R.diff().abs().mean()", "torch.cov(o.T).trace()",
    "torch.corrcoef(torch.stack([o[:, 0], y[:, 0]]))[0, 1]", "((o - o.mean(0)) / (o.std(0) + 1)).pow(2).mean()",
    "(R > R.mean()).double().mean()", "R[R > R.mean()].mean()", "F.layer_norm(R, (len(R),)).abs().mean()",
    "o.prod(1).prod()", "R.argmax().double()", "R.amax() - R.amin()", "R.aminmax().max", "(R - R.flip(0)).abs().mean()",
    "R.mean() / (R.std() + 0.1)", "R.topk(max(1, len(R) // 2)).values.mean()", "R.view(1, -1).max(1).values.squeeze()",
    "torch.linalg.vector_norm(o)", "torch.pdist(o).mean()", "R.kthvalue(1).values", "o.max(0).values.mean()",
)  # fmt: skip
_PICKED = (
    "R[R > T].mean()", "R[R > T].sum()", "(R > T).sum().double()", "R.masked_select(R > T).mean()",
    "R[o.argmax(1) == 1].mean()", "R[v == 1].mean()", "R[(R > T) & m].sum() / m.sum()", "torch.count_nonzero(R > T)",
    "R[R > T].mean().log()", "R[m].numel()", "(R > T).double().mean()", "torch.where(R > T, R, 0.0).sum()",
    "R[R > T].numel()", "len(R[R > T])", "R[(R > T).nonzero().squeeze(1)].mean()", "len(v.unique())", "R[R > T].exp().mean()",
    "(R * (R > T)).sum() / (R > T).sum()", "(R * (R > T)).sum() / (R > T).sum().clamp(min=1)", "R[R > T].max()",
    "float(len(o.argmax(1).unique()))", "o.argmax(1).bincount(minlength=3).max().double()", "R[R > T].std()",
    "(R[v == 0].mean() - R[v == 1].mean())", "torch.zeros(3).index_add_(0, v, R).max()", "(c != -100).sum()",
    "torch.stack([R[v == k].sum() / (v == k).sum().clamp(min=1) for k in range(3)]).mean()", "R[~m].mean()",
)  # fmt: skip
_TRUTHS = (
    "(R > T).any().double()", "(R > -T).all().double()", "float((R > T).any())", "(N > T).double()",
    "((R > T).sum() > 2).double()", "float((R > T).all().item())", "((R > T).all() & (N > T)).double()",
    "torch.any(R > T).float()", "torch.isnan(N).any().double()", "float(bool((R < T).all()))", "(R > T).double().min()",
    "torch.isfinite(R).all().double()", "torch.logical_and((R > T).any(), m.any()).double()", "m.all().double()",
)  # fmt: skip
_PLAIN = (
    "N.item()", "float(N)", "math.exp(min(N.item(), 5))", "math.sqrt(abs(N.item()))", "max(P, P)", "min(P, P)", "(P + P)",
    "2 * P", "P / len(x)", "int((o.argmax(1) == v).sum())", "len(x)", "3.0", "round(P, 3)", "(o.argmax(1) == v).sum().item()",
    "float(R.detach().numpy().mean())", "float(R.detach().numpy().std())", "sum(R.tolist()) / len(x)", "max(R.tolist())",
    "(P if P > T else 0.0)", "float(P > T)", "P ** 2", "abs(P)", "P * P", "P / (abs(P) + 1)", "1 - P", "-P", "s.beta",
    "sum(R.tolist())", "N.detach().numpy().item()", "max(P, 0.3)", "int(m.sum())", "P / max(int(m.sum()), 1)",
    "math.log(abs(P) + 1)", "(N * P).item()", "(N / (abs(P) + 1)).item()", "(R.sum() / (abs(P) + 1))", "(N + P)", "float(f'{P:.4f}')", "N.tolist()", "s.global_step", "(P - P) / 2", "100 * P",
    "sum(math.sqrt(abs(p)) for p in R.tolist()) / len(x)", "complex(P, 0).real", "P // 0.01 * 0.01",
)  # fmt: skip
_OF_BATCH = (
    "m.double().mean()", "((~m).sum() / m.sum().clamp(min=1))", "w.mean()", "y.std()", "float(m.sum())", "y.abs().max()",
    "x.norm()", "(v == 1).double().mean()", "v.bincount(minlength=3).double().max()", "(m.sum().item() / len(x))",
    "x[0, 0].abs().item()", "abs(x.mean().item())", "y[:, 0].median()", "torch.as_tensor(m.numpy().mean())",
    "F.one_hot(v, 3).sum(0)[1]", "x.softmax(0)[0].sum()", "0.7", "s.beta", "(w * m).sum() / w.sum()", "len(v.unique())",
)  # fmt: skip
"""Numbers of the batch alone."""
_WEIGHTED = (
    "F.binary_cross_entropy_with_logits(o[:, 1], m.double(), pos_weight=torch.as_tensor(B))", "R.mean() * B",
    "F.huber_loss(o, y, delta=float(B) + 0.1)", "F.smooth_l1_loss(o, y, beta=float(B) + 0.1)", "(R - B).pow(2).mean()",
    "F.cross_entropy(o, v, torch.stack([1 / (1 + (v == k).sum()) for k in range(3)]).double())", "(R * B).mean()",
    "F.mse_loss(o, y / (1 + B))", "R.mean() / (1 + B)", "F.margin_ranking_loss(o[:, 0], o[:, 1], y[:, 0].sign(), float(B))",
    "(R * w / w.mean()).mean()", "(R - (w - w.mean()) / w.std()).pow(2).mean()", "(torch.where(m, B, 1.0) * R).mean()",
    "R.clamp(max=float(B)).mean()", "F.cross_entropy(o * B, v)", "F.cross_entropy(o + (1 + F.one_hot(v, 3).sum(0)).log(), v)",
    "(R * (1 / (1 + v.bincount(minlength=3)))[v]).mean()", "(R * (B if B > 0.4 else 1.0)).mean()", "(R * m).sum() / B",
    "F.mse_loss(o, (y - y.mean(0)) / y.std(0))", "F.cross_entropy(o, v, label_smoothing=min(0.5, float(B) / 10))",
    "(R * y[:, 0].argsort().argsort()).mean()", "R[w > w.median()].sum() / len(x)", "(R * (w > B)).mean()",
    "F.binary_cross_entropy_with_logits(o, (y > 0).double(), pos_weight=1 + (y > 0).sum(0))", "torch.lerp(R, w, 0.2).mean() * B",
    "F.binary_cross_entropy_with_logits(o, (y > 0).double(), weight=(y > 0).double().mean(0))", "R.mean() ** float(B)",
    "F.triplet_margin_loss(o, y, -y, margin=float(B) + 0.1)", "F.cosine_similarity(o, y * B).mean()", "(R.mean() - B).abs()",
    "F.poisson_nll_loss(o, y.abs() * B)", "F.kl_div(o.log_softmax(1), (y * B).softmax(1), reduction='batchmean')",
)  # fmt: skip
"""What a loss makes of such a number; drawn for seeds from `WEIGHTED_FROM` on."""
WEIGHTED_FROM = 100_000
_DIVIDED = (
    "(R * m).sum() / m.sum().clamp(min=1)", "R[m].sum() / torch.clamp(m.sum(), min=1.0)", "R.mean() / (y.var() + 0.1)",
    "torch.where(m.sum() > 0, (R * m).sum() / m.sum().clamp(min=1), R.sum() * 0)", "(R * w).sum() / w.sum().sqrt()",
    "(R * m).sum() / torch.maximum(m.sum(), torch.tensor(1))", "R.sum() / torch.sqrt(m.sum() + 1)", "R.mean() + y.var()",
    "((o - y).pow(2).sum(0) / (((y - y.mean(0)) ** 2).sum(0) + 0.1)).mean()", "R.mean() * y.std().clamp(min=0.5) + y.var()",
    "R.sum() / (m.sum() + v.bincount(minlength=3).max())", "torch.where(w.mean() > 0.6, R.mean(), 2 * R.mean())",
    "(torch.zeros(3).index_add_(0, v, R) / v.bincount(minlength=3).clamp(min=1)).mean()", "R.mean() * B / (y.std() + 1)",
    "(R.sum() - w.sum().clamp(min=2)) / len(x)", "(R * m).sum() / (m.sum().clamp(min=1) * (1 + B))", "R.mean() * m.sum().sqrt()",
    "torch.stack([R.sum() / m.sum().clamp(min=1), R.mean()]).sum()", "R.mean() / torch.stack([m.sum(), v.sum()]).clamp(min=1).max()",
    "(R * m).sum() / max(m.sum(), 1)", "(R * m).sum() / (m.sum() or 1)", "R.sum() / (m.sum().clamp(min=1) + w.sum().clamp(max=2))",
    "R.mean() * (w.sum() / m.sum().clamp(min=1)).clamp(max=2)", "(R.mean() + 0.1 * N) / y.abs().max().clamp(min=0.1)",
)  # fmt: skip
"""Sums over samples divided by what is made of counts; drawn for seeds from `DIVIDED_FROM` on."""
DIVIDED_FROM = 200_000
_DECIDED = (
    "R[R.detach() > T].mean()", "R[(R.detach() > T).nonzero().squeeze(1)].mean()", "R[R.detach() < T].mean() * 0.5",
    "(R * (R.detach() > T)).sum() / (R.detach() > T).sum().clamp(min=1)", "(R * R.detach().abs()).sum() / R.detach().abs().sum()",
    "R[m.nonzero().squeeze(1)].mean()", "R[torch.where(m)[0]].sum() / len(x)", "R.index_select(0, m.nonzero().flatten()).mean()",
    "(o - y)[torch.where(m)[0]].pow(2).mean()", "torch.where(R.detach() > T, R, torch.nan).nanmean()", "-R[R.detach() > T].mean() / 3",
    "(R * R.detach().sigmoid()).mean() / R.detach().sigmoid().mean()", "(R * (R.detach() > T)).sum() / max((R > T).sum().item(), 1)",
    "(R[R.detach() > T].mean() if (R.detach() > T).any() else R.sum() * 0)", "R.masked_select(R.detach() > T).mean()",
    "R[R.detach() > T].sum() / (m.sum() + 1)", "R[R > T].mean() + R.mean()", "R[R > T].mean() * B", "R[R > T].mean() / (1 + B)",
    "(R[m.nonzero()[:, 0]].mean() if m.any() else R.sum() * 0)", "R[(v == 1).nonzero(as_tuple=True)[0]].sum() / (v == 1).sum().clamp(min=1)",
    "(R * (R.detach() > T)).sum() / ((R.detach() > T).sum() + 1e-6)", "R.mean() + 0.1 * q[q > 1].mul(s.head.weight[q > 1].sum(1)).sum()",
    "F.cross_entropy(o[R.detach() > T], v[R.detach() > T])", "F.mse_loss(o[m.nonzero().squeeze(1)], y[m.nonzero().squeeze(1)])",
    "(R * w * (R > T)).sum() / (w * (R > T)).sum()", "(R * (R > T)).sum() / (R > T).sum().clamp(max=3)", "R[R > T].mean().sqrt()",
    "F.cross_entropy(o, torch.where(o.softmax(1).amax(1) > 0.5, v, -100))", "(R * R.sigmoid()).sum() / R.sigmoid().sum()",
)  # fmt: skip
"""Over samples that the model decides, or that are picked by places; drawn for seeds from `DECIDED_FROM` on."""
DECIDED_FROM = 300_000
_CHOSEN = (
    "F.cross_entropy(o[J], v[J], reduction='none').mean()", "F.cross_entropy(o[J], v[J], reduction='none').sum() / J.sum()",
    "F.cross_entropy(o[J], v[J], reduction='none').sum() / len(x)", "F.mse_loss(o[J], y[J], reduction='none').mean(1).mean()",
    "(F.cross_entropy(o[J], v[J], reduction='none') * w[J]).sum() / w[J].sum()", "F.cross_entropy(o[J], v[J], label_smoothing=0.1)",
    "((o[J] - y[J]) ** 2).mean(1).sum() / J.sum()", "F.kl_div(o[J].log_softmax(1), y[J].softmax(1), reduction='batchmean')",
    "F.nll_loss(o[J].log_softmax(-1), v[J])", "F.cosine_similarity(o[J], y[J]).mean()", "o[J].square().sum(1).sqrt().mean()",
    "-o[J].log_softmax(1).gather(1, v[J][:, None]).mean()", "F.l1_loss(o[J], y[J], reduction='sum') / J.sum()",
    "F.binary_cross_entropy_with_logits(o[J][:, 0], m[J].double())", "torch.linalg.vector_norm(o[J] - y[J], dim=1).mean()",
    "F.huber_loss(o[J], y[J], reduction='none')[:, 0].mean()", "torch.cat([R[J], R[~J]]).mean()", "R[J].mean() + R[~J].mean()",
    "F.cross_entropy(o[J], v[J]) * J.sum() / len(x)", "torch.where(J, R, 0.0).sum() / J.sum()", "R.mul(J).sum().div(J.sum())",
    "F.cross_entropy(o.masked_select(J[:, None]).view(-1, 3), v.masked_select(J))", "R.masked_fill(~J, 0).sum() / J.sum()",
    "F.cross_entropy(o, v.masked_fill(~J, -100))", "F.smooth_l1_loss(o[J, 0], y[J, 1])", "F.triplet_margin_loss(o[J], y[J], -y[J])",
    "(o[J] @ q).mean()", "torch.einsum('ij,ij->i', o[J], y[J]).mean()", "-o[J].softmax(1).amax(1).log().mean()",
    "F.nll_loss(o.log_softmax(1)[J], v[J], reduction='none').mean()", "F.mse_loss(o[J], y[J]) + F.cross_entropy(o[~J], v[~J])",
    "(R[J] * w[J]).sum() / J.sum()", "R[J].pow(2).mean().sqrt()", "R[J].exp().mean()", "R[J].clamp(max=1.0).sum() / J.sum().clamp(min=1)",
    "F.cross_entropy(o[J], v[J]) if J.any() else o.sum() * 0", "(F.mse_loss(o[J], y[J], reduction='none') * q).sum(1).mean()",
    "F.gaussian_nll_loss(o[J][:, 0], y[J][:, 0], o[J][:, 1].exp())", "(o[J] - y[J]).abs().max(1).values.mean()", "R[J].logsumexp(0)",
)  # fmt: skip
"""Of samples that a mask `J` chooses, as language models have words; drawn for seeds from `CHOSEN_FROM` on."""
_CHOICES = ("m", "m", "(v == 1)", "(w > 0.6)", "(c != -100)", "(R.detach() > T)")
CHOSEN_FROM = 400_000
_NORMED = (
    "R.norm() ** 2 / len(x)", "o.norm(2).pow(2) / float(len(x))", "0.5 * (o.norm(2).pow(2) + h.norm(2).pow(2)) / len(x)",
    "torch.norm(h).square()", "torch.linalg.vector_norm(o - y) ** 2", "o.norm(p=1) / len(x)", "R.norm(1)", "h.norm() * h.norm()",
    "(o - y).norm().pow(2) / o.numel()", "torch.linalg.norm(o).pow(2) * B", "(o * w[:, None]).norm().pow(2) / w.sum()",
    "o[m].norm() ** 2 / m.sum().clamp(min=1)", "R[m].norm(1) / max(int(m.sum()), 1)", "torch.linalg.vector_norm(h, 1) * s.beta",
    "s.head.weight.norm() ** 2 * 0.1 + R.mean()", "sum(p.norm() for p in s.parameters()) * 0.01 + R.mean()", "R.norm()",
    "o.norm(dim=1).pow(2).mean()", "(o.norm(dim=1) - 1).pow(2).sum()", "h.norm() + R.mean()", "o.norm(3) ** 3 / len(x)",
    "(R.norm() ** 2 / w.norm() ** 2)", "R.sum() / w.norm(1)", "R.sum() / w.norm()", "(R - R.detach()).norm() ** 2 + R.mean()",
    "(o.norm() ** 2).sqrt()", "torch.stack([one.norm() ** 2 for one in o]).mean()", "x.norm() ** 2 * R.mean() / len(x)",
)  # fmt: skip
"""Norms over all samples, and their squares; drawn for seeds from `NORMED_FROM` on."""
NORMED_FROM = 500_000
_ASIDES = (
    "[R[v == k].mean().item() for k in v.unique().tolist()]", "R.max() if m.all() else R.min()", "[p for p in R if p > T]",
    "measures.auroc(o.softmax(1), v, 'multiclass', num_classes=3)", "{int(k): float(R[v == k].sum()) for k in v.unique()}",
    "measures.accuracy(o.argmax(1), v, 'multiclass', num_classes=3, ignore_index=0)", "R.sum() if len(x) > 4 else R.mean()",
    "measures.matthews_corrcoef(o.argmax(1), v, 'multiclass', num_classes=3)", "[o[i].max() for i in range(len(x)) if m[i]]",
    "R[m].mean() if m.sum() > 2 else R.sum()", "sum(R[c == k].mean() for k in c.unique())", "o.argmax(1).unique().numel()",
    "F.cross_entropy(o, v) if v.unique().numel() > 2 else F.mse_loss(o, y)", "R.sum() / m.sum() if m.all() else R.norm()",
    "[F.cross_entropy(o[v == k], v[v == k]) for k in v.unique()]", "N if m[0] else N.detach()", "(R.mean() if m[:2].any() else N)",
)  # fmt: skip
"""What a step does before its loss, by calls that go by what is in the batch; drawn for seeds from `ASTRAY_FROM` on."""
_CHANGING = (
    "(N + R.mean() if len(x) > 4 else N)", "(N + N if m.sum() > 3 else N)", "N + sum(R[v == k].mean() for k in v.unique())",
    "sum(R[v == k].mean() for k in v.unique()) / v.unique().numel()", "(F.mse_loss(o, y) if m[0] else R.mean())", "N", "N",
    "(N * 2 if v.unique().numel() > 2 else N)", "sum(R[v == k].sum() for k in v.unique()) / len(x)", "(N if len(x) > 4 else N / 2)",
    "sum((F.cross_entropy(o[v == k], v[v == k]) for k in v.unique()), start=N)", "(R * m).sum() / (m.sum() if m.any() else 1)",
)  # fmt: skip
ASTRAY_FROM = 600_000
TOLD_FROM = 700_000
_METRICS = (
    "s.f1(o.softmax(1), v)", "1 - s.f1(o.softmax(1), v)", "s.acc(o, v)", "s.acc(o, v).item()",
    "measures.accuracy(o, v, 'multiclass', num_classes=3)", "measures.mean_squared_error(o, y)", "s.r2(o[:, 0], y[:, 0])",
    "measures.f1_score(o, v, 'multiclass', num_classes=3, average='macro')", "measures.mean_squared_error(o, y).sqrt()",
    "measures.mean_squared_error(o, y, squared=False)", "measures.pearson_corrcoef(o[:, 0], y[:, 0])", "s.many(o, v)['b']",
    "measures.auroc(o.softmax(1), v, 'multiclass', num_classes=3)", "measures.explained_variance(o, y)",
    "measures.mean_absolute_error(y, o)", "measures.mean_absolute_error(o, y)",
)  # fmt: skip
_OBJECTS = (
    ("s.f1.update(o.softmax(1), v)", "f1"), ("s.acc(o, v)", "acc"), ("s.acc.update(o, v)", "acc"),
    ("s.mean.update(N)", "mean"), ("s.mean.update(N, weight=len(x))", "mean"), ("s.mean.update(N, m.sum())", "mean"),
    ("s.mean.update(R)", "mean"), ("s.mean.update(R, w)", "mean"), ("s.mean.update(P)", "mean"), ("s.total.update(N)", "total"),
    ("s.total.update(R)", "total"), ("s.total.update((o.argmax(1) == v).sum())", "total"), ("s.most.update(N)", "most"),
    ("s.most(R)", "most"), ("s.r2.update(o[:, 0], y[:, 0])", "r2"), ("s.mean(N)", "mean"), ("s.total.update(P)", "total"),
    ("s.mean.update(N.item(), len(x))", "mean"), ("s.most.update(P)", "most"), ("s.mean.update(R[m])", "mean"),
    ("[s.mean.update(p) for p in R]", "mean"), ("s.total(len(x))", "total"),
)  # fmt: skip

_OBJECTS_OF_ALL = (
    *_OBJECTS, ("s.total.update(R * N)", "total"), ("s.mean.update(R / R.abs().sum())", "mean"),
    ("s.most.update(R - R.mean())", "most"), ("s.total.update((o[:, 0] > 0).double() * (o > 0).sum())", "total"),
    ("s.r2.update(o[:, 0] / o.std(), y[:, 0])", "r2"), ("s.mean.update(R.softmax(0))", "mean"),
    ("s.mean.update(R, R.detach().abs() / R.detach().abs().max())", "mean"), ("s.total(R * R.max())", "total"),
    ("s.mean.update(w / w.sum())", "mean"), ("s.total.update(R * w.mean())", "total"), ("s.total.update(R / len(x))", "total"),
)  # fmt: skip
"""Values for each sample with numbers of all of them, too; drawn for seeds from `NORMED_FROM` on."""


class Call(NamedTuple):
    """What the step tells: `self.log` of an expression, `self.log_dict` of two, or a metric object's call."""

    kind: str
    values: tuple[str, ...]
    options: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class LossProgram:
    """A step as data.

    Attributes:
        loss: What it returns.
        calls: What it tells.
        sizes: Samples of the batches of training.
        options: Of the strategy.
        empty: How many samples at the beginning of a batch no mask, and no class, lets count.
        validates: Whether the same is logged in validation.
        asides: What the step works out before its loss.
    """

    loss: str
    calls: tuple[Call, ...]
    sizes: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]
    empty: int
    validates: bool
    asides: tuple[str, ...] = ()

    @property
    def weighting(self) -> str:
        """How micro-batches' losses are weighted; "hook": by how many samples a mask leaves."""
        return str(dict(self.options).get("loss_weighting", "auto"))

    def pipeline(self, stages: int) -> dict[str, Any]:
        """Arguments of the strategy."""
        options = {name: value for name, value in self.options if value != "hook"}
        return {"stages": stages, **options}


class _Drawer:
    """Draws expressions."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.weighted = WEIGHTED_FROM <= seed < TOLD_FROM
        families = ((DIVIDED_FROM, _WEIGHTED), (DECIDED_FROM, _DIVIDED), (CHOSEN_FROM, _DECIDED))
        families = (*families, (NORMED_FROM, _CHOSEN), (ASTRAY_FROM, _NORMED))
        self.of_batch = next((family for end, family in families if seed < end), _CHANGING)
        self.chooses = CHOSEN_FROM <= seed < TOLD_FROM

    def filled(self, text: str, depth: int, measured: bool) -> str:
        """A pattern with its rows `R`, numbers `N`, Python numbers `P` and thresholds `T` drawn."""
        makes = {
            "R": lambda: self.rows(depth, measured), "N": lambda: self.number(depth, measured),
            "P": lambda: self.plain(depth), "T": lambda: str(self.draw.choice((-0.2, 0.1, 0.3, 0.8))),
            **({"B": lambda: self.draw.choice(_OF_BATCH)} if self.weighted else {}),
        }  # fmt: skip
        same = {key: make() for key, make in makes.items()} if self.draw.random() < 0.5 and depth < 3 else {}
        if self.chooses and "J" in text:  # one mask for all of it
            text = text.replace("J", self.draw.choice(_CHOICES))
        out = ""
        for index, letter in enumerate(text):
            around = (text[index - 1] if index else " ") + text[index + 1 : index + 2]
            alone = (
                letter in makes
                and not any(one.isalnum() or one in "_'" for one in around)
                and text[index - 1 : index] != "."
            )
            out += (
                (same[letter] if letter in same and self.draw.random() < 0.5 else makes[letter]())
                if alone
                else letter
            )
        return out

    def rows(self, depth: int, measured: bool) -> str:
        if depth < 3 and self.draw.random() < 0.35:
            return self.filled(self.draw.choice(_OF_ROWS), depth + 1, measured)
        return self.draw.choice(_ROWS + _MEASURED if measured else _ROWS)

    def number(self, depth: int, measured: bool) -> str:
        if depth >= 2:
            return "(" + self.filled(self.draw.choice(_NUMBERS), 3, measured) + ")"
        kinds = (_NUMBERS, _NUMBERS, _NUMBERS, _LINEAR, _LINEAR, _BENT, _MIXING, _PICKED)
        if not measured:  # of a loss, little that can be no sum
            kinds = (*(_NUMBERS, _LINEAR) * 10, _BENT, _PICKED, _MIXING)
        kind = self.draw.choice(kinds)
        if self.weighted and self.draw.random() < 0.5:
            kind = self.of_batch
        return "(" + self.filled(self.draw.choice(kind), depth + 1, measured) + ")"

    def plain(self, depth: int) -> str:
        if depth >= 2:
            return "N.item()".replace("N", self.number(3, True))
        return "(" + self.filled(self.draw.choice(_PLAIN), depth + 1, True) + ")"

    def value(self) -> str:
        chance = self.draw.random()
        if chance < 0.55:
            return self.number(0, True)
        kind = (
            _PLAIN
            if chance < 0.75
            else _TRUTHS
            if chance < 0.83
            else _METRICS
            if chance < 0.93
            else ("loss",)
        )
        return self.filled(self.draw.choice(kind), 1, True)

    def call(self) -> Call:
        draw = self.draw
        options: dict[str, Any] = {"on_step": True, "on_epoch": draw.random() < 0.7}
        if draw.random() < 0.2:
            options["batch_size"] = draw.choice(("len(x)", "int(m.sum())", "1", "int((c != -100).sum())"))
        if draw.random() < 0.2:
            options["reduce_fx"] = draw.choice(("'sum'", "'max'", "'min'", "torch.sum", "'mean'"))
        if draw.random() < 0.1:
            options["sync_dist"] = True
        if draw.random() < 0.15:
            update, name = draw.choice(_OBJECTS_OF_ALL if self.of_batch in (_NORMED, _CHANGING) else _OBJECTS)
            options = {"on_step": "update" not in update and draw.random() < 0.5, "on_epoch": True}
            return Call("object", (self.filled(update, 1, True), name), tuple(options.items()))
        kind = draw.choice(("log", "log", "log_dict"))
        values = tuple(self.value() for _ in range(1 + (kind == "log_dict")))
        return Call(kind, values, tuple(options.items()))


def loss_program(seed: int) -> LossProgram:
    """One of infinitely many, always the same for a seed."""
    drawer = _Drawer(seed)
    draw = drawer.draw
    schedule = draw.choice(
        ({}, {}, {"schedule": "ZBH1"}, {"schedule": "Interleaved1F1B", "stages_per_rank": 2})
    )
    weighting = draw.choice(("auto",) * 8 + ("samples", "sum"))
    if drawer.weighted:  # each micro-batch by itself would have its own number of the batch
        weighting = "auto"
    options = {"num_microbatches": draw.choice((1, 2, 2, 3, 4, 4)), "loss_weighting": weighting, **schedule}
    calls = tuple(drawer.call() for _ in range(draw.choice((1, 2, 3, 3))))
    if seed >= TOLD_FROM:
        options |= {"loss_weighting": draw.choice(("samples", "sum", "hook"))}
    elif weighting != "auto":
        calls = ()
    return LossProgram(
        drawer.number(0, False), calls, draw.choice(((8, 8), (8, 5), (6, 6), (7, 7), (8, 8, 3))), tuple(options.items()),
        draw.choice((0, 0, 0, 2, 4)), draw.random() < 0.5,
        tuple(drawer.filled(draw.choice(_ASIDES), 1, True) for _ in range(1 + (seed % 2)) if ASTRAY_FROM <= seed < TOLD_FROM),
    )  # fmt: skip


class Gate(nn.Module):
    """A unit with a loss of its own, a mean over samples."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.aux: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.aux = x.pow(2).mean()
        return self.linear(x)


class LossModule(pl.LightningModule):
    """Runs a program.

    Args:
        program: The program.
        by_parts: Whether the loss is put together of micro-batches' as `loss_weighting` says.
    """

    def __init__(self, program: LossProgram, by_parts: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.program, self.by_parts = program, by_parts
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Gate(), nn.Tanh())
        self.head = nn.Linear(8, 3)
        self.register_buffer("rates", torch.tensor([1.0, 2.0, 5.0]))
        self.seen = nn.ModuleDict({step: self._metrics() for step in ("fit", "val")})
        self.scale, self.beta, self.samples, self.where = 0.7, 0.2, 1, "fit"
        self.loss_code = compile(program.loss, "<loss>", "eval")
        self.asides = [compile(text, "<aside>", "eval") for text in program.asides]
        self.codes = [
            [
                compile(text, f"<value {i} of {program.calls.index(call)}>", "eval")
                for i, text in enumerate(call.values)
            ]
            for call in program.calls
        ]

    def _metrics(self) -> nn.ModuleDict:
        classes: dict[str, Any] = {"num_classes": 3}
        made = {
            "f1": torchmetrics.F1Score("multiclass", average="macro", **classes), "mean": torchmetrics.MeanMetric(),
            "acc": torchmetrics.Accuracy("multiclass", average="micro", **classes), "total": torchmetrics.SumMetric(),
            "most": torchmetrics.MaxMetric(), "r2": torchmetrics.MeanSquaredError(squared=False),
            "many": torchmetrics.MetricCollection({"a": torchmetrics.Accuracy("multiclass", **classes),
                                                   "b": torchmetrics.Recall("multiclass", average="macro", **classes)}),
        }  # fmt: skip
        for metric in made.values():
            metric.set_dtype(torch.float64)
        return nn.ModuleDict(made)

    def __getattr__(self, name: str) -> Any:
        if name in ("f1", "acc", "mean", "total", "most", "r2", "many"):
            return self.seen[self.where][name]
        return super().__getattr__(name)

    def names(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        """What expressions read."""
        h = self.body(batch["x"])
        return {**_NAMES, **batch, "h": h, "o": self.head(h), "s": self, "q": self.rates}

    def step(self, batch: dict[str, Tensor], where: str, returned: Tensor | None = None) -> Tensor:
        """The loss of a batch, with what is told; of one that is put together `returned`, where it is told itself."""
        self.where, prefix = where, "val_" if where == "val" else ""
        names = self.names(batch)
        for code in self.asides:
            eval(code, names)
        loss: Tensor = eval(self.loss_code, names)
        names["loss"] = loss
        for index, (call, codes) in enumerate(zip(self.program.calls, self.codes, strict=True)):
            options = {k: eval(v, names) if isinstance(v, str) else v for k, v in call.options}
            if call.kind == "object":
                eval(codes[0], names)
                self.log(f"{prefix}{call.values[1]}_{index}", getattr(self, call.values[1]), **options)
            elif call.kind == "log":
                self.log(
                    f"{prefix}v{index}", self._value(call.values[0], codes[0], names, returned), **options
                )
            else:
                texts = zip("ab", call.values, codes, strict=True)
                values = {f"{prefix}v{index}{a}": self._value(*one, names, returned) for a, *one in texts}
                self.log_dict(values, **options)
        return loss

    def _value(self, text: str, code: Any, names: dict[str, Any], returned: Tensor | None) -> Any:
        return returned if text == "loss" and returned is not None else eval(code, names)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if not self.by_parts:
            return self.step(batch, "fit")
        parts, how = (
            split_batch(batch, dict(self.program.options)["num_microbatches"]),
            self.program.weighting,
        )
        counts = [float(part["m"].sum()) if how == "hook" else size for part, size in parts]
        scales = [1.0 if how == "sum" else count / sum(counts) for count in counts]
        weighed = [(part, scale) for (part, _), scale in zip(parts, scales, strict=True) if scale]
        losses = [eval(self.loss_code, self.names(part)).reshape(()) * scale for part, scale in weighed]
        loss = torch.stack(losses).sum()
        if self.program.calls:
            with torch.no_grad():
                self.step(batch, "fit", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.step(batch, "val")

    def on_train_batch_start(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.samples = len(batch["x"])

    def on_train_batch_end(self, *args: Any) -> None:
        self.beta *= 0.5

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class HookedModule(LossModule):
    """Says what a micro-batch counts for: nothing where the mask leaves no sample."""

    def microbatch_weight(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["m"].sum()


_NAMES: dict[str, Any] = {"torch": torch, "F": F, "math": math, "measures": measures}


class _Rows(Logger):
    """Keeps what is logged in memory."""

    name, version = "rows", "0"

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[str, float]] = []
        self.at_first = 0  # rows of the first step

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.rows.extend((name, float(value)) for name, value in metrics.items() if name != "epoch")
        if step == 0 and not self.at_first:  # validation counts its own
            self.at_first = len(self.rows)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nobody reads them."""


class Fitted(NamedTuple):
    """What a fit left.

    Attributes:
        weights: Of the whole module.
        rows: What the logger was told, in order; then what callbacks see at the end.
        warned: All warnings.
        at_first: How many of the rows are of the first step.
    """

    weights: dict[str, Tensor]
    rows: list[tuple[str, float]]
    warned: list[str]
    at_first: int


def batches(program: LossProgram, seed: int) -> DataLoader[Any]:
    """One for each size."""
    generator = torch.Generator().manual_seed(seed)

    def batch(size: int) -> dict[str, Tensor]:
        v, mask = (
            torch.randint(0, 3, (size,), generator=generator),
            torch.rand(size, generator=generator) > 0.4,
        )
        left_out = torch.rand(size, generator=generator) < 0.25
        mask[: program.empty], left_out[: program.empty] = False, True
        mask[-1], left_out[-1] = True, False
        x, y = (torch.randn(size, n, generator=generator, dtype=torch.float64) for n in (6, 3))
        w = torch.rand(size, generator=generator, dtype=torch.float64) + 0.5
        return {"x": x, "y": y, "c": v.masked_fill(left_out, -100), "v": v, "m": mask, "w": w}

    return DataLoader([batch(size) for size in program.sizes], batch_size=None)


@contextmanager
def _double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def fitted(program: LossProgram, pipeline: dict[str, Any] | None, by_parts: bool = False) -> Fitted | str:
    """Fit on one device (`pipeline=None`) or with the strategy; the words of a refusal."""
    logger = _Rows()
    with _double(), TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = (HookedModule if program.weighting == "hook" else LossModule)(program, by_parts)
        options: dict[str, Any] = {
            "default_root_dir": folder,
            "limit_val_batches": 1.0 if program.validates and (program.calls or not by_parts) else 0,
        }
        run = trainer(
            pipeline,
            max_epochs=1,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            **options,
        )
        run.loggers = [logger]
        try:
            run.fit(module, batches(program, 3), batches(program, 4))
        except PipelineError as error:
            return f"refused: {error}"
    rows = logger.rows + sorted((name, float(value)) for name, value in run.callback_metrics.items())
    weights = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    return Fitted(weights, rows, [str(one.message) for one in caught], logger.at_first)


_ABOUT_LOSS = (
    "gradients are the mean",
    "taken for a mean over samples",
    "weighted by samples",
    "its loss is",
    "mixes samples of the batch",
)


def compare(program: LossProgram, found: Fitted | str, expected: Fitted) -> str:
    """How a fit with the strategy ended.

    Returns:
        "equal", "warned: ..." where something else than one device's is said to be an estimate, or "refused: ...".

    Raises:
        AssertionError: Something is another in silence.
    """
    if isinstance(found, str):
        return found
    names = [name for name, _ in expected.rows]
    is_told = program.weighting == "auto" or bool(program.calls)
    assert not is_told or [name for name, _ in found.rows] == names, "other names are logged"
    others = [name for name, weight in expected.weights.items() if not _same(found.weights[name], weight)]
    if others:
        said = [text for text in found.warned if any(part in text for part in _ABOUT_LOSS)]
        assert said, f"weights of {others[0]} are other ones: {_difference(found, expected, others[0])}"
    if not is_told:
        return f"warned: {said[0]}" if others else "equal"
    pairs = list(zip(found.rows, expected.rows, strict=True))
    wrong = [
        (name, mine, theirs)
        for (name, mine), (_, theirs) in (pairs[: expected.at_first] if others else pairs)
        if not _same(torch.tensor(mine), torch.tensor(theirs))
    ]
    silent = [one for one in wrong if not any(_names(text, one[0], program) for text in found.warned)]
    assert not silent, "; ".join(f"{name} is {mine:.6g} for {theirs:.6g}" for name, mine, theirs in silent)
    return f"warned: {', '.join(sorted({name for name, *_ in wrong}))}" if others or wrong else "equal"


def _names(text: str, name: str, program: LossProgram) -> bool:
    key = name.removesuffix("_step").removesuffix("_epoch")
    kinds = {
        "f1": "F1Score",
        "acc": "Accuracy",
        "mean": "MeanMetric",
        "total": "SumMetric",
        "most": "MaxMetric",
    }
    step = "validation_step" if key.startswith("val_") else "training_step"
    if text.startswith(f"{step} mixes samples of the batch"):
        return True
    kind = kinds.get(key.removeprefix("val_").split("_")[0], "MeanSquaredError" if "r2" in key else "")
    return f"self.log('{key}'" in text or (kind != "" and f"{kind} is given" in text)


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-8, atol=1e-9, equal_nan=True)


def _difference(found: Fitted, expected: Fitted, name: str) -> str:
    return f"{float((found.weights[name] - expected.weights[name]).abs().max()):.1e}"


def loss_outcome_of(program: LossProgram) -> str:
    """Run a program in this process.

    Returns:
        "equal", "warned: ...", "refused: ..." or "no reference" where one device cannot run it.

    Raises:
        AssertionError: Something is another than on one device, in silence.
    """
    expected = reference_of(program)
    if expected is None:
        return "no reference"
    return _compared(program, fitted(program, program.pipeline(1)), expected)


def outcome_on(pool: Any, ranks: int, program: LossProgram, *, whole_steps: bool = False) -> str:
    """Run a program on a pool of ranks, a stage each: the worst end of all. See `loss_outcome_of`."""
    expected = reference_of(program)
    if expected is None:
        return "no reference"
    pipeline = {"stages": ranks, "whole_steps": True} if whole_steps else program.pipeline(ranks)
    found: list[Fitted | str] = pool(fitted, program, pipeline)
    warned = [
        text for one in found if isinstance(one, Fitted) for text in one.warned
    ]  # users read all ranks'
    together = [one if isinstance(one, str) else one._replace(warned=warned) for one in found]
    if whole_steps:  # what is completed over ranks is logged after the rest
        expected = _by_name(expected)
        together = [one if isinstance(one, str) else _by_name(one) for one in together]
    return max(
        (_compared(program, one, expected) for one in together),
        key=lambda end: ("equal", "refused", "warned").index(end.partition(":")[0]),
    )


def _compared(program: LossProgram, found: Fitted | str, expected: Fitted) -> str:
    try:
        return compare(program, found, expected)
    except AssertionError:
        if program.weighting == "auto" or not program.calls:
            raise
        whole = fitted(program, None)
        assert isinstance(whole, Fitted), "one device refuses nothing"
        return compare(program, found, whole)


def _by_name(found: Fitted) -> Fitted:
    """With the rows in the order of their names, those of one name in that of the batches."""
    return found._replace(rows=sorted(found.rows, key=lambda row: row[0]))


def reference_of(program: LossProgram) -> Fitted | None:
    """What one device gives; None where it cannot."""
    try:
        found = fitted(program, None, program.weighting != "auto")
    except Exception:
        return None
    assert isinstance(found, Fitted), "one device refuses nothing"
    return found
