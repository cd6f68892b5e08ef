"""One stage of a split model, as the executor drives it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from lightning_pipeline.errors import SplitError
from lightning_pipeline.model.loss import seeds_of
from lightning_pipeline.model.places import BatchAsGiven
from lightning_pipeline.model.replay.between_units import Recomputation
from lightning_pipeline.model.replay.replay import Replay, Replayed
from lightning_pipeline.model.replay.view import Gathers, StageView, Step
from lightning_pipeline.model.replay.weight_gradients import Deferral, WeightQueue
from lightning_pipeline.model.state import AsOne, BufferStarts, StepState
from lightning_pipeline.model.tensors import copied_at_end, map_tensors
from lightning_pipeline.model.trace import Transient, UnitPatches, reentrant_checkpoint_replaced
from lightning_pipeline.registry import parameters_of
from lightning_pipeline.wire import Stage, Values


@dataclass(slots=True)
class _Saved:
    """The autograd graph of one micro-batch: where it begins and ends."""

    leaves: list[Tensor | None]
    roots: list[Any]
    again: Recomputation | None
    seeds: list[Tensor] = field(default_factory=list)
    queue: WeightQueue | None = None


class StageProgram(Stage):
    """Implements the executor's `Stage` by replaying the user's step.

    Args:
        view: What a step is to this stage.
        patches: The patched units.

    Attributes:
        is_last: Whether this is the last stage.
        apart: Around each forward, such as what keeps metrics silent.
        state: Where the step leaves something behind.
        unit_state: Where its units keep something of the samples.
        starts: Where its units advance buffers whatever they are given.
        counts: Whether what this stage leaves of it is the rank's.
        ends_itself: Whether the step ends after the last call, for what comes then runs once for the batch.
        replay_kind: Replays a micro-batch.
    """

    def __init__(self, view: StageView, patches: UnitPatches) -> None:
        self.view, self._patches, self._mode = view, patches, view.mode
        self.is_last = view.is_last
        self.apart: Callable[[], AbstractContextManager[None]] = nullcontext
        self.state: StepState | AsOne | None = None
        self.unit_state: StepState | None = None
        self.starts: BufferStarts | None = None
        self.counts, self.ends_itself = True, False
        self.replay_kind: type[Replay] = Replay
        self._saved: dict[int, _Saved] = {}
        self._queues: dict[int, WeightQueue] = {}
        self._deferral = Deferral()

    @property
    def index(self) -> int:
        """Position in model order."""
        return self.view.index

    def begin(self, step: Step) -> None:
        """Take on a batch."""
        self._saved.clear()
        self._queues.clear()
        self.view.begin(step)

    def end(self) -> None:
        """Let go of the batch."""
        self.view.end()
        self._saved.clear()
        self._queues.clear()

    @property
    def num_saved(self) -> int:
        """Micro-batches whose activations are held."""
        return len(self._saved)

    @property
    def num_waiting(self) -> int:
        """Micro-batches whose weight gradients are still to be computed."""
        return len(self._queues)

    # ---- forward

    def forward(self, microbatch: int, incoming: Values | None) -> Values | None:
        """Replay the user's step for one micro-batch. See `wire.Stage`."""
        step = self.view.current_step()
        if incoming is not None and incoming.empty:
            return self._pass_empty(microbatch, step)
        self.view.take(step.routes[microbatch])
        args, kwargs = step.microbatches[microbatch]
        args, kwargs = self.view.fresh(args), self.view.fresh(kwargs) if kwargs else {}
        looks = self.is_last or step.trace.writes_batch
        given = BatchAsGiven(args, deep=step.trace.changes_batch) if looks else None
        queue = WeightQueue() if step.split_backward else None
        with self._replaying(microbatch, step, incoming, queue) as replay:
            if replay.recipes is not None:
                replay.recipes.begin((args, kwargs))
            with replay.running():
                replay.replayed.result = step.function(*args, **kwargs)
            if self.is_last:
                for gathered in self._gathered(step):
                    gathered.take(microbatch, replay.given(gathered.keys), replay.described)
            if given is not None:
                step.batch_changes[microbatch] = given.changes(replay.taint.holds)
            done = replay.replayed
        if self.is_last:
            self._finish(microbatch, step, done)
            if step.follower is not None:
                step.follower.left()
        elif step.weights is not None and done.outgoing is not None:
            roots = [_edge(tensor) for tensor in done.outgoing.tensors]
            self._saved[microbatch] = _Saved(done.leaves, roots, done.again)
        if microbatch in self._saved:
            self._saved[microbatch].queue = queue
        return done.outgoing

    def _gathered(self, step: Step) -> list[Gathers]:
        """Who keeps what units give, until the batch ends."""
        left = self.state.gathered if isinstance(self.state, StepState) else None
        return [one for one in (step.gathered, left) if one is not None]

    @contextmanager
    def _replaying(
        self, microbatch: int, step: Step, incoming: Values | None, queue: WeightQueue | None
    ) -> Iterator[Replay]:
        """Around the step: its units are answered, and what it leaves behind is the micro-batch's."""
        if self.is_last:
            step.on_microbatch(microbatch)
        if self.state is not None:
            self.state.before(microbatch, counts=self.counts)
        self._units_begin(microbatch)
        with (
            self._stashing(step),
            self._counting(microbatch, incoming),
            self._deferring(queue),
            self.apart(),
            step.context(),
            step.telling(),
        ):
            replay = self.replay_kind(self.view, microbatch, incoming, step.seeds.microbatch(microbatch))
            if step.mixing:
                replay.mixing = step.mixing[microbatch]()
            if self.ends_itself or self.view.no_unit_follows:
                replay.on_unit = replay.end_after_own
            if self.is_last and step.follower is not None:
                seen = step.follower.microbatch(microbatch)
                replay.follow, replay.on_unit, replay.recipes = seen.call, seen.unit, seen.recipes
            self._patches.runner, self._mode.watcher = replay, replay
            emptied = Transient(
                self.view.modules, () if self.is_last else step.routes[microbatch].trace.transient
            )
            try:
                with (
                    reentrant_checkpoint_replaced(lambda: replay.inside, self.view.root) as regions,
                    replay.trying_hooks(),
                ):
                    yield replay
                again = replay.replayed.again = replay.again() if step.weights is not None else None
                if again is not None:
                    again.reentrant = regions.replaced
            finally:
                self._patches.runner = self._mode.watcher = None
                replay.close()
                emptied.restore()
        self._units_end()
        if self.state is not None:
            self.state.after(counts=self.counts)

    def _units_begin(self, microbatch: int) -> None:
        """What units keep is the micro-batch's."""
        if self.unit_state is not None:
            self.unit_state.before(microbatch, counts=True)
        if self.starts is not None:
            self.starts.before()

    def _units_end(self) -> None:
        if self.starts is not None:
            self.starts.after()
        if self.unit_state is not None:
            self.unit_state.after(counts=True)

    def _counting(self, microbatch: int, incoming: Values | None) -> AbstractContextManager[None]:
        count = self.view.current_step().count
        if count is None or self.view.current_step().weights is None:
            return nullcontext()
        return count.forward(self.index, microbatch, [] if incoming is None else incoming.tensors)

    def _stashing(self, step: Step) -> AbstractContextManager[None]:
        """Backwards see the weights of their own micro-batch, not what later ones made of them."""
        if step.weights is None or not self.view.rewritten:
            return nullcontext()
        return copied_at_end(self.view.rewritten)

    def _deferring(
        self, queue: WeightQueue | None, roots: Sequence[Any] | None = None
    ) -> AbstractContextManager[None]:
        return nullcontext() if queue is None else self._into(queue, roots)

    @contextmanager
    def _into(self, queue: WeightQueue, roots: Sequence[Any] | None) -> Iterator[None]:
        with self._deferral.into(queue), nullcontext() if roots is None else queue.collecting(roots):
            yield

    def _pass_empty(self, microbatch: int, step: Step) -> Values | None:
        if not self.is_last:
            return Values([], (), empty=True)
        step.results[microbatch] = step.losses[microbatch] = None
        return None

    def _finish(self, microbatch: int, step: Step, done: Replayed) -> None:
        result = done.result
        if step.follower is not None:
            step.returned(microbatch, result)
        loss = result.get("loss") if isinstance(result, dict) else result
        if step.weights is None:
            step.results[microbatch], step.losses[microbatch] = map_tensors(Tensor.detach, result), None
            return
        if isinstance(loss, int | float) and step.follower is not None and step.follower.tries():
            device = next((p.device for p in parameters_of(self.view.root)), None)
            loss = torch.tensor(float(loss), device=device)  # of no sample, unlike the batch's
        without = isinstance(result, dict) and loss is None and self.is_last
        if without or not isinstance(loss, Tensor | None):
            what = "a dict without a loss" if without else type(loss).__name__
            raise SplitError(
                f"{step.name} returned {what}; it must return a tensor, a dict with 'loss', or None"
            )
        if loss is not None and loss.numel() != 1:
            raise SplitError(
                f"{step.name} returned a loss of shape {tuple(loss.shape)}; a backward begins at one number: "
                "return its mean or sum, or `(loss * weights).sum()`"
            )
        step.results[microbatch] = map_tensors(Tensor.detach, result)
        step.losses[microbatch] = None if loss is None else loss.detach()
        roots = [] if loss is None else self._roots(microbatch, step, loss)
        edges, seeds = [_edge(tensor) for tensor, _ in roots], [seed for _, seed in roots]
        self._saved[microbatch] = _Saved(done.leaves, edges, done.again, seeds)

    def _roots(self, microbatch: int, step: Step, loss: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Where the backward of a micro-batch begins, and with what."""
        assert step.weights is not None, "a backward follows"
        share = None if step.follower is None else step.follower.loss(loss)
        if share is not None:
            total = share.total()
            step.parts[microbatch] = torch.zeros_like(loss.detach()) if total is None else total
            return [(tensor, step.scaled(seed)) for tensor, seed in seeds_of(share, step.scale)]
        weight = step.weights[microbatch]
        return [(loss, step.scaled(torch.full_like(loss.detach(), weight)))] if weight else []

    # ---- backward

    def backward_input(
        self, microbatch: int, gradients: Sequence[Tensor | None] | None
    ) -> list[Tensor | None] | None:
        """The half of the backward that the stage before waits for. See `wire.Stage`."""
        count = self.view.current_step().count
        if count is not None:
            count.backward(self.index, microbatch)
        self.view.take(self.view.current_step().routes[microbatch])
        saved = self._saved.pop(microbatch, None)
        if saved is None:  # the step returned None before any unit ran
            return [None] * len(self.view.incoming) if self.index else None
        received: Sequence[Tensor | None] = saved.seeds if gradients is None else gradients
        pairs = [
            (r, g) for r, g in zip(saved.roots, received, strict=True) if r is not None and g is not None
        ]
        if pairs:
            with self.view.current_step().around_backward():
                self._run_graph(saved, [root for root, _ in pairs], [gradient for _, gradient in pairs])
        if saved.queue is not None:
            self._queues[microbatch] = saved.queue
            if count is not None:
                count.keep(self.index, microbatch, saved.queue.held())
        if not self.index:
            return None
        return [None if leaf is None else leaf.grad for leaf in saved.leaves]

    def _run_graph(self, saved: _Saved, roots: list[Any], gradients: list[Tensor]) -> None:
        again, queue = saved.again, saved.queue
        assert again is not None, "a forward that a backward follows says what answers code in it"
        if self.starts is not None:
            self.starts.backward()
        self._patches.runner, self._mode.watcher = again, again.watcher
        try:
            with (
                again.running(),
                self._deferring(queue, roots),
                reentrant_checkpoint_replaced(lambda: again.inside, self.view.root),
            ):
                torch.autograd.backward(roots, gradients)
        except CheckpointError as error:
            if not again.reentrant:
                raise
            raise SplitError(
                f"a region of checkpoint(..., use_reentrant=True) in {self.view.step} does something else "
                "when it is run again for the backward, such as after self.eval() at the end of the step, "
                "and stages cannot follow it: change modes and attributes before such a region, or in a hook"
            ) from error
        finally:
            self._patches.runner = self._mode.watcher = None
            again.close()

    def backward_weight(self, microbatch: int) -> None:
        """Compute the weight gradients that `backward_input` left."""
        count = self.view.current_step().count
        if count is not None:
            count.backward(self.index, microbatch)
        queue = self._queues.pop(microbatch, None)
        if queue is not None:
            with self.view.current_step().around_backward():
                queue.drain()
        if count is not None:
            count.done(self.index, microbatch)


def _edge(tensor: Tensor) -> Any:
    """The place in the graph where a tensor's gradient goes in; holds no values of the tensor itself."""
    return torch.autograd.graph.get_gradient_edge(tensor) if tensor.requires_grad else None
