"""The agent's side of the template: start it, restart it, request forks.

A `TemplateProcess` is one process with one socket, on which at most one request is pending. `TemplateClient` restarts a
template that exits, with growing delays if it exits soon after its start. After too many such exits in a row there is no
template any more, and children are started by exec, which is slower. A template that was replaced because of a module that
prevents forks does not count.
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
from covey.template_process import fork_server, protocol

IMPORT_TIMEOUT_S = 300.0  # limit of one import request
FORK_TIMEOUT_S = 60.0  # limit of one fork request
EARLY_EXIT_S = 30.0  # an exit less than this time after the start is early
RESTART_DELAYS_S = (0.0, 0.1, 0.2, 0.4)  # after the first exit, the second, ... of `RestartBackoff`; no restart after the fifth
FORK_ATTEMPTS_MAX = 5  # for one child, each with a new template
MODULES_MAX = 1000  # that a template imports
OUTPUT_TAIL_MAX = 2000  # bytes of a template's output that are logged

log = logging.getLogger("covey.agent")


class TemplateExited(Exception):
    """The template exited, or was killed, before it sent a valid reply."""


class TemplateProcess:
    """One template process, which handles one request at a time. The constructor starts it, and raises `OSError` if that fails.
    `exited` is set when it exits."""

    def __init__(self) -> None:
        self.was_replaced = False  # killed by the agent because of a module that prevents forks
        self.exited: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # cause and last output
        self._loop = asyncio.get_running_loop()
        self._request_lock = asyncio.Lock()
        self._pending_reply: asyncio.Future[protocol.TemplateReply] | None = None
        self._output_fd = os.memfd_create("covey-template")
        self._socket, template_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        try:
            process = subprocess.Popen(
                fork_server.build_command(template_end.fileno()),
                env={**os.environ, **fork_server.SINGLE_THREAD_VARIABLES},
                stdin=subprocess.DEVNULL,
                stdout=self._output_fd,
                stderr=self._output_fd,
                pass_fds=[template_end.fileno()],
                start_new_session=True,  # the agent handles Ctrl-C
            )
        except OSError:
            self._socket.close()
            os.close(self._output_fd)
            raise
        finally:
            template_end.close()
        self.pid = process.pid
        process.returncode = 0  # Popen must not reap it: `_on_exit` does
        self._pidfd = os.pidfd_open(self.pid)
        self._loop.add_reader(self._pidfd, self._on_exit)
        self._loop.add_reader(self._socket, self._on_packet)

    async def request(
        self, order: protocol.TemplateRequest, fds: Sequence[int] = (), *, limit_s: float
    ) -> protocol.TemplateReply:
        """Send a request when those before it are complete, and return the reply.

        Raises `TemplateExited` if the template exits first. If it does not reply within `limit_s` seconds, it is killed. If the
        caller is cancelled, the request continues, so that its reply is not taken for that of the next request.
        """
        # Copies, because the caller may close its descriptors before the exchange begins.
        copies = [os.dup(fd) for fd in fds]
        exchange = asyncio.ensure_future(self._request_in_turn(order, copies, limit_s))
        exchange.add_done_callback(
            lambda done: done.cancelled() or done.exception()
        )  # retrieve the exception even if the caller was cancelled
        return await asyncio.shield(exchange)

    async def _request_in_turn(
        self, order: protocol.TemplateRequest, fds: Sequence[int], limit_s: float
    ) -> protocol.TemplateReply:
        try:
            async with self._request_lock:
                return await self._send_request(order, fds, limit_s)
        finally:
            for fd in fds:
                os.close(fd)

    async def _send_request(
        self, order: protocol.TemplateRequest, fds: Sequence[int], limit_s: float
    ) -> protocol.TemplateReply:
        if self.exited.done():
            raise TemplateExited
        self._pending_reply = self._loop.create_future()
        try:
            socket.send_fds(self._socket, [msgspec.msgpack.encode(order)], fds)
            return await asyncio.wait_for(self._pending_reply, limit_s)
        except (OSError, msgspec.MsgspecError) as error:  # a TimeoutError is an OSError
            if self.exited.done():
                raise TemplateExited from error
            log.warning("killing the template (pid %d): %s failed (%s)", self.pid, order, error or "no reply in time")
            self.kill()
            raise TemplateExited from error
        finally:
            self._pending_reply = None

    def _on_packet(self) -> None:
        try:
            packet = self._socket.recv(protocol.PACKET_MAX)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if not packet:  # the pidfd reports the exit
            self._loop.remove_reader(self._socket)
        elif self._pending_reply is not None and not self._pending_reply.done():
            try:
                self._pending_reply.set_result(msgspec.msgpack.decode(packet, type=protocol.TemplateReply))
            except msgspec.MsgspecError as error:
                self._pending_reply.set_exception(error)

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._pidfd)
        _, status = os.waitpid(self.pid, 0)
        self._on_packet()  # the last reply may still be in the socket
        self._loop.remove_reader(self._socket)
        if self._pending_reply is not None and not self._pending_reply.done():
            self._pending_reply.set_exception(TemplateExited())
        cause = protocol.exit_from_status("template", self.pid, os.waitstatus_to_exitcode(status)).reason
        output = self.output_tail()
        self.exited.set_result(f"{cause}; its output: {output}" if output else cause)
        self._socket.close()
        os.close(self._output_fd)
        os.close(self._pidfd)

    def output_tail(self) -> str:
        """Return the end of the template's output, at most `OUTPUT_TAIL_MAX` bytes."""
        size = os.fstat(self._output_fd).st_size
        return os.pread(self._output_fd, OUTPUT_TAIL_MAX, max(0, size - OUTPUT_TAIL_MAX)).decode(errors="replace").strip()

    def kill(self) -> None:
        if not self.exited.done():
            os.kill(self.pid, signal.SIGKILL)


class TemplateClient:
    """Keeps one template with imported modules running, until it has exited early too often."""

    def __init__(self, modules: Iterable[str]) -> None:
        self._modules = list(dict.fromkeys(modules))[:MODULES_MAX]
        self._template: TemplateProcess | None = None
        self._ready: asyncio.Future[TemplateProcess | None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._keep_template_running())

    @property
    def pid(self) -> int:
        return 0 if self._template is None or self._template.exited.done() else self._template.pid

    async def fork(self, spec: protocol.ChildSpec, outputs: Sequence[int]) -> tuple[int, Lifeline] | None:
        """Wait until the template is ready, fork a child, and return its pid and lifeline. Return None if there is no template
        any more, or after `FORK_ATTEMPTS_MAX` attempts. Raises `CoveyError` if this child cannot be forked."""
        with open_memory_file(protocol.encode_spec(spec)) as data:
            for _ in range(FORK_ATTEMPTS_MAX):
                template = await self._wait_until_ready()
                if template is None:
                    return None
                lifeline_pipe = Lifeline()
                try:
                    reply = await template.request(
                        protocol.Fork(), [data, lifeline_pipe.read_end, *outputs], limit_s=FORK_TIMEOUT_S
                    )
                except BaseException as error:
                    lifeline_pipe.close()  # kills the child if it was forked nevertheless
                    if not isinstance(error, TemplateExited):
                        raise
                    continue
                if isinstance(reply, protocol.Forked):
                    lifeline_pipe.close_read_end()
                    return reply.pid, lifeline_pipe
                lifeline_pipe.close()
                self._on_fork_refused(spec.name, template, reply)
        return None

    def _on_fork_refused(self, name: str, template: TemplateProcess, reply: protocol.TemplateReply) -> None:
        reason = reply.reason if isinstance(reply, protocol.NotForked) else f"unexpected reply {type(reply).__name__}"
        if not isinstance(reply, protocol.NotForked) or reply.template_unusable:
            log.warning("the template (pid %d) cannot be forked any more (%s): replacing it", template.pid, reason)
            template.kill()
        else:
            raise CoveyError(f"cannot fork {name}: {reason}")

    async def preload(self, names: Sequence[str]) -> None:
        """Wait until the template is ready and let it import the modules `names`; later templates import them too. A module
        that cannot be imported, or that prevents forks, is left out. Raises `UsageError` above `MODULES_MAX` modules in
        total."""
        new = [name for name in dict.fromkeys(names) if name not in self._modules]
        if len(self._modules) + len(new) > MODULES_MAX:
            raise UsageError(f"the template imports at most {MODULES_MAX} modules: leave out some of {', '.join(new)}")
        self._modules += new
        template = await self._wait_until_ready()
        if template is not None and new:
            await self._import_modules(template, new)

    async def close(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        if self._template is not None:
            self._template.kill()
            await self._template.exited
        self._reset_ready()
        self._ready.set_result(None)

    # -- restarts --------------------------------------------------------------------------------------------------

    async def _keep_template_running(self) -> None:
        backoff = RestartBackoff(RESTART_DELAYS_S, EARLY_EXIT_S)
        delay_s: float | None = 0.0
        while delay_s is not None:
            await asyncio.sleep(delay_s)
            started_at = time.monotonic()
            cause = await self._run_template()
            self._reset_ready()
            if cause is None:
                continue
            delay_s = backoff.record_exit(time.monotonic() - started_at)
            log.warning("template exited (%s): restarting it; running workers are not affected", cause)
        log.error("template failed %d times: workers are started by exec from now on", backoff.exits)
        self._ready.set_result(None)

    async def _run_template(self) -> str | None:
        """Start a template and wait for its exit. Return why it exited or could not be started; None if it was killed because
        of a module that prevents forks."""
        try:
            template = self._template = TemplateProcess()
        except OSError as error:
            return f"cannot start it: {error.strerror}"
        await self._import_modules(template, self._modules)
        if not template.exited.done():
            if output := template.output_tail():
                log.info("template output: %s", output)
            self._ready.set_result(template)
        cause = await asyncio.shield(template.exited)
        return None if template.was_replaced else cause

    def _reset_ready(self) -> None:
        if self._ready.done():
            self._ready = asyncio.get_running_loop().create_future()

    async def _wait_until_ready(self) -> TemplateProcess | None:
        while True:
            template = await asyncio.shield(self._ready)
            if template is None or not template.exited.done():
                return template
            await asyncio.sleep(0)  # `_keep_template_running` resets `_ready` in this iteration of the loop

    async def _import_modules(self, template: TemplateProcess, names: Sequence[str]) -> None:
        try:
            reply = await template.request(protocol.Import(list(names)), limit_s=IMPORT_TIMEOUT_S)
        except TemplateExited:
            return
        if not isinstance(reply, protocol.Imported):
            template.kill()
            return
        for name, reason in reply.failed.items():
            log.warning("template continues without %s, which cannot be imported (%s)", name, reason)
            self._drop_module(name)
        if reply.blocking_module:
            log.warning(
                "template does not import %s, because %s: the workers import it themselves",
                reply.blocking_module,
                reply.reason,
            )
            self._drop_module(reply.blocking_module)
            template.was_replaced = True
            template.kill()

    def _drop_module(self, name: str) -> None:
        if name in self._modules:
            self._modules.remove(name)


@contextlib.contextmanager
def open_memory_file(data: bytes) -> Iterator[int]:
    """Yield a descriptor of a memory file with `data`, and close it afterwards."""
    fd = os.memfd_create("covey-spec")
    try:
        with open(os.dup(fd), "wb") as file:  # noqa: PTH123 (a descriptor has no path)
            file.write(data)
        yield fd
    finally:
        os.close(fd)
