"""What the code between the units does while a step is traced: where values go, and what it writes."""

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_pipeline._torch import TorchDispatchMode
from lightning_pipeline.errors import SplitError
from lightning_pipeline.model.tensors import (
    RANDOM_FUNCTIONS,
    Tag,
    TagStore,
    TensorSpec,
    is_placeholder,
    map_tensors,
    storage_key,
    tensors_in,
    user_line,
    weights_needed,
    written_tensors,
)
from lightning_pipeline.model.trace.choices import is_tensor_read
from lightning_pipeline.model.trace.costs import Work
from lightning_pipeline.model.trace.record import refuse

if TYPE_CHECKING:
    from lightning_pipeline.model.trace.tracer import Tracer

SCALAR_READS = ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero")
_SET_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]


class Glue:
    """Follows dependence through the operations between units.

    Attributes:
        unknown_line: Where the trace stopped knowing what the values are; empty before.
        written_states: Parameters and buffers that glue writes, by name.
        draws: Whether a function runs that is known to draw random numbers.
    """

    def __init__(self, tracer: "Tracer") -> None:
        self._tracer = tracer
        self.unknown_line, self.draws = "", False
        self.written_states: dict[str, Tensor] = {}
        self.write_positions: dict[str, set[int]] = {}  # by name, how many units had been called
        self.moved: set[str] = set()  # parameters whose memory is another one after the step
        self._seen_states: set[str] = set()
        self._restores: list[tuple[Tensor, Tensor]] = []
        self._hooks: list[tuple[int, str]] = []
        self._poisoned: dict[int, Tensor] = {}
        self._stand_ins: dict[int, Tensor] = {}
        self._poisoned_by: dict[int, Tensor] = {}  # the other way: the real tensor behind a stand-in
        self.batch = TagStore()

    def close(self) -> None:
        """Put back what glue wrote into parameters and buffers."""
        with torch.no_grad():
            for tensor, value in self._restores:
                tensor.copy_(value)
        for held in (self._poisoned, self._stand_ins, self._poisoned_by, self.written_states):
            held.clear()

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation of glue; its results, and what it writes, come from all of its operands."""
        operands = list(operands_of(args, kwargs))
        if func.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
            raise refuse(
                "a collective of torch.distributed inside a step would be entered by one stage only",
                self._tracer.root,
            )
        poisoned = any(map(self.is_poisoned, operands))
        empty = poisoned or any(map(is_placeholder, operands))
        faked = poisoned or any(map(self._is_foreign, operands))
        tags = self._tracer.tags.union(operands)
        written = list(written_tensors(func, args, kwargs))
        if poisoned:
            args, kwargs = self.without_poison((args, kwargs))
        self._note_states(written, faked)
        if func._schema.name in SCALAR_READS:
            if faked:
                return self._scalar(func, operands)
            if empty:
                raise weights_needed(tags, self._tracer.root)
            self._tracer.trace.everywhere |= {tag.name for tag in tags if tag.kind == "state"}
            self._tracer.trace.steered = True
        if not self.draws and torch.Tag.nondeterministic_seeded in func.tags:
            self._tracer.trace.draws_unseen = True
        result = func(*args, **kwargs)
        results = list(operands_of((result,), {}))
        self._note_work(self._tracer.keeping.work_of(func, args, kwargs, result))
        for tensor in results:
            self._tracer.tags.add(tensor, tags)
            if empty and not any(tensor is operand for operand in operands):
                self._tracer.made.append(weakref.ref(tensor))
        for tensor in written:
            self._note_write(tensor, tags, empty)
        self._tracer.keeping.operation_in_glue(results)
        return result

    def _note_work(self, work: Work) -> None:
        if work.flops or work.num_bytes:
            self._tracer.trace.between[len(self._tracer.trace.calls)].append(work)

    def _is_foreign(self, tensor: Tensor) -> bool:
        """Whether its values are computed by units, so that some stages do not know them."""
        if not is_placeholder(tensor):
            return False
        tags = self._tracer.tags.of(tensor)
        return not self._tracer.weightless or not tags or any(t.kind not in ("state", "batch") for t in tags)

    def _note_write(self, tensor: Tensor, tags: frozenset[Tag], empty: bool) -> None:
        tracer = self._tracer
        for tag in tracer.shared.of(tensor):
            unit = tracer.patches.units[tracer.trace.calls[tag.call].unit].name
            raise refuse(
                f"the memory of an output of unit {unit!r}, which it shares with another of its outputs or "
                "with its input, is changed in place between units: return a copy",
                tracer.root,
            )
        self._tracer.trace.mutated |= {(tag.call, tag.leaf) for tag in self._tracer.handed.of(tensor)}
        self.note_batch(tensor)
        self._tracer.tags.add(tensor, tags)
        if storage_key(tensor) in self._poisoned_by:
            self._tracer.tags.add(self._poisoned_by[storage_key(tensor)], tags)
        if empty and not is_placeholder(tensor):
            self._poisoned[storage_key(tensor)] = tensor

    def _note_states(self, written: list[Tensor], faked: bool) -> None:
        for tensor in written:
            name = self._tracer.states.get(storage_key(tensor))
            if name is None:
                continue
            if name not in self._seen_states and not is_placeholder(tensor) and not tensor.is_meta:
                self._restores.append((tensor, tensor.detach().clone()))
            self._seen_states.add(name)
            self.write_positions.setdefault(name, set()).add(len(self._tracer.trace.calls))
            if faked or self._tracer.trace.calls:  # before any unit, every stage does the same
                self.written_states.setdefault(name, tensor)

    @property
    def all_written(self) -> list[str]:
        """Every parameter, buffer and plain tensor that glue writes, before the units too."""
        return sorted(self._seen_states | self.moved)

    def note_batch(self, written: Tensor) -> None:
        """Note a write into the memory of the batch."""
        if self.batch.of(written):
            self._tracer.trace.writes_batch = True

    def is_poisoned(self, tensor: Tensor) -> bool:
        """Whether a placeholder was written into this real tensor."""
        return storage_key(tensor) in self._poisoned

    def without_poison(self, value: Any) -> Any:
        """The same with placeholders for real tensors that a placeholder was written into."""
        if not self._poisoned:
            return value

        def swap(tensor: Tensor) -> Tensor:
            if is_placeholder(tensor) or not self.is_poisoned(tensor):
                return tensor
            return self._stand_in(tensor)

        return map_tensors(swap, value)

    def _stand_in(self, tensor: Tensor) -> Tensor:
        """A view of the one placeholder for the memory of `tensor`; what is written there is noted here."""
        base = self._stand_ins.get(storage_key(tensor))
        if base is None:
            count = tensor.untyped_storage().nbytes() // tensor.element_size()
            spec = TensorSpec((count,), (1,), tensor.dtype, tensor.device.type, False)
            base = self._stand_ins[storage_key(tensor)] = self._tracer.mode.make(spec)
            self._poisoned_by[storage_key(base)] = tensor
        self._tracer.tags.add(base, self._tracer.tags.of(tensor))
        return base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def _scalar(self, func: Any, operands: list[Tensor]) -> Any:
        self._tracer.effects.values_read()
        if not self.unknown_line:
            self.unknown_line = user_line(self._tracer.root)
        self._tracer.trace.tail |= self._tracer.tags.union(operands)
        dtype = operands[0].dtype
        if func._schema.name != "aten::_local_scalar_dense" or dtype is torch.bool:
            return False
        return 1.0 if dtype.is_floating_point else 1

    def data_set(self, state: Tensor, value: Tensor) -> None:
        """A weight is given another's values: the last stage, which has these at the end, needs it too."""
        own, given = (set(self._tracer.tags.of(tensor)) for tensor in (state, value))
        if given - own:
            self._tracer.trace.tail |= own | given

    def hook_registered(self, tensor: Tensor) -> None:
        """A gradient hook was put on a tensor between units."""
        derived = self._tracer.tags.of(tensor)
        if any(t.kind == "value" for t in derived) and not any(
            r() is tensor for r in self._tracer.values.values()
        ):
            self._hooks.append((len(self._tracer.trace.calls), user_line(self._tracer.root)))

    def check_hooks(self) -> None:
        """Refuse hooks on values whose gradient comes from several stages."""
        for position, line in self._hooks:
            if position < len(self._tracer.trace.calls):
                raise SplitError(
                    f"register_hook at {line} is on a value computed between units, whose gradient may come "
                    "from several stages: put the hook on the output of a module"
                )


class GlueOperations(TorchDispatchMode):
    """Sees every operation that is not inside a unit."""

    def __init__(self, tracer: "Tracer") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tracer = tracer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._tracer.inside is not None or self._tracer.keeping.is_packing:
            result = func(*args, **(kwargs or {}))
            if self._tracer.runs_really:
                self._tracer.note_made(operands_of((result,), {}))
            return result
        return self._tracer.glue.operation(func, args, kwargs or {})


class GlueFunctions(TorchFunctionMode):
    """Sees calls that are no operations: gradients taken inside the step, and hooks on tensors."""

    def __init__(self, tracer: "Tracer") -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tracer = self._tracer
        if func == _SET_DATA and is_placeholder(args[1]) and not is_placeholder(args[0]):
            return None  # `weight.data = weight.data.to(device)` in a unit, which keeps its values here
        if tracer.inside is None:
            if func in (torch.autograd.grad, torch.autograd.backward, Tensor.backward):
                values = tracer.tags.union(tensors_in((args, kwargs or {})))
                if any(tag.kind == "value" for tag in values):
                    raise refuse(
                        "a gradient is taken inside the step through what units return, as for a gradient "
                        "penalty: the graph inside units is each stage's own, of another backward. Take it "
                        "in the forward of one module, which returns what is needed, and keep it whole: "
                        "PipelineStrategy(units=['<its name>']); with create_graph=True the loss may depend "
                        "on it there, under any schedule",
                        tracer.root,
                    )
            elif func == _SET_DATA:
                tracer.glue.data_set(*args)
            elif func is Tensor.register_hook:
                tracer.glue.hook_registered(args[0])
            elif is_tensor_read(func) and not is_placeholder(args[0]):
                tracer.trace.steered = True
        tracer.glue.draws = func in RANDOM_FUNCTIONS
        try:
            if not tracer.glue.draws or tracer.inside is not None or tracer.seeds is None:
                return func(*args, **(kwargs or {}))
            before = tracer.seeds.drawing((kwargs or {}).get("generator"))
            result = func(*args, **(kwargs or {}))
            tracer.seeds.drawn(before)
            return result
        finally:
            tracer.glue.draws = False


def operands_of(args: Any, kwargs: Any) -> Iterator[Tensor]:
    """The tensors among the arguments of an operation."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (item for item in value if isinstance(item, Tensor))
