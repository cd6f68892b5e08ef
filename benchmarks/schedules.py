"""Every schedule on stages that sleep: the measured step against the simulated makespan, ours and torch's.

    torchrun --nproc-per-node 4 benchmarks/schedules.py
    torchrun --nproc-per-node 4 benchmarks/schedules.py --slow_stage 2   # one stage takes twice as long

A rank's whole share of the model sleeps `nap_ms` in each of forward, input-gradient and weight-gradient half;
with two stages per rank each stage sleeps half of that. The simulator is given the naps as they were measured
in the same run. Rounds of all schedules alternate; medians are printed. "gain" is the time saved against
1F1B, as measured and as simulated.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from jsonargparse import auto_cli
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from lightning_pipeline.executor.executor import Executor
from lightning_pipeline.ranks.groups import Groups
from lightning_pipeline.schedules import Auto, Costs, Plan, get_schedule, simulate
from lightning_pipeline.wire.stage import Values

NAMES = (
    "1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "ZBH1", "ZBH2", "InterleavedZeroBubble", "ZBV", "VHalf",
    "VMin", "DualPipeV", "Auto",
)  # fmt: skip
IN_TORCH = {
    "1F1B": "1F1B", "GPipe": "GPipe", "Interleaved1F1B": "Interleaved1F1B", "LoopedBFS": "LoopedBFS",
    "InterleavedZeroBubble": "InterleavedZeroBubble", "ZBV": "ZBVZeroBubble", "DualPipeV": "DualPipeV",
}  # fmt: skip


class NapStage:
    """A stage of our runtime that only sleeps."""

    def __init__(self, index: int, last: bool, elements: int, seconds: float) -> None:
        self.index, self.last, self.seconds = index, last, seconds
        self.value = torch.ones(1, elements, requires_grad=True)

    def forward(self, microbatch: int, incoming: Values | None) -> Values | None:
        """Sleep and hand a value on."""
        time.sleep(self.seconds)
        return None if self.last else Values([self.value])

    def backward(self, microbatch: int, gradients: Any) -> list[Tensor | None] | None:
        """Sleep for both halves."""
        time.sleep(2 * self.seconds)
        return [self.value.detach()] if self.index else None

    def backward_input(self, microbatch: int, gradients: Any) -> list[Tensor | None] | None:
        """Sleep for the input gradient."""
        time.sleep(self.seconds)
        return [self.value.detach()] if self.index else None

    def backward_weight(self, microbatch: int) -> None:
        """Sleep for the weight gradient."""
        time.sleep(self.seconds)


class _Nap(torch.autograd.Function):
    """For torch's runtime: sleeps for each half of the backward that is asked for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        time.sleep(ctx.seconds * sum(ctx.needs_input_grad[:2]))
        return gradients[0].contiguous(), gradients[0].sum(), None


class NapModule(nn.Module):
    """A stage for torch's runtime. Its first stage's input needs no gradient, so it naps that half itself."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.ones(())), seconds

    def forward(self, x: Tensor) -> Tensor:
        """Sleep."""
        if not x.requires_grad:
            x = x.clone().requires_grad_()
        return _Nap.apply(x, self.weight, self.seconds)


class Ours:
    """Our executor with one plan."""

    def __init__(self, plan: Plan, seconds: float, elements: int, slow_stage: int | None = None) -> None:
        self.plan, self.groups = plan, Groups(plan)
        share = seconds * plan.num_ranks / plan.num_stages
        last = plan.num_stages - 1
        stages: Any = {
            s: NapStage(s, s == last, elements, share * (2 if s == slow_stage else 1))
            for s in plan.stages_of(self.groups.rank)
        }
        self.executor = Executor(stages, self.groups)
        self.naps: dict[tuple[int, str], list[float]] = defaultdict(list)

    def step(self) -> None:
        """Run the plan and keep what each nap took."""
        self.executor.run(self.plan, [0] * self.plan.num_microbatches)
        for event in self.executor.timeline:
            self.naps[event.action.stage, event.action.kind].append((event.ended - event.started) / 1e9)

    def simulated(self) -> float:
        """The makespan with the naps as measured, all ranks together."""
        return simulate(self.plan, self.costs()).makespan

    def costs(self) -> Costs:
        """The naps as measured, by stage, gathered from all ranks."""
        own = {key: statistics.median(times) for key, times in self.naps.items()}
        merged: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(merged, own)
        seconds = {key: value for part in merged for key, value in part.items()}
        stages = range(self.plan.num_stages)
        forward = [seconds[s, "F"] for s in stages]
        halves = [
            (seconds[s, "I"], seconds[s, "W"]) if (s, "I") in seconds else (seconds[s, "B"] / 2,) * 2
            for s in stages
        ]
        return Costs(forward, [i for i, _ in halves], [w for _, w in halves])


class Torchs:
    """torch's runtime with its schedule of the same name."""

    def __init__(self, name: str, num_microbatches: int, seconds: float, elements: int) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        cls = get_schedule_class(IN_TORCH[name])
        self.rank, self.size = rank, size
        self.batch = torch.ones(num_microbatches, elements)
        many = issubclass(cls, PipelineScheduleMulti)
        vee = name in ("ZBV", "DualPipeV")
        indices = [rank, 2 * size - 1 - rank if vee else size + rank] if many else [rank]
        total = size * len(indices)
        stages = [
            PipelineStage(NapModule(seconds / len(indices)), index, total, torch.device("cpu"))
            for index in indices
        ]
        self.last = total - 1 in indices
        options: Any = {"loss_fn": lambda output, target: output.sum()}
        self.schedule: Any = cls(stages if many else stages[0], num_microbatches, **options)

    def step(self) -> None:
        """One step of torch's runtime."""
        inputs = (self.batch,) if self.rank == 0 else ()
        options = {"target": self.batch, "losses": []} if self.last else {}
        self.schedule.step(*inputs, **options)


def timed(side: Any) -> float:
    """Seconds of one step on the slowest rank."""
    dist.barrier()
    begin = time.perf_counter()
    side.step()
    taken = torch.tensor(time.perf_counter() - begin)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def plan_of(name: str, size: int, num_microbatches: int) -> Plan:
    """The plan of a schedule; the planner gets equal halves and may hold two stages per rank."""
    if name == "Auto":
        return Auto(costs=Costs(1, 1, 1), max_stages_per_rank=2).plan(size, num_microbatches)
    return get_schedule(name).plan(size, num_microbatches)


def measure_uneven(num_microbatches: int, seconds: float, elements: int, rounds: int, slow: int) -> None:
    """One stage takes twice as long; the planner is given the naps as a first run measured them."""
    size = dist.get_world_size()
    first = Ours(plan_of("1F1B", size, num_microbatches), seconds, elements, slow)
    for _ in range(2):
        first.step()
    costs = first.costs()
    planned = Auto(costs=costs).plan(size, num_microbatches)
    sides = {"1F1B": first, "Auto": Ours(planned, seconds, elements, slow)}
    sides["Auto"].step()
    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        for name, side in sides.items():
            times[name].append(timed(side))
    simulated = {name: side.simulated() for name, side in sides.items()}
    if dist.get_rank() == 0:
        for name, measured in times.items():
            middle = statistics.median(measured)
            print(f"m={num_microbatches} slow stage {slow}: {name} {1e3 * middle:.1f} ms, simulated "
                  f"{1e3 * simulated[name]:.1f}")  # fmt: skip
    for side in sides.values():
        side.groups.close()


def measure(num_microbatches: int, seconds: float, elements: int, rounds: int, torchs: bool) -> None:
    """Measure and print one table."""
    size = dist.get_world_size()
    sides: dict[tuple[str, str], Any] = {}
    for name in NAMES:
        sides[name, "ours"] = Ours(plan_of(name, size, num_microbatches), seconds, elements)
        if torchs and name in IN_TORCH:
            sides[name, "torch"] = Torchs(name, num_microbatches, seconds, elements)
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for side in sides.values():
        side.step()
    for _ in range(rounds):
        for key, side in sides.items():
            times[key].append(timed(side))
    simulated = {name: sides[name, "ours"].simulated() for name in NAMES}
    if dist.get_rank() == 0:
        _print(num_microbatches, times, simulated)
    for (_, kind), side in sides.items():
        if kind == "ours":
            side.groups.close()


def _print(num_microbatches: int, times: dict[Any, list[float]], simulated: dict[str, float]) -> None:
    base = statistics.median(times["1F1B", "ours"])
    print(
        f"m={num_microbatches}: schedule, ms measured, simulated, ratio, gain measured, simulated; torch ms"
    )
    for name in NAMES:
        ours = statistics.median(times[name, "ours"])
        gain, expected = 1 - ours / base, 1 - simulated[name] / simulated["1F1B"]
        theirs = (
            f"{1e3 * statistics.median(times[name, 'torch']):8.1f}"
            if (name, "torch") in times
            else "       -"
        )
        print(
            f"{name:22s} {1e3 * ours:8.1f} {1e3 * simulated[name]:8.1f} {ours / simulated[name]:6.3f} "
            f"{gain:7.1%} {expected:7.1%} {theirs}",
            flush=True,
        )


def main(
    num_microbatches: Sequence[int] = (16, 32), nap_ms: float = 20.0, elements: int = 256, rounds: int = 3,
    torchs: bool = True, slow_stage: int | None = None,
) -> None:  # fmt: skip
    """Measure and print a table per number of micro-batches.

    Args:
        num_microbatches: Micro-batches per step.
        nap_ms: What a rank's whole share sleeps in a forward, and in each half of a backward.
        elements: Floats that cross each cut.
        rounds: Measured steps of each schedule.
        torchs: Whether torch's runtime is measured beside ours.
        slow_stage: A stage that takes twice as long: 1F1B against the planner alone.
    """
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for count in num_microbatches:
        if slow_stage is None:
            measure(count, nap_ms / 1e3, elements, rounds, torchs)
        else:
            measure_uneven(count, nap_ms / 1e3, elements, rounds, slow_stage)
    dist.destroy_process_group()


if __name__ == "__main__":
    auto_cli(main)
