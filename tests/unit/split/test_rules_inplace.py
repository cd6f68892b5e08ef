"""R1 and R0: code between units that changes values in place."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.unit.split.nets import MORE_CUTS, WIDTH, Net, assert_refused, assert_works, same_or_refused


class AddedPosition(Net):
    def __init__(self) -> None:
        super().__init__()
        self.pos = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))

    def body(self, h: Tensor) -> Tensor:
        h += self.pos
        return super().body(h)


class InplaceResidual(Net):
    def body(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            r = h
            h = layer(h)
            h += r
        return h


class MulInplace(Net):
    def body(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(h)
            h.mul_(1.5).add_(0.1)
        return h


class SetItem(Net):
    def __init__(self) -> None:
        super().__init__()
        self.cls = nn.Parameter(torch.randn((), dtype=torch.float64))

    def body(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(h)
            h[:, 0] = self.cls
        return h


class InplaceActivation(Net):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.LeakyReLU(0.3, inplace=True)

    def body(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            h = self.act(layer(h) - 0.1) if layer is self.layers[1] else self.act(layer(h))
        return h


class HookInplace(Net):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.register_forward_hook(lambda m, i, o: o.mul_(1.5))


class HookReplaces(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1].register_forward_hook(lambda m, i, o: o * 1.5)
        self.layers[2].register_forward_pre_hook(lambda m, i: (i[0] - 0.5,))


class WriteThroughView(Net):
    def body(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(h)
            h[:, 1:].select(1, 0).mul_(3.0)
            h.narrow(1, 0, 1).copy_(h[:, 2:3] * 2)
        return h


class BufferOfSlots(Net):
    """Real memory that glue fills with outputs of several units."""

    def body(self, h: Tensor) -> Tensor:
        out = h.new_zeros(h.shape[0], len(self.layers), WIDTH)
        for i, layer in enumerate(self.layers):
            h = layer(h)
            out[:, i] = h
        return out.sum(1)


class ViewAdd(Net):
    def body(self, h: Tensor) -> Tensor:
        buf = torch.zeros(h.shape[0], 2, WIDTH, dtype=h.dtype)
        buf[:, 0].add_(h)
        buf.select(1, 1).copy_(self.layers[0](h))
        for layer in self.layers[1:]:
            buf = layer(buf)
        return buf.mean(1)


class CopyInto(Net):
    def body(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            fresh = torch.empty_like(h)
            fresh.copy_(layer(h))
            h = fresh
        return h


class MaskedFillByPlaceholder(Net):
    def body(self, h: Tensor) -> Tensor:
        gate = torch.ones(h.shape[0], WIDTH, dtype=h.dtype)
        g = self.layers[0](h)
        gate.masked_fill_(g > 0, 0.5)
        for layer in self.layers[1:]:
            h = layer(h * gate)
        return h


class ChangedAndSkip(Net):
    """The changed value is read as it was before, by a later stage, through a copy."""

    def body(self, h: Tensor) -> Tensor:
        skip = h.clone()
        h *= 2
        h = self.layers[0](h)
        first = h
        h = self.layers[1](h)
        first += 1.0
        h = self.layers[2](h + first)
        return self.layers[3](h + skip + first)


class ViewOfOutput(Net):
    """Glue changes a view; the base is read on."""

    def body(self, h: Tensor) -> Tensor:
        h = self.layers[1](self.layers[0](h))
        left, right = h[:, :2], h[:, 2:]
        right.mul_(0.5)
        left.add_(1.0)
        h = self.layers[2](h)
        return self.layers[3](h + torch.cat([right, left], 1))


class IntoBatch(Net):
    def training_step(self, batch, batch_idx):
        batch["x"].div_(2)
        return super().training_step(batch, batch_idx)


class FilledMask(Net):
    def body(self, h: Tensor) -> Tensor:
        mask = h.new_zeros(WIDTH)
        mask[1:] = 1.0
        for layer in self.layers:
            h = layer(h) * mask
            h.masked_fill_(mask == 0, 0.25)
        return h


class DropoutInplaceEval(Net):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.0, inplace=True)
        self.silu = nn.SiLU(inplace=True)

    def body(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            h = self.silu(self.drop(layer(h)))
        return h


class InplaceSkip(Net):
    """ResNet style: two branches, `+=`, in-place ReLU."""

    def body(self, h: Tensor) -> Tensor:
        for first, second in ((0, 1), (2, 3)):
            identity = h
            out = self.layers[second](self.layers[first](h))
            out += identity
            h = F.relu_(out)
        return h


@pytest.mark.parametrize(
    "kind",
    [
        AddedPosition, InplaceResidual, MulInplace, SetItem, InplaceActivation, HookInplace, HookReplaces,
        WriteThroughView, BufferOfSlots, ViewAdd, CopyInto, MaskedFillByPlaceholder, ChangedAndSkip,
        ViewOfOutput,
        IntoBatch, FilledMask, DropoutInplaceEval, InplaceSkip,
    ],
)  # fmt: skip
def test_in_place_code_between_units_equals_one_process(kind):
    assert_works(kind, num_microbatches=3)


class ActsFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.LeakyReLU(0.2, inplace=True)
        self.m = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.m(self.act(x))


class PreActivation(Net):
    """A unit changes its input in place; nobody else reads that."""

    def __init__(self) -> None:
        super().__init__(ActsFirst)


class PreActivationWithSkip(PreActivation):
    """The value a unit changed in place is read afterwards too."""

    def body(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(h) + h
        return h


class SkipReadLate(PreActivation):
    def body(self, h: Tensor) -> Tensor:
        skip = h
        for layer in self.layers:
            h = layer(h)
        return h + skip


def test_a_unit_that_changes_its_input_in_place_works_where_nobody_else_reads_it():
    assert_works(PreActivation)


@pytest.mark.parametrize("kind", [PreActivationWithSkip, SkipReadLate])
def test_a_unit_that_changes_what_others_read_is_right_or_refused(kind):
    same_or_refused(kind, "beside its output|kept together|are together")


class ReturnsInput(Net):
    """A unit that hands its (changed) input out again."""

    class Through(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.m = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.m(x), x

    def __init__(self) -> None:
        super().__init__(ReturnsInput.Through)

    def body(self, h: Tensor) -> Tensor:
        total = 0.0
        for layer in self.layers:
            h, before = layer(h)
            h += 0.5
            total = total + before
        return h + total


class TwoViews(Net):
    """A unit returns two views of one memory, and glue changes one of them."""

    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.m = nn.Linear(WIDTH, 2 * WIDTH)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            both = self.m(x)
            return both[:, :WIDTH] * 1, both.view(-1, 2 * WIDTH)

    def __init__(self) -> None:
        super().__init__(TwoViews.Halves)

    def body(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            h, both = layer(h)
            both.tanh_()
            h = h + both[:, WIDTH:]
        return h


class SharedMemory(Net):
    """Two outputs of a unit share memory, and a write into one is seen in the other."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.m = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            out = self.m(x)
            return out, out

    def __init__(self) -> None:
        super().__init__(SharedMemory.Twice)

    def body(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            h, same = layer(h)
            same.mul_(2.0)
        return h


class LastState(Net):
    """Each layer returns all states and the last of them, which nobody reads."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.m = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            out = self.m(x)
            return out, out[-1:]

    def __init__(self) -> None:
        super().__init__(LastState.Layer)

    def body(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            residual = h
            h, _ = layer(h)
            h += residual
        return h


class LastStateBefore(LastState):
    """It is read, and only then what it is a part of is changed."""

    def body(self, h: Tensor) -> Tensor:
        total = 0.0
        for layer in self.layers:
            h, last = layer(h)
            total = total + last.sum()
            h.add_(0.5)
        return h + total


class LastStateAfter(LastState):
    def body(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            h, last = layer(h)
            h += 0.5
        return h + last


class LastStateUnseen(LastState):
    """The trace cannot follow the end of the step, which reads it."""

    def training_step(self, batch, batch_idx):
        h, last = self.layers[0](self.emb(batch["x"]))
        h += 0.5
        for layer in self.layers[1:]:
            h, _ = layer(h)
        out = self.head(h)
        assert len(out.detach().untyped_storage().tolist())
        return F.mse_loss(out, batch["y"]) + last.sum()


class Interleaved(Net):
    """Outputs in one memory, where none has an entry of another."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.m = nn.Linear(WIDTH, 2 * WIDTH)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            both = self.m(x).unflatten(-1, (2, WIDTH))
            return both[:, 0], both[:, 1]

    def __init__(self) -> None:
        super().__init__(Interleaved.Two)

    def body(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            one, other = layer(h)
            one *= 0.5
            h = torch.tanh(one + other)
        return h


class GivesItsInput(Net):
    """A layer that changes what it is given and returns that; code between changes it further."""

    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.m = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x += self.m.bias
            return x

    def __init__(self) -> None:
        super().__init__(GivesItsInput.Adds)

    def body(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(h)
            h += 0.5
        return h


class GivesBack(nn.Module):
    """Has a weight and gives back a view of what it is given, as an adapter that is switched off."""

    def __init__(self) -> None:
        super().__init__()
        self.m = nn.Linear(WIDTH, WIDTH)
        self.on = False

    def forward(self, x: Tensor) -> Tensor:
        return self.m(x) if self.on else x.view_as(x)


class TwoGiveBack(Net):
    """Two layers give back the same memory, and code between changes what one gave."""

    def __init__(self) -> None:
        super().__init__(GivesBack)

    def body(self, h: Tensor) -> Tensor:
        first, *others = self.layers
        h = h * 1
        changed = first(h)
        views = [layer(h) for layer in others]
        changed += 1.0
        return changed + sum(views)


class OneAfterTheOther(TwoGiveBack):
    """The second layer is given what the first gave back."""

    def body(self, h: Tensor) -> Tensor:
        changed = h = h * 1
        for layer in self.layers:
            changed = layer(changed)
        changed *= 0.5
        return changed + h


class Writes(nn.Module):
    """A layer that changes what it is given, as one that begins with `nn.ReLU(inplace=True)` does."""

    def __init__(self) -> None:
        super().__init__()
        self.m = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.m(x.tanh_())


class WrittenByALayer(SharedMemory):
    """A layer writes into one of two outputs in one memory, and the other is read."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = Writes()

    def body(self, h: Tensor) -> Tensor:
        h, same = self.layers[0](h)
        return self.layers[1](same) + self.layers[2](h)[0] + self.layers[3](h)[0]


class LooksAtNumbers(SharedMemory.Twice):
    """A layer that is traced on made-up values, for it looks at them."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x * 2 if float(x.detach().sum()) > 1e6 else x)


class SharedUnseen(SharedMemory):
    """Two outputs of such a layer share memory."""

    def __init__(self) -> None:
        Net.__init__(self, LooksAtNumbers)


class GivesBackUnseen(TwoGiveBack):
    """Such a layer gives back what it is given."""

    class Layer(GivesBack):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * 2 if float(x.detach().sum()) > 1e6 else x)

    def __init__(self) -> None:
        Net.__init__(self, GivesBackUnseen.Layer)


class WritesUnseen(WrittenByALayer):
    """Such a layer writes into what it is given."""

    class Layer(Writes):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (2.0 if float(x.detach().sum()) > 1e6 else 1.0)

    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = WritesUnseen.Layer()


class WrittenAfterAView(WrittenByALayer):
    """A layer writes into what another was given and gave back."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0] = GivesBack()

    def body(self, h: Tensor) -> Tensor:
        h = h * 1
        same = self.layers[0](h)
        return self.layers[1](h) + self.layers[2](same)[0] + self.layers[3](same)[0]


@pytest.mark.parametrize("kind", [LastState, LastStateBefore, Interleaved, GivesItsInput])
def test_one_of_several_outputs_in_one_memory_may_be_changed(kind):
    assert_works(kind, num_microbatches=3)


@pytest.mark.parametrize(
    "kind",
    [
        LastStateAfter, LastStateUnseen, SharedMemory, TwoGiveBack, OneAfterTheOther, WrittenByALayer,
        WrittenAfterAView, SharedUnseen, GivesBackUnseen, WritesUnseen,
    ],
)  # fmt: skip
def test_reading_what_was_changed_through_another_output_is_refused(kind):
    assert_refused(kind, r"memory of an output of unit 'layers.\d'.* read afterwards .*test_rules_inplace")


@pytest.mark.parametrize("kind", [ReturnsInput, TwoViews, SharedMemory])
def test_outputs_that_share_memory_are_right_or_refused(kind):
    same_or_refused(kind, "memory|beside its output|kept together|are together")


@pytest.mark.parametrize("kind", [InplaceResidual, ChangedAndSkip, ViewAdd])
@pytest.mark.parametrize("cut", MORE_CUTS, ids=",".join)
def test_the_place_of_the_cut_does_not_matter(kind, cut):
    assert_works(kind, cuts=[cut])
