"""The gloo transport (`Group` on torch's ProcessGroupGloo).

A blocked gloo call cannot be aborted, so operations are issued asynchronously, and a callback puts `WorkDone` into the inbox.
`abort` shuts down the group's connected sockets, which ends its pending works.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

from covey.errors import CoveyError
from covey.training.collectives.group import GroupBuilt, ReduceOp, Work, WorkDone
from covey.training.lazy_torch import torch_module
from covey.training.node_interface import NodeInterface, RankInfo

COLLECTIVE_TIMEOUT = timedelta(minutes=30)  # of a work, and of a rendezvous; long, because a slow step is not a failure


class GlooTransport:
    """Builder of groups on gloo."""

    def build(self, context: NodeInterface, rank_info: RankInfo) -> GlooGroup:
        return GlooGroup(context, rank_info)


class GlooGroup:
    """A gloo group, built on a separate thread, because building blocks until every rank takes part."""

    def __init__(self, context: NodeInterface, rank_info: RankInfo) -> None:
        self.generation, self.rank, self.world = rank_info.generation, rank_info.rank, rank_info.world
        self.is_ready = False
        self._context = context
        self._process_group: Any = None
        self._pending_works: dict[int, tuple[Work, Any]] = {}  # by id: the work and its buffers
        self._sockets: dict[str, int] = {}  # by kernel name: descriptors that this process opened during the build
        threading.Thread(target=self._build, name=f"covey group {self.generation}", daemon=True).start()

    def all_reduce(self, tensor: Any, op: ReduceOp) -> Work:
        options = torch_module().distributed.AllreduceOptions()
        options.reduceOp = _torch_reduce_op(op)
        return self._track_work(self._process_group.allreduce([tensor], options), tensor)

    def all_gather(self, outputs: list[Any], tensor: Any) -> Work:
        return self._track_work(self._process_group.allgather([outputs], [tensor]), (outputs, tensor))

    def broadcast(self, tensor: Any, root: int) -> Work:
        options = torch_module().distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        return self._track_work(self._process_group.broadcast([tensor], options), tensor)

    def abort(self) -> None:
        for name, descriptor in self._sockets.items():
            shut_down_socket(name, descriptor)

    @property
    def is_drained(self) -> bool:
        return not self._pending_works

    def close_in_child(self) -> None:
        """Close the sockets in a forked child, for example in a data loader's worker."""
        for name, descriptor in self._sockets.items():
            if list_sockets().get(name) == descriptor:
                with contextlib.suppress(OSError):
                    os.close(descriptor)

    def _track_work(self, work: Any, buffers: Any) -> Work:
        self._pending_works[id(work)] = (work, buffers)
        pending, inbox = self._pending_works, self._context.inbox  # not `self`: gloo's thread must not free the group

        def done(future: Any) -> None:
            error = ""
            try:
                future.value()
            except RuntimeError as failure:
                error = str(failure)
            pending.pop(id(work), None)
            inbox.put(WorkDone(work, error))

        work.get_future().add_done_callback(done)
        return work

    def _build(self) -> None:
        try:
            before = list_sockets()
            self._process_group = _make_process_group(self._context, self.generation, self.rank, self.world)
            self._sockets = {name: fd for name, fd in list_sockets().items() if name not in before}
            self.is_ready = True
            self._context.inbox.put(GroupBuilt(self.generation))
        except (RuntimeError, OSError, CoveyError) as error:
            self._context.inbox.put(GroupBuilt(self.generation, str(error)))


@functools.cache
def _torch_reduce_op(op: ReduceOp) -> Any:
    return getattr(torch_module().distributed.ReduceOp, op.name)


def _make_process_group(context: NodeInterface, generation: int, rank: int, world: int) -> Any:
    dist = torch_module().distributed
    options = dist.ProcessGroupGloo._Options()
    # the node's address, because the host name may resolve to another one
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=context.address, lazy_init=False)]
    options._timeout = COLLECTIVE_TIMEOUT
    return dist.ProcessGroupGloo(_make_rendezvous_store(context, generation), rank, world, options)


def _make_rendezvous_store(context: NodeInterface, generation: int) -> Any:
    dist = torch_module().distributed

    class RendezvousTorchStore(dist.Store):  # type: ignore[misc, name-defined]
        def set(self, key: str, value: bytes) -> None:
            context.put_rendezvous(key, bytes(value), generation)

        def get(self, key: str) -> bytes:
            return context.get_rendezvous(key, generation, COLLECTIVE_TIMEOUT.total_seconds())

        def wait(self, keys: list[str], timeout: timedelta = COLLECTIVE_TIMEOUT) -> None:
            for key in keys:
                context.get_rendezvous(key, generation, timeout.total_seconds())

        def check(self, keys: list[str]) -> bool:
            return all(context.has_rendezvous(key) for key in keys)

    return RendezvousTorchStore()


def list_sockets() -> dict[str, int]:
    """Return a descriptor of each socket of this process, by the socket's kernel name (`socket:[inode]`)."""
    found: dict[str, int] = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            name = str(entry.readlink())
            if name.startswith("socket:"):
                found[name] = int(entry.name)
    return found


def shut_down_socket(name: str, descriptor: int) -> None:
    """Shut down a socket if `descriptor` still refers to it, and ignore `OSError`.

    Unix sockets are skipped. So are listening sockets, because gloo aborts the process when a listening socket ends.
    """
    with contextlib.suppress(OSError):
        if str(Path(f"/proc/self/fd/{descriptor}").readlink()) != name:
            return
        copy = socket.socket(fileno=os.dup(descriptor))
        try:
            if not copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and copy.family != socket.AF_UNIX:
                copy.shutdown(socket.SHUT_RDWR)
        finally:
            copy.close()
