"""What is built without weights gets, part by part, the weights of one device, bit for bit."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_pipeline.errors import SplitError
from lightning_pipeline.model.construction import Construction, Recorder, named_states
from tests.unit.construction.built import TORCH, Make, hugging_face

CHOSEN = ("gpt2", "t5", "vit", "mixtral", "mamba", "wav2vec2")  # the others: benchmarks/staged.py


def parts(make: Make, number: int) -> tuple[list[dict[str, Tensor]], dict[str, Tensor], list[Tensor]]:
    """What each of some stages makes, what one device has, and generators' states at the end."""
    torch.manual_seed(7)
    whole = dict(named_states(make()))
    states, made = [torch.get_rng_state()], []
    for stage in range(number):
        torch.manual_seed(7)
        recorder = Recorder()
        with recorder.recording():
            module = make()
        states.append(torch.get_rng_state())
        construction = Construction(module, recorder)
        names = list(whole)
        construction.make(set(names[len(names) * stage // number : len(names) * (stage + 1) // number]))
        states.append(torch.get_rng_state())
        assert list(dict(named_states(module))) == names
        found = dict(named_states(module))
        assert {n: type(t) for n, t in found.items()} == {n: type(t) for n, t in whole.items()}
        assert {n: (t.shape, t.dtype) for n, t in found.items()} == {
            n: (t.shape, t.dtype) for n, t in whole.items()
        }
        assert {n: t.requires_grad for n, t in found.items()} == {
            n: t.requires_grad for n, t in whole.items()
        }
        made.append({name: tensor for name, tensor in found.items() if not tensor.is_meta})
    return made, whole, states


@pytest.mark.parametrize("name", TORCH)
def test_modules_of_torch(name: str) -> None:
    assert_equal(TORCH[name], 2)


@pytest.mark.parametrize("name", CHOSEN)
def test_hugging_face_models(name: str) -> None:
    assert_equal(hugging_face()[name], 4)


def assert_equal(make: Make, number: int) -> None:
    made, whole, states = parts(make, number)
    assert all(torch.equal(states[0], state) for state in states[1:])
    together: dict[str, Tensor] = {}
    for found in made:
        assert len(found) < len(whole)
        for name, tensor in found.items():
            assert torch.equal(tensor, whole[name]), name
            assert tensor.stride() == whole[name].stride(), name
        together.update(found)
    assert together.keys() == whole.keys()


def build(make: Make) -> tuple[Any, Construction]:
    recorder = Recorder()
    with recorder.recording():
        module = make()
    return module, Construction(module, recorder)


def test_ties_attributes_and_references_hold() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.LSTM(4, 4)
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.second.weight = self.first.weight
            self.first.weight.no_decay = True  # type: ignore[attr-defined]
            self.known = [self.first.weight, torch.arange(3.0)]
            self.scale = torch.ones(2) * 3

    module, construction = build(Net)
    assert module.first.weight.is_meta
    assert module.scale.tolist() == [3, 3]
    assert module.known[1].tolist() == [0, 1, 2]
    construction.make()
    assert not construction
    assert module.second.weight is module.first.weight is module.known[0]
    assert module.first.weight.no_decay
    assert module.net._flat_weights[0] is module.net.weight_ih_l0
    module.net(torch.ones(2, 1, 4))[0].sum().backward()
    assert module.net.weight_ih_l0.grad is not None


def test_what_happens_after_the_constructor_counts() -> None:
    torch.manual_seed(1)
    expected = nn.Linear(3, 3)
    with torch.no_grad():
        expected.weight.mul_(2)
    torch.manual_seed(1)
    recorder = Recorder()
    with recorder.recording():
        module = nn.Linear(3, 3)
    with torch.no_grad():
        module.weight.mul_(2)
    construction = Construction(module, recorder)
    construction.make()
    assert torch.equal(module.weight, expected.weight)


def test_real_tensors_take_true_values() -> None:
    table = torch.zeros(3, 3)

    def make() -> nn.Module:
        net = nn.Linear(3, 3)
        table.copy_(net.weight.detach())
        return net

    torch.manual_seed(1)
    module, construction = build(make)
    construction.make()
    assert torch.equal(table, module.weight)


def test_values_from_outside_are_those_of_the_moment() -> None:
    table = torch.arange(40_000.0).reshape(200, 200)

    def make() -> nn.Module:
        net = nn.ModuleList([nn.Linear(200, 200, bias=False) for _ in range(2)])
        for part in net:
            part.weight.data.copy_(table)  # type: ignore[operator, union-attr, arg-type]
            table.mul_(2)
        return net

    module, construction = build(make)
    construction.make()
    assert torch.equal(module[1].weight, module[0].weight * 2)
    module, construction = build(lambda: make()[1:])
    table.add_(1)
    construction.make()
    recorder = Recorder()
    with recorder.recording():
        net = nn.Linear(200, 200)
        net.weight.data.copy_(table)
    late = Construction(net, recorder)
    table.add_(1)
    with pytest.raises(
        SplitError, match=r"shape \(200, 200\) that the constructor copied values from was changed"
    ):
        late.make()


def test_typed_in_values_stay_when_they_are_asked_for() -> None:
    def make() -> nn.Module:
        net = nn.Module()
        scale = torch.tensor([1.0, 2.0])
        scale.add_(1)
        net.asked = [one.item() for one in scale]
        net.register_buffer("scale", scale)
        return net

    module, _ = build(make)
    assert module.asked == [2, 3]
    assert module.scale.tolist() == [2, 3]


class Draws(TorchDispatchMode):
    """Counts normal numbers that are drawn into memory."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.normal_.default and type(args[0]) is Tensor
        return func(*args, **(kwargs or {}))


def test_questions_in_a_loop_do_not_draw_all_again() -> None:
    """Rejection sampling asks after each round of draws whether another is needed."""

    def make() -> nn.Module:
        net = nn.Linear(256, 256, bias=False)
        nn.init.trunc_normal_(net.weight, std=1.0, a=-1.0, b=1.0)
        return net

    torch.manual_seed(3)
    with Draws() as once:
        expected = make()
    torch.manual_seed(3)
    recorder = Recorder()
    with Draws() as asked, recorder.recording():
        module = make()
    Construction(module, recorder).make()
    assert torch.equal(module.weight, expected.weight)  # type: ignore[arg-type]
    assert once.count > 5
    assert (
        asked.count < 3 * once.count
    )  # drawn and dropped, and drawn for the question; not all rounds for each


def test_values_that_were_asked_for_may_be_changed_and_asked_for_again() -> None:
    def make() -> nn.Module:
        net = nn.Linear(32, 32)
        first = net.weight.detach().abs()
        total = first.sum()
        assert total > 0
        first.mul_(2)
        assert (first.sum() / total).item() == 2
        second = first + 1
        first.fill_(0.5)
        assert second.min() >= 1
        assert first.max() == 0.5
        net.weight.data.copy_(second / second.max())
        assert net.weight.max() == 1
        return net

    torch.manual_seed(3)
    expected = make()
    torch.manual_seed(3)
    module, construction = build(make)
    construction.make()
    assert torch.equal(module.weight, expected.weight)  # type: ignore[arg-type]


def test_pretrained_folders_are_read_in_parts(tmp_path: Path) -> None:
    import transformers as hf

    config = hf.GPT2Config(n_layer=2, n_embd=256, n_head=2, vocab_size=4096, bos_token_id=1, eos_token_id=1)
    hf.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    expected = hf.GPT2LMHeadModel.from_pretrained(tmp_path).state_dict()
    size = sum(tensor.nbytes for tensor in expected.values())
    gc.collect()
    before = anonymous()
    module, construction = build(lambda: hf.GPT2LMHeadModel.from_pretrained(tmp_path))
    assert anonymous() - before < size / 4
    construction.make()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in module.state_dict().items())
    assert module.lm_head.weight is module.transformer.wte.weight


@pytest.mark.parametrize("kind", ["torch", "safetensors"])
def test_states_that_are_loaded_in_the_constructor_are_read_in_parts(tmp_path: Path, kind: str) -> None:
    def layers() -> nn.Sequential:
        return nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)])

    expected, path = layers().state_dict(), tmp_path / "weights"
    size = sum(tensor.nbytes for tensor in expected.values())
    torch.save(expected, path) if kind == "torch" else save_file(expected, path)

    def make() -> nn.Module:
        net = layers()
        net.load_state_dict(torch.load(path, mmap=True) if kind == "torch" else load_file(path))
        return net

    gc.collect()
    before = anonymous()
    module, construction = build(make)
    construction.make({"0.weight", "0.bias"})
    assert anonymous() - before < size / 2
    assert torch.equal(module[0].weight, expected["0.weight"])
    assert module[7].weight.is_meta
    construction.make()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in module.state_dict().items())


def anonymous() -> int:
    """Bytes of this process that are no files'."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
