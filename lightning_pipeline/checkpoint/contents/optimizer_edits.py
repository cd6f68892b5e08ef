"""What `on_load_checkpoint` sees of optimizers, and what it has changed there, as on one device.

Of a folder the options of the groups are shown, such as the learning rate: the state is on its stages.
"""

import pickle
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from torch.optim import Optimizer

from lightning_pipeline.errors import CheckpointError


class StateOfStages(dict[int, Any]):
    """Stands for the state of an optimizer, which each stage reads for itself. Another may take its place."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise CheckpointError(
            "checkpoint['optimizer_states'][...]['state'] cannot be read in on_load_checkpoint: each stage "
            "reads that of its own parameters. Put a dictionary in its place, change optimizer.state in "
            "on_train_start, or read a file that `python -m lightning_pipeline consolidate` has made"
        )

    __getitem__ = __iter__ = __len__ = __contains__ = _refuse
    get = keys = values = items = pop = popitem = setdefault = update = _refuse  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        return StateOfStages, ()

    def __repr__(self) -> str:
        return "<the state of an optimizer, on its stages>"


class Shown(NamedTuple):
    """What a hook was given of an optimizer.

    Attributes:
        items: What was in the state, by `id`; None of that of stages.
        options: Of each group, as bytes.
    """

    items: dict[Any, int] | None
    options: list[dict[str, bytes]]

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Shown":
        """Of what is about to be given."""
        options = [{key: pickle.dumps(value) for key, value in one.items()} for one in given["param_groups"]]
        return cls(_items(given["state"]), options)


def _items(state: Mapping[Any, Any]) -> dict[Any, int] | None:
    return None if isinstance(state, StateOfStages) else {key: id(value) for key, value in state.items()}


def given_states(states: Sequence[Any]) -> list[dict[str, Any]]:
    """The states of optimizers in a file of one device, for a hook; none where they are of another form.

    Args:
        states: As they are read.
    """
    if not all(isinstance(one, dict) and {"state", "param_groups"} <= one.keys() for one in states):
        return []
    return [
        {**one, "state": dict(one["state"]), "param_groups": [dict(group) for group in one["param_groups"]]}
        for one in states
    ]


def shown_states(groups: Iterable[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """What stands for the states of optimizers in a checkpoint that a hook is given.

    Args:
        groups: Of each optimizer, from `groups_of`.
    """
    return [
        {"state": StateOfStages(), "param_groups": [dict(group["options"]) for group in of]} for of in groups
    ]


def put_edits(optimizers: Sequence[Optimizer], states: Sequence[Any], shown: Sequence[Shown]) -> None:
    """After optimizers were filled: what the user has put into the checkpoint for them.

    Args:
        optimizers: Whole, or with what stands for other stages' parameters.
        states: As the user has left them.
        shown: What these were.
    """
    for optimizer, given, before in zip(optimizers, states, shown, strict=False):
        groups, state = given.get("param_groups", []), given.get("state", StateOfStages())
        is_other = not isinstance(state, StateOfStages) and _items(state) != before.items
        if is_other and groups and all("params" in group for group in groups):  # a whole `state_dict`
            optimizer.load_state_dict({**given, "state": state})
            continue
        for group, now, old in zip(optimizer.param_groups, groups, before.options, strict=False):
            group.update({k: v for k, v in now.items() if k != "params" and pickle.dumps(v) != old.get(k)})
        if is_other:
            own = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": state, "param_groups": own})
