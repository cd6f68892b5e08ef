"""Boolean masks and lengths from the batch: shapes that depend on data, which every stage has."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.unit.split.nets import MORE_CUTS, WIDTH, Net, assert_works, batch_of


def masked_batch() -> dict[str, torch.Tensor]:
    batch = batch_of(4, 6)
    generator = torch.Generator().manual_seed(3)
    batch["mask"] = torch.rand(4, 6, generator=generator) > 0.4
    batch["lengths"] = torch.tensor([6, 4, 5, 2])
    return batch


class Unpadded(Net):
    """Only the positions of the mask go through the layers, and are put back."""

    def body(self, h):
        raise NotImplementedError

    def training_step(self, batch, batch_idx):
        mask = batch["mask"]
        h = self.emb(batch["x"])
        picked = h[mask]
        for layer in self.layers:
            picked = layer(picked)
        h = h.clone()
        h[mask] = picked
        chosen = torch.masked_select(h, mask[..., None])
        return F.mse_loss(self.head(h)[mask], batch["y"][mask]) + chosen.pow(2).mean()


def test_positions_that_a_mask_of_the_batch_selects_cross_every_cut():
    assert_works(Unpadded, batch=masked_batch(), cuts=MORE_CUTS)


class Tagger(Net):
    """Packed sequences through recurrent layers."""

    def __init__(self) -> None:
        super().__init__()
        self.rnns = nn.ModuleList([nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(2)])
        self.double()

    def training_step(self, batch, batch_idx):
        packed = pack_padded_sequence(
            self.emb(batch["x"]), batch["lengths"], batch_first=True, enforce_sorted=False
        )
        for rnn in self.rnns:
            packed, _ = rnn(packed)
        h, lengths = pad_packed_sequence(packed, batch_first=True, total_length=6)
        assert lengths.tolist() == batch["lengths"].tolist()
        return self.loss(self.body(h), batch)


def test_packed_sequences_cross_every_cut():
    assert_works(Tagger, batch=masked_batch(), cuts=[["rnns.0"], ["rnns.1"], ["rnns.1", "layers.1"]])


class Moved(Net):
    """As the losses of pytorch-metric-learning: a weight is moved to where the input is, in each forward."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

        def forward(self, x):
            self.weight.data = self.weight.data.to(device=x.device, dtype=x.dtype)
            return torch.tanh(x) @ self.weight

    def __init__(self) -> None:
        super().__init__(Moved.Block)


def test_a_weight_that_is_moved_in_each_forward_is_traced():
    assert_works(Moved, cuts=MORE_CUTS)


class Graph(Net):
    """As layers of torch_geometric: each chooses among the edges, which are the batch's, by their values."""

    class Layer(nn.Linear):
        def forward(self, x, edges):
            source, target = edges[:, :, 0].flatten(), edges[:, :, 1].flatten()
            kept = source != target
            rows = super().forward(x).flatten(0, 1)
            rows = rows.index_add(0, target[kept], rows[source[kept]])
            return torch.tanh(rows.view_as(x))

    def __init__(self) -> None:
        super().__init__(lambda: Graph.Layer(WIDTH, WIDTH))
        self.double()

    def training_step(self, batch, batch_idx):
        h = self.emb(batch["x"])
        for layer in self.layers:
            h = layer(h, batch["edges"])
        return self.loss(h, batch)


def test_layers_that_look_at_values_of_the_batch_may_be_parted():
    batch = masked_batch()
    batch["edges"] = torch.randint(0, 6, (4, 6, 2), generator=torch.Generator().manual_seed(4))
    assert_works(Graph, batch=batch, cuts=MORE_CUTS)


class Marked(Net):
    """As UDOP: a mask is made like a value of a unit, and then set by what the batch says."""

    def training_step(self, batch, batch_idx):
        h = self.emb(batch["x"])
        marks = torch.full_like(h[..., 0], 1.0).bool()
        marks[:, batch["lengths"].min() - 1] = False
        total = h.new_zeros(())
        for layer in self.layers:
            picked = layer(h[marks])
            h = torch.zeros_like(h)
            h[marks] = picked
            total = total + picked.pow(2).mean()
        return self.loss(h, batch) + total


def test_a_mask_made_like_a_value_has_values_on_every_stage():
    assert_works(Marked, batch=masked_batch(), cuts=MORE_CUTS)
