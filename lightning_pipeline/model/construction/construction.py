"""A module that was built without weights, and the weights that it is to have."""

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_pipeline.model.construction.places import named_states, replace, substituted
from lightning_pipeline.model.construction.recorder import Recorder
from lightning_pipeline.model.construction.tape import View
from lightning_pipeline.model.random import random_state_kept

_Module = TypeVar("_Module", bound=nn.Module)
_SEEN_BY_GLUE = 1 << 24  # bytes of buffers that are made before the module is traced


class Construction:
    """Weights that are not there yet, by name. The module's tensors are put on the meta device.

    Small buffers are made at once, for code between layers looks at them; so are plain attributes.

    Args:
        module: Built while the recorder was recording.
        recorder: What recorded it.

    Attributes:
        given: By name, fills a tensor that has memory and no values yet, in place of making it.
    """

    def __init__(self, module: nn.Module, recorder: Recorder) -> None:
        self._recorder = recorder
        self._module = module
        self.given: Mapping[str, Callable[[Tensor], object]] = {}
        absent = {name: tensor for name, tensor in named_states(module) if recorder.owns(tensor)}
        self._views: dict[str, View] = {name: recorder.tape.view(tensor) for name, tensor in absent.items()}
        replace(module, {id(tensor): _on_meta(tensor) for tensor in absent.values()})
        self._make_attributes()
        self.make(self._small_buffers())

    def __bool__(self) -> bool:
        return bool(self._views)

    @property
    def num_bytes(self) -> int:
        """Of what is not there yet, tied weights once."""
        return sum(self._recorder.tape.sizes[number] for number in {v.memory for v in self._views.values()})

    def make(self, names: Collection[str] | None = None) -> None:
        """Give tensors the values that the constructor gives them on one device, or those that are `given`.

        Args:
            names: In the module. Default: all, as the constructor makes them. What is there already stays.
        """
        wanted = {name: view for name, view in self._views.items() if names is None or name in names}
        states = dict(named_states(self._module))
        storages = {} if names is None else self._filled(wanted)
        storages |= self._recorder.make({view.memory for view in wanted.values()} - storages.keys())
        by: dict[int, Tensor] = {}
        for name, view in wanted.items():
            if states[name].is_meta:
                by.setdefault(id(states[name]), view.of(storages[view.memory]).to(states[name].dtype))
            del self._views[name]
        replace(self._module, by)

    def _filled(self, wanted: Mapping[str, View]) -> dict[int, torch.UntypedStorage]:
        """Memories of which all is given; tied weights are filled once."""
        sizes = self._recorder.tape.sizes
        asked = {view.memory for name, view in wanted.items() if name not in self.given}
        filled: dict[int, torch.UntypedStorage] = {}
        for name, view in wanted.items():
            whole = view.span * view.dtype.itemsize == sizes[view.memory]
            if whole and view.memory not in asked | filled.keys():
                filled[view.memory] = torch.empty(sizes[view.memory], dtype=torch.uint8).untyped_storage()
                with torch.no_grad():
                    self.given[name](view.of(filled[view.memory]))
        return filled

    def _small_buffers(self) -> set[str]:
        """Buffers, the smallest first, as long as they are few bytes together."""
        buffers: dict[str, View] = {
            name: self._views[name]
            for name, _ in self._module.named_buffers(remove_duplicate=False)
            if name in self._views
        }
        sizes = self._recorder.tape.sizes
        chosen, left = set[str](), _SEEN_BY_GLUE
        for name, view in sorted(buffers.items(), key=lambda item: (sizes[item[1].memory], item[0])):
            left -= sizes[view.memory]
            if left < 0:
                break
            chosen.add(name)
        return chosen

    def _make_attributes(self) -> None:
        """Tensors in plain attributes, lists and dictionaries of modules have values from now on."""
        values: dict[int, Tensor] = {}

        def valued(tensor: Tensor) -> Any:
            if not self._recorder.owns(tensor):
                return tensor
            if id(tensor) not in values:
                value = self._recorder.value(tensor).clone()
                is_parameter = isinstance(tensor, nn.Parameter)
                values[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if is_parameter else value
            return values[id(tensor)]

        for part in self._module.modules():
            for name, held in vars(part).items():
                if name not in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
                    vars(part)[name] = substituted(held, valued)


def without_weights(make: Callable[[], _Module]) -> _Module:
    """Build a module whose weights nobody wants, on the meta device. Random states are as before.

    There, torch's initialisers do nothing. Where that fails, since the code looks at values, it is called
    once more and recorded.

    Args:
        make: Builds it, each time anew. Values that it looks at are drawn otherwise than on one device.
    """
    with random_state_kept(), suppress(Exception), torch.device("meta"):
        return make()
    recorder = Recorder(draws=False)
    with random_state_kept():
        with recorder.recording():
            module = make()
        Construction(module, recorder)
    return module


def _on_meta(tensor: Tensor) -> Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return made.requires_grad_(tensor.requires_grad and not isinstance(tensor, nn.Parameter))


def is_whole(module: nn.Module) -> bool:
    """Whether a module has all its weights: none stands on the meta device."""
    return not any(tensor.is_meta for _, tensor in named_states(module))


def sizes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors, tied ones once."""
    return sum({id(tensor): tensor.nbytes for tensor in tensors}.values())
