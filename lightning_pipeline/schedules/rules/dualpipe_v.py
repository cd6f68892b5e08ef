"""DualPipeV: forwards and backwards of different micro-batches overlapped in pairs."""

from lightning_pipeline.schedules.plans import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    Plan,
    Schedule,
    require_sizes,
)


class DualPipeV(Schedule):
    """DualPipe folded into a V: rank r holds stages r and 2p - 1 - r, so the loss is on rank 0.

    Serves every size; made for m >= 2p. With fewer micro-batches it is the order for 2p with the surplus
    left out. A forward and a backward that overlap are one pair of the plan.

    Source:
        DeepSeek-AI 2024, arXiv 2412.19437 and github.com/deepseek-ai/DualPipe.
    """

    stages_per_rank = 2

    def plan(self, num_ranks: int, num_microbatches: int) -> Plan:
        """Work the rule out for any number of ranks and micro-batches, at least 1 each."""
        require_sizes(num_ranks, num_microbatches)
        whole = max(num_microbatches, 2 * num_ranks)
        writers = [_written(rank, num_ranks, whole) for rank in range(num_ranks)]
        return Plan((w.order for w in writers), pairs=[w.pairs for w in writers]).first(num_microbatches)


def _written(rank: int, num_ranks: int, num_microbatches: int) -> "_Writer":
    """One rank's order, in the eight steps of the source."""
    write = _Writer(rank, 2 * num_ranks - 1 - rank)
    after = num_ranks - rank - 1
    write("F0", 2 * after)
    write("F0 F1", rank + 1)
    write("I1 W F1", after)
    main = num_microbatches - 2 * num_ranks + rank + 1
    if after == 0:
        write("F0 B1 F1&B0")
    write("F0&B1 F1&B0", main - (after == 0))
    write("B1 F1&B0", after)
    split = _write_step_6(write, rank)
    write(f"W {split}0", after)
    write("W", rank + 1)
    assert not write.weights, "every input half is followed by its weight half"
    return write


def _write_step_6(write: "_Writer", rank: int) -> str:
    """Alternate the two backwards, the second half of them split; the kind of backward at the end."""
    count, backward = rank + 1, BACKWARD
    for step in range(count):
        if step == count // 2 and rank % 2 == 1:
            backward = BACKWARD_INPUT
        write(f"{backward}1")
        if step == count // 2 and rank % 2 == 0:
            backward = BACKWARD_INPUT
        write(f"{backward}0")
    return backward


class _Writer:
    """Writes down actions of a rank's two stages; each takes the next micro-batch by itself."""

    def __init__(self, first: int, second: int) -> None:
        self.stages = (first, second)
        self.count = {(forward, local): 0 for forward in (True, False) for local in (0, 1)}
        self.weights: list[Action] = []
        self.order: list[Action] = []
        self.pairs: list[int] = []

    def __call__(self, text: str, times: int = 1) -> None:
        for word in text.split() * times:
            if word == "W":
                self.order.extend(self.weights[:1])
                del self.weights[:1]
                continue
            if "&" in word:
                self.pairs.append(len(self.order))
            for part in word.split("&"):
                self._write(part[0], int(part[1]))

    def _write(self, kind: str, local: int) -> None:
        microbatch = self.count[kind == FORWARD, local]
        self.count[kind == FORWARD, local] += 1
        self.order.append(Action(self.stages[local], kind, microbatch))
        if kind == BACKWARD_INPUT:
            self.weights.append(Action(self.stages[local], BACKWARD_WEIGHT, microbatch))
