"""Devices, links, optimizers and rivals: predictions against figures worked out by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipeline.errors import ConfigurationError
from lightning_pipeline.forecast import DEVICES, Assumptions, Workload, device_named, forecast, rates
from lightning_pipeline.forecast.predict import predict
from lightning_pipeline.forecast.verdict import Rivals
from lightning_pipeline.forecast.workload.optimizer_states import optimizer_states
from lightning_pipeline.forecast.workload.times import estimated
from lightning_pipeline.model.tensors import Work
from tests.unit.planning.command import GPT, in_examples, refusal, run
from tests.unit.split.pipe import Module

__all__ = ["in_examples"]
ROOT = Path(__file__).resolve().parents[3]
H100 = DEVICES["h100"]
WIDTH, ROWS, WORDS = 64, 16, 4096


class Words(Module):
    """Layers, a head over many words, and a loss between units and the end; `make`: its optimizer."""

    def __init__(self, layers: int = 4, make: Any = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.make = make

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = layer(batch)
        logits = self.head(self.norm(batch))
        return torch.nn.functional.cross_entropy(logits, torch.zeros(len(batch), dtype=torch.int64))

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters()) if self.make is not None else None


class Layers(Module):
    """Equal layers alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(16))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = layer(batch)
        return batch.sum()


def workload(module: nn.Module) -> Workload:
    return Workload(module, (torch.zeros(ROWS, WIDTH), 0))


# ---- devices


def test_every_device_is_in_the_documentation_with_its_numbers_and_source() -> None:
    page = (ROOT / "docs" / "plan.md").read_text()
    for device in DEVICES.values():
        cells = (
            f"`{device.name}`", device.title, f"{device.peak['bf16'] / 1e12:,g}",
            f"{device.peak['fp32'] / 1e12:,g}", f"{device.memory / 2**30:g}", f"{device.bandwidth / 1e9:,g}",
            f"{device.link / 1e9:g}", f"{device.node_link / 1e9:g}", f"{device.node_size}",
        )  # fmt: skip
        assert f"| {' | '.join(cells)} | " in page, device.name
        assert device.source.split(",")[0].split(" ")[0].rstrip(";") in page


def test_a_device_that_is_not_known_is_refused_with_those_that_are() -> None:
    assert device_named("RTX 4090") is DEVICES["4090"]
    with pytest.raises(ConfigurationError, match="device 'h1000' is not known: use one of b200, h200, h100"):
        device_named("h1000")


def test_products_are_bound_by_arithmetic_and_norms_by_memory() -> None:
    known = Assumptions.of_device("h100")
    n = 4096
    product = Work(2.0 * n**3, 3.0 * n * n * 2, torch.bfloat16)
    norm = Work(0.0, 2.0 * n * n * 2, torch.bfloat16)
    assert known.seconds(product) == pytest.approx(2 * n**3 / (0.6 * 989e12))
    assert known.seconds(norm) == pytest.approx(4 * n * n / (0.8 * 3350e9))
    assert known.seconds(product._replace(dtype=torch.float32)) == pytest.approx(2 * n**3 / (0.6 * 67e12))


def test_float32_runs_as_fast_as_the_program_has_set_it() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert H100.flops(torch.float32) == 494e12
    finally:
        torch.set_float32_matmul_precision(before)
    assert H100.flops(torch.float32) == 67e12


def test_a_loss_over_many_words_is_on_the_last_stage_and_takes_memory_traffic() -> None:
    first, last = workload(Words()).stages(2)
    wide = [work for work in last.forward if not work.flops and work.num_bytes >= 2 * ROWS * WORDS * 4]
    assert len(wide) == 1  # log_softmax reads and writes all logits
    assert not [work for work in first.forward if work.num_bytes >= 2 * ROWS * WORDS * 4]
    slow = estimated([first, last], Assumptions(flops=1e30, bandwidth=1e6))
    fast = estimated([first, last], Assumptions(flops=1e30, bandwidth=2e6))
    assert slow.forward[1] == pytest.approx(2 * fast.forward[1])
    assert slow.forward[1] > 2 * ROWS * WORDS * 4 / 1e6


def test_a_hop_between_nodes_is_slower() -> None:
    work, link = workload(Words(8)), {"link_bytes": 1e9, "latency": 0.0, "flops": 1e30, "bandwidth": 1e30}
    size = ROWS * WIDTH * 4

    def step(**options: Any) -> float:
        found = predict(work, 4, 1, Assumptions(**link, **options))
        return next(one for one in found if one.name == "1F1B").step

    assert step() == pytest.approx(2 * 3 * size / 1e9)
    assert step(node_size=2, node_link_bytes=1e6) == pytest.approx(2 * (2 * size / 1e9 + size / 1e6))
    assert step(node_size=4, node_link_bytes=1e6) == step()


# ---- the optimizer


@pytest.mark.parametrize(
    ("make", "copies"),
    [
        (torch.optim.AdamW, 2),
        (lambda p: torch.optim.SGD(p, 0.1), 0),
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), 1),
        (lambda p: {"optimizer": torch.optim.Adam(p, amsgrad=True), "lr_scheduler": None}, 3),
    ],
)
def test_the_module_s_own_optimizer_says_what_it_keeps(make: Any, copies: int) -> None:
    module = Words(make=make)
    kept = optimizer_states(module)
    assert kept == {name: copies * 4.0 * p.numel() for name, p in module.named_parameters()}
    assert all(parameter.grad is None for parameter in module.parameters())
    held = predict(workload(module), 2, 2, Assumptions())[0].memory
    assert [rank.optimizer for rank in held] == [copies * rank.parameters for rank in held]
    asked = predict(workload(module), 2, 2, Assumptions(optimizer_copies=7))[0].memory
    assert [rank.optimizer for rank in asked] == [7 * rank.parameters for rank in asked]


def test_an_optimizer_that_needs_a_trainer_counts_as_adam() -> None:
    def make(parameters: Any) -> Any:
        raise RuntimeError("is not attached to a Trainer")

    assert optimizer_states(Words(make=make)) is None
    held = predict(workload(Words(make=make)), 2, 2, Assumptions())[0].memory
    assert [rank.optimizer for rank in held] == [2 * rank.parameters for rank in held]


# ---- rivals and rates


def test_ddp_hides_its_exchange_behind_the_last_backward() -> None:
    work = workload(Words())
    slow = {"flops": 1e9, "bandwidth": 1e30}
    times = work.times(1, Assumptions(**slow))
    hidden = Rivals(work, (4, 8), Assumptions(**slow, link_bytes=1e12))
    assert hidden.ddp == pytest.approx(2 * times.alone)
    gradients = sum(p.numel() for p in work.root.parameters()) * 4
    open_ = Rivals(work, (4, 8), Assumptions(**slow, link_bytes=1e6))
    assert open_.ddp == pytest.approx(2 * times.alone + 2 * gradients * 3 / 4 / 1e6 - sum(times.backward))
    assert Rivals(work, (4, 3), Assumptions(**slow)).ddp is None


def test_fsdp_is_named_where_one_device_does_not_hold_the_model() -> None:
    work = workload(Words(8))
    need = Rivals(work, (4, 8), Assumptions()).alone.total
    said = forecast(work, 4, 8, Assumptions(memory=0.9 * need)).verdict
    assert said.startswith("One device does not hold the model")
    # the head is most of the model, and FSDP holds it whole twice, and its gradient
    assert "FSDP would need " in said
    need = Rivals(workload(Layers()), (4, 8), Assumptions()).alone.total
    said = forecast(workload(Layers()), 4, 8, Assumptions(memory=0.9 * need)).verdict
    assert "FSDP on the same devices would take about" in said


def test_fsdp_gathers_the_weights_of_every_micro_batch() -> None:
    work, link = workload(Words()), Assumptions(flops=1e30, bandwidth=1e30, link_bytes=1e6)
    weights = sum(p.numel() for p in work.root.parameters()) * 4
    rival = Rivals(work, (4, 8), link).fsdp
    assert rival is not None
    assert rival.step == pytest.approx(2 * 3 * weights * 3 / 4 / 1e6)
    largest = WIDTH * WORDS * 4
    held = Rivals(work, (4, 8), link).alone
    assert rival.memory == pytest.approx(weights + held.activations + 4 * largest)  # four quarters of states


def test_rates_are_those_of_the_definition() -> None:
    stages = workload(Words()).stages(2)
    forward = 2 * ROWS * (4 * WIDTH**2 + WIDTH * WORDS)
    found = rates(stages, 0.5, 2, 4, Assumptions.of_device("h100"), samples=64, tokens=100)
    assert sum(stage.flops for stage in stages) == forward
    assert found.tflops_per_device == pytest.approx(3 * forward * 4 / 0.5 / 2 / 1e12)
    assert found.mfu == pytest.approx(found.tflops_per_device / 67)
    assert (found.samples_per_s, found.tokens_per_s, found.tokens_per_s_per_device) == (128, 800, 400)
    assert found.days(800 * 86400 * 3) == pytest.approx(3)
    assert found.text(800 * 86400 * 3).endswith("3 days for 2.07e+08 tokens")


# ---- models that are known


def test_llama_2_7b_is_what_is_worked_out_by_hand() -> None:
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        config = transformers.LlamaConfig(
            intermediate_size=11008, max_position_embeddings=4096, use_cache=False
        )
        module = Whole(transformers.LlamaForCausalLM(config.from_dict({**config.to_dict(), "dtype": None})))
    module.model.to(torch.bfloat16).gradient_checkpointing_enable()
    module.train()
    ids = torch.zeros(1, 4096, dtype=torch.int64)
    work = Workload(module, (ids, 0))
    stages = work.stages(8)
    assert sum(p.numel() for p in module.parameters()) == 6_738_415_616
    matrices = 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 32000 * 4096
    attention = 32 * 4 * 4096**2 * 4096
    assert sum(stage.flops for stage in stages) == pytest.approx(2 * matrices * 4096 + attention, rel=0.005)
    hidden = 4096 * 4096 * 2  # all that a checkpointed layer keeps is what it is given
    assert stages[1].activation_bytes == 4 * hidden
    # run again: all of a layer but the last matrix, whose input is the last that is saved
    again = 4 * (2 * 4096 * (4 * 4096**2 + 2 * 4096 * 11008) + attention / 32)
    assert sum(work.flops for call in _calls(work, 1) for work in call.recomputed) == pytest.approx(
        again, rel=0.01
    )


def _calls(work: Workload, stage: int) -> list[Any]:
    cut = work.partition(8)
    return [call for call in cut.trace.calls if cut.stage_of[call.unit] == stage]


class Whole(Module):
    """A model of transformers with its own loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch.is_floating_point():
            return self.model(batch).logits.square().mean()
        return self.model(input_ids=batch, labels=batch).loss


def test_vit_l_16_is_what_is_worked_out_by_hand() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    with torch.device("meta"):
        model = transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, num_labels=1000))
    work = Workload(Whole(model), (torch.zeros(2, 3, 224, 224), 0))
    assert sum(p.numel() for p in model.parameters()) == 304_326_632
    tokens, width = 197, 1024
    layer = 2 * tokens * 12 * width**2 + 4 * tokens**2 * width
    image = 24 * layer + 2 * 196 * 16 * 16 * 3 * width
    assert sum(stage.flops for stage in work.stages(4)) == pytest.approx(2 * image, rel=0.005)


# ---- the command

SMALL = [*GPT, "--batch", "16,65:int64", "--stages", "2"]


def test_a_device_by_name_sets_memory_speed_and_links(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, *SMALL, "--device", "h100", "--tokens", "1e9", "--link", "100")
    assert "NVIDIA H100 SXM 80 GB achieves 60% of its peak and 80% of its memory's 3,350 GB/s" in text
    assert "100 GB/s inside a node of 8 and at 50 GB/s between nodes. Memory of a device is 80.0 GiB" in text
    assert "(MFU " in text
    assert " for 1e+09 tokens" in text
    assert "the optimizer keeps what the module's own keeps after a step" in text


def test_the_report_is_also_plain_data(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(run(capsys, *SMALL, "--json", "--tokens", "1e9", "--schedule", "1F1B"))
    assert (found["chosen"], found["devices"], len(found["memory"])) == ("1F1B", 2, 2)
    assert found["days"] == pytest.approx(1e9 / found["rates"]["tokens_per_s"] / 86400)
    assert {"schedule", "step_s", "bubble", "peak_bytes", "fits", "stages_per_rank"} == set(
        found["schedules"][0]
    )


def test_pictures_are_written_as_their_suffix_says(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    run(capsys, *SMALL, "--svg", str(tmp_path / "a.svg"), "--png", str(tmp_path / "b.png"))
    assert (tmp_path / "a.svg").read_text().startswith("<svg")
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
    assert "x.pdf is neither .svg nor .png" in refusal(*SMALL, "--svg", "x.pdf")
    assert "device 'h1000' is not known" in refusal(*SMALL, "--device", "h1000")


def test_fewer_micro_batches_than_asked_for_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, *SMALL, "--num_microbatches", "32")
    assert "\n\n32 micro-batches were asked for; a batch of 16 makes 16.\n" in text
