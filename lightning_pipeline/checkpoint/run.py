"""The checkpoints of one run: what the strategy's hooks call."""

import secrets
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipeline.checkpoint.background import Background
from lightning_pipeline.checkpoint.contents import (
    Shown,
    added_to,
    as_bytes,
    as_read,
    at,
    bare,
    contested,
    different,
    entries_of,
    given_states,
    groups_of,
    held_here,
    joined,
    kept_by_optimizers,
    put_edits,
    refuse_losses,
    replaced_in,
    schedulers_for,
    set_apart,
    shown_states,
    tensor_digests,
    with_edits,
    with_objects,
    writers_of,
)
from lightning_pipeline.checkpoint.folder import MODEL, OURS, is_folder, optimizer_key
from lightning_pipeline.checkpoint.load import Opened, Target, open_folder, read_rest
from lightning_pipeline.checkpoint.one_file import Put, write_file
from lightning_pipeline.checkpoint.plain_file import Get, open_file, read_file
from lightning_pipeline.checkpoint.ranks import Ranks
from lightning_pipeline.checkpoint.retention import Retention
from lightning_pipeline.checkpoint.save import Part, without_ties, write
from lightning_pipeline.ranks import Lookout, Numbering
from lightning_pipeline.settings import Settings

_GRACE_SECONDS = 20.0


@dataclass(frozen=True)
class Options:
    """How checkpoints are written and read; `PipelineStrategy` describes them."""

    integrity: str
    trust: bool
    in_background: bool
    timeout: timedelta
    one_file: bool = False


def writes_one_file(settings: Settings, num_stages: int) -> bool:
    """Whether a checkpoint is Lightning's one file, and no folder."""
    asked = settings.save_distributed_checkpoint
    return num_stages == 1 if asked is None else not asked


def checkpoint_options(settings: Settings, num_stages: int) -> Options:
    """The settings that checkpoints need.

    Args:
        settings: Of the strategy.
        num_stages: Of the pipeline.
    """
    return Options(
        settings.integrity, settings.trust_checkpoint, settings.async_save, settings.checkpoint_timeout,
        writes_one_file(settings, num_stages),
    )  # fmt: skip


@dataclass(frozen=True)
class Holdings:
    """What one rank holds that goes into a checkpoint.

    Attributes:
        tensors: Parameters and buffers that this rank writes, by name.
        optimizers: With this rank's parameters.
        names: Of this rank's parameters, by `id`.
        schedulers: The optimizer of each LR scheduler, by index.
        order: All parameter names of the module, tied ones once.
        parameters: All parameter names of the module.
        owned: Names of parameters and buffers of which this rank has the true values.
        extra: Names of the extra state of modules that this rank has.
        load_extra: Gives modules their extra state, by name.
        position: This replica's random states and loaders; asked on one rank of a replica.
        topology: How the run is spread over ranks, for the manifest.
        objects: What was pickled already, and where it stands in what Lightning dumps.
        put: Saves one-file checkpoints in place of us, as a plugin does.
        get: Reads them.
        listed: Names of parameters and buffers of all ranks, in the order of the module's `state_dict`.
    """

    tensors: Mapping[str, Tensor]
    optimizers: Sequence[Optimizer]
    names: Mapping[int, str]
    schedulers: Sequence[int]
    order: Sequence[str]
    parameters: Collection[str]
    owned: Collection[str]
    extra: Collection[str]
    load_extra: Callable[[Mapping[str, Any]], None]
    position: Callable[[], Any]
    topology: Mapping[str, Any]
    objects: Sequence[tuple[tuple[str, ...], bytes]] = ()
    put: Put | None = None
    get: Get | None = None
    listed: Sequence[str] = ()


def _rest(dumped: Mapping[str, Any]) -> dict[str, Any]:
    """What Lightning dumped beside model and optimizers."""
    return {key: value for key, value in dumped.items() if key not in ("state_dict", "optimizer_states")}


class Checkpoints:
    """Saves and loads for one run. All ranks make one together.

    Args:
        options: Of the strategy.
        numbering: Which global rank is where.
        store: Of the run; none but this run uses it.
        lookout: Of the run.
    """

    def __init__(
        self, options: Options, numbering: Numbering, store: Any, lookout: Lookout | None = None
    ) -> None:
        self._options, self._numbering = options, numbering
        alone = not dist.is_initialized() or dist.get_world_size() == 1
        rank = 0 if alone else dist.get_rank()
        group = None if alone else dist.new_group(
            timeout=options.timeout, backend="gloo", group_desc="lp_checkpoint"
        )  # fmt: skip
        name = f"checkpoint/{secrets.token_hex(4)}" if alone else "checkpoint"
        self._ranks = Ranks(group, store, rank, options.timeout, name, lookout)
        self._rank, self._replica = numbering.coordinates(rank)
        self._background = Background(options.timeout.total_seconds() / 4)  # the rest is for full speed
        self._retention = Retention(self._background.later)
        self._coming: set[Path] = set()
        self._at_once = False
        self._warned: set[str] = set()
        self._opened: Opened | None = None
        self._with_optimizers: tuple[Opened | None, Any] = None, None
        self._schedulers_read: list[dict[str, bytes]] = []
        self._optimizers_read: list[Shown] = []

    @property
    def ranks(self) -> Ranks:
        """All ranks, once what is in flight is written."""
        self._background.wait()
        return self._ranks

    # Saving

    def save(self, path: Path, dumped: Mapping[str, Any], held: Holdings) -> None:
        """Write a checkpoint; in the background, if so configured, once it is copied.

        Args:
            path: The folder; the same on every rank.
            dumped: What Lightning dumped.
            held: This rank's part.

        Raises:
            CheckpointWriteError: It was not written, or the one before it was not.
        """
        self._background.wait()
        part = self._part(path, held_here(dumped), held)
        written: Any = partial(write_file, put=held.put) if self._options.one_file else write
        if self._at_once or not self._options.in_background:
            written(part, path, self._ranks, self._options.integrity)
            return
        self._coming = {path.absolute()}
        self._background.start(partial(written, part.staged(), path, self._ranks, self._options.integrity))

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Inside, a save is complete when it returns, also with `async_save=True`."""
        self._at_once = True
        try:
            yield
        finally:
            self._at_once = False

    def link(self, target: Path, link: Path) -> None:
        """Make a link lead to a checkpoint, once the save in flight is complete."""
        if self._coming:
            self._coming.add(link.absolute())
        if self._ranks.leads:
            self._retention.link(target, link)

    def remove(self, path: Path) -> None:
        """Remove a checkpoint, once the save in flight is complete."""
        self._coming.discard(path.absolute())
        if self._ranks.leads:
            self._retention.remove(path)

    def is_coming(self, path: Path) -> bool:
        """Whether the last save in the background gives a path its name, or has. The same on every rank."""
        return path.absolute() in self._coming

    def _part(self, path: Path, dumped: Mapping[str, Any], held: Holdings) -> Part:
        given: Mapping[str, Any] = dumped.get("state_dict", held.tensors)

        def whole_of(told: list[dict[str, Any]]) -> list[dict[str, Any]]:
            refuse_losses([entry for entry in told if entry["replica"] == 0], held.order)
            return told

        own = self._ranks.collect(f"saving {path}", lambda: self._told(dumped, held, given), whole_of)
        own.sort(key=lambda entry: (entry["replica"], entry["rank"]))
        writers = writers_of(self._added(path, given, held, own))
        mine = {name: v for name, v in given.items() if writers.get(name, self._rank) == self._rank}
        tensors, aliases = without_ties({k: v for k, v in mine.items() if isinstance(v, Tensor)})
        if self._replica != 0:  # parameters are alike; of all else that of the first replica counts
            tensors = {name: tensor for name, tensor in tensors.items() if name in held.parameters}
        state: dict[str, dict[str, Any]] = {MODEL: dict(tensors)}
        for index, flat in enumerate(dumped.get("optimizer_states", ())):
            if flat:
                state[optimizer_key(index)] = dict(flat)
        whole = self._joined(path, dumped, own)
        meta = self._meta(whole, held, own) if self._ranks.leads else b""
        about = {
            "step": int(dumped.get("global_step", 0)),
            "epoch": int(dumped.get("epoch", 0)),
            "topology": dict(held.topology),
        }
        return Part(state, self._rank, aliases, meta, about)

    def _added(
        self, path: Path, given: Mapping[str, Any], held: Holdings, told: Sequence[Mapping[str, Any]]
    ) -> list[Mapping[str, Any]]:
        """What each rank of the first replica would store beside what is its own."""
        first = [entry for entry in told if entry["replica"] == 0]
        names = contested(first)
        if not names:
            return [entry["added"] for entry in first]

        def own() -> dict[str, Any]:
            replaced = replaced_in(given, held.tensors) if self._replica == 0 else {}
            return {"rank": self._rank, "replica": self._replica, "more": entries_of(replaced, names)}

        more = {
            entry["rank"]: entry["more"]
            for entry in self._ranks.everyone(f"saving {path}", own)
            if entry["replica"] == 0
        }
        return [{**entry["added"], **more[entry["rank"]]} for entry in first]

    def _told(self, dumped: Mapping[str, Any], held: Holdings, given: Mapping[str, Any]) -> dict[str, Any]:
        """What is no tensor and differs between ranks or replicas."""
        speaks = self._rank == self._numbering.last
        return {
            "rank": self._rank,
            "replica": self._replica,
            "lr_schedulers": dumped.get("lr_schedulers"),
            "groups": [groups_of(bare(optimizer), held.names) for optimizer in held.optimizers]
            if "optimizer_states" in dumped
            else [],
            "kept": kept_by_optimizers(dumped.get("optimizer_states", ())),
            "position": held.position() if speaks else None,
            "added": added_to(given, held.tensors) if self._replica == 0 else {},
            "replaced": list(replaced_in(given, held.tensors)) if self._replica == 0 else [],
            "owned": list(held.owned),
            "given": list(given),
            "digests": tensor_digests(_rest(dumped)),
        }

    def _joined(
        self, path: Path, dumped: Mapping[str, Any], told: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        """What Lightning dumped, with what stages hold different parts of put together on the leader."""
        first = [entry for entry in told if entry["replica"] == 0]
        places = different([entry["digests"] for entry in first])
        found: list[dict[str, Any]] = [_rest(dumped)]
        if places:
            owners = {name: entry["rank"] for entry in first for name in entry["owned"]}
            own = (self._rank, at(found[0], places)) if self._replica == 0 else None

            def join(parts: list[Any]) -> None:
                found[0] = joined(found[0], dict(part for part in parts if part is not None), owners)

            self._ranks.collect(f"saving {path}", lambda: own, join)
        return found[0]

    def _meta(self, dumped: Mapping[str, Any], held: Holdings, told: Sequence[Mapping[str, Any]]) -> bytes:
        rest, apart = set_apart(dumped)
        apart += held.objects
        first = [entry for entry in told if entry["replica"] == 0]
        speaking = [entry for entry in told if entry["position"]]
        added = {name: entry for rank in first for name, entry in rank["added"].items()}
        rest[OURS] = {
            "ranks": [{key: entry[key] for key in ("lr_schedulers", "groups")} for entry in first],
            "replicas": [entry["position"] for entry in speaking],
            "order": list(held.order),
            "listed": list(held.listed),
            "schedulers": list(held.schedulers),
            "extra": {name: entry.value for name, entry in added.items() if not entry.is_tensor},
        }
        with_objects(rest, apart)
        if not self._options.one_file:
            self._warn_of_objects({place[0] for place, _ in apart})
        return as_bytes(rest)

    def _warn_of_objects(self, keys: set[str]) -> None:
        if self._options.trust:
            return
        for key in keys - self._warned:
            self._warned.add(key)
            rank_zero_warn(
                f"{key!r} in the checkpoint holds objects that only PipelineStrategy(trust_checkpoint=True) "
                "will read back: keep plain numbers, strings, containers and tensors there"
            )

    # Loading

    def load(
        self, path: Path, held: Holdings, *, strict: bool, training: bool, edited: bool = False
    ) -> tuple[dict[str, Any], Any]:
        """Fill this rank's tensors; in training `apply_optimizers` comes later.

        Args:
            path: A folder or a one-file checkpoint; the same on every rank.
            held: What to fill.
            strict: Whether every name must fit.
            training: Whether the run goes on with optimizers.
            edited: Whether the user may edit the `state_dict` first; it is then in what is returned, whole,
                and `apply` does the rest.

        Returns:
            What Lightning restores from, and where this replica stood in its data, if that was saved.

        Raises:
            CheckpointError: On every rank, with nothing changed.
        """
        self._background.wait()
        target = Target(
            held.tensors, (), held.names, strict=strict, trust=self._options.trust,
            checksums=self._options.integrity != "off", extra=held.extra, load_extra=held.load_extra,
            later=[bare(optimizer) for optimizer in held.optimizers] if training else (),
        )  # fmt: skip
        folder = self._ranks.leader(f"loading {path}", lambda: held.get is None and is_folder(path))
        if folder:
            found = open_folder(path, target, self._ranks, editable=edited)
        else:
            found = open_file(path, target, self._ranks, held.order, held.get)
        meta = dict(found.meta)
        if edited:
            meta["state_dict"] = found.states()
            self._opened = found
        else:
            found.apply()
        own = meta.pop(OURS, {})
        if training:
            self._with_optimizers = found, own.get("ranks")
            saved = own.get("ranks")
            if meta.get("lr_schedulers") and saved:
                meta["lr_schedulers"] = saved[-1]["lr_schedulers"] or []
                self._schedulers_read = as_read(meta["lr_schedulers"])
        given = _given_of_optimizers(found, own.get("ranks"))
        self._optimizers_read = [Shown.of(one) for one in given]
        if training or given:
            meta["optimizer_states"] = given or [{}]
        replicas = own.get("replicas") or [None]
        return meta, replicas[self._replica % len(replicas)]

    def rest(self, path: Path, get: Get | None = None) -> dict[str, Any]:
        """What stands in a checkpoint beside weights and optimizers. Every rank calls this.

        Args:
            path: A folder or a one-file checkpoint; the same on every rank.
            get: Reads files in place of us, as a plugin does.

        Raises:
            CheckpointError: On every rank.
        """
        self._background.wait()
        what, trust = f"loading {path}", self._options.trust
        folder = self._ranks.leader(what, lambda: get is None and is_folder(path))
        read = partial(read_rest, path) if folder else partial(read_file, path, get=get)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is left out `load` warns
            return _rest(self._ranks.everyone_local(what, lambda: read(trust=trust)))

    def apply(
        self, states: Mapping[str, Any] | None, held: Holdings,
        load: Callable[[Mapping[str, Any]], object] | None = None,
    ) -> None:  # fmt: skip
        """Put what `load` opened into use, where that was left for later.

        Args:
            states: The `state_dict` that `load` gave, as the user left it.
            held: What to fill, as hooks have left it since.
            load: The user's code, where that puts it into use.

        Raises:
            CheckpointError: On every rank, with nothing changed.
        """
        opened, self._opened = self._opened, None
        if opened is not None and load is not None:
            opened.apply_by(partial(load, states or {}), "loading the weights of a checkpoint", self._ranks)
        elif opened is not None:
            now = replace(
                opened.target, tensors=held.tensors, names=held.names, extra=held.extra,
                load_extra=held.load_extra,
            )  # fmt: skip
            opened.apply(states or {}, now)

    def apply_optimizers(self, restored: dict[str, Any], held: Holdings) -> None:
        """Fill the optimizers, as hooks have left them since the weights were loaded.

        Args:
            restored: What `load` gave; its LR schedulers become those of this run's groups, but for what
                `on_load_checkpoint` has changed. Without `optimizer_states`, as it may have left
                it, optimizers stay as they are.
            held: What to fill.

        Raises:
            CheckpointError: On every rank: they do not fit.
        """
        (opened, saved), self._with_optimizers = self._with_optimizers, (None, None)
        if opened is None:
            return
        optimizers = [bare(optimizer) for optimizer in held.optimizers]
        if restored.get("optimizer_states"):
            opened.apply_optimizers(optimizers, held.names)
            put_edits(optimizers, restored["optimizer_states"], self._optimizers_read)
        if restored.get("lr_schedulers") and saved:
            rebuilt = schedulers_for(saved, _all_groups(held), held.schedulers)
            edited = restored["lr_schedulers"]
            restored["lr_schedulers"] = with_edits(rebuilt, edited, self._schedulers_read)

    # The end

    def check(self) -> None:
        """Raise what went wrong in the background."""
        self._background.check()

    def finish(self) -> None:
        """Wait for what is in flight.

        Raises:
            CheckpointWriteError: It was not written.
        """
        self._background.wait()

    def close(self, *, failed: bool) -> None:
        """End it. After a failure of the run nothing is raised, and others are not waited for long."""
        if failed:
            self._background.abandon(_GRACE_SECONDS)
        self._ranks.leave()


def _all_groups(held: Holdings) -> list[Any]:
    return [groups_of(bare(optimizer), held.names) for optimizer in held.optimizers]


def _given_of_optimizers(found: Opened, saved: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """What a hook is given of the optimizers in a checkpoint."""
    if found.optimizers is None:
        return shown_states(saved[-1]["groups"]) if saved else []
    return given_states(found.optimizers)
