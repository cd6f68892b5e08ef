"""The strategy's hooks for checkpoints."""

import os
import pickle
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeVar, cast

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pipeline import _lightning
from lightning_pipeline.checkpoint import (
    Holdings,
    Put,
    Ranks,
    checkpoint_options,
    first_holders,
    outside_a_run,
    save_whole,
    writes_one_file,
)
from lightning_pipeline.checkpoint.contents import (
    as_told,
    bare,
    extra_names,
    extra_states,
    flat_state,
    is_loaded_by_code,
    load_extra_states,
    names_by_identity,
    pickled,
)
from lightning_pipeline.checkpoint.folder import discard, local_path
from lightning_pipeline.errors import CheckpointError, ConfigurationError
from lightning_pipeline.patching import all_undone
from lightning_pipeline.registry import named_parameters_of
from lightning_pipeline.run.one_device import pipelined
from lightning_pipeline.run.plain import PlainStrategy
from lightning_pipeline.run.run import Running
from lightning_pipeline.run.setup import held_states, listed_states
from lightning_pipeline.weights import fillers, holds_weights_only, load_weights, save_weights

Method = TypeVar("Method", bound=Callable[..., Any])


def no_hook(method: Method) -> Method:
    """Mark what hooks of the user call, and what is none of their code: it reads what this rank holds."""

    @wraps(method)
    def run(strategy: Any, *args: Any, **kwargs: Any) -> Any:
        pipeline = strategy._pipeline
        with nullcontext() if pipeline is None else pipeline.stages.aside():
            return method(strategy, *args, **kwargs)

    return cast(Method, run)


class CheckpointHooks(Running, PlainStrategy):
    """Saves and loads checkpoint folders. `PipelineStrategy` inherits this."""

    _names: Mapping[int, str] = {}
    _written: Mapping[int, str] = {}
    _stood: Mapping[str, Any] | None = None
    _pickled: Mapping[str, tuple[Any, bytes]] = {}

    def __init__(self) -> None:
        self._unlink: list[Callable[[], None]] = []
        self._expected: Any = None
        self._restored = False
        self._data_restored: tuple[str, bytes] | None = None
        super().__init__()

    def note_names(self, trainer: Trainer) -> None:
        """Once the module is split: what its parameters are called, and how its callbacks link.

        Args:
            trainer: Of this run.
        """
        stages = self._running.stages
        self._names, self._written = stages.names(), stages.written_names()
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):
                local_path(callback.dirpath or "")
                self._unlink.append(_lightning.link_through(callback, self._link_checkpoint))
                self._unlink.append(_lightning.count_as_existing(callback, self._is_coming))

    def expect_checkpoint(self, path: Any) -> None:
        """The Trainer is about to load a checkpoint, once the module is set up.

        Args:
            path: As the user gave it; None where there is none.
        """
        self._expected = path

    def values_from_elsewhere(self, module: LightningModule) -> Mapping[str, Callable[[Tensor], object]]:
        """What fills weights that this rank need not make: the first replica's, or a checkpoint's.

        Args:
            module: Built without weights.
        """
        states = held_states(module)
        if self.replica_index:  # `start_equal` gives all of these the values of the first
            return dict.fromkeys(states, lambda tensor: None)
        if self._expected is None or "://" in os.fspath(self._expected):
            return {}
        shapes = {name: tensor.shape for name, tensor in states.items()}
        return fillers(local_path(self._expected), shapes, trust=self._settings.trust_checkpoint)

    def leave_callbacks(self) -> None:
        """The run ends: its callbacks may be used in another."""
        undo, self._unlink = self._unlink, []
        self._restored, self._data_restored = False, None
        all_undone(undo)()

    @property
    def _is_one_file(self) -> bool:
        """Whether a checkpoint is Lightning's one file, and no folder."""
        return writes_one_file(self._settings, self._ranks.num_stages)

    def note_hyper_parameters(self, module: LightningModule) -> None:
        """Before the module is split: pickle what is not simple among its hyper-parameters, such as modules.

        Their tensors are those of the module's state, which a checkpoint has anyway.
        """
        names = names_by_identity(held_states(module).items())
        values = dict(module.hparams)
        try:
            found = pickled(values, names)
        except Exception as error:  # as Lightning does where one device saves
            rank_zero_warn(f"hyper_parameters that cannot be pickled are not in checkpoints: {error!r}")
            found = {}
        self._pickled = {key: (values[key], content) for key, content in found.items()}

    def _without_pickled(
        self, dumped: dict[str, Any]
    ) -> tuple[dict[str, Any], list[tuple[tuple[str, ...], bytes]]]:
        """What Lightning dumped, without what was pickled before the module was split."""
        key = LightningModule.CHECKPOINT_HYPER_PARAMS_KEY
        values = dumped.get(key)
        if not isinstance(values, Mapping):
            return dumped, []
        known = {name: self._pickled[name][0] for name in values if name in self._pickled}
        same = {name for name, value in known.items() if values[name] is value}
        rest = {**dumped, key: {name: value for name, value in values.items() if name not in same}}
        return rest, [((key, name), self._pickled[name][1]) for name in sorted(same)]

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io
        if self._rank_map is not None:
            self.check_checkpoint_io()

    def check_checkpoint_io(self) -> None:
        """Once it is known whether there is anything to split: a plugin of the user's writes one file.

        Raises:
            ConfigurationError: The user asked for folders too.
        """
        if not _lightning.brings_checkpoint_io(self):
            return
        if self._settings.save_distributed_checkpoint is None:
            self._settings = replace(self._settings, save_distributed_checkpoint=False)
        if not self._is_one_file:
            raise ConfigurationError(
                f"CheckpointIO plugin {type(self._checkpoint_io).__name__} writes one file, and "
                "save_distributed_checkpoint=True asks for a folder, which each stage writes its part of: "
                "leave one of them out (async_save=True writes folders in the background)"
            )

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return not self.is_one_device and not self._restored

    @no_hook
    def restore_data(self, trainer: Trainer) -> None:
        """Before a loader is asked for: a data module makes loaders by its state, and hooks by the epoch.

        Args:
            trainer: Of this run.
        """
        found, io = _lightning.with_state(trainer), self.checkpoint_io
        get = io.load_checkpoint if _lightning.reads_checkpoints_itself(io) else None
        asks = get is None and _lightning.asks_hook(trainer)
        if self._expected is None or (found is None and (not asks or "://" in os.fspath(self._expected))):
            return
        path = local_path(self.broadcast(self._expected))
        checkpoints = self._running.checkpoints
        if get is None and checkpoints.ranks.leader(f"loading {path}", lambda: holds_weights_only(path)):
            return
        rest = checkpoints.rest(path, get)
        self._running.loops = rest.get("loops", {})
        if found is not None and found[0] in rest:
            name, load = found
            self._data_restored = name, pickle.dumps(rest[name])  # before it is used, and may be changed
            load(rest[name])

    def restore_early(self, trainer: Trainer) -> None:
        """The module is split; `configure_optimizers` and `on_fit_start` see what was loaded.

        Args:
            trainer: Of this run; it would load once those hooks have run.
        """
        before = self._data_restored
        _lightning.restore(
            trainer, self._expected,
            lambda checkpoint: before is None or pickle.dumps(checkpoint.get(before[0])) != before[1],
        )  # fmt: skip
        self._restored = True

    @pipelined
    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        module = self.lightning_module
        assert module is not None, "a run has a module"
        if self._pipeline is None:
            return module.state_dict()
        stages = self._pipeline.stages
        stages.take_in()
        own = {**stages.own_state(), **extra_states(module, stages.owns())}
        self._names, self._written = stages.names(), stages.written_names()  # hooks may have added some
        self._pipeline.list_parameters()
        return as_told(module, own, held_states(module))

    @pipelined
    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return flat_state(bare(optimizer), self._written)

    @pipelined
    @no_hook
    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if storage_options is not None and not self._is_one_file:
            raise CheckpointError(
                "storage_options reach only one-file checkpoints, and stages write a folder: leave them out, "
                "or use PipelineStrategy(save_distributed_checkpoint=False)"
            )
        if self._alone and self._ranks.numbering.world_size > 1:
            rank_zero_warn(f"{filepath} was not saved: the run was interrupted, and it needs all ranks")
            return
        told = self.broadcast(filepath)
        put = self._put_by_plugin(told, storage_options) if self._is_one_file else None
        path = local_path(told)
        dumped, objects = self._without_pickled(checkpoint)
        if self._pipeline is not None:
            held = replace(self._held(whole=False), objects=objects, put=put)
            self._pipeline.checkpoints.save(path, dumped, held)
        else:
            placement, numbering = self._ranks.placement, self._ranks.numbering
            options = checkpoint_options(self._settings, placement.num_stages)
            save_whole(
                path, dumped, options, numbering, self.optimizers, self._written, self._scheduled(),
                self._order(), self._stood, objects, put,
            )  # fmt: skip

    def _put_by_plugin(self, path: Any, storage_options: Any) -> Put | None:
        """What saves a one-file checkpoint where a plugin does."""
        if not (storage_options or _lightning.brings_checkpoint_io(self)):
            return None
        io = self.checkpoint_io
        return lambda checkpoint, _: io.save_checkpoint(checkpoint, path, storage_options=storage_options)

    @no_hook
    def save_weights(
        self, path: str | os.PathLike[str], *, prefix: str = "", max_shard_bytes: int = 5 * 10**9,
        overwrite: bool = False,
    ) -> None:  # fmt: skip
        """Write weights as safetensors shards with an index, as `transformers` reads them; all ranks call.

        Each rank writes what it holds, one tensor after the other, during a run and after it. What lies in
        the folder beside, such as `config.json`, stays.

        Args:
            path: A folder; made where there is none.
            prefix: Taken off the names, such as `model.`; what has it not is left out.
            max_shard_bytes: Largest size of a shard with several tensors.
            overwrite: Whether weights that lie there are replaced.

        Raises:
            CheckpointError: On every rank: they could not be written, or would replace others.
        """
        module = self.lightning_module
        assert module is not None, "the strategy has seen a run"
        told = local_path(path if self._alone else self.broadcast(os.fspath(path)))
        write = partial(
            save_weights, told, prefix=prefix, max_shard_bytes=max_shard_bytes, overwrite=overwrite
        )
        if self._pipeline is not None:
            own = self._pipeline.stages.own_state() if self.replica_index == 0 else {}
            write(own, self._pipeline.checkpoints.ranks)
            return
        placement, numbering = self._ranks.placement, self._ranks.numbering
        with outside_a_run(
            told, checkpoint_options(self._settings, placement.num_stages), numbering
        ) as checkpoints:
            held = first_holders(module.state_dict())
            own = {name: value for name, value in held.items() if isinstance(value, Tensor)}
            write(own, checkpoints.ranks)

    @no_hook
    def load_weights(
        self, path: str | os.PathLike[str], *, prefix: str | None = None, strict: bool = True
    ) -> None:
        """Fill the module from files of weights, each rank what it holds; all ranks call.

        In a run (in a hook, or in `configure_model` after the module is made) or after it. Tensors are read
        from mapped files straight into place.

        Args:
            path: A checkpoint folder, a Hugging Face folder, a safetensors file or index, a `state_dict` of
                torch's, or a `.ckpt` of Lightning's.
            prefix: What stands before the stored names in the module, such as `model.`. Default: that with
                which most names fit.
            strict: Whether missing and unexpected names are errors.

        Raises:
            CheckpointError: On every rank, with nothing changed: names or shapes do not fit, or a file is
                missing or damaged; all of it is listed.
        """
        told = local_path(path if self._alone else self.broadcast(os.fspath(path)))
        if self._pipeline is not None:
            self._fill_from(told, self._pipeline.checkpoints.ranks, prefix, strict)
            return
        placement, numbering = self._ranks.placement, self._ranks.numbering
        with outside_a_run(
            told, checkpoint_options(self._settings, placement.num_stages), numbering
        ) as checkpoints:
            self._fill_from(told, checkpoints.ranks, prefix, strict)

    def _fill_from(self, path: Path, ranks: Ranks, prefix: str | None, strict: bool) -> None:
        module = self.lightning_module
        assert module is not None, "the strategy has seen a run"
        states = held_states(module) if self._is_split else module.state_dict(keep_vars=True)
        held = {name: v for name, v in states.items() if isinstance(v, Tensor) and not v.is_meta}
        names = {*held, *(name for name, _ in named_parameters_of(module))}
        if self._pipeline is not None and self._is_split:
            names.update(self._pipeline.order)
        settings = self._settings
        load_weights(
            path, held, names, ranks, prefix=prefix, strict=strict, trust=settings.trust_checkpoint,
            checksums=settings.integrity != "off",
        )  # fmt: skip

    @property
    def _is_split(self) -> bool:
        return self._pipeline is not None and self._pipeline.stages.table is not None

    def finish_saving(self) -> None:
        """Before a run ends: wait for what late hooks, an evaluation or a SIGTERM began to save.

        Raises:
            CheckpointWriteError: It was not written; the other ranks are told that this one fails.
        """
        pipeline = self._pipeline
        try:
            if pipeline is not None:
                pipeline.checkpoints.finish()
        except BaseException as error:
            self.on_exception(error)
            raise

    def note_position(self) -> None:
        """Before a run ends: where it stands, for a save that comes later."""
        if self._pipeline is not None and not self._alone:
            self._stood = self._position()

    def _held(self, *, whole: bool) -> Holdings:
        """What this rank writes into a checkpoint, or with `whole` all that it fills from one."""
        pipeline, module = self._running, self.lightning_module
        assert module is not None, "a run has a module"
        placement, numbering = self._ranks.placement, self._ranks.numbering
        own = pipeline.stages.own_state()
        topology = {
            "ranks": placement.num_ranks,
            "stages": placement.num_stages,
            "replicas": numbering.replicas,
            "schedule": repr(self._settings.schedule),
            "units": pipeline.stages.units_by_stage(),
        }
        return Holdings(
            tensors=held_states(module) if whole else own,
            optimizers=self.optimizers,
            names=self._names,
            schedulers=self._scheduled(),
            order=pipeline.order,
            parameters=set(pipeline.order),
            owned=set(own),
            extra=extra_names(module),
            load_extra=partial(load_extra_states, module),
            position=self._position,
            topology=topology,
            listed=listed_states(module),
        )

    def _order(self) -> list[str]:
        """All parameter names of the module, which is whole again."""
        assert self.lightning_module is not None, "a run had a module"
        return [name for name, _ in named_parameters_of(self.lightning_module)]

    def _scheduled(self) -> list[int]:
        """The optimizer of each LR scheduler, by index."""
        numbers = {id(bare(optimizer)): index for index, optimizer in enumerate(self.optimizers)}
        return [numbers.get(id(bare(c.scheduler.optimizer)), 0) for c in self.lr_scheduler_configs]

    def _position(self) -> dict[str, Any]:
        return {**self._running.position.state(), "seed": self._running.seed}

    @pipelined
    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        try:
            return self._load(checkpoint_path)
        except BaseException:
            if self.is_global_zero and _lightning.is_of_a_search(checkpoint_path):
                discard(local_path(checkpoint_path))
            raise

    @no_hook
    def _load(self, checkpoint_path: Any) -> dict[str, Any]:
        pipeline, module = self._running, self.lightning_module
        assert module is not None, "a run has a module"
        path = local_path(self.broadcast(checkpoint_path))
        training = bool(module.trainer.training)
        ranks = pipeline.checkpoints.ranks
        io = self.checkpoint_io
        get = io.load_checkpoint if _lightning.reads_checkpoints_itself(io) else None
        if get is None and ranks.leader(f"loading {path}", lambda: holds_weights_only(path)):
            self._fill_from(path, ranks, None, module.strict_loading)
            return _lightning.checkpoint_without_state()
        rest, stood = pipeline.checkpoints.load(
            path, replace(self._held(whole=True), get=get), strict=module.strict_loading, training=training,
            edited=is_loaded_by_code(module)
            or is_overridden("on_load_checkpoint", module)
            or bool(_lightning.callbacks_with("on_load_checkpoint", module.trainer)),
        )  # fmt: skip
        if training and not _lightning.is_of_a_search(checkpoint_path):  # that goes on with what it drew
            pipeline.resume(stood)
        return rest

    @pipelined
    @no_hook
    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Fill the module where the user's code has a say; elsewhere `load_checkpoint` did."""
        module = self.lightning_module
        assert module is not None, "a run has a module"
        load = partial(module.load_state_dict, strict=strict) if is_loaded_by_code(module) else None
        self._running.checkpoints.apply(checkpoint.get("state_dict"), self._held(whole=True), load)

    @pipelined
    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Fill the optimizers, with the groups that `on_fit_start` may have added."""
        running = self._running
        self._names, self._written = running.stages.names(), running.stages.written_names()
        running.checkpoints.apply_optimizers(cast(dict[str, Any], checkpoint), self._held(whole=True))

    @pipelined
    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        path = local_path(filepath)
        if self._pipeline is not None:
            self._pipeline.checkpoints.remove(path)
        elif self.is_global_zero and os.path.lexists(path):  # callbacks do so in `teardown`, after the run
            discard(path)

    def _link_checkpoint(self, target: str, link: str) -> None:
        self._running.checkpoints.link(Path(target), Path(link))
        self.barrier()

    def _is_coming(self, path: Any) -> bool:
        return self._pipeline is not None and self._pipeline.checkpoints.is_coming(local_path(path))
