"""What the user's hooks see and call of a module that is cut."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim import Optimizer

from lightning_pipeline.errors import SplitError
from lightning_pipeline.model.cut import ModuleTree, Partition, stages_of_states
from lightning_pipeline.model.places import Findings
from lightning_pipeline.model.replay import StageView
from lightning_pipeline.model.state import Meeting, SharedParameter, Sources, StageParameters
from lightning_pipeline.model.tensors import PlaceholderMode, TensorSpec, tensors_in, user_line
from lightning_pipeline.model.trace import Runner, UnitPatches
from lightning_pipeline.registry import named_parameters_of

R = TypeVar("R", bound=Runner)


class OutsideSteps:
    """This rank's part of the module, between the steps. `SplitModel` inherits this.

    Args:
        root: The LightningModule, whole.
        cut: Its partition.
        stages: The stages of this rank.
        device: Of the run.

    Attributes:
        mode: Of placeholders.
        findings: What is found once for all runs of a step with which a batch begins.
        around_backward: Each backward of a stage.
        on_gradient_read: Called where a step reads `.grad` of a weight.
    """

    _tree: ModuleTree
    _open: ExitStack | None
    _on_growth: list[Callable[[], None]]

    def __init__(self, root: nn.Module, cut: Partition, stages: Sequence[int], device: torch.device) -> None:
        self.root, self.cut, self._device = root, cut, device
        self.mode, self.findings = PlaceholderMode(), Findings()
        self.around_backward: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.on_gradient_read: Callable[[], None] = lambda: None
        self._patches = UnitPatches(cut.trace.units)
        self._stage_of, self._here = cut.stage_of, set(stages)
        needed = stages_of_states(root, cut.trace, self._stage_of, cut.num_stages)
        self._residence = StageParameters(root, needed, set(stages), self.mode, device)
        self.guard_modules()

    def guard_modules(self) -> None:
        """From now on tell of hooks on modules that are spread over stages."""
        self._module_guards = ModuleGuards(self.root, self._patches.units, self._stage_of)

    # ---- what this rank holds

    def owned_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters by their first names, tied ones once."""
        return self._residence.parameters()

    @property
    def stand_ins(self) -> dict[Tensor, nn.Parameter]:
        """The placeholder of each parameter of other stages, by what it stands for."""
        return self._residence.stand_ins

    def stand_in(self, name: str, spec: TensorSpec) -> Tensor:
        """What stands for a tensor that belongs to a parameter of another stage.

        Args:
            name: Of the parameter.
            spec: Of the tensor.
        """
        return self._residence.absent.make(name, spec)

    def parameter_names(self) -> list[str]:
        """Names of all parameters of the whole module, tied ones once, in its order."""
        return self._residence.parameter_names

    def owned_states(self, *, transient: bool = False) -> dict[str, Tensor]:
        """Parameters and buffers that this rank writes into a checkpoint; each is owned by one stage.

        Args:
            transient: Whether non-persistent buffers are among them, which no checkpoint holds.
        """
        return self._residence.owned_states(self._here, transient=transient)

    @property
    def shared(self) -> list[SharedParameter]:
        """Parameters that several stages keep a copy of; their gradients must be summed."""
        return self._residence.shared

    def stages_of(self, name: str) -> tuple[int, ...]:
        """The stages that keep a copy of a parameter or buffer; none is known of what a hook makes."""
        return self._residence.needed.get(name, ())

    # ---- what hooks add

    def watch_growth(self) -> None:
        """From now on `take_in` finds what has come."""
        self._tree = ModuleTree(self.root)
        self._on_growth = [self.changed]
        self._is_replaced = False
        self._registration = register_module_parameter_registration_hook(self._note_registered)

    def _note_registered(self, module: nn.Module, name: str, parameter: Any) -> None:
        self._is_replaced |= self._open is not None  # a batch is on its way

    def settle_replaced(self) -> None:
        """After a batch: a layer may have given itself other parameters in the place of its own.

        That is seen by the ranks that have it alone, and nothing comes to others by it.
        """
        if self._is_replaced:
            self._is_replaced = False
            self._residence.list_anew()
            self._tree.look()

    def changed(self) -> None:
        """Told when something has come."""
        raise NotImplementedError

    def take_in(self) -> bool:
        """Between batches: what hooks have added to the module goes to stages. Whether anything has changed.

        A new layer is a unit on the stage of the one before it; a parameter or buffer beside the units is on
        all stages. All ranks have run the same hooks, and come to the same. Steps are traced anew.
        """
        if not self._tree.has_changed():
            return False
        units = self._patches.units
        for unit, stage in list(self._tree.new_units(units, self._stage_of, self._patches.copied())):
            self.cut.take_in(unit, stage)
            self._patches.take_in(unit)
            self._stage_of.append(stage)
        names = {id(module): name for name, module in reversed(list(self.root.named_modules()))}
        for listed in (self.cut.trace.units, units):
            listed[:] = [one.named(names.get(id(one.module), one.name)) for one in listed]
        stages = {
            id(part): (stage,)
            for unit, stage in zip(units, self._stage_of, strict=True)
            for part in unit.module.modules()
        }
        self._residence.take_in(lambda module: stages.get(id(module)))
        for told in self._on_growth:
            told()
        self._tree.look()
        return True

    def spread(self, wider: Mapping[str, Collection[int]]) -> dict[int, nn.Parameter]:
        """Let more stages keep copies of parameters, and trace the steps anew; all ranks call.

        Args:
            wider: The stages that need a copy from now on, by name.

        Returns:
            This rank's new copies, which have no values yet, by the identity of what has stood for them.
        """
        made = self._residence.spread(wider)
        for told in self._on_growth:
            told()
        self._tree.look()
        return made

    # ---- what hooks see

    def meeting(
        self, rank_of: Callable[[int], int], num_ranks: int, gather: Callable[[str, Any], list[Any]],
        optimizers: Callable[[], Iterable[Optimizer]], leave: Callable[[], None] = lambda: None,
    ) -> Meeting:  # fmt: skip
        """What completes values of several stages in the user's hooks.

        Args:
            rank_of: The pipeline rank of a stage.
            num_ranks: Of the pipeline.
            gather: Collects an object of each pipeline rank; told for what.
            optimizers: Of the run.
            leave: Called at the end of a hook.
        """
        partly: dict[str, frozenset[int]] = {}

        def look() -> None:
            needed = self._residence.needed
            holders = {name: frozenset(map(rank_of, stages)) for name, stages in needed.items()}
            partly.clear()
            partly.update({name: ranks for name, ranks in holders.items() if len(ranks) < num_ranks})

        look()
        self._on_growth.append(look)

        def listed() -> Iterator[tuple[str, list[Tensor]]]:
            states = list(optimizers())
            for name, tensor in named_parameters_of(self.root):
                kept = [t for o in states for t in tensors_in(o.state.get(tensor, ()))]
                yield name, [tensor, *([] if tensor.grad is None else [tensor.grad]), *kept]
            yield from ((name, [buffer]) for name, buffer in self.root.named_buffers())

        sources = Sources(lambda: ((name, found) for name, found in listed() if name in partly))
        return Meeting(
            self._residence.absent, sources, partly, num_ranks, gather, self._residence.show_gradients, leave,
            self._residence.compare_gradients,
        )  # fmt: skip

    @contextmanager
    def whole(self, states: Mapping[str, Tensor]) -> Iterator[None]:
        """Inside, this rank has the whole module, whose units run here.

        Args:
            states: Parameters and buffers of other stages, by name.
        """
        idle, self._patches.idle = self._patches.idle, None
        try:
            with self._residence.filled(states):
                yield
        finally:
            self._patches.idle = idle

    def answer_calls(self, answered: Callable[[UnitPatches, Runner, Sequence[int]], R]) -> R:
        """Let someone else answer calls of units outside of steps.

        Args:
            answered: Given the units, who answers now, and the stage of each unit.
        """
        idle = self._patches.idle
        assert idle is not None, "the split installs one"
        answers = answered(self._patches, idle, self._stage_of)
        self._patches.idle = answers
        return answers

    def note_gradients(self) -> None:
        """A backward has run: let the next hook see a gradient at each trained parameter of other stages."""
        self._residence.has_gradients = True

    def note_zeroed(self, zeroed: Collection[int], own: Iterable[Tensor]) -> None:
        """Let the next hook see no gradient at parameters of other stages.

        Args:
            zeroed: Parameters, by `id`, whose `.grad` is set to None with no hook in between.
            own: The parameters of this rank.
        """
        self._residence.note_zeroed(zeroed, own)


class IdleRunner:
    """Answers calls of units outside a step: own ones run, those of other stages raise.

    Args:
        root: The LightningModule.
        patches: The patched units.
        view: Of a stage of this rank.
        stages: Those of this rank.
    """

    inside = False

    def __init__(
        self, root: nn.Module, patches: UnitPatches, view: StageView, stages: Collection[int]
    ) -> None:
        self._root, self._patches, self._view, self._stages = root, patches, view, stages

    def call(self, unit: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an own unit, or raise."""
        stage = self._view.stage_of[unit]
        if stage in self._stages:
            return self._patches.run_alone(unit, args, kwargs)
        if self._patches.alone is not None:
            raise self._inside(self._patches.alone, unit)
        raise SplitError(
            f"unit {self._patches.units[unit].name!r} is on stage {stage} and is called "
            "outside a step on a rank that does not hold it: do this in validation_step or predict_step, "
            "which run across the stages, in a hook, where ranks answer each other (a dataset that asks the "
            "model is filled in on_train_epoch_start, or in train_dataloader() with "
            "reload_dataloaders_every_n_epochs=1), or on the whole model after fit "
            f"[at {user_line(self._root)}]"
        )

    def _inside(self, caller: int, unit: int) -> SplitError:
        """The refusal of a unit that another one's forward calls, where that runs on its rank alone."""
        caller_name, name = (self._patches.units[number].name for number in (caller, unit))
        return SplitError(
            f"the forward of unit {caller_name!r} calls unit {name!r}, which is on stage "
            f"{self._view.stage_of[unit]}, and a unit that is called by message (manual optimization, "
            "whole_steps=True, hooks) runs on its rank alone: let the step call both, or keep them on one "
            f"stage by PipelineStrategy(partition=...) [at {user_line(self._root)}]"
        )


class ModuleGuards:
    """What the user may not do to modules whose units are on stages; looked at before each batch.

    Args:
        root: The LightningModule.
        units: Of it.
        stage_of: The stage of each.
    """

    def __init__(self, root: nn.Module, units: Sequence[Any], stage_of: Sequence[int]) -> None:
        stages = {id(unit.module): stage for unit, stage in zip(units, stage_of, strict=True)}
        self._spread = [
            (name, module)
            for name, module in root.named_modules()
            if len({stages[id(part)] for part in module.modules() if id(part) in stages}) > 1
        ]

    def check(self) -> None:
        """Before a batch.

        Raises:
            SplitError: A hook needs gradients of several stages at once.
        """
        for name, module in self._spread:
            if module._backward_hooks:
                raise SplitError(
                    f"register_full_backward_hook: the backward hook of {(name or type(module).__name__)!r}, "
                    "which is spread over stages, would need the gradients of its inputs and of its outputs "
                    "on one of them: put it on a module inside, or keep that whole with "
                    f"PipelineStrategy(units=['{name}'])"
                )
