"""Optimizers of one stage: their groups list the whole model, and a step goes over this stage's part."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_pipeline._torch import tree_map
from lightning_pipeline.errors import ConfigurationError
from lightning_pipeline.model.split import OutsideSteps
from lightning_pipeline.model.state import Sent
from lightning_pipeline.model.tensors import TensorSpec, is_placeholder
from lightning_pipeline.patching import all_undone, patch
from lightning_pipeline.registry import named_parameters_of, parameters_of

_Undo = Callable[[], None]


@dataclass(frozen=True)
class _Described:
    """A tensor in an optimizer's state, without its values."""

    spec: TensorSpec


def _described(value: Any) -> Any:
    return _Described(TensorSpec.of(value)) if isinstance(value, Tensor) else value


def _stand_in(split: OutsideSteps, name: str, value: Any) -> Any:
    return split.stand_in(name, value.spec) if isinstance(value, _Described) else value


def is_torchs(optimizer: Optimizer) -> bool:
    """Whether the step is one of torch's, which do to each parameter what its own gradient and state tell."""
    return type(optimizer).step.__module__.startswith("torch.optim.")


@contextmanager
def own_groups(optimizer: Optimizer) -> Iterator[None]:
    """Inside, an optimizer's groups list this rank's parameters only."""
    whole = [(group, group["params"]) for group in optimizer.param_groups]
    for group, every in whole:
        group["params"] = [parameter for parameter in every if not is_placeholder(parameter)]
    try:
        yield
    finally:
        for group, every in whole:
            group["params"] = every


def _parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _asks_first(name: str) -> Callable[..., Any]:
    """A method of dictionaries that asks other ranks, where these may know more."""
    original = getattr(defaultdict, name)

    @wraps(original)
    def read(self: "_States", *args: Any) -> Any:
        self.ask()
        return original(self, *args)

    return read


class _States(defaultdict[Any, Any]):
    """An optimizer's state.

    Args:
        states: By parameter.
        ask: Called before it is read.
    """

    def __init__(self, states: Mapping[Any, Any], ask: Callable[[], None]) -> None:
        self.ask: Callable[[], None] = _nothing
        super().__init__(dict, states)
        self.ask = ask

    __getitem__, __delitem__, __contains__ = map(_asks_first, ("__getitem__", "__delitem__", "__contains__"))
    __iter__, __reversed__, __len__ = map(_asks_first, ("__iter__", "__reversed__", "__len__"))
    get, pop, popitem, setdefault = map(_asks_first, ("get", "pop", "popitem", "setdefault"))
    keys, values, items = map(_asks_first, ("keys", "values", "items"))

    def copy(self) -> Any:
        """The plain one that torch makes."""
        return defaultdict(dict, self)

    __copy__ = copy

    def __reduce__(self) -> Any:
        return defaultdict, (dict,), None, None, iter(self.items())


class OwnParts:
    """Takes what stands for other stages' parameters out of an optimizer's groups, for its step only.

    Hooks and callbacks see the groups of the whole model, also those that run in the step's closure. So does
    the step of an optimizer that is not torch's own, which may work out a norm over all of them.

    Args:
        optimizers: Of the run.
        split: Knows the names, and makes what stands for tensors of other stages.
        tell: Gives an object to all ranks, told what it is, and returns theirs, where code of a hook runs;
            None elsewhere.
    """

    def __init__(
        self, optimizers: Iterable[Optimizer], split: OutsideSteps,
        tell: Callable[[str, Any], Iterable[Any] | None],
    ) -> None:  # fmt: skip
        self._split, self._tell = split, tell
        self._out: list[tuple[dict[str, Any], list[Tensor]]] = []
        self._listed: dict[int, int] = {}
        self._stepped: set[int] = set()
        self._unsure: dict[int, list[Any]] = {}
        self._watched: list[Optimizer] = []
        self._handles: list[RemovableHandle] = []
        for optimizer in optimizers:
            self.know(optimizer)

    def know(self, optimizer: Optimizer) -> None:
        """Ahead of a step: it may be that of an optimizer that a hook has put into another one's place."""
        if is_torchs(optimizer) and all(optimizer is not one for one in self._watched):
            self._watched.append(optimizer)
            self._handles.append(optimizer.register_step_pre_hook(self._before))
            self._handles.append(optimizer.register_step_post_hook(self._after))

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Around the closure, in which Lightning runs the step and its hooks, the groups are whole."""
        own, *rest = args  # the optimizer itself comes first
        closure = kwargs.get("closure", rest[0] if rest else None)
        if closure is None:
            self._begin(optimizer)
            return None

        @wraps(closure)
        def whole() -> Any:
            self.put_back()
            try:
                return closure()
            finally:
                self._begin(optimizer)

        self._take_out(optimizer)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": whole}
        return (own, whole, *rest[1:]), kwargs

    def _begin(self, optimizer: Optimizer) -> None:
        """What parameters without an entry get is known to the rank that has them."""
        if any(not optimizer.state.get(parameter) for parameter in _parameters_of(optimizer)):
            self._unsure.setdefault(id(optimizer), list(optimizer.state))
        self._take_out(optimizer)

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        self._stepped.add(id(optimizer))
        self.put_back()

    def _take_out(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            whole: list[Tensor] = group["params"]
            own = [parameter for parameter in whole if not is_placeholder(parameter)]
            if len(own) < len(whole):
                self._out.append((group, whole))
                group["params"] = own

    def show_states(self, optimizer: Optimizer, gather: Callable[[Any], list[Any]]) -> None:
        """After a step: let the state list the whole model too, in the order of the groups.

        That is done at once where the optimizer has other parameters than before, and after that, where a
        step may have made entries, when code of a hook reads the state.

        Args:
            optimizer: That has stepped.
            gather: Collects an object of every rank of this replica; all ranks step alike.
        """
        if id(optimizer) not in self._stepped:
            return  # it has left its step out
        if not isinstance(optimizer.state, _States):
            optimizer.state = _States(optimizer.state, partial(self._ask, optimizer))
        number = sum(1 for _ in _parameters_of(optimizer))
        if self._listed.get(id(optimizer)) != number:
            self._listed[id(optimizer)] = number
            before = self._unsure.pop(id(optimizer), list(optimizer.state))
            self._complete(optimizer, before, gather(self._described(optimizer)))

    def _ask(self, optimizer: Optimizer) -> None:
        """Code of the user's is about to read the state of an optimizer."""
        if id(optimizer) not in self._unsure:
            return
        before = self._unsure.pop(id(optimizer))  # what is told is read, too
        told = self._tell("what optimizers keep", self._described(optimizer))
        if told is None:  # no hook runs
            self._unsure[id(optimizer)] = before
        else:
            self._complete(optimizer, before, told)

    def _described(self, optimizer: Optimizer) -> dict[str, Any]:
        """What is kept of parameters of this rank, by their names."""
        names = {id(parameter): name for name, parameter in named_parameters_of(self._split.root)}
        return {
            names[id(p)]: tree_map(_described, dict(state))
            for p, state in optimizer.state.items()
            if id(p) in names and not is_placeholder(p)
        }

    def _complete(
        self, optimizer: Optimizer, before: Sequence[Any], told: Iterable[Mapping[str, Any]]
    ) -> None:
        """Let the state have an entry for each parameter that has one on its own rank.

        Args:
            optimizer: Whose state that is.
            before: What had entries ahead of the step, which come first.
            told: What each rank keeps, from `_described`.
        """
        every = list(_parameters_of(optimizer))
        names = {id(parameter): name for name, parameter in named_parameters_of(self._split.root)}
        specs = {name: state for part in told for name, state in part.items()}
        found = dict(optimizer.state)
        for parameter in filter(is_placeholder, every):
            name = names.get(id(parameter))  # none where its module has been taken away
            if name is None:
                continue
            if name not in specs:
                found.pop(parameter, None)
            elif found.get(parameter, {}).keys() != specs[name].keys() or not specs[name]:
                found[parameter] = tree_map(partial(_stand_in, self._split, name), specs[name])
        optimizer.state.clear()
        order = {id(key): key for key in (*before, *every)}.values()
        optimizer.state.update({key: found.pop(key) for key in order if key in found})
        optimizer.state.update(found)

    def put_back(self) -> None:
        """Make the groups whole, also after a step that failed."""
        for group, whole in self._out:
            group["params"] = whole
        self._out = []

    def remove(self) -> None:
        """Leave the optimizers alone from now on."""
        self.put_back()
        for handle in self._handles:
            handle.remove()
        for optimizer in self._watched:
            if isinstance(optimizer.state, _States):
                optimizer.state = optimizer.state.copy()


def watch_steps(
    optimizers: Iterable[Optimizer], is_inside: Callable[[], bool],
    stepping: Callable[[Optimizer, Callable[[], Any]], AbstractContextManager[Callable[[], Any]]],
) -> Callable[[], None]:  # fmt: skip
    """From now on a step that code of the user's takes past Lightning is an optimizer's step too.

    Such as `self.optimizers().optimizer.step()`, or that of a `GradScaler` of the user's own.

    Args:
        optimizers: Of the run. Steps of those that are not torch's own are seen anyway.
        is_inside: Whether code of the user's runs now.
        stepping: Made around a step, with its closure; gives the closure to call.

    Returns:
        The undoing.
    """

    def watched(optimizer: Optimizer) -> Callable[..., Any]:
        original: Callable[..., Any] = optimizer.step

        @wraps(original)
        def step(_: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            if not is_inside():
                return original(closure)
            with stepping(optimizer, closure or _nothing) as own:
                return original(closure and own)

        return MethodType(step, optimizer)  # which schedulers expect

    made = filter(is_torchs, optimizers)
    return all_undone([patch(optimizer, "step", watched(optimizer)) for optimizer in made])


def _nothing() -> None:
    """What a step without a closure calls."""


def exchange(optimizers: Iterable[Optimizer], others: Mapping[int, Tensor]) -> None:
    """Put other tensors into optimizers' groups; state of what they replace is dropped.

    An optimizer may have been built from the whole module before it was split, as LightningCLI does it.

    Args:
        optimizers: To change, in place.
        others: What comes into its place, by the identity of a tensor.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"][:] = [others.get(id(parameter), parameter) for parameter in group["params"]]
        for parameter in [p for p in optimizer.state if id(p) in others]:
            del optimizer.state[parameter]


def states_of(optimizers: Iterable[Optimizer], names: Mapping[int, str]) -> list[dict[str, Sent]]:
    """What each optimizer knows of some of this rank's parameters, by name, ready to travel.

    Args:
        optimizers: Of the run.
        names: Of the parameters, by identity.
    """
    return [
        {
            names[id(parameter)]: Sent.of(dict(state))
            for parameter, state in optimizer.state.items()
            if id(parameter) in names and not is_placeholder(parameter)
        }
        for optimizer in optimizers
    ]


def give_states(
    optimizers: Iterable[Optimizer], parameters: Mapping[str, nn.Parameter],
    told: Iterable[Sequence[Mapping[str, Sent]]],
) -> None:  # fmt: skip
    """Let optimizers know of copies of parameters what those of other ranks do.

    Args:
        optimizers: Of the run.
        parameters: This rank's new copies, by name.
        told: By rank, from `states_of`.
    """
    for states in told:
        for optimizer, known in zip(optimizers, states, strict=True):
            for name in parameters.keys() & known.keys():
                parameter = parameters[name]
                optimizer.state[parameter] = known[name].received(parameter.device)


def gradients_of(module: nn.Module, names: Mapping[int, str]) -> dict[str, Sent]:
    """What this rank's parameters have accumulated, ready to travel.

    Args:
        module: That has them.
        names: Of those that are asked for, by identity.
    """
    return {
        names[id(parameter)]: Sent.of({"grad": parameter.grad})
        for parameter in parameters_of(module)
        if id(parameter) in names and not is_placeholder(parameter) and parameter.grad is not None
    }


def give_gradients(parameters: Mapping[str, nn.Parameter], told: Iterable[Mapping[str, Sent]]) -> None:
    """Let copies of parameters go on from what was accumulated, as in the middle of accumulated batches.

    Args:
        parameters: This rank's new copies, by name.
        told: By rank, from `gradients_of`.
    """
    for known in told:
        for name in parameters.keys() & known.keys():
            parameter = parameters[name]
            parameter.grad = known[name].received(parameter.device)["grad"]


def refuse_unserved(optimizers: Iterable[Optimizer], ranks: int) -> None:
    """Refuse optimizers whose number of steps each rank would decide from its own stages.

    Args:
        optimizers: Of the run.
        ranks: On which the stages are. One has the whole model, so that nothing is refused.

    Raises:
        ConfigurationError: For LBFGS.
    """
    for optimizer in optimizers:
        if ranks > 1 and isinstance(optimizer, LBFGS):
            raise ConfigurationError(
                "LBFGS runs the step several times per batch and decides from one stage's parameters how "
                "often: with stages on several ranks use an optimizer that runs it once, such as "
                "torch.optim.AdamW"
            )


def refuse_strangers(optimizers: Iterable[Optimizer], module: nn.Module) -> _Undo:
    """Refuse gradients of parameters that are not the module's: no stage would collect them.

    One that no gradient reaches is left alone. Optimizers of others may list copies of their own.

    Args:
        optimizers: Of the run; their groups list what the module does.
        module: As it is cut.

    Returns:
        Undoes it. Until then the backward raises `ConfigurationError`, which names the group.
    """
    known = {id(parameter) for parameter in parameters_of(module)}
    return all_undone(
        [
            parameter.register_hook(partial(_refuse_gradient, f"group {place} of optimizer {number}")).remove
            for number, optimizer in enumerate(optimizers)
            if is_torchs(optimizer)
            for place, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
            if parameter.requires_grad and id(parameter) not in known
        ]
    )


def _refuse_gradient(group: str, gradient: Tensor) -> None:
    raise ConfigurationError(
        f"{group} has a parameter of shape {tuple(gradient.shape)} that is not among the module's own, and "
        "stages keep and send gradients of these: let the module know it, as an nn.Parameter that is its "
        "attribute, or in an nn.ParameterList or nn.Module that is"
    )


class Calls:
    """A closure that all ranks of a pipeline call equally often.

    Most optimizers call it once. One that calls it again (LBFGS, sharpness-aware minimization) runs the step
    for the batch again, for which each stage waits for the others.

    Args:
        closure: Of Lightning: the step, its backward and the hooks around them.
        gather: Collects an object of every rank of this replica and refuses ranks that gather for something
            else.
    """

    def __init__(self, closure: Callable[[], Any], gather: Callable[[Any, str], list[Any]]) -> None:
        self._closure, self._gather = closure, gather
        self._calls = 0

    def __call__(self) -> Any:
        """Call it.

        Raises:
            MessageError: Other ranks have no further call.
        """
        self._calls += 1
        if self._calls > 1:
            self._gather(self._calls, f"call {self._calls} of an optimizer's closure for one batch")
        return self._closure()

    def end(self) -> None:
        """After the optimizer's step: no rank calls it again.

        Raises:
            MessageError: Others do.
        """
        self._gather(self._calls, "the end of an optimizer's step")
