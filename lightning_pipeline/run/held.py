"""What a rank holds of a module: all of it before it is split, and without data; then its stages."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops.optimization.closure import AbstractClosure
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipeline.checkpoint.contents import Owns, names_by_identity, owned_by
from lightning_pipeline.hooks import (
    Calls,
    HooksElsewhere,
    OwnParts,
    exchange,
    give_gradients,
    give_states,
    gradients_of,
    is_torchs,
    refuse_strangers,
    refuse_unserved,
    states_of,
    watch_steps,
)
from lightning_pipeline.model.cut import StageTable
from lightning_pipeline.model.places import exchange_kept
from lightning_pipeline.model.split import SplitModel
from lightning_pipeline.model.state import Meeting
from lightning_pipeline.registry import named_parameters_of
from lightning_pipeline.run.batch import Gradients
from lightning_pipeline.run.members import Members
from lightning_pipeline.run.setup import (
    Cut,
    equal_buffers,
    held_states,
    kept_by_units,
    make_whole,
    move,
    start_equal,
)
from lightning_pipeline.schedules import Plan
from lightning_pipeline.settings import Settings


class Whole:
    """What `Stages` answers, of a module that is not split.

    Args:
        module: Of the run.

    Attributes:
        table: There are no stages.
        says: What the run does.
        last_plan: Of no training batch.
        batch_size: Of no training batch.
    """

    table: StageTable | None = None
    says = ""
    last_plan: Plan | None = None
    batch_size: int | None = None

    def __init__(self, module: LightningModule) -> None:
        self._module = module

    def to_device(self, device: torch.device) -> None:
        """It stays where it is."""

    def adopt(self, optimizers: Sequence[Optimizer]) -> None:
        """They list what is here."""

    def take_in(self) -> None:
        """What hooks add to it is there."""

    def names(self) -> dict[int, str]:
        """Names of the parameters, by `id`."""
        return names_by_identity(named_parameters_of(self._module))

    def written_names(self) -> dict[int, str]:
        """Those whose optimizer state this rank writes."""
        return self.names()

    def own_state(self) -> dict[str, Tensor]:
        """What this rank writes into a checkpoint."""
        return held_states(self._module)

    def owns(self) -> Owns:
        """Whether this rank has the true state of a module that is neither parameter nor buffer."""
        return owned_by(None, ())

    def units_by_stage(self) -> list[list[str]]:
        """None: there are no stages."""
        return []

    def in_hook(self) -> AbstractContextManager[None]:
        """Around code of the user that sees the module."""
        return nullcontext()

    def aside(self) -> AbstractContextManager[None]:
        """Inside a hook: around what is no code of the user's."""
        return nullcontext()

    def meet(self) -> None:
        """Nobody calls units of another rank."""

    def complete(self, value: Any) -> Any:
        """Values are whole."""
        return value

    def reseed(self, seed: int) -> None:
        """Nothing draws."""


class StagesHeld:
    """What this rank has of a module that is split, and what optimizers know of it. `Stages` inherits this.

    Args:
        members: The ranks of the run.
        settings: Of the strategy.
        placement: Which pipeline rank holds which stage.
        trainer: Of the run.
        cut: Where the module is cut.
        split: This rank's part of it.

    Attributes:
        split: This rank's part of the module.
        gradients: What batches make of them.
        hooks: On gradients, where one rank alone has registered them.
        meeting: Completes values of several stages in the user's hooks.
        own_parts: What optimizers step over here.
        has_stepped: Whether gradients were averaged over replicas since the last batch began.
    """

    gradients: Gradients
    hooks: HooksElsewhere
    meeting: Meeting
    own_parts: OwnParts

    def __init__(
        self, members: Members, settings: Settings, placement: Plan, trainer: Trainer, cut: Cut,
        split: SplitModel,
    ) -> None:  # fmt: skip
        self.split = split
        self._members, self._settings, self._placement = members, settings, placement
        self._trainer, self._module = trainer, trainer.lightning_module
        self._partition = cut.partition
        self._here = placement.stages_of(members.groups.rank)
        self._equal: list[Tensor] = []
        self.has_stepped = False
        self._undo: list[Callable[[], Any]] = []

    @property
    def _trains_whole(self) -> bool:
        """Whether every rank runs the training step whole."""
        return self._settings.trains_whole(automatic=self._module.automatic_optimization)

    def hold(self) -> None:
        """The ranks know which of them have what; all call, before hooks of the user's run."""
        members, split = self._members, self.split
        members.groups.share((shared.stages for shared in split.shared), self._placement)
        self.gradients = Gradients(split, members.groups, members.failure, self._placement)
        self.hooks = self._hooks_elsewhere()
        self._exchange_kept(self._stand_ins())
        self._undo.append(lambda: self._exchange_kept(self._originals()))

    def _stand_ins(self) -> dict[int, Tensor]:
        """What stands for parameters of other stages, by the identity of these."""
        return {id(tensor): made for tensor, made in self.split.stand_ins.items()}

    def _originals(self) -> dict[int, Tensor]:
        """These parameters, by the identity of what stands for them."""
        return {id(made): tensor for tensor, made in self.split.stand_ins.items()}

    def _exchange_kept(self, others: Mapping[int, Tensor]) -> None:
        """Let what keeps weights beside the module's lists of them (`self.tracked`) have others."""
        trainer: Any = self._trainer
        data = [] if trainer.datamodule is None else [trainer.datamodule]
        exchange_kept(self._module, [*trainer.callbacks, *data], others)

    def _hooks_elsewhere(self) -> HooksElsewhere:
        members, split = self._members, self.split

        def holders(name: str) -> list[int]:
            return [self._placement.rank_of(stage) for stage in split.stages_of(name)]

        def send(what: str, tensor: Tensor, rank: int) -> None:
            members.replica.broadcast(what, tensor, members.ranks[rank], members.groups.pipeline)

        return HooksElsewhere(
            self._module, self._originals(), holders, members.gather, send, members.groups.rank,
            self._placement.num_ranks,
            {name: (part, self._placement.rank_of(stage)) for name, part, stage in split.modules_run()},
        )  # fmt: skip

    # ---- what comes, and goes to more stages

    def start_equal(self) -> None:
        """Give what is new here the same values on all replicas and stages that have it."""
        known = set(map(id, self._equal))
        new = [tensor for tensor in held_states(self._module).values() if id(tensor) not in known]
        here = set(map(id, new))
        shared = [one for one in self.split.shared if one.parameter is None or id(one.parameter) in here]
        start_equal(new, shared, self._members.groups, self._placement)
        self._equal = list(held_states(self._module).values())

    def take_in(self) -> None:
        """Before a batch or a checkpoint: what hooks have added goes to its stages; all ranks call."""
        split, groups = self.split, self._members.groups
        if not split.take_in():
            return
        exchange(self._trainer.optimizers, self._stand_ins())
        self._exchange_kept(self._stand_ins())
        groups.share((shared.stages for shared in split.shared), self._placement)
        self.start_equal()
        self.gradients.list_anew()
        self.hooks = self._hooks_elsewhere()

    def begin_batch(self) -> None:
        """A batch comes: hooks may have added something, and a step may have left replicas other buffers."""
        self.take_in()
        groups = self._members.groups
        if self.has_stepped and groups.numbering.replicas > 1:
            self.has_stepped = False
            with self._members.failure.watch("making buffers equal", groups.control):
                equal_buffers(self._module, groups)

    def spread(self, wider: Mapping[str, Set[int]]) -> None:
        """Give more stages copies of parameters, with what optimizers know of them; all ranks call."""
        split, groups, optimizers = self.split, self._members.groups, self._trainer.optimizers
        names = {id(parameter): name for name, parameter in named_parameters_of(self._module)}
        asked = {key: name for key, name in names.items() if name in wider}
        own = states_of(optimizers, asked), gradients_of(self._module, asked)
        made = split.spread(wider)
        exchange(optimizers, made)
        self._exchange_kept(made)
        groups.share((shared.stages for shared in split.shared), self._placement)
        start_equal((), [one for one in split.shared if one.name in wider], groups, self._placement)
        self._equal = list(held_states(self._module).values())
        told = self._members.gather(own, "sharing what optimizers know of parameters")
        copies = {names[key]: parameter for key, parameter in made.items()}
        give_states(optimizers, copies, [states for states, _ in told])
        give_gradients(copies, [found for _, found in told])
        self.gradients.list_anew()
        self.hooks = self._hooks_elsewhere()

    # ---- optimizers

    def adopt(self, optimizers: Sequence[Optimizer]) -> None:
        """Let optimizers list the whole model, and step over what this rank holds.

        Raises:
            ConfigurationError: One that cannot be served.
        """
        refuse_unserved(optimizers, self._placement.num_ranks)
        exchange(optimizers, self._stand_ins())
        if not self._trains_whole:
            self._undo.append(refuse_strangers(optimizers, self._module))
        self.own_parts = OwnParts(optimizers, self.split, self.meeting.told)

        def whole() -> None:
            exchange(optimizers, self._originals())

        steps = watch_steps(optimizers, lambda: self.meeting.is_inside, self.stepping)
        self._undo += [whole, self.own_parts.remove, steps]

    @contextmanager
    def stepping(
        self, optimizer: Optimizer, closure: Callable[[], Any]
    ) -> Iterator[Callable[[], Any]]:  # fmt: skip
        """Around an optimizer's step. torch's own go over each parameter by itself; what others do is seen.

        Args:
            optimizer: Whose step follows. Hooks that it calls by its closure are hooks again.
            closure: Of that step.

        Yields:
            The closure, which all ranks call equally often.
        """
        own, calls = is_torchs(optimizer), Calls(closure, self._members.gather)
        automatic = isinstance(closure, AbstractClosure)
        self.own_parts.know(optimizer)
        try:
            with self.meeting.aside() if own else self.meeting.hook():
                if own:
                    yield closure if automatic else self._as_a_hook(closure)
                else:
                    yield calls
                    calls.end()
                self.own_parts.put_back()
                self.own_parts.show_states(optimizer, self._members.gather)
        finally:
            self.own_parts.put_back()
            self.meeting.changed()

    def _as_a_hook(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The user's own closure, around Lightning's or by hand; Lightning's calls hooks of the user's."""

        @wraps(closure)
        def run() -> Any:
            with self.meeting.hook():
                return closure()

        return run

    # ---- what is here

    def to_device(self, device: torch.device) -> None:
        """Move this rank's parameters, buffers and metrics, which take a data type of it, on the CPU too."""
        move(self._module, device)

    def names(self) -> dict[int, str]:
        """Names of this rank's parameters in the whole module, by `id`."""
        return names_by_identity(self.split.owned_parameters())

    def written_names(self) -> dict[int, str]:
        """Those whose optimizer state this rank writes: of a shared parameter only its owner does."""
        elsewhere = self.gradients.counted_elsewhere
        return {identity: name for identity, name in self.names().items() if identity not in elsewhere}

    def own_state(self) -> dict[str, Tensor]:
        """What this rank writes into a checkpoint: each name is owned by one stage."""
        return self.split.owned_states()

    def owns(self) -> Owns:
        """Whether this rank has the true state of a module that is neither parameter nor buffer."""
        return owned_by(self._partition, self._here)

    def units_by_stage(self) -> list[list[str]]:
        """Names of the units of each stage."""
        cut = self._partition
        units = [unit.name for unit in cut.trace.units]
        return [[units[number] for number in cut.units_of(stage)] for stage in range(cut.num_stages)]

    def reseed(self, seed: int) -> None:
        """Draw from other random numbers from now on."""
        self.split.seed = seed

    # ---- the end

    def join(self, *, failed: bool, staged: bool) -> None:
        """The module becomes whole, on CPU, on the ranks that `gather_weights` names.

        On the others what they did not hold is on the meta device. After an exception the other stages'
        weights are not to be had; the module then keeps empty tensors for them, which fail loudly when used.

        Args:
            failed: Whether there was one.
            staged: Whether ranks built their own stages only.
        """
        if failed:
            self.split.restore()
            return
        self.split.mode.forget()
        from_last = self._members.from_last
        try:
            self.take_in()  # what hooks at the end of training have added or renamed
            left, _ = from_last.share(self.split.left_so_far, "gathering what steps left on the last stage")
            how = self._settings.gather_weights
            kept = kept_by_units(self.split.in_units, self._members.replica, how, staged=staged)
            came = make_whole(
                self._trainer, self.split, self.owns(), self._members.replica, how, staged=staged
            )
        except BaseException:  # another rank has failed
            self.split.restore()
            raise
        self.split.restore(came, on_meta=True)
        if not from_last.is_source:
            self.split.take(left)
        self.split.in_units.take_last(kept)
