"""Objects in a checkpoint that are no plain data: kept apart, so that the rest can be read without them."""

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_pipeline.checkpoint.folder import META, OURS, is_plain, load_object
from lightning_pipeline.errors import CheckpointCorruptError

Place = tuple[str, ...]
_NESTED = ("hyper_parameters", "datamodule_hyper_parameters", "callbacks")
_OBJECTS = "objects"
_SIMPLE = (str, int, float, bool, bytes, type(None))


class _Pickler(pickle.Pickler):
    """Writes the names of a module's tensors in place of the tensors."""

    def __init__(self, file: io.BytesIO, names: Mapping[int, str]) -> None:
        super().__init__(file)
        self._names = names

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor) or id(obj) not in self._names:
            return None
        return self._names[id(obj)], isinstance(obj, torch.nn.Parameter), obj.requires_grad


class _Unpickler(pickle.Unpickler):
    """Finds the tensors by those names."""

    def __init__(self, file: io.BytesIO, state: Callable[[str], Tensor]) -> None:
        super().__init__(file)
        self._state = state

    def persistent_load(self, pid: Any) -> Tensor:
        name, is_parameter, requires_grad = pid
        tensor = self._state(name)
        return torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor


def pickled(values: Mapping[str, Any], names: Mapping[int, str]) -> dict[str, bytes]:
    """Values that are not simple, such as modules among the hyper-parameters, without the module's tensors.

    Args:
        values: By key.
        names: Of the tensors in the module's `state_dict`, by `id`. They are not written.
    """
    return {key: _dumped(value, names) for key, value in values.items() if not _is_simple(value)}


def _is_simple(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_simple, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_simple, value))
    return isinstance(value, _SIMPLE)


def _dumped(value: Any, names: Mapping[int, str]) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, names).dump(value)
    return buffer.getvalue()


def set_apart(meta: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[Place, bytes]]]:
    """Take out of what Lightning dumped what could not be read without trust.

    Args:
        meta: Beside the tensors of model and optimizers.

    Returns:
        The rest, and where what was taken stood.
    """
    rest, apart = dict(meta), list[tuple[Place, bytes]]()
    if is_plain(rest):
        return rest, apart
    for key, value in meta.items():
        if key in _NESTED and isinstance(value, Mapping) and not is_plain(value):
            odd = [name for name, entry in value.items() if not is_plain(entry)]
            rest[key] = {name: entry for name, entry in value.items() if name not in odd}
            apart += [((key, str(name)), _dumped(value[name], {})) for name in odd]
        elif not is_plain(value):
            del rest[key]
            apart.append(((key,), _dumped(value, {})))
    return rest, apart


def with_objects(meta: dict[str, Any], apart: Sequence[tuple[Place, bytes]]) -> None:
    """Write down what was set apart."""
    meta[OURS][_OBJECTS] = [(list(place), content) for place, content in apart]


def read_meta(
    folder: Path, *, trust: bool, state: Callable[[str], Tensor] = lambda name: torch.empty(0)
) -> dict[str, Any]:
    """What a folder holds beside the tensors of model and optimizers.

    Objects that are no plain data are left out with a warning that names them, unless they are trusted.

    Args:
        folder: The checkpoint.
        trust: Whether objects of any class may be unpickled.
        state: Gives a tensor of the module's state by name.

    Raises:
        CheckpointCorruptError: It is something else than what this program writes.
        UnsafeCheckpointError: It would run code.
    """
    meta: dict[str, Any] = load_object(folder / META, f"checkpoint file {folder / META}", trust=trust)
    _check_meta(folder / META, meta)
    apart = meta.get(OURS, {}).pop(_OBJECTS, ())
    if not trust and apart:
        names = ", ".join(place[0] + "".join(f"[{key!r}]" for key in place[1:]) for place, _ in apart)
        rank_zero_warn(
            f"checkpoint {folder}: {names} was left out, for it holds objects that are no plain data. If you "
            "know who made this checkpoint, read it with PipelineStrategy(trust_checkpoint=True)"
        )
        return meta
    for place, content in apart:
        holder = meta
        for key in place[:-1]:
            holder = holder.setdefault(key, {})
        holder[place[-1]] = _Unpickler(io.BytesIO(content), state).load()
    return meta


def _check_meta(path: Path, meta: Any) -> None:
    """Refuse a `meta.pt` that this program does not write, before anything live is touched.

    Raises:
        CheckpointCorruptError: With the names of the parts that are something else.
    """
    kinds: dict[str, type] = {"loops": dict, "lr_schedulers": list, "callbacks": dict, OURS: dict}
    wrong = [] if isinstance(meta, dict) else ["all of it"]
    if not wrong:
        wrong = [name for name, kind in kinds.items() if name in meta and not isinstance(meta[name], kind)]
    if not wrong:
        wrong += [f"loops[{n!r}]" for n, loop in meta.get("loops", {}).items() if not _is_loop(loop)]
        own = meta.get(OURS, {})
        lists = ("ranks", "replicas", "order", "listed", "schedulers", _OBJECTS)
        inner: dict[str, type] = {"extra": dict, **dict.fromkeys(lists, list)}
        wrong += [f"{OURS}[{n!r}]" for n, kind in inner.items() if not isinstance(own.get(n, kind()), kind)]
        wrong += [f"{OURS}['ranks']" for rank in own.get("ranks", ()) if not _is_rank(rank)][:1]
    if wrong:
        raise CheckpointCorruptError(
            f"checkpoint file {path} is not what this program writes, in {', '.join(wrong)}: nothing was "
            "loaded"
        )


def _is_loop(loop: Any) -> bool:
    return isinstance(loop, dict) and all(isinstance(part, dict) for part in loop.values())


def _is_rank(rank: Any) -> bool:
    return isinstance(rank, dict) and isinstance(rank.get("groups"), list)
