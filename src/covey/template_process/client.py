"""The agent's side of the template: start it, keep it up, ask it for forks.

One `TemplateProcess` is one process with one socket, on which at most one order is open. `TemplateClient` replaces a life that
is over: at once when it had lived, with growing pauses when lives are short, and not at all after the fifth short one. From
then on children are started by exec, which is slower and says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from covey.errors import CoveyError, UsageError
from covey.runtime.lifeline import Lifeline
from covey.runtime.restart_backoff import RestartBackoff
from covey.template_process import fork_server
from covey.template_process.protocol import (
    PACKET_MAX,
    ChildSpec,
    Fork,
    Forked,
    Import,
    Imported,
    NotForked,
    TemplateReply,
    TemplateRequest,
    encode_spec,
    exit_from_status,
)

IMPORT_TIMEOUT_S = 300.0  # limit of one import order
FORK_TIMEOUT_S = 60.0  # limit of one fork order
EARLY_EXIT_S = 30.0  # a template that ends sooner has failed
RESTART_DELAYS_S = (0.0, 0.1, 0.2, 0.4)  # after the first early exit, the second, ...; none after the fifth
FORK_ATTEMPTS_MAX = 5  # each with another template
MODULES_MAX = 1000
OUTPUT_TAIL_MAX = 2000  # characters of what a template printed

log = logging.getLogger("covey.agent")


class TemplateExited(Exception):
    """The template ended before it replied."""


class TemplateProcess:
    """One template process. Its orders are answered one after the other; its end is an event."""

    def __init__(self) -> None:
        self.was_replaced = False  # ended by us, for the sake of one module
        self.exited: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # how it ended
        self._loop = asyncio.get_running_loop()
        self._request_lock = asyncio.Lock()
        self._pending_reply: asyncio.Future[TemplateReply] | None = None
        self._output_fd = os.memfd_create("covey-template")
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        try:
            process = subprocess.Popen(
                fork_server.build_command(theirs.fileno()),
                env={**os.environ, **fork_server.SINGLE_THREAD_VARIABLES},
                stdin=subprocess.DEVNULL,
                stdout=self._output_fd,
                stderr=self._output_fd,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the agent to hear
            )
        except OSError:
            self._socket.close()
            os.close(self._output_fd)
            raise
        finally:
            theirs.close()
        self.pid = process.pid
        process.returncode = 0  # reaped by us, so that nobody else may
        self._pidfd = os.pidfd_open(self.pid)
        self._loop.add_reader(self._pidfd, self._on_exit)
        self._loop.add_reader(self._socket, self._on_packet)

    async def request(self, order: TemplateRequest, fds: Sequence[int] = (), *, limit_s: float) -> TemplateReply:
        """Raises TemplateOver. A caller that gives up early does not disturb the next: the turn ends with the reply."""
        # Copies, since the turn may come when the caller has closed its own and their numbers mean something else.
        copies = [os.dup(fd) for fd in fds]
        turn = asyncio.ensure_future(self._request_in_turn(order, copies, limit_s))
        turn.add_done_callback(lambda done: done.cancelled() or done.exception())  # heard, also if the caller has gone
        return await asyncio.shield(turn)

    async def _request_in_turn(self, order: TemplateRequest, fds: Sequence[int], limit_s: float) -> TemplateReply:
        try:
            async with self._request_lock:
                return await self._send_request(order, fds, limit_s)
        finally:
            for fd in fds:
                os.close(fd)

    async def _send_request(self, order: TemplateRequest, fds: Sequence[int], limit_s: float) -> TemplateReply:
        if self.exited.done():
            raise TemplateExited
        self._pending_reply = self._loop.create_future()
        try:
            socket.send_fds(self._socket, [msgspec.msgpack.encode(order)], fds)
            return await asyncio.wait_for(self._pending_reply, limit_s)
        except (OSError, msgspec.MsgspecError) as error:  # a TimeoutError is an OSError
            if self.exited.done():
                raise TemplateExited from error
            log.warning("the template (pid %d) is ended: %s failed (%s)", self.pid, order, error or "no reply in time")
            self.kill()
            raise TemplateExited from error
        finally:
            self._pending_reply = None

    def _on_packet(self) -> None:
        try:
            packet = self._socket.recv(PACKET_MAX)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if not packet:  # its end comes by the pidfd
            self._loop.remove_reader(self._socket)
        elif self._pending_reply is not None and not self._pending_reply.done():
            try:
                self._pending_reply.set_result(msgspec.msgpack.decode(packet, type=TemplateReply))
            except msgspec.MsgspecError as error:
                self._pending_reply.set_exception(error)

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._pidfd)
        _, status = os.waitpid(self.pid, 0)
        self._on_packet()  # its last word may still be in the socket
        self._loop.remove_reader(self._socket)
        if self._pending_reply is not None and not self._pending_reply.done():
            self._pending_reply.set_exception(TemplateExited())
        how = exit_from_status("template", self.pid, os.waitstatus_to_exitcode(status)).reason
        said = self.output_tail()
        self.exited.set_result(f"{how}, after saying: {said}" if said else how)
        self._socket.close()
        os.close(self._output_fd)
        os.close(self._pidfd)

    def output_tail(self) -> str:
        """The end of what it and its imports have printed."""
        size = os.fstat(self._output_fd).st_size
        return os.pread(self._output_fd, OUTPUT_TAIL_MAX, max(0, size - OUTPUT_TAIL_MAX)).decode(errors="replace").strip()

    def kill(self) -> None:
        if not self.exited.done():
            os.kill(self.pid, signal.SIGKILL)


class TemplateClient:
    """Keeps one template alive, with the wanted modules imported."""

    def __init__(self, modules: Iterable[str]) -> None:
        self._modules = list(dict.fromkeys(modules))[:MODULES_MAX]
        self._template: TemplateProcess | None = None
        self._ready: asyncio.Future[TemplateProcess | None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._keep_template_running())

    @property
    def pid(self) -> int:
        """The living template's; 0 when there is none."""
        return 0 if self._template is None or self._template.exited.done() else self._template.pid

    async def fork(self, spec: ChildSpec, outputs: Sequence[int]) -> tuple[int, Lifeline] | None:
        """A child of this process, or None when there is no template to fork it from."""
        with open_memory_file(encode_spec(spec)) as data:
            for _ in range(FORK_ATTEMPTS_MAX):
                life = await self._wait_until_ready()
                if life is None:
                    return None
                line = Lifeline()
                try:
                    reply = await life.request(Fork(), [data, line.read_end, *outputs], limit_s=FORK_TIMEOUT_S)
                except BaseException as error:
                    line.close()  # if the child was born all the same, this ends it
                    if not isinstance(error, TemplateExited):
                        raise
                    continue
                if isinstance(reply, Forked):
                    line.close_read_end()
                    return reply.pid, line
                line.close()
                self._on_fork_refused(spec.name, life, reply)
        return None

    def _on_fork_refused(self, name: str, life: TemplateProcess, reply: TemplateReply) -> None:
        reason = reply.reason if isinstance(reply, NotForked) else f"it answered {type(reply).__name__}"
        if not isinstance(reply, NotForked) or reply.template_unusable:
            log.warning("the template (pid %d) cannot be forked any more (%s): it is replaced", life.pid, reason)
            life.kill()
        else:
            raise CoveyError(f"{name} cannot be forked: {reason}")

    async def preload(self, names: Sequence[str]) -> None:
        """Import more, now and in every later template."""
        new = [name for name in dict.fromkeys(names) if name not in self._modules]
        if len(self._modules) + len(new) > MODULES_MAX:
            raise UsageError(f"the template imports at most {MODULES_MAX} modules: leave out some of {', '.join(new)}")
        self._modules += new
        life = await self._wait_until_ready()
        if life is not None and new:
            await self._import_modules(life, new)

    async def close(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        if self._template is not None:
            self._template.kill()
            await self._template.exited
        self._reset_ready()
        self._ready.set_result(None)

    # -- one life after the other ----------------------------------------------------------------------------------

    async def _keep_template_running(self) -> None:
        backoff = RestartBackoff(RESTART_DELAYS_S, EARLY_EXIT_S)
        delay_s: float | None = 0.0
        while delay_s is not None:
            await asyncio.sleep(delay_s)
            began = time.monotonic()
            how = await self._run_template()
            self._reset_ready()
            if how is None:
                continue
            delay_s = backoff.record_exit(time.monotonic() - began)
            log.warning("the template ended (%s): no child is hurt by that, and it is started again", how)
        log.error("the template failed %d times: children are started by exec from now on", backoff.exits)
        self._ready.set_result(None)

    async def _run_template(self) -> str | None:
        """From start to end; how it ended, or None when it was replaced for the sake of one module."""
        try:
            life = self._template = TemplateProcess()
        except OSError as error:
            return f"it cannot be started: {error.strerror}"
        await self._import_modules(life, self._modules)
        if not life.exited.done():
            if said := life.output_tail():
                log.info("the template said: %s", said)
            self._ready.set_result(life)
        how = await asyncio.shield(life.exited)
        return None if life.was_replaced else how

    def _reset_ready(self) -> None:
        if self._ready.done():
            self._ready = asyncio.get_running_loop().create_future()

    async def _wait_until_ready(self) -> TemplateProcess | None:
        while True:
            life = await asyncio.shield(self._ready)
            if life is None or not life.exited.done():
                return life
            await asyncio.sleep(0)  # its end is known and `_keep` will hear of it in this very turn

    async def _import_modules(self, life: TemplateProcess, names: Sequence[str]) -> None:
        try:
            reply = await life.request(Import(list(names)), limit_s=IMPORT_TIMEOUT_S)
        except TemplateExited:
            return
        if not isinstance(reply, Imported):
            life.kill()
            return
        for name, reason in reply.failed.items():
            log.warning("the template goes on without %s, which cannot be imported (%s)", name, reason)
            self._drop_module(name)
        if reply.blocking_module:
            log.warning(
                "importing %s in the template is impossible, because %s: it is left to the children",
                reply.blocking_module,
                reply.reason,
            )
            self._drop_module(reply.blocking_module)
            life.was_replaced = True
            life.kill()

    def _drop_module(self, name: str) -> None:
        if name in self._modules:
            self._modules.remove(name)


@contextlib.contextmanager
def open_memory_file(data: bytes) -> Iterator[int]:
    """A descriptor to read `data` from: it may be larger than a packet."""
    fd = os.memfd_create("covey-spec")
    try:
        with open(os.dup(fd), "wb") as file:  # noqa: PTH123 (a descriptor has no path)
            file.write(data)
        yield fd
    finally:
        os.close(fd)
