"""Which parameters and buffers live on this rank, and what stands for the others."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeline.errors import SplitError
from lightning_pipeline.model.state.absent import AbsentTensors, rename
from lightning_pipeline.model.tensors import PlaceholderMode, TensorSpec, is_placeholder
from lightning_pipeline.registry import named_parameters_of


@dataclass(frozen=True, slots=True)
class SharedParameter:
    """A parameter that several stages keep a copy of.

    Attributes:
        name: Its first name.
        stages: The stages; the first one owns it in norms and checkpoints.
        parameter: This rank's copy; None where it has none.
    """

    name: str
    stages: tuple[int, ...]
    parameter: nn.Parameter | None


@dataclass(slots=True)
class _Dropped:
    """One place from which a tensor was taken away. The object is kept, its memory is not."""

    module: nn.Module
    name: str
    full_name: str
    tensor: Tensor
    spec: TensorSpec
    is_parameter: bool


class StageParameters:
    """Takes the tensors of other stages out of the module, and puts them back.

    Names never change. A parameter's place is taken by a placeholder that is an `nn.Parameter`, that of a
    buffer by a placeholder, so that `parameters()` and `buffers()` list the whole model.

    Attributes:
        needed: The stages that need each parameter and buffer, by every name.
        parameter_names: Of the whole module, tied ones once.
        absent: Makes what stands for tensors of other stages.
        shared: Parameters that several stages keep a copy of.
        stand_ins: The placeholder for each parameter of other stages, by what it stands for.
        has_gradients: Whether these may have gradients that `show_gradients` has not shown yet.
    """

    def __init__(
        self, root: nn.Module, needed: dict[str, tuple[int, ...]], stages: set[int], mode: PlaceholderMode,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.needed = needed
        self._root, self._stages, self._device = root, stages, device
        self.absent = AbsentTensors(root, mode, needed)
        self._dropped: list[_Dropped] = []
        self.stand_ins: dict[Tensor, nn.Parameter] = {}
        self._gradients: dict[int, Tensor] = {}
        self.has_gradients, self._unsure = True, False  # of an earlier fit, which no optimizer zeroes
        self._first_names = _first_names(root)
        self.parameter_names = [name for name, _ in named_parameters_of(root)]
        self.shared = self._find_shared()
        self._listed = _every_tensor(root)

    def _find_shared(self) -> list[SharedParameter]:
        found = []
        for name, parameter in named_parameters_of(self._root):
            stages = self.needed[name]
            if len(stages) > 1:
                here = parameter if self._stages & set(stages) else None
                found.append(SharedParameter(name, stages, here))
        return found

    def drop(self) -> None:
        """Free what no stage of this rank needs."""
        for prefix, module in self._root.named_modules(remove_duplicate=True):
            for registry, is_parameter in ((module._parameters, True), (module._buffers, False)):
                for name, tensor in list(registry.items()):
                    full = f"{prefix}.{name}" if prefix else name
                    if tensor is None or is_placeholder(tensor) or tensor.layout is not torch.strided:
                        continue  # a sparse one stays on all stages
                    if not self._stages & set(self.needed.get(full, self._stages)):
                        self._take(module, registry, name, full, tensor, is_parameter)
        with torch.no_grad():
            for item in self._dropped:
                item.tensor.data = torch.empty(0, dtype=item.spec.dtype, device=item.tensor.device)
        self._listed = _every_tensor(self._root)

    def take_in(self, stages_of: Callable[[nn.Module], tuple[int, ...] | None]) -> None:
        """The module has changed: what has come goes to its stages, and all is known by the names it has now.

        Args:
            stages_of: The stages of a module's tensors; None for one that is in no unit, whose new tensors
                go to all of them, as code between units may use them.
        """
        every = tuple(sorted({stage for stages in self.needed.values() for stage in stages}))
        known = {id(tensor): self.needed[name] for name, tensor in self._listed}
        holders = dict(self._root.named_modules(remove_duplicate=False))
        needed = {
            name: known.get(id(tensor))
            or stages_of(holders[name.rpartition(".")[0]])
            or self.needed.get(name, every)
            for name, tensor in _every_tensor(self._root)
        }
        self.needed.clear()
        self.needed.update(needed)
        self._name_dropped()
        self._first_names = _first_names(self._root)
        self.parameter_names = [name for name, _ in named_parameters_of(self._root)]
        self.shared = self._find_shared()
        self._adopt_copies()
        self.drop()

    def list_anew(self) -> None:
        """Parameters have taken the place of others, under the same names."""
        self._first_names = _first_names(self._root)
        self.shared = self._find_shared()
        self._listed = _every_tensor(self._root)

    def spread(self, wider: Mapping[str, Collection[int]]) -> dict[int, nn.Parameter]:
        """Let more stages keep copies of parameters; the one that owns them stays the same.

        Args:
            wider: The stages that need a copy from now on, by any name.

        Returns:
            This rank's new copies, which have no values yet, by the identity of what has stood for them.
        """
        by_name = dict(self._listed)
        tied: dict[int, list[str]] = {}
        for name, tensor in self._listed:
            tied.setdefault(id(tensor), []).append(name)
        made: dict[int, nn.Parameter] = {}
        for name, stages in wider.items():
            stand_in = by_name[name]
            new = [stage for stage in sorted(stages) if stage not in self.needed[name]]
            for one in tied[id(stand_in)]:
                self.needed[one] = (*self.needed[one], *new)
            if is_placeholder(stand_in) and self._stages & set(new):
                made[id(stand_in)] = self._copy_for(stand_in)
        self.shared = self._find_shared()
        self._listed = _every_tensor(self._root)
        return made

    def _copy_for(self, stand_in: Tensor) -> nn.Parameter:
        """A parameter in all places of what has stood for it."""
        tensor = next(one for one, made in self.stand_ins.items() if made is stand_in)
        items = [item for item in self._dropped if item.tensor is tensor]
        spec = items[0].spec
        copy = nn.Parameter(
            torch.empty(spec.shape, dtype=spec.dtype, device=self._device),
            requires_grad=stand_in.requires_grad,
        )
        for item in items:
            item.module._parameters[item.name] = copy
            self._dropped.remove(item)
        del self.stand_ins[tensor], self._gradients[id(stand_in)]
        return copy

    def _adopt_copies(self) -> None:
        """What was copied from what stands for tensors of other stages stands for tensors of its own."""
        own = {id(made) for made in self.stand_ins.values()}
        own |= {
            id((i.module._parameters if i.is_parameter else i.module._buffers).get(i.name))
            for i in self._dropped
        }
        for prefix, module in self._root.named_modules(remove_duplicate=True):
            for registry, is_parameter in ((module._parameters, True), (module._buffers, False)):
                for name, tensor in list(registry.items()):
                    if tensor is not None and is_placeholder(tensor) and id(tensor) not in own:
                        full = f"{prefix}.{name}" if prefix else name
                        spec = TensorSpec.of(tensor)
                        gone: Tensor = torch.empty(0, dtype=spec.dtype, device=self._device)
                        if is_parameter:
                            gone = nn.Parameter(gone, requires_grad=tensor.requires_grad)
                        self._take(module, registry, name, full, gone, is_parameter, spec)

    def _name_dropped(self) -> None:
        """What stands for tensors of other stages is called as it is now."""
        names = {id(module): name for name, module in reversed(list(self._root.named_modules()))}
        places = {
            id(one): (module, name)
            for module in reversed(list(self._root.modules()))
            for name, one in module._parameters.items()
        }
        renamed: set[int] = set()
        for item in self._dropped:
            if id(item.module) not in names:
                continue
            self._follow_name(item, places)
            prefix = names[id(item.module)]
            item.full_name = f"{prefix}.{item.name}" if prefix else item.name
            registry: Any = item.module._parameters if item.is_parameter else item.module._buffers
            made = registry.get(item.name)
            if made is None or id(made) in renamed:
                continue
            renamed.add(id(made))
            for stands in (made, made.grad, self._gradients.get(id(made))):
                if stands is not None and is_placeholder(stands):
                    rename(stands, item.full_name)

    def _follow_name(self, item: _Dropped, places: Mapping[int, tuple[nn.Module, str]]) -> None:
        """A parameter may have another name, such as one that is pruned, or be in another module."""
        made = self.stand_ins.get(item.tensor)
        names = [name for name, one in item.module._parameters.items() if one is made]
        if made is not None and names and item.name not in names:
            item.name = names[0]
        elif made is not None and not names and id(made) in places:  # as a parametrization moves it
            item.module, item.name = places[id(made)]

    def _take(
        self, module: nn.Module, registry: Any, name: str, full: str, tensor: Tensor, is_parameter: bool,
        spec: TensorSpec | None = None,
    ) -> None:  # fmt: skip
        spec = (spec or TensorSpec.of(tensor))._replace(device=self._device.type)
        self._dropped.append(_Dropped(module, name, full, tensor, spec, is_parameter))
        registry[name] = self._stand_in(tensor, full, spec) if is_parameter else self.absent.make(full, spec)

    def _stand_in(self, tensor: Tensor, full: str, spec: TensorSpec) -> nn.Parameter:
        """What stands for a parameter, and later for its gradient; one for all names of a tied one."""
        if tensor not in self.stand_ins:
            bare = spec._replace(requires_grad=False)
            made = nn.Parameter(self.absent.make(full, bare), requires_grad=spec.requires_grad)
            self.stand_ins[tensor] = made
            self._gradients[id(made)] = self.absent.make(full, bare)
        return self.stand_ins[tensor]

    def note_zeroed(self, zeroed: Collection[int], own: Iterable[Tensor]) -> None:
        """The gradients of these, by `id`, are None now; where more have one a hook finds out which."""
        every = (*own, *self.stand_ins.values())
        left = any(id(one) not in zeroed for one in every)
        self.has_gradients = self.has_gradients and left

    def show_gradients(self) -> None:
        """Before code of the user: after a backward, what stands for parameters has gradients too.

        So has one that is frozen now, which may have had one before: `compare_gradients` knows.
        """
        if not self.has_gradients:
            return
        self.has_gradients, self._unsure = False, True
        for parameter in self.stand_ins.values():
            if parameter.grad is None:
                parameter.grad = self._gradients[id(parameter)]

    def compare_gradients(self, tell: Callable[[frozenset[str]], Iterable[frozenset[str]]]) -> None:
        """When a hook asks for a gradient: which there are, once after each backward, on all ranks.

        Args:
            tell: Gives all ranks the names of this rank's parameters without one; returns those of each.
        """
        if not self._unsure:
            return
        self._unsure = False
        own = frozenset(name for name, parameter in self.parameters() if parameter.grad is None)
        without = frozenset[str]().union(*tell(own))
        names = {id(made): self._first_names[name] for name, made in named_parameters_of(self._root)}
        for made in self.stand_ins.values():
            if names.get(id(made)) in without:
                made.grad = None

    @contextmanager
    def filled(self, states: Mapping[str, Tensor]) -> Iterator[None]:
        """Inside, the tensors of other stages are here too.

        Args:
            states: Their values, by any of their names.

        Raises:
            SplitError: One of them was changed, which their stages would not see.
        """
        before: list[tuple[Any, str, Any]] = []
        made: dict[int, Tensor] = {}
        for item in self._dropped:
            registry: Any = item.module._parameters if item.is_parameter else item.module._buffers
            value = self._value(item, states)
            if value is not None:
                before.append((registry, item.name, registry[item.name]))
                value = value.to(self._device)
                registry[item.name] = made.setdefault(id(item.tensor), _replacement(item, value))
        versions = {key: tensor._version for key, tensor in made.items()}
        try:
            yield
        finally:
            for registry, name, stand_in in before:
                registry[name] = stand_in
        changed = {key for key, tensor in made.items() if tensor._version != versions[key]}
        names = [item.full_name for item in self._dropped if id(item.tensor) in changed]
        if names:
            raise SplitError(
                f"{', '.join(names[:5])} were changed inside whole_model(), where they are copies: "
                "change them outside of it, on all ranks"
            )

    def restore(self, states: Mapping[str, Tensor], *, on_meta: bool = False) -> None:
        """Put the tensors back, with values where `states` has them under any of their names.

        One without a value stays empty: its shape is `(0,)`, so that no use of it goes unnoticed. With
        `on_meta` it is left on the meta device, in its shape, so that the module can be split again.
        """
        filled: set[int] = set()
        made: dict[int, Tensor] = {}  # in place of what cannot be given a value, or is to have none
        for item in self._dropped:
            vars(item.module).pop(item.name, None)
            registry: Any = item.module._parameters if item.is_parameter else item.module._buffers
            registry[item.name] = item.tensor
            if item.tensor in self.stand_ins:
                item.tensor.requires_grad_(self.stand_ins[item.tensor].requires_grad)
            if id(item.tensor) in filled:
                continue
            value = self._value(item, states)
            if value is not None and not item.tensor.is_meta:
                item.tensor.data = value.detach().to(item.spec.dtype)
                filled.add(id(item.tensor))
            elif value is not None or on_meta:
                registry[item.name] = made.setdefault(id(item.tensor), _replacement(item, value))
        self._dropped.clear()
        self._fill_copies(states)
        _reorder(self._root, self._first_names)

    def _fill_copies(self, states: Mapping[str, Tensor]) -> None:
        """A module that a step has made by copying has placeholders, with no tensor of this rank's behind."""
        for prefix, module in self._root.named_modules():
            for registry in (module._parameters, module._buffers):
                for name, tensor in registry.items():
                    if tensor is None or not is_placeholder(tensor):
                        continue
                    value = states.get(f"{prefix}.{name}" if prefix else name)
                    made = (
                        torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                        if value is None
                        else value
                    )
                    is_parameter = isinstance(tensor, nn.Parameter)
                    registry[name] = nn.Parameter(made, tensor.requires_grad) if is_parameter else made

    def _value(self, item: _Dropped, states: Mapping[str, Tensor]) -> Tensor | None:
        """What `states` has for a tensor under any name; none where a hook has taken its module away."""
        name = item.full_name
        return states.get(self._first_names.get(name, name), states.get(name))

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters, by first name, tied ones once."""
        seen: set[int] = set()
        for prefix, module in self._root.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and not is_placeholder(parameter) and id(parameter) not in seen:
                    seen.add(id(parameter))
                    full = f"{prefix}.{name}" if prefix else name
                    yield self._first_names[full], parameter

    def owned_states(self, stages: set[int], *, transient: bool = False) -> dict[str, Tensor]:
        """What these stages own: the first stage that needs a parameter, the last that needs a buffer.

        A buffer that code outside the units writes has its true value on the last stage. Names are those of
        `state_dict`, so a tied weight appears under each.

        Args:
            stages: Of this rank.
            transient: Whether non-persistent buffers are among them, which `state_dict` leaves out.
        """
        result: dict[str, Tensor] = {}
        for prefix, module in self._root.named_modules(remove_duplicate=False):
            for name, tensor in module._parameters.items():
                full = f"{prefix}.{name}" if prefix else name
                if tensor is not None and self.needed[full][0] in stages:
                    result[full] = tensor
            for name, buffer in module._buffers.items():
                full = f"{prefix}.{name}" if prefix else name
                listed = transient or name not in module._non_persistent_buffers_set
                if buffer is not None and listed and self.needed[full][-1] in stages:
                    result[full] = buffer
        return result


def _replacement(item: _Dropped, value: Tensor | None) -> Tensor:
    """A tensor with a value, or on the meta device, where it has no memory."""
    spec = item.spec
    made = torch.empty(spec.shape, dtype=spec.dtype, device="meta") if value is None else value.to(spec.dtype)
    return nn.Parameter(made, requires_grad=item.tensor.requires_grad) if item.is_parameter else made


def _every_tensor(root: nn.Module) -> list[tuple[str, Tensor]]:
    """All parameters and buffers under every name."""
    return [
        *named_parameters_of(root, remove_duplicate=False),
        *root.named_buffers(remove_duplicate=False),
    ]


def _first_names(root: nn.Module) -> dict[str, str]:
    """The first name of each tensor, by every name it has."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for full, tensor in _every_tensor(root):
        names[full] = first.setdefault(id(tensor), full)
    return names


def _reorder(root: nn.Module, order: dict[str, str]) -> None:
    """Give every registry the order of names it had, so that `parameters()` lists them as before."""
    rank = {full: position for position, full in enumerate(order)}
    for prefix, module in root.named_modules():
        for registry in (module._parameters, module._buffers):
            if not isinstance(registry, dict):  # of a scripted module, which nobody has changed
                continue
            names = sorted(
                registry, key=lambda name: rank.get(f"{prefix}.{name}" if prefix else name, len(rank))
            )
            items = [(name, registry[name]) for name in names]
            registry.clear()
            registry.update(items)
