"""One generation's gloo group, and how it is left behind.

A blocked gloo call cannot be aborted, so nobody blocks in one: collectives are issued asynchronously and their completion is
news in a queue, where a new generation is news too. A group whose generation is over is abandoned: its connected sockets are
shut, which makes its pending works fail within milliseconds, and everything they use is kept alive until they have.
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

from covey.errors import CoveyError, UsageError
from covey.training.worker_context import WorkerContext

COLLECTIVE_TIMEOUT = timedelta(minutes=30)  # of a collective; long, because a slow step is not a fault


@functools.cache
def torch_module() -> Any:
    """torch, imported when it is first needed."""
    try:
        import torch
        import torch.distributed
    except ImportError:
        raise UsageError("collectives need torch: pip install 'covey[torch]'") from None
    return torch


class GroupBuilt:
    """News: the group of a generation is there, or could not be made."""

    def __init__(self, generation: int, error: str = "") -> None:
        self.generation = generation
        self.error = error


class WorkDone:
    """News: a work has completed, with an error or without."""

    def __init__(self, work: Any, error: str = "") -> None:
        self.work = work
        self.error = error


class GlooGroup:
    """The group of one generation; it is built in a thread of its own, because building waits for every rank."""

    def __init__(self, meeting: WorkerContext, generation: int) -> None:
        self.generation = generation
        self.is_ready = False
        self.participation_proven = False  # whether a push of served parameters has shown that every rank takes part
        self.rank, self.world = meeting.assignment.rank, meeting.assignment.world
        self._context = meeting
        self._process_group: Any = None
        self._pending_works: dict[int, tuple[Any, Any]] = {}  # works under way, with what they read and write
        self._sockets: dict[str, int] = {}
        threading.Thread(target=self._build, name=f"covey group {generation}", daemon=True).start()

    def all_reduce(self, tensor: Any, operation: Any) -> Any:
        """Issue a reduction; its completion is `WorkDone` in the inbox."""
        options = torch_module().distributed.AllreduceOptions()
        options.reduceOp = operation
        return self._track_work(self._process_group.allreduce([tensor], options), tensor)

    def all_gather(self, outputs: list[Any], tensor: Any) -> Any:
        """Issue a gathering; its completion is `WorkDone` in the inbox."""
        return self._track_work(self._process_group.allgather([outputs], [tensor]), (outputs, tensor))

    def broadcast(self, tensor: Any, root: int) -> Any:
        """Issue a broadcast; its completion is `WorkDone` in the inbox."""
        options = torch_module().distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        return self._track_work(self._process_group.broadcast([tensor], options), tensor)

    def abandon(self) -> None:
        """Leave the group behind. Its works fail soon, and it is freed when the last one has."""
        for name, descriptor in self._sockets.items():
            shut_down_socket(name, descriptor)

    @property
    def is_idle(self) -> bool:
        """Whether an abandoned group may be freed: by the main thread, since gloo's own cannot end themselves."""
        return not self._pending_works

    def close_in_child(self) -> None:
        """In a forked child (a data loader's worker): the sockets are not its to keep open."""
        for name, descriptor in self._sockets.items():
            if list_sockets().get(name) == descriptor:
                with contextlib.suppress(OSError):
                    os.close(descriptor)

    def _track_work(self, work: Any, buffers: Any) -> Any:
        self._pending_works[id(work)] = (work, buffers)
        inbox = self._context.inbox

        def done(future: Any) -> None:
            error = ""
            try:
                future.value()
            except RuntimeError as failure:
                error = str(failure)
            self._pending_works.pop(id(work), None)
            inbox.put(WorkDone(work, error))

        work.get_future().add_done_callback(done)
        return work

    def _build(self) -> None:
        try:
            before = list_sockets()
            self._process_group = make_group(self._context, self.generation, self.rank, self.world)
            self._sockets = {name: fd for name, fd in list_sockets().items() if name not in before}
            self.is_ready = True
            self._context.inbox.put(GroupBuilt(self.generation))
        except (RuntimeError, OSError, CoveyError) as error:
            self._context.inbox.put(GroupBuilt(self.generation, str(error)))


def make_group(meeting: WorkerContext, generation: int, rank: int, world: int) -> Any:
    """A gloo group whose device is bound to the node's address, never to what the host name means."""
    dist = torch_module().distributed
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=meeting.address, lazy_init=False)]
    options._timeout = COLLECTIVE_TIMEOUT
    return dist.ProcessGroupGloo(_make_rendezvous_store(meeting, generation), rank, world, options)


def _make_rendezvous_store(meeting: WorkerContext, generation: int) -> Any:
    """torch's store interface over the cluster's board. Its waits end when the generation does."""
    dist = torch_module().distributed

    class RendezvousTorchStore(dist.Store):  # type: ignore[misc, name-defined]
        def set(self, key: str, value: bytes) -> None:
            meeting.put_rendezvous(key, bytes(value), generation)

        def get(self, key: str) -> bytes:
            return meeting.get_rendezvous(key, generation, COLLECTIVE_TIMEOUT.total_seconds())

        def wait(self, keys: list[str], timeout: timedelta = COLLECTIVE_TIMEOUT) -> None:
            for key in keys:
                meeting.get_rendezvous(key, generation, timeout.total_seconds())

        def check(self, keys: list[str]) -> bool:
            return all(meeting.has_rendezvous(key) for key in keys)

    return RendezvousTorchStore()


def list_sockets() -> dict[str, int]:
    """This process's sockets by kernel name. Descriptors are reused, kernel names are not."""
    found: dict[str, int] = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            name = str(entry.readlink())
            if name.startswith("socket:"):
                found[name] = int(entry.name)
    return found


def shut_down_socket(name: str, descriptor: int) -> None:
    """Shut a connected socket if the descriptor still is that socket. A listening one is left alone: gloo dies of it."""
    with contextlib.suppress(OSError):
        if str(Path(f"/proc/self/fd/{descriptor}").readlink()) != name:
            return
        copy = socket.socket(fileno=os.dup(descriptor))
        try:
            if not copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and copy.family != socket.AF_UNIX:
                copy.shutdown(socket.SHUT_RDWR)
        finally:
            copy.close()
