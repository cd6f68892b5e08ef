"""What an edge holds, packs and refuses, without a device and without another process."""

import ctypes
import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_pipeline.errors import ConfigurationError
from lightning_pipeline.ranks import lookout
from lightning_pipeline.ranks.edges import Place, Ways, nccl_version
from lightning_pipeline.wire import Communicators, LinkError, Wait
from lightning_pipeline.wire.packing import Layout, specs_of


class Work:
    """An operation that ends when it is told to."""

    over = False

    def is_completed(self) -> bool:
        return self.over

    def wait(self) -> None:
        assert self.over


class Group:
    """A communicator that keeps addresses of what it was given."""

    def __init__(self) -> None:
        self.works: list[Work] = []
        self.sent: list[tuple[int, int]] = []

    def rank(self) -> int:
        return 0

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        self.sent.append((tensors[0].data_ptr(), tensors[0].numel()))
        self.works.append(Work())
        return self.works[-1]


class Link:
    """The hosts' side; the lookout ends a wait as soon as it begins if `ends`."""

    peer, timeout, ends = 1, timedelta(seconds=5), False

    @contextmanager
    def waiting(self) -> Iterator[Wait]:
        wait = Wait("tensors", (1,), None)
        wait.is_over = self.ends
        yield wait


def edge_of(group: Group, link: Link | None = None) -> Communicators:
    cpu = torch.device("cpu")
    return Communicators(link or Link(), group, group, device=cpu)  # type: ignore[arg-type]


def send(edge: Communicators, *tensors: Tensor) -> None:
    edge.send(Layout(specs_of(tensors), start=0), tensors)


def test_what_was_sent_is_let_go_of_within_the_step() -> None:
    group = Group()
    edge = edge_of(group)
    values = torch.ones(1000)
    gone = weakref.ref(values.untyped_storage())
    send(edge, values)
    del values
    gc.collect()
    assert edge._launched[0][1].numel() == 4000
    group.works[0].over = True
    send(edge, torch.ones(3))
    gc.collect()
    assert len(edge._launched) == 1
    assert gone() is None


def test_one_tensor_travels_as_it_lies_and_several_are_packed() -> None:
    group = Group()
    edge = edge_of(group)
    one, columns, strided = torch.ones(7), torch.ones(3, 4).t(), torch.ones(8, 2)[:, 0]
    for tensor in (one, columns):
        send(edge, tensor)
    assert group.sent == [(one.data_ptr(), 28), (columns.data_ptr(), 48)]
    send(edge, strided)
    send(edge, one, columns)
    assert group.sent[2][0] != strided.data_ptr()
    assert group.sent[2][1] == 32
    assert group.sent[3][0] not in (one.data_ptr(), columns.data_ptr())


def test_the_lookout_ends_the_wait_for_the_last_step() -> None:
    link = Link()
    edge = edge_of(Group(), link)
    send(edge, torch.ones(3))
    link.ends = True
    with pytest.raises(LinkError, match="tensors that were launched did not arrive"):
        edge.settle()


ONE, OTHER = Place("machine", "GPU-1"), Place("machine", "GPU-2")


def test_nccl_is_not_asked_to_serve_two_processes_of_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
    ways = Ways("nccl", "faster", torch.device("cpu"))
    assert ways.may_communicate([(ONE, OTHER)])
    assert not ways.may_communicate([(ONE, OTHER), (ONE, ONE)])
    with pytest.raises(ConfigurationError, match="use transport='ipc'"):
        Ways("nccl", "never", torch.device("cpu")).may_communicate([(ONE, ONE)])
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 7))
    assert not ways.may_communicate([(ONE, ONE)])
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert ways.may_communicate([(ONE, ONE)])


class Library:
    """Of NCCL, as `ctypes` gives it."""

    def ncclGetVersion(self, number: Any) -> int:  # its name
        number._obj.value = 23007
        return 0


def test_the_version_of_nccl_is_that_of_the_library_that_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(ctypes, "CDLL", lambda name, mode: asked.append(name) or Library())
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert nccl_version() == (2, 30, 7)
    assert Ways("nccl", "never", torch.device("cpu")).may_communicate([(ONE, ONE)])
    assert {*asked} == {"libnccl.so.2"}


class Nccl:
    """Writes down what is asked of it."""

    def __init__(self, asked: list[str], name: str) -> None:
        self.asked, self.name = asked, name

    def size(self) -> int:
        return 2

    def abort(self) -> None:
        self.asked.append(self.name)
        if self.name == "second":
            raise RuntimeError("no communicator")

    def _group_start(self) -> None:
        self.asked.append("start")

    def _group_end(self) -> None:
        self.asked.append("end")


def test_communicators_are_aborted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    groups: list[Any] = [Nccl(asked, "first"), Nccl(asked, "second")]
    monkeypatch.setattr(lookout, "_nccl_of", lambda group: group)
    lookout.abort_devices(groups)
    assert asked == ["start", "first", "second", "end"]
