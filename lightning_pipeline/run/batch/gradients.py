"""The gradients of a run's batches: out of `.grad` and back, summed, averaged, clipped, looked at."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipeline._lightning import is_overridden
from lightning_pipeline.hooks import (
    AgreedGradients,
    GradientHooks,
    ReportChannel,
    SetAside,
    zeroed_unseen,
)
from lightning_pipeline.model.split import OutsideSteps
from lightning_pipeline.model.tensors import is_placeholder
from lightning_pipeline.ranks import Company, Failure, Groups, average_gradients, clip_by_norm, sum_shared
from lightning_pipeline.schedules import Plan


class Gradients:
    """What the stages of this rank make of gradients.

    Args:
        split: The stages.
        groups: Of the run.
        failure: Of the run.
        placement: Which pipeline rank holds which stage.

    Attributes:
        aside: Those that are not in `.grad` now.
        calls_backward: Whether the module's `backward` is the project's own.
        counted_elsewhere: Shared parameters, by `id`, that another rank counts.
    """

    def __init__(self, split: OutsideSteps, groups: Groups, failure: Failure, placement: Plan) -> None:
        self._split, self._groups, self._failure, self._placement = split, groups, failure, placement
        self._finite: AgreedGradients | None = None
        self._look_again: Callable[[], None] = lambda: None
        self._at_step: Callable[[Optimizer], list[str]] | None = None
        self.aside, self._by_nothing = SetAside(), False
        self.calls_backward = False
        split.around_backward, split.on_gradient_read = self.aside.accumulating, self._is_read
        self.list_anew()

    def list_anew(self) -> None:
        """The stages hold other parameters than before."""
        split, rank = self._split, self._groups.rank
        self._parameters = [parameter for _, parameter in split.owned_parameters()]
        self._hooks = GradientHooks(self._parameters)
        self._given = set[int]()  # which steps give gradients whose loss the model's own count divides
        self.counted_elsewhere = {
            id(shared.parameter) for shared in split.shared
            if shared.parameter is not None and self._placement.rank_of(shared.stages[0]) != rank
        }  # fmt: skip
        self._look_again()

    def look(self, reports: ReportChannel) -> None:
        """Steps depend on it: tell all ranks of gradients that are not finite, with the reports."""
        finite = self._finite = self._agreed()
        reports.numbers = lambda: finite.own(self.aside.totals())
        reports.told = lambda found: finite.of_replica(self._by_rank(found))
        self._look_again = partial(self.look, reports)

    def look_at_steps(self, replica: Company) -> None:
        """Likewise where steps run whole: ranks of a replica tell each other at each step of an optimizer.

        Replicas, whose gradients are averaged by then, find the same.
        """
        agreed = self._agreed()
        agreed.counts = True

        def found(optimizer: Optimizer) -> list[str]:
            listed = [one for group in optimizer.param_groups for one in group["params"]]
            number = agreed.own((one, one.grad) for one in listed if one.grad is not None)
            told = replica.numbers("looking whether gradients are finite", [number])
            agreed.of_replica(self._by_rank([int(one) for (one,) in told]))
            return agreed.found()

        self._at_step = found
        self._look_again = partial(self.look_at_steps, replica)

    def _agreed(self) -> AgreedGradients:
        groups, split = self._groups, self._split
        return AgreedGradients(
            split.parameter_names(), split.stages_of, split.owned_parameters(), groups.replica,
            groups.numbering.replicas, groups.numbering.global_rank,
        )  # fmt: skip

    def _by_rank(self, found: Sequence[int]) -> list[int]:
        """What was told in the order of the replica's group, by pipeline rank."""
        places = dist.get_process_group_ranks(self._groups.pipeline)
        return [
            found[places.index(rank)] for rank in self._groups.numbering.pipelines()[self._groups.replica]
        ]

    @contextmanager
    def of_batch(self, trainer: Trainer, *, stepping: bool, is_read: bool) -> Iterator[None]:
        """Around a training step, at whose end what it gave to `.grad` is taken out.

        Args:
            trainer: In its training.
            stepping: Whether the optimizer steps on this batch.
            is_read: Whether the user's step reads `.grad` of weights.
        """
        if self._finite is not None:
            self._finite.counts = stepping
        self._by_nothing = False
        self.calls_backward = is_overridden("backward", trainer.lightning_module)
        zeroed = () if is_read else zeroed_unseen(trainer, trainer.fit_loop.batch_idx)
        self.aside.begin(self._parameters, drop=zeroed, is_read=is_read)
        if zeroed:
            self._split.note_zeroed(zeroed, self._parameters)
        try:
            yield
        except BaseException:
            self.aside.cancel()
            raise
        self.aside.end()

    def _is_read(self) -> None:
        """The user's step reads `.grad` of a weight."""
        if not self.aside.note_read():
            rank_zero_warn(
                "training_step reads gradients of weights (`p.grad`), and has not in the batches before: "
                "those of the batch before are gone, and what it reads now are those of micro-batches. From "
                "the next batch on it has what one device has; on_before_optimizer_step always has"
            )

    @contextmanager
    def of_backwards(self) -> Iterator[None]:
        """Around the plan of a training step: the user's hooks on gradients see those of the whole batch."""
        with self._hooks.put_off():
            yield
        with self.aside.accumulating():
            self._share()

    def _share(self) -> None:
        """After all backwards: sum those of parameters that several stages have."""
        shared = self._split.shared
        if shared:
            with self._failure.watch("adding up gradients of shared parameters", self._groups.control):
                copies = [(tuple(one.stages), one.parameter) for one in shared]
                group_of = partial(self._groups.shared, placement=self._placement)
                sum_shared(copies, group_of, self._groups.flags_of)
        if self.calls_backward:
            self._hooks.forget()
        else:
            self._hooks.change()

    def scale(self, by: Tensor | float) -> None:
        """Multiply what the step has made: what divides its loss is known after the last forward.

        Args:
            by: A number, on any device; 0 or nan where nothing counted, so that no backward has run.
        """
        self._hooks.warn_of_scaling()
        factor = by if isinstance(by, Tensor) else torch.tensor(by, dtype=torch.float64)
        ran = bool(factor.isfinite()) and bool(factor)
        self._by_nothing = self._by_nothing or bool(factor.isnan())
        every = not self._given  # no batch has shown yet which ones the loss follows from
        with torch.no_grad(), self.aside.accumulating():
            for parameter in self._parameters:
                if not ran and (id(parameter) in self._given or (every and parameter.requires_grad)):
                    parameter.grad = torch.zeros_like(parameter)
                if parameter.grad is not None:
                    self._given.add(id(parameter))
                    parameter.grad.mul_(factor.to(parameter.grad.device, parameter.grad.dtype))

    def as_of(self, loss: Tensor) -> Tensor:
        """A loss whose backward gives `.grad` what the step made; nothing else does then."""
        return self.aside.as_of(loss)

    def put_back(self) -> None:
        """Give `.grad` what the step made."""
        self._hooks.after(self.aside.put_back())
        self._split.note_gradients()

    def average(self) -> None:
        """Before the optimizer steps, average over replicas."""
        with self._failure.watch("averaging gradients", self._groups.control):
            told = average_gradients(
                self._parameters, *self._groups.replicas,
                numbers=() if self._finite is None else self._finite.numbers,
            )  # fmt: skip
            if self._finite is not None:
                self._finite.of_all(told)

    def not_finite(self, optimizer: Optimizer) -> list[str]:
        """Gradients that are inf or nan before a step, in words, the same on every rank."""
        if self._at_step is not None:
            return self._at_step(optimizer)
        if self._finite is None:
            return []
        return [
            *self._finite.found(),
            *(["all, as the loss is divided by nothing"] if self._by_nothing else []),
        ]

    def clip(
        self, parameters: Iterable[Tensor], max_norm: float, device: torch.device, *, error_if_nonfinite: bool
    ) -> Tensor:
        """Clip gradients by their norm over all stages; tied parameters count once."""
        with self._failure.watch("clipping gradients", self._groups.pipeline):
            here = [parameter for parameter in parameters if not is_placeholder(parameter)]
            return clip_by_norm(
                here, max_norm, elsewhere=self.counted_elsewhere, groups=[self._groups.pipeline],
                device=device, error_if_nonfinite=error_if_nonfinite,
            )  # fmt: skip
