"""Does it run on this machine's GPU, are the numbers those of one device, and what does it cost?

    python benchmarks/gpu.py                    everything, in one call; several ranks share one GPU
    python benchmarks/gpu.py --device cpu       the matrix without a GPU, to try the script out

Each case is a run in processes of its own: fit with validation, a checkpoint and a resume from it, test and
predict. Weights, metrics and predictions are compared with a run of the same module by one device without
this package. The figures at the end (synchronisation in a step, speed, messages, memory) need CUDA. The exit
status is 0 where every case and every bound holds.
"""

import copy
import inspect
import itertools
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jsonargparse
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipeline import PipelineStrategy
from lightning_pipeline.ranks import Groups
from lightning_pipeline.schedules import OneFOneB
from lightning_pipeline.wire import Layout, TensorSpec

# How far apart the numbers may be: additions in another order, at each precision.
TOLERANCE = {"32-true": 1e-4, "bf16-mixed": 3e-2, "bf16-true": 6e-2, "16-mixed": 1e-2}
TOKENS, WIDTH, VOCABULARY, SAMPLES = 16, 32, 64, 32


class Language(LightningModule):
    """Predicts the next token by the loss of a model's own, or by cross-entropy of its output."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model, self.name = model, name

    def loss(self, tokens: Tensor) -> Tensor:
        """Of a batch of token numbers, (samples, tokens)."""
        if self.name in ("gpt2", "llama"):
            loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
            return loss
        logits = self.model(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Log the loss."""
        loss = self.loss(batch[0])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Log the loss."""
        self.log("val_loss", self.loss(batch[0]))

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Log the loss."""
        self.log("test_loss", self.loss(batch[0]))

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """The loss."""
        return self.loss(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW; it takes no steps along gradients that are zero but for rounding, as of a key's bias.

        In bfloat16 that rounding is some 1e-6; with an eps of 1e-5 the bias went far enough to tell nothing.
        """
        return torch.optim.AdamW(self.parameters(), 1e-3, eps=1e-3)


class Layers(nn.Module):
    """Residual layers on embeddings, with batch norm on request."""

    def __init__(self, batch_norm: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        middle = nn.BatchNorm1d(TOKENS - 1) if batch_norm else nn.Identity()
        layers = (nn.Linear(WIDTH, WIDTH), middle, nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList(copy.deepcopy(nn.Sequential(*layers)) for _ in range(6))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of (samples, tokens) as (samples, tokens, vocabulary)."""
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        logits: Tensor = self.head(hidden)
        return logits


def make(name: str) -> Language:
    """The module of a case, the same in every process."""
    seed_everything(1, verbose=False)
    if name == "layers":
        return Language(Layers(batch_norm=False), name)
    if name == "batch norm":
        return Language(Layers(batch_norm=True), name)
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    if name == "gpt2":
        config = GPT2Config(
            vocab_size=VOCABULARY, n_positions=TOKENS, n_embd=WIDTH, n_layer=6, n_head=2, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        return Language(GPT2LMHeadModel(config), name)
    llama = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=6,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=TOKENS, bos_token_id=0,
        eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return Language(LlamaForCausalLM(llama), name)


def batches() -> DataLoader[Any]:
    """The data of every case."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(VOCABULARY, (SAMPLES, TOKENS), generator=generator)
    return DataLoader(TensorDataset(tokens), batch_size=8)


def trainer_of(case: dict[str, Any], folder: Path, **options: Any) -> Trainer:
    """With bar, logger and checkpoints, as users have it."""
    plugins = []
    precision = case["precision"]
    if precision == "16-mixed" and case["device"] == "cpu":  # Lightning would take bfloat16 there
        plugins, precision = [MixedPrecision("16-mixed", "cpu")], None
    strategy: Any = "auto"
    if case["pipeline"]:
        strategy = PipelineStrategy(**case["pipeline"])
    return Trainer(
        accelerator=case["device"], devices=1, num_nodes=case["ranks"], precision=precision, plugins=plugins,
        strategy=strategy, default_root_dir=folder, log_every_n_steps=1, **options,
    )  # fmt: skip


def run_case(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What is compared: weights, metrics and predictions, on the CPU."""
    data = batches()
    first = trainer_of(case, folder, max_epochs=1)
    first.fit(make(case["model"]), data, data)
    path = folder / "saved.ckpt"
    first.save_checkpoint(path)
    module, run = make(case["model"]), trainer_of(case, folder, max_epochs=2)
    whole = {"weights_only": False} if "weights_only" in inspect.signature(run.fit).parameters else {}
    run.fit(module, data, data, ckpt_path=path, **whole)
    metrics = {name: float(value) for name, value in run.callback_metrics.items()}
    metrics |= {name: float(value) for name, value in run.test(module, data, verbose=False)[0].items()}
    predicted = [one.float().cpu() for one in run.predict(module, data) or [] if one is not None]
    weights = {name: tensor.detach().float().cpu() for name, tensor in module.state_dict().items()}
    return {"weights": weights, "metrics": metrics, "predicted": predicted, "rank": run.global_rank}


# What is measured on CUDA


class Watched(PipelineStrategy):
    """In steps after the first ones, operations that make the host wait for the device are counted."""

    mode = "warn"
    """Or "error": the first one ends the run."""
    waits = 0

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """As ever, between two settings of CUDA."""
        assert self.lightning_module is not None
        if self.lightning_module.trainer.global_step < 5:
            return super().training_step(*args, **kwargs)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode(self.mode)
            try:
                return super().training_step(*args, **kwargs)
            finally:
                torch.cuda.set_sync_debug_mode("default")
                Watched.waits += sum("synchroniz" in str(one.message) for one in caught)


class Steps(Callback):
    """Seconds of each step, and what the allocator holds after it."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.reserved: list[int] = []

    def on_train_batch_start(self, *args: Any) -> None:
        """Start."""
        torch.cuda.synchronize()
        self._since = time.perf_counter()

    def on_train_batch_end(self, *args: Any) -> None:
        """Stop when the device has."""
        torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self._since)
        self.reserved.append(torch.cuda.memory_reserved())


def large() -> Language:
    """A GPT of 12 layers and width 1024."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=8192, n_positions=512, n_embd=1024, n_layer=12, n_head=16)
    seed_everything(1, verbose=False)
    return Language(GPT2LMHeadModel(config), "gpt2")


def steps_of(strategy: Any, folder: Path, accumulate: int, samples: int, steps: int = 60) -> Steps:
    """Steps of the large model."""
    tokens = torch.randint(8192, (samples * steps * accumulate, 512))
    watch = Steps()
    trainer = Trainer(
        accelerator="cuda", devices=1, precision="bf16-true", strategy=strategy, callbacks=[watch],
        max_epochs=1, default_root_dir=folder, enable_checkpointing=False, accumulate_grad_batches=accumulate,
    )  # fmt: skip
    trainer.fit(large(), DataLoader(TensorDataset(tokens), batch_size=samples))
    return watch


def figures(folder: Path) -> dict[str, Any]:
    """Host waits in a step, its time against the unsplit step's, and whether memory stays."""
    pipeline = {"stages": 1, "stages_per_rank": 4, "schedule": "LoopedBFS", "num_microbatches": 4}
    whole = steps_of("auto", folder, accumulate=4, samples=4)
    ours = steps_of(PipelineStrategy(**pipeline), folder, accumulate=1, samples=16)
    steps_of(Watched(**pipeline), folder, accumulate=1, samples=16, steps=10)
    Watched.mode, error = "error", "none"
    try:
        steps_of(Watched(**pipeline), folder, accumulate=1, samples=16, steps=10)
    except RuntimeError as raised:
        error = str(raised).splitlines()[0]
    unsplit = statistics.median(sum(whole.seconds[i : i + 4]) for i in range(20, len(whole.seconds) - 3, 4))
    split = statistics.median(ours.seconds[5:])
    kept = [ours.reserved[n] / 2**20 for n in (5, -1)]
    return {
        "milliseconds of an unsplit step of 4 accumulated batches": 1e3 * unsplit,
        "ratio of a step of 4 stages and 4 micro-batches to it": split / unsplit,
        "host waits in 5 steps": Watched.waits,
        'error with set_sync_debug_mode("error")': error,
        "MiB reserved after step 5 and at the end": kept,
        "missed": [
            text
            for text, holds in (
                ("a step within 2 % of the unsplit one", split <= 1.02 * unsplit),
                ("no host wait in a step", Watched.waits == 0 and error == "none"),
                ("memory reserved constant after step 5", kept[0] == kept[1]),
            )
            if not holds
        ],
    }


def message(mebibytes: int = 64, count: int = 50) -> dict[str, Any]:
    """Microseconds of a message between two processes of one GPU, by CUDA's IPC."""
    rank = int(os.environ["NODE_RANK"])
    device = torch.device("cuda", 0)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    groups = Groups(OneFOneB().plan(2, 1), copies="only", device=device)
    (edge,) = groups.edges.values()
    size = mebibytes * 2**20
    layout = Layout((TensorSpec((size,), (1,), torch.uint8, False),), start=0)
    tensor = torch.zeros(size, dtype=torch.uint8, device=device)
    marks = []
    for number in range(count):
        if rank == 1:
            edge.send(layout, [tensor])
        else:
            edge.receive(layout).tensors()
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()
        if number % 8 == 7:  # as messages go the other way in a step, and say what was copied
            groups.control.barrier().wait()
            told: list[Any] = [None, None]
            torch.distributed.all_gather_object(told, edge.copied, group=groups.control)
            edge.peer_copied(told[1 - rank])
    torch.cuda.synchronize()
    groups.close()
    if rank == 1:
        return {}
    gaps = [1e3 * before.elapsed_time(after) for before, after in itertools.pairwise(marks)]
    quickest = statistics.median(sorted(gaps[count // 2 :])[: count // 8])
    return {
        f"microseconds of a message of {mebibytes} MiB by IPC, in a row": quickest,
        "missed": [] if quickest < 100 else ["64 MiB by IPC within 100 microseconds"],
    }


# Processes


# Imported once, by a server that each process is forked from; importing them starts nothing on a device.
PRELOAD = [
    "lightning.pytorch",
    "lightning_pipeline",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
]


def work(case: dict[str, Any], log: str, environment: dict[str, str]) -> None:
    """One process of a case: run it and leave what it found in a file."""
    out = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(out, descriptor)
    os.environ.update(environment)
    torch.set_num_threads(1)
    folder = Path(case["folder"])
    found: Any
    if case["name"] == "figures":
        found = figures(folder)
    elif case["name"] == "message":
        found = message()
    else:
        found = run_case(case, folder)
    if environment["NODE_RANK"] == "0":
        torch.save(found, folder / "found.pt")


def start(case: dict[str, Any], seconds: float) -> dict[str, Any] | str:
    """Run a case, each rank as a node of its own, so that several can share a GPU.

    Returns:
        What rank 0 found, or the last line of what went wrong.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": "0"}
    logs = [Path(case["folder"]) / f"rank{rank}.log" for rank in range(case["ranks"])]
    processes = [
        context.Process(target=work, args=(case, str(log), {**common, "NODE_RANK": str(rank)}))
        for rank, log in enumerate(logs)
    ]
    until = time.monotonic() + seconds
    for process in processes:
        process.start()
    for process in processes:
        process.join(max(1.0, until - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    if any(codes) or None in codes:
        failed = [log for log, code in zip(logs, codes, strict=True) if code]
        text = [line.strip() for log in failed or logs for line in log.read_text().splitlines()]
        late = f"no end within {seconds:g} s"
        return next((line for line in reversed(text) if "Error" in line), late)
    found: dict[str, Any] = torch.load(Path(case["folder"]) / "found.pt", weights_only=True)
    return found


def farthest(found: Any, expected: Any) -> float:
    """The largest difference, relative to the largest number it is found in."""
    if isinstance(expected, dict):
        return max((farthest(found[name], value) for name, value in expected.items()), default=0.0)
    if isinstance(expected, list):
        assert len(found) == len(expected), "as many predictions as one device"
        return max((farthest(a, b) for a, b in zip(found, expected, strict=True)), default=0.0)
    a, b = torch.as_tensor(found).double(), torch.as_tensor(expected).double()
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-3)) if b.numel() else 0.0


def pipelines(device: str, num_microbatches: int) -> dict[str, tuple[int, dict[str, Any]]]:
    """Ranks and settings of each row, by its name."""
    common = {"num_microbatches": num_microbatches, "step_timeout": 120}
    host = {**common, "transport": "host", "process_group_backend": "gloo"}
    rows: dict[str, tuple[int, dict[str, Any]]] = {
        "1 rank x 4 stages": (
            1,
            {**common, "stages": 1, "stages_per_rank": 4, "schedule": "LoopedBFS"},
        ),
        "2 ranks, host": (2, {**host, "stages": 2}),
        "4 ranks, host, ZBH1": (4, {**host, "stages": 4, "schedule": "ZBH1"}),
    }
    if device == "cuda":
        ipc = {**common, "transport": "ipc", "process_group_backend": "gloo"}
        rows["2 ranks, ipc"] = (2, {**ipc, "stages": 2})
        rows["4 ranks, ipc, ZBV"] = (4, {**ipc, "stages": 4, "schedule": "ZBV"})
        if torch.cuda.nccl.version() >= (2, 30, 3):  # older ones refuse two ranks of one GPU
            os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
            rows["2 ranks, nccl"] = (2, {**common, "stages": 2, "transport": "nccl"})
    return rows


def measure(
    device: Literal["cuda", "cpu"] = "cuda",
    models: tuple[str, ...] = ("layers", "batch norm", "gpt2", "llama"),
    precisions: tuple[str, ...] = ("32-true", "bf16-mixed", "bf16-true", "16-mixed"),
    seconds: float = 120.0,
    figures: bool = True,
) -> None:
    """Run everything and print a line per case.

    Args:
        device: Where.
        models: Rows of the matrix. With "batch norm" a batch is not cut: one device sees it whole.
        precisions: Columns.
        seconds: Longest time of a case.
        figures: Whether to measure on CUDA what steps and messages cost.
    """
    if device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here; --device cpu tries the script out")
        raise SystemExit(1)
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"{where}, torch {torch.__version__}")
    failed = 0
    with tempfile.TemporaryDirectory() as root:

        def case(name: str, **values: Any) -> dict[str, Any] | str:
            folder = tempfile.mkdtemp(dir=root)
            return start({"name": name, "device": device, "folder": folder, **values}, seconds)

        for model in models:
            for precision in precisions:
                failed += _compare(
                    case, model, precision, pipelines(device, 1 if model == "batch norm" else 4)
                )
        if device == "cuda" and figures:
            for name, ranks in (("figures", 1), ("message", 2)):
                found = case(name, ranks=ranks)
                if isinstance(found, str):
                    print(found)
                    failed += 1
                else:
                    failed += len(found["missed"])
                    print("\n".join(f"{what}: {value}" for what, value in found.items()))
    print(f"{failed} cases failed")
    raise SystemExit(failed > 0)


def _compare(
    case: Callable[..., dict[str, Any] | str], model: str, precision: str,
    rows: dict[str, tuple[int, dict[str, Any]]],
) -> int:  # fmt: skip
    expected = case("one device", model=model, precision=precision, ranks=1, pipeline=None)
    if isinstance(expected, str):
        print(f"{model:12} {precision:12} one device: {expected}")
        return 1
    failed = 0
    for row, (ranks, pipeline) in rows.items():
        found = case(row, model=model, precision=precision, ranks=ranks, pipeline=pipeline)
        if isinstance(found, str):
            failed, text = failed + 1, found
        else:
            parts = {
                part: farthest(found[part], expected[part]) for part in ("weights", "metrics", "predicted")
            }
            failed += max(parts.values()) > TOLERANCE[precision]
            text = ", ".join(f"{part} {value:.1e}" for part, value in parts.items())
        print(f"{model:12} {precision:12} {row:22} {text}", flush=True)
    return failed


if __name__ == "__main__":
    # jsonargparse before 4.41 has it under another name
    getattr(jsonargparse, "auto_cli", jsonargparse.CLI)(measure, as_positional=False)
